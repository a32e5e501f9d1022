"""One run, as a secondary that was asked to take part in it sees it before the ring is closed."""

from __future__ import annotations

import threading
import time

from mdi.control.messages import InitRequest, PartSpec
from mdi.errors import MdiError

LEASE_S = 10.0  # a starter that is heard nothing of for so long, before the ring is closed, is gone


class Abandoned(MdiError):
    """The run ended before it began."""


class Job:
    """One run that this node was asked to take part in.

    Attributes:
        missing: parts that the starter has to send, by sha256; None until that is known.
        failure: what went wrong while they came.
    """

    def __init__(self, request: InitRequest) -> None:
        self.request = request
        self.missing: dict[str, PartSpec] | None = None
        self.failure: MdiError | None = None
        self.total_bytes = 0
        self.received_bytes = 0
        self.changed = threading.Condition()
        self.stopped = False
        self._last_sign = time.monotonic()

    def touch(self) -> None:
        self._last_sign = time.monotonic()

    @property
    def run(self) -> str:
        return self.request.epoch

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
