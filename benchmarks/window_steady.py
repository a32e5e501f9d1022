"""Whether computing waits for a disk from which weights are read meanwhile, and for how long.

The conditions are those of TPI-LLM (propositions 3, 4 and 6): attention and MLP of a block take `attention_s` and `mlp_s` to
compute and `attention_load_s` and `mlp_load_s` to read, and between them nothing is computed for `link_s` (there an all-reduce;
0 on a node of a ring). They suppose that reading is never ahead by more than the window holds; `simulate` does not, and gives
the waits of a pass in seconds for any units and any window.

Where the paper keeps every T-th MLP in memory, we keep every T-th block, attention and MLP; so the left-hand sides below are
the paper's, and on the right neither half of a kept block is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PASSES = 6  # simulated, until every pass is like the one before; the last one is looked at


@dataclass(frozen=True)
class HalfTimes:
    """Seconds of one block's halves; see the module."""

    attention_s: float
    mlp_s: float
    attention_load_s: float
    mlp_load_s: float
    link_s: float = 0.0


def is_tight(t: HalfTimes) -> bool:
    """Proposition 4: each half is read while the one before it is computed."""
    return t.attention_s + t.link_s >= t.mlp_load_s and t.mlp_s + t.link_s >= t.attention_load_s


def is_loose(t: HalfTimes, n_blocks: int, retain: int | None = None) -> bool:
    """Propositions 3 and, with `retain`, 6: what is read too late in one place was read early enough before."""
    blocks = range(1, n_blocks + 1)
    if retain is None:
        if t.attention_s + t.mlp_s + 2 * t.link_s < t.mlp_load_s + t.attention_load_s:
            return False
        return all(_until_mlp(t, n, n, n - 1) for n in blocks) or all(_until_attention(t, n) for n in blocks)

    def n_read(n: int) -> int:
        """Of the first n blocks, the first of each `retain` stays."""
        return n - math.ceil(n / retain)

    return all(_until_mlp(t, n, n_read(n), n_read(n)) and _whole(t, n, n_read(n)) for n in blocks)


def _until_mlp(t: HalfTimes, n: int, n_mlps: int, n_attentions: int) -> bool:
    """(5) and (10): when the n-th MLP is due, so many MLPs and attentions have been read beside the first."""
    spent = n * t.attention_s + (n - 1) * t.mlp_s + (2 * n - 1) * t.link_s
    return spent >= n_mlps * t.mlp_load_s + n_attentions * t.attention_load_s


def _until_attention(t: HalfTimes, n: int) -> bool:
    """(6)"""
    spent = (n - 1) * t.attention_s + n * t.mlp_s + (2 * n - 1) * t.link_s
    return spent >= (n - 1) * t.mlp_load_s + n * t.attention_load_s


def _whole(t: HalfTimes, n: int, n_read: int) -> bool:
    """(9): of n whole blocks."""
    return n * (t.attention_s + t.mlp_s + 2 * t.link_s) >= n_read * (t.mlp_load_s + t.attention_load_s)


@dataclass(frozen=True)
class UnitTimes:
    """One unit of a pass: seconds to read it (0: it stays in memory), to compute with it, and until the next can begin."""

    load_s: float
    compute_s: float
    link_s: float = 0.0


@dataclass(frozen=True)
class PassTimes:
    """A pass over all units, in seconds: from its beginning to that of the next, and the part that waits for the disk."""

    pass_s: float
    wait_s: float

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.pass_s if self.pass_s else 0.0


def simulate(units: Sequence[UnitTimes], n_slots: int, pause_s: float = 0.0) -> PassTimes:
    """A pass in steady state.

    Args:
        units: in order.
        n_slots: that are in memory at a time, of those that do not stay; a unit is read as soon as the one `n_slots` before it
            has been computed with.
        pause_s: between two passes, for links and other nodes; the disk goes on meanwhile.
    """
    ends: list[float] = []  # of computing, of all units that were read
    disk_s = clock = wait_s = begin = 0.0
    for _ in range(PASSES):
        begin, wait_s = clock, 0.0
        for unit in units:
            if unit.load_s:
                free_s = ends[-n_slots] if len(ends) >= n_slots else 0.0
                disk_s = max(disk_s, free_s) + unit.load_s
                wait_s += max(0.0, disk_s - clock)
                clock = max(clock, disk_s) + unit.compute_s
                ends.append(clock)
            else:
                clock += unit.compute_s
            clock += unit.link_s
        clock += pause_s
    return PassTimes(clock - begin, wait_s)
