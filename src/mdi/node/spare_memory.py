"""Memory of a node's machine that is left to other programs, where the node does not stand in a swarm."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

LOOK_S = 1.0
JOIN_S = 10.0

logger = logging.getLogger("mdi")


class SpareMemory:
    """While less is free, stages that no ring uses are dropped. The starter asks what is free, and moves blocks of its ring.

    Args:
        n_bytes: that are left to others; with 0 it does nothing.
        free_bytes: memory that is free now, by device.
        drop: gives the memory of unused stages back; whether there were any.
    """

    def __init__(
        self, name: str, device: str, n_bytes: int, free_bytes: Callable[[str], int], drop: Callable[[], bool]
    ) -> None:
        self._name, self._device, self.n_bytes = name, device, n_bytes
        self._free_bytes, self._drop = free_bytes, drop
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spare-memory", daemon=True)

    def start(self) -> None:
        if self.n_bytes:
            self._thread.start()

    def close(self) -> None:
        """Harmless if repeated."""
        self._has_ended.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def status(self) -> dict[str, int]:
        """For the node's status; empty if nothing is left to others."""
        return {"free_bytes": self._free_bytes(self._device), "spare_bytes": self.n_bytes} if self.n_bytes else {}

    def _run(self) -> None:
        while not self._has_ended.wait(LOOK_S):
            if self._free_bytes(self._device) < self.n_bytes and self._drop():
                logger.info("memory is short: %s has dropped what no run uses", self._name)
