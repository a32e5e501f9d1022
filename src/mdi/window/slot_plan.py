"""Which units stay in memory, and which share slots. Sizes only: nothing is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdi.window.weight_units import HEAD_PIECE_BYTES, StoredMatrix, Unit, head_units


@dataclass(frozen=True)
class WindowPlan:
    """See the module.

    Attributes:
        units: of one pass, in order; None is a position of the window that holds nothing, see window.unit_reader.
        kept: indices of those that stay.
        n_slots: units in memory at a time, besides those that stay.
        retain: every so-manieth block stays; None: none does.
    """

    units: tuple[Unit, ...]
    kept: frozenset[int]
    n_slots: int
    retain: int | None

    @property
    def streamed(self) -> list[int]:
        """Indices of the units that are read in every pass."""
        return [i for i in range(len(self.units)) if i not in self.kept]

    @property
    def slot_bytes(self) -> list[int]:
        """Bytes of each slot: those of its largest unit."""
        sizes = [0] * self.n_slots
        for position, i in enumerate(self.streamed):
            slot = position % self.n_slots
            sizes[slot] = max(sizes[slot], self.units[i].n_bytes)
        return sizes

    @property
    def kept_bytes(self) -> int:
        return sum(self.units[i].n_bytes for i in self.kept)

    @property
    def resident_bytes(self) -> int:
        return self.kept_bytes + sum(self.slot_bytes)

    @property
    def pass_bytes(self) -> int:
        """Read from the disk for every frame."""
        return sum(self.units[i].n_bytes for i in self.streamed)


def plan_window(blocks: Sequence[Unit], head: StoredMatrix | None, n_slots: int, retain: int | None) -> WindowPlan:
    """A window of `n_slots` units over the blocks of a stage and, on a starter, the head.

    Args:
        blocks: attention and MLP of each block, in turn.
        retain: 1 keeps everything, the head as well.
    """
    kept = frozenset(i for i in range(len(blocks)) if retain is not None and i // 2 % retain == 0)
    n_streamed = len(blocks) - len(kept)
    pieces: list[Unit] = []
    if head is not None:
        # No larger than the smallest unit, so that they make no slot larger.
        sizes = [unit.n_bytes for i, unit in enumerate(blocks) if i not in kept and unit.n_bytes]
        smallest = min(sizes, default=HEAD_PIECE_BYTES)
        pieces = head_units(head, smallest, n_slots, n_streamed)
    units = (*blocks, *pieces)
    if retain == 1 or n_slots >= n_streamed + len(pieces):
        return WindowPlan(units, frozenset(range(len(units))), 0, retain)
    return WindowPlan(units, kept, n_slots, retain)
