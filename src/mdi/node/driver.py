"""The thread that an engine runs in: whatever ends it is kept, and told to everybody who waits for a text."""

from __future__ import annotations

import logging
import threading

from mdi.engine.starter_engine import StarterEngine
from mdi.errors import EngineError, MdiError, RingError
from mdi.net.hello import Fault
from mdi.net.ring import LoopbackRing, TcpRing
from mdi.tracing.recorder import Recorder

JOIN_S = 10.0

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine over a ring until `close`, or until something goes wrong.

    Args:
        name: of the node, as the others know it.
        recorder: notes what is done with each frame.

    Attributes:
        failure: what ended the engine, if that was not `close`; then all its sequences have ended.
    """

    def __init__(
        self, engine: StarterEngine, ring: LoopbackRing | TcpRing, name: str, recorder: Recorder | None = None
    ) -> None:
        self._engine = engine
        self._ring = ring
        self._recorded = ring if recorder is None else recorder.over(ring)
        self._name = name
        self.failure: MdiError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._engine.run(self._recorded, until_idle=False)
        except MdiError as e:
            self.failure = e
        except BaseException as e:  # out of memory, say: what the samples have reached is still to be told
            logger.debug("the engine failed", exc_info=True)
            self.failure = EngineError(f"starter failed: {type(e).__name__}: {e}")
        if self.failure is not None and not isinstance(self.failure, RingError):
            # This process goes on to send signs of life: the other nodes must not wait for a computation that has ended.
            self._ring.fail(Fault(self._name, f"it failed: {self.failure}", self._name, self.failure.code))
        self._engine.end_all()

    def close(self) -> None:
        """Let the engine end after the frame that it is at."""
        self._engine.close()
        self._thread.join(JOIN_S)
