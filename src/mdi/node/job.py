"""One ring of a run as a secondary sees it: its progress, and how it is ended from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mdi.control.messages import InitRequest, PartSpec
from mdi.errors import MdiError, NodeLostError, RingError
from mdi.machine.computing import Computing
from mdi.net.hello import Fault
from mdi.net.ring import TcpRing
from mdi.node.cache_budget import CacheReport

if TYPE_CHECKING:
    from mdi.node.stage_slots import Slot

LEASE_S = 10.0  # before the ring is closed, a starter that is silent for so long is gone


class Abandoned(MdiError):
    """The ring ended before it began, or this node does not take part any more."""

    def __init__(self, message: str, code: str = "run") -> None:
        super().__init__(message)
        self.code = code


class Job:
    """One ring of a run that this node was asked to take part in.

    Args:
        computing: what this node will do it with.
        slot: where its stage is, or will be.
        has_caches: whether the caches of the run's last ring still exist.

    Attributes:
        state: LOADING, READY (everything is here, the ring is open) or RUNNING; and when it is over, READY again if it ended in
            good order, else IDLE.
        error, error_code: what ended it, if that was not in good order.
        lost: which node broke the ring and how, as far as this one knows.
        over: set when this node has no part in it any more.
        stopped: whether it was ended from here; is_replaced: because of another ring of its run.
        has_begun: whether its ring was closed.
        missing: parts that the starter has to send, by sha256; None until that is known.
        failure: what went wrong while they came.
        n_looked_for: parts that were looked for on this machine, of those in the request.
        is_loading, n_loaded: whether the stage is being loaded, and parts that it has taken in, of those in the request.
        report_caches: while READY, tells how much cache this node can hold.
        measure: the measurements so far, while RUNNING.
        metrics: the measurements, once the run is over.
    """

    def __init__(self, request: InitRequest, computing: Computing, slot: Slot, has_caches: bool = False) -> None:
        self.request = request
        self.computing = computing
        self.slot = slot
        self.has_caches = has_caches
        self.state = "LOADING"
        self.error: str | None = None
        self.error_code: str | None = None
        self.lost: Fault | None = None
        self.over = threading.Event()
        self.missing: dict[str, PartSpec] | None = None
        self.failure: MdiError | None = None
        self.total_bytes = 0
        self.received_bytes = 0
        self.n_looked_for = 0
        self.is_loading = False
        self.n_loaded = 0
        self.report_caches: Callable[[], CacheReport] | None = None
        self.measure: Callable[[], dict[str, Any]] | None = None
        self.metrics: dict[str, Any] | None = None
        self.changed = threading.Condition()
        self.stopped = self.is_replaced = self.has_begun = False
        self._aborted: Fault | None = None
        self.ring: TcpRing | None = None
        self._fault: Fault | None = None  # that ended it from here
        self._last_sign = time.monotonic()

    def touch(self) -> None:
        self._last_sign = time.monotonic()

    @property
    def run(self) -> str:
        return self.request.run

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    @property
    def loading(self) -> dict[str, int] | None:
        """How far the stage is, while it is built."""
        if self.state != "LOADING" or not self.is_loading:
            return None
        return {"done": self.n_loaded, "total": len(self.request.parts)}

    @property
    def looking(self) -> dict[str, int] | None:
        """How far it is with looking for the weights that are here already."""
        if self.state != "LOADING" or self.missing is not None:
            return None
        return {"done": self.n_looked_for, "total": len(self.request.parts)}

    @property
    def is_running(self) -> bool:
        """Whether the ring is closed: from then on the ring itself shows whether the starter is alive."""
        return self.ring is not None

    @property
    def is_abandoned(self) -> bool:
        return self.stopped or time.monotonic() - self._last_sign > LEASE_S

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._aborted is not None:
            raise Abandoned(f"the run ended before it began: {self._aborted.message}", self._aborted.code)
        if self.stopped:
            raise Abandoned("the starter ended the run before it began")
        if self.is_abandoned:
            raise Abandoned(f"the starter has been silent for {LEASE_S:.0f} s: given up")

    def get_ready(self, report_caches: Callable[[], CacheReport]) -> None:
        """Everything is here, the ring is open."""
        with self.changed:
            self.report_caches, self.state = report_caches, "READY"
            self.changed.notify_all()

    def wait_until_known(self, timeout_s: float) -> None:
        """Until it is READY, or over, or parts are known to be missing."""
        with self.changed:
            self.changed.wait_for(lambda: self.state != "LOADING" or bool(self.missing), timeout_s)

    def begin(self, ring: TcpRing) -> None:
        """The ring is closed. If it was ended meanwhile, it is ended at once for all nodes, with the same reason."""
        with self.changed:
            self.ring, self.state = ring, "RUNNING"
            self.has_begun = True
            was_stopped, fault = self.stopped, self._fault
        if fault is not None:
            ring.fail(fault)
        elif was_stopped:
            ring.stop("ended before it began")

    def finish(self, error: Exception | None) -> None:
        """It is over, by an error or in good order; its ring's buffers are not needed any more."""
        if isinstance(error, RingError):
            node = error.node if isinstance(error, NodeLostError) else ""
            self.lost = Fault(node, str(error), self.request.names[self.request.index], error.code)
        with self.changed:
            self.error, self.error_code = _told(error)
            self.state = "READY" if error is None else "IDLE"
            self.ring = None
            self.changed.notify_all()
        self.over.set()

    def end(self) -> None:
        """End it in good order, however far it is."""
        if (ring := self._stop()) is not None:
            ring.stop("the starter ended the run")

    def abort(self, fault: Fault) -> None:
        """End it, however far it is, and tell the other nodes why."""
        self._aborted = fault
        if (ring := self._stop(fault)) is not None:
            ring.fail(fault)

    def replace(self, name: str) -> None:
        """End it for another ring of the same run, which may use its caches."""
        self.is_replaced = True
        self.abort(Fault("", f"{name} takes part in another ring of this run", name, "run"))

    def _stop(self, fault: Fault | None = None) -> TcpRing | None:
        with self.changed:
            self.stopped = True
            self._fault = self._fault or fault
            self.changed.notify_all()
            return self.ring

    def announce_leave(self) -> None:
        """Tell the starter that this node waits for its blocks to be taken over."""
        if (ring := self.ring) is not None:
            ring.announce_leave()


def _told(error: Exception | None) -> tuple[str | None, str | None]:
    """An error in words and as a code."""
    if error is None:
        return None, None
    if isinstance(error, MemoryError):
        return "it ran out of memory", "memory"
    if isinstance(error, RingError):
        return f"the run ended: {error}", error.code
    if isinstance(error, MdiError):
        return str(error), error.code
    return f"{type(error).__name__}: {error}", MdiError.code
