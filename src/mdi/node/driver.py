"""The thread of an engine. It keeps the error that ends the engine, and reports it to everybody who waits for a text."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from mdi.engine.starter import StarterEngine
from mdi.errors import EngineError, MdiError, RingError
from mdi.net.hello import Fault
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.tracing.recorder import Recorder

JOIN_S = 10.0

logger = logging.getLogger(__name__)


class Keeper(Protocol):
    def after_loss(self, error: RingError) -> LoopbackRing | TcpRing:
        """Another ring in the place of a broken one. Raises MdiError if there is none."""

    def after_leave(self) -> LoopbackRing | TcpRing:
        """Another ring in the place of one that the engine was asked to leave. Raises as `after_loss`."""


class EngineThread:
    """Runs an engine over one ring after the other until `close`, or until something goes wrong.

    Args:
        ring: the first.
        keeper: forms another ring where nodes are lost; without, that is the end.
        name: the node's name in the ring.
        recorder: records what happens to each frame.

    Attributes:
        is_recovering: whether another ring is being formed.
        failure: what ended the engine, if that was not `close`; then all its sequences have ended.
    """

    def __init__(
        self, engine: StarterEngine, ring: LoopbackRing | TcpRing, name: str, recorder: Recorder | None = None,
        keeper: Keeper | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self._ring = ring
        self._recorder = recorder
        self._keeper = keeper
        self.is_recovering = False
        self._name = name
        self.failure: MdiError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._run_rings()
        except MdiError as e:
            self.failure = e
        except BaseException as e:  # for example out of memory: the samples' texts so far must still be reported
            logger.debug("the engine failed", exc_info=True)
            self.failure = EngineError(f"starter failed: {type(e).__name__}: {e}")
        if self.failure is not None and not isinstance(self.failure, RingError):
            # This process still sends PINGs, so the other nodes would wait for a computation that has ended.
            self._ring.fail(Fault(self._name, f"it failed: {self.failure}", self._name, self.failure.code))
        self.engine.end_all()

    def _run_rings(self) -> None:
        """Return when the engine is closed."""
        while True:
            broken = self._run_ring()
            if self.engine.is_closing or self._keeper is None:
                if broken is not None:
                    raise broken
                return
            self.is_recovering = True
            self._ring = self._keeper.after_leave() if broken is None else self._keeper.after_loss(broken)
            self.is_recovering = False
            if self.engine.is_closing:
                # Who closes rings may be through with it: forming one may take longer than `close` waits.
                self._ring.stop("the run is over")
                self._ring.close()
                return

    def _run_ring(self) -> RingError | None:
        """What broke the ring; None if the engine left it."""
        ring = self._ring
        try:
            self.engine.run(ring if self._recorder is None else self._recorder.over(ring), until_idle=False)
        except RingError as e:
            return e.with_traceback(
                None
            )  # whoever keeps it, a log say, would keep the frames, and they the ring's buffers
        return None

    def close(self) -> None:
        """Let the engine end after the frame that it is at."""
        self.engine.close()
        self._thread.join(JOIN_S)
