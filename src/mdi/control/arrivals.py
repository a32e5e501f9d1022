"""Nodes that start during a run and are in no nodes file: they announce themselves, or connect to --dial-port."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from mdi.control.gather import Gathering, Source
from mdi.errors import UsageError
from mdi.net.keys import KeyFile
from mdi.spec.cluster import NodeConfig

logger = logging.getLogger("mdi")


class Arrivals:
    """Present nodes that prove that they have the key. Listening begins with the first call. Not for several threads.

    Args:
        listen: gives the sources, and closes them with the stack. Raises UsageError if the network cannot be used.
    """

    def __init__(self, listen: Callable[[ExitStack], list[Source]], keys: KeyFile) -> None:
        self._listen = listen
        self._keys = keys
        self._stack = ExitStack()
        self._gathering: Gathering | None = None

    def nodes(self) -> dict[str, NodeConfig]:
        """By the numbers that their processes drew; a node that takes part in the run is among them."""
        if self._gathering is None:
            self._gathering = Gathering(self._sources(), self._keys)
        self._gathering.look()
        return {n.announcement.process: n.config(n.announcement.name) for n in self._gathering.nodes}

    def close(self) -> None:
        """Harmless if repeated; `nodes` listens again."""
        self._gathering = None
        self._stack.close()

    def _sources(self) -> list[Source]:
        try:
            return self._listen(self._stack)
        except UsageError as e:
            logger.debug("nodes that start later are not found: %s", e)
            return []
