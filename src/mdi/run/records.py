"""The report of recoveries at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

TOKENS, REPLAY = "tokens", "replay"  # how caches were restored: from the token ids, or from rows that a node had kept
NONE: Mapping[int, int] = MappingProxyType({})
MAY_DIFFER = (
    "numbers are summed in other parts, or by other hardware, than before: from here on texts may differ from those of an "
    "undisturbed run"
)


@dataclass(frozen=True)
class Recovery:
    """One lost node.

    Attributes:
        node: that was lost.
        replaced_by: nodes that have its blocks now, starter first.
        restored_by: TOKENS or REPLAY.
        differs: how many ids each text had, prompt included, whose tokens may be others from there on than without the loss.
        seconds: from the last token before to the first one after; None if none came.
    """

    node: str
    replaced_by: tuple[str, ...]
    restored_by: str
    seconds: float | None
    differs: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else round(self.seconds, 3)
        replaced_by = ", ".join(self.replaced_by)
        return {"node": self.node, "replaced_by": replaced_by, "restored_by": self.restored_by, "seconds": seconds}


@dataclass
class _Open:
    node: str
    replaced_by: tuple[str, ...]
    restored_by: str
    last_s: float
    differs: Mapping[int, int] = field(default_factory=dict)


class Records:
    """Recoveries in order; those after which no token has come yet are open."""

    def __init__(self) -> None:
        self._closed: list[Recovery] = []
        self._open: list[_Open] = []

    def begin(self, nodes: Sequence[str], last_s: float) -> None:
        """These nodes were lost; the last token came at `last_s`, in the time of time.perf_counter()."""
        known = {one.node for one in self._open}
        if self._open:
            last_s = self._open[0].last_s
        self._open += [_Open(node, (), TOKENS, last_s) for node in nodes if node not in known]

    def replace(
        self, node: str, replaced_by: Sequence[str], restored_by: str = TOKENS, differs: Mapping[int, int] = NONE
    ) -> None:
        """Name the nodes that have the blocks of a lost one."""
        for one in self._open:
            if one.node == node:
                one.replaced_by, one.restored_by = tuple(replaced_by), restored_by
                one.differs = {**differs, **one.differs}

    def end(self, first_s: float | None) -> None:
        """The first token afterwards came; None if there was none."""
        self._closed += self._ended(first_s)
        self._open.clear()

    def so_far(self, first_s: float | None) -> list[Recovery]:
        """All of them, where the first token after the open ones came at `first_s`."""
        return [*self._closed, *self._ended(first_s)]

    def _ended(self, first_s: float | None) -> list[Recovery]:
        return [
            Recovery(
                one.node, one.replaced_by, one.restored_by, None if first_s is None else first_s - one.last_s, one.differs
            )
            for one in self._open
        ]  # fmt: skip
