"""Log lines about dropped connections: few, so that strangers cannot fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

N_TOLD = 10
QUIET_S = 60.0

logger = logging.getLogger("mdi")


class DropLog:
    """Reports the first few drops one by one, then each doubling of their number. Starts again after a quiet minute.

    Args:
        name: of the node.
        clock: seconds, rising.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._n = 0
        self._last = clock()

    def tell(self, peer: str, why: str) -> None:
        now = self._clock()
        if now - self._last > QUIET_S:
            self._n = 0
        self._last = now
        self._n += 1
        if self._n <= N_TOLD:
            logger.info("%s: dropped a connection from %s: %s", self._name, peer, why)
        elif self._n % N_TOLD == 0 and (self._n // N_TOLD).bit_count() == 1:
            logger.info("%s: dropped %d connections; the last was from %s: %s", self._name, self._n, peer, why)
        else:
            logger.debug("%s: dropped a connection from %s: %s", self._name, peer, why)
