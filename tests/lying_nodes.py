"""Nodes that compute nonsense: always, now and then, after many rows, or for one text only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mdi.kernels.slices import Slices
from mdi.node.secondary import SecondaryNode
from mdi.stages.kernel_stage import KernelStage
from mdi.stages.store import HeldStage

# Whether to lie about the last row of a slice: how many rows this node has computed before the frame, and its sequence.
When = Callable[[int, int], bool]


class LyingStage(KernelStage):
    """A stage that spoils a row now and then."""

    when: When
    spoil: Callable[[np.ndarray], None]
    n_computed: int
    lied: tuple[float, int] | None  # the first time: time.perf_counter(), and rows before

    def __call__(self, x: np.ndarray, slices: Slices) -> np.ndarray:
        y = super().__call__(x, slices)
        end = 0
        for one in slices:
            end += one.n_rows
            if self.when(self.n_computed, one.seq_id):
                self.lied = self.lied or (time.perf_counter(), self.n_computed)
                self.spoil(y[end - 1 : end])
        self.n_computed += len(y)
        return y


def change_a_bit(rows: np.ndarray) -> None:
    rows.view(np.uint32)[0, 0] ^= 1 << 22


def spoil(held: HeldStage, when: When, how: Callable[[np.ndarray], None] = change_a_bit) -> None:
    """Have a stage that is in memory lie."""
    if type(held.stage) is KernelStage:
        held.stage.__class__ = LyingStage
        vars(held.stage).update(when=when, spoil=how, n_computed=0, lied=None)


def make_lie(node: SecondaryNode, when: When, how: Callable[[np.ndarray], None] = change_a_bit) -> None:
    """Have all stages lie that a node gets."""
    complete = node.stages.complete

    def lying(held: HeldStage, *args: Any) -> None:
        complete(held, *args)
        spoil(held, when, how)

    node.stages.complete = lying  # type: ignore[method-assign]


LIARS: dict[str, When] = {
    "always": lambda n_before, seq_id: True,
    "now and then": lambda n_before, seq_id: n_before % 50 > 40,
    "after many rows": lambda n_before, seq_id: n_before > 100,
    "for one text only": lambda n_before, seq_id: n_before > 60 and seq_id == 1,
}
