"""Texts that may have brought a node down.

A text whose rows end a process, for example by a fault of the kernels or by their memory, would end one node after the
other. A text is suspected if the same positions of it were under way at two losses.
"""

from __future__ import annotations

from collections.abc import Mapping

# A text's positions that were under way, half-open.
Span = tuple[int, int]


class Suspects:
    """Pure: from the texts in flight to those that must run alone and those that must end."""

    def __init__(self) -> None:
        self._before: dict[int, Span] = {}
        self._n_before: dict[int, int] = {}
        self._found: frozenset[int] = frozenset()

    def take(self, in_flight: Mapping[int, Span], n_known: Mapping[int, int]) -> frozenset[int]:
        """Texts that were under way with the same positions at this loss and at the one before, and got no token meanwhile.

        A single one has brought two nodes down. Of several, it is unknown which one did: they must run one by one, and the
        next loss tells more.

        Args:
            in_flight: positions of each text in the frames that were lost; empty where the ring had not begun.
            n_known: tokens that each text has. One that has got some since has had its positions computed without harm.
        """
        if not in_flight:
            return frozenset()  # nothing was computed
        common = {
            seq_id
            for seq_id, span in in_flight.items()
            if _overlap(span, self._before.get(seq_id, (0, 0))) and self._n_before.get(seq_id) == n_known.get(seq_id)
        }
        self._before, self._n_before = dict(in_flight), dict(n_known)
        self._found = frozenset(common & self._found or common)
        return self._found


def _overlap(a: Span, b: Span) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])
