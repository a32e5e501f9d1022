"""The time to the first token of a prompt that is alone in the cluster.

A prompt goes round in pieces, one behind the other, so that stages overlap; the first token is drawn from the last row of the
last piece. With every block on all nodes, the pieces are computed one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mdi.model.caches import CHUNK_ROWS
from mdi.placement.cost import CostModel, seconds
from mdi.placement.tensor_plan import SUMS_PER_BLOCK, TensorPlan, row_bytes

MANY_ROWS = 128  # with which a block computes as fast as it can


class Piece(NamedTuple):
    """Rows of a prompt, `n_rows` from position `start` on; the last one of `is_last` gives the first token."""

    start: int
    n_rows: int
    is_last: bool


def pieces(n_tokens: int, most_rows: int = CHUNK_ROWS) -> Iterator[Piece]:
    for start in range(0, n_tokens, most_rows):
        stop = min(start + most_rows, n_tokens)
        yield Piece(start, stop - start, stop == n_tokens)


def ring_first_token_s(
    cost: CostModel, order: Sequence[int], counts: Sequence[int], n_tokens: int, n_frames: int | None = None
) -> float:
    """Seconds to the first token of a prompt in a ring, see `CostModel.predict`.

    Args:
        n_frames: under way at most; None is one for each node.
    """
    ends = [0, *itertools.accumulate(counts)]
    n_frames = n_frames or len(order)
    free = [0.0] * len(order)  # when each stage is done with the piece before
    link_free = [0.0] * len(order)
    back: list[float] = []
    for piece in pieces(n_tokens, cost.prompt_rows):
        now = back[-n_frames] if len(back) >= n_frames else 0.0
        for k, i in enumerate(order):
            now = max(now, free[k]) + stage_s(cost, i, ends[k], ends[k + 1], piece)
            free[k] = now
            if len(order) > 1:
                n_bytes = _sent_bytes(cost, ends[k + 1], piece)
                following = order[(k + 1) % len(order)]
                leaves = max(now, link_free[k])
                link_free[k] = leaves + cost.links.transmit_s(i, following, n_bytes)
                now = leaves + cost.links.seconds(i, following, n_bytes)
        back.append(now)
    return back[-1] + cost.head_s(1)


def tensor_first_token_s(cost: CostModel, plan: TensorPlan, n_tokens: int) -> float:
    """The same with every block on all nodes."""
    total = cost.head_s(1)
    for piece in pieces(n_tokens):
        total += max(part * stage_s(cost, i, 0, cost.n_layer, piece) for i, part in enumerate(plan.parts))
        one = seconds(plan.algorithm, cost.n_nodes, piece.n_rows * row_bytes(cost), plan.link)
        total += cost.n_layer * SUMS_PER_BLOCK * one
    return total


def stage_s(cost: CostModel, i: int, start: int, stop: int, piece: Piece) -> float:
    """Seconds of node `i` for a piece in the blocks [start, stop)."""
    skipped = cost.shape.skipped_from
    whole = stop if skipped is None else min(stop, max(start, skipped))
    found = _rows_s(cost, i, start, whole, piece.start, piece.n_rows)
    if whole < stop and piece.is_last:
        found += _rows_s(cost, i, whole, stop, piece.start + piece.n_rows - 1, 1)
    return max(found, cost.reads_s(i, start, stop, piece.n_rows))


def _rows_s(cost: CostModel, i: int, start: int, stop: int, position: int, n_rows: int) -> float:
    work = (cost.work[stop] - cost.work[start]) * cost.block_s(i, n_rows)
    looks = sum(block.attention_macs(position, n_rows) for block in cost.shape.blocks[start:stop])
    return work + looks / attention_macs_s(cost, i)


def attention_macs_s(cost: CostModel, i: int) -> float:
    """Multiplications per second of attention on node `i`; if that was not measured, as with weights."""
    measured = cost.profile.nodes[i].attention_macs_s
    return measured or cost.shape.reference.macs * MANY_ROWS / cost.block_s(i, MANY_ROWS)


def _sent_bytes(cost: CostModel, cut: int, piece: Piece) -> float:
    """What travels behind a stage: of rows that no block behind computes, only the columns for caches."""
    shape = cost.shape
    if cut == cost.n_layer:
        return piece.is_last * shape.row_bytes
    cached = 0 if shape.cached_bytes is None else shape.cached_bytes[cut]
    n_whole = piece.is_last if shape.skipped_from is not None and cut >= shape.skipped_from else piece.n_rows
    return n_whole * (shape.row_bytes_at(cut) - cached) + piece.n_rows * cached
