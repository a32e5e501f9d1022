"""One run, as a secondary that was asked to take part in it sees it: how far it is, and how it is ended from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mdi.control.messages import InitRequest, PartSpec
from mdi.errors import MdiError
from mdi.machine.computing import Computing
from mdi.net.ring import TcpRing
from mdi.node.cache_budget import CacheReport

LEASE_S = 10.0  # a starter that is heard nothing of for so long, before the ring is closed, is gone


class Abandoned(MdiError):
    """The run ended before it began."""

    code = "run"


class Job:
    """One run that this node was asked to take part in.

    Args:
        computing: what this node will do it with.

    Attributes:
        state: LOADING, READY (everything is here, the ring is open) or RUNNING.
        missing: parts that the starter has to send, by sha256; None until that is known.
        failure: what went wrong while they came.
        n_looked_for: parts that were looked for on this machine, of those in the request.
        is_loading, n_loaded: whether the stage is being loaded, and parts that it has taken in, of those in the request.
        report_caches: while READY, tells how much cache this node can hold.
        measure: while RUNNING, what was measured so far.
        metrics: what was measured, once the run is over.
    """

    def __init__(self, request: InitRequest, computing: Computing) -> None:
        self.request = request
        self.computing = computing
        self.state = "LOADING"
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
        self.stopped = False
        self._ring: TcpRing | None = None
        self._last_sign = time.monotonic()

    def touch(self) -> None:
        self._last_sign = time.monotonic()

    @property
    def run(self) -> str:
        return self.request.run

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
        """Whether the ring is closed: from here on it tells by itself whether the starter is alive."""
        return self._ring is not None

    @property
    def is_abandoned(self) -> bool:
        return self.stopped or time.monotonic() - self._last_sign > LEASE_S

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.stopped:
            raise Abandoned("the starter ended the run before it began")
        if self.is_abandoned:
            raise Abandoned(f"the starter has been silent for {LEASE_S:.0f} s: given up")

    def begin(self, ring: TcpRing) -> None:
        """The ring is closed; one that was ended meanwhile is stopped at once."""
        with self.changed:
            self._ring, self.state = ring, "RUNNING"
            was_stopped = self.stopped
        if was_stopped:
            ring.stop("ended before it began")

    def detach(self) -> None:
        """The ring is closed and its buffers are not needed any more."""
        self._ring = None

    def end(self) -> None:
        """End it, however far it is."""
        with self.changed:
            self.stopped = True
            ring = self._ring
            self.changed.notify_all()
        if ring is not None:
            ring.stop("the starter ended the run")
