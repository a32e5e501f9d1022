"""Predicts what sharing every block over all nodes would bring: shares, time of a token, memory.

Each node computes its part of a block at the same time; then all wait for the sum. So a node's share is in proportion to how
fast it computes, as far as its memory goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mdi.errors import PlacementError
from mdi.kernels.weight_formats import weight_format
from mdi.placement.cost import CostModel, LinkSpeed, seconds
from mdi.spec.options import DEFAULT_SUM

SUMS_PER_BLOCK = 2  # behind attention and behind the MLP; of blocks with parallel residuals one


@dataclass(frozen=True)
class TensorPlan:
    """The plan of a run in which all nodes compute every block together.

    Attributes:
        parts: of each node, from 0 to 1; together 1.
        token_s: of one token of each of `n_rows` sequences: blocks_s + sums_s + head_s.
        algorithm: of the sums, the cheapest by `link`, delay and rate of the slowest one.
        weight_bytes: each node's share of the blocks, and what it has whole; on the starter also embedding and head.
    """

    names: tuple[str, ...]
    parts: tuple[float, ...]
    n_rows: int
    token_s: float
    blocks_s: float
    sums_s: float
    head_s: float
    algorithm: str
    weight_bytes: tuple[int, ...]
    link: LinkSpeed

    @property
    def tokens_s(self) -> float:
        return self.n_rows / self.token_s if self.token_s else float("inf")

    def to_json(self) -> dict[str, Any]:
        fields = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {**fields, "tokens_s": self.tokens_s}


def plan_tensor(cost: CostModel, sums_per_block: int = SUMS_PER_BLOCK, is_head_shared: bool = False) -> TensorPlan:
    """Shares for all nodes of a profile.

    Raises:
        PlacementError: the blocks do not fit into the memory of all nodes together.
    """
    nodes, shape, n_rows = range(cost.n_nodes), cost.shape, cost.timed.n_sequences
    parts = shares_of([1 / cost.block_s(i, n_rows) for i in nodes], [_most(cost, i) for i in nodes])
    work = cost.work[shape.n_layer]
    stages = [part * cost.block_s(i, n_rows) * work for i, part in enumerate(parts)]
    speed = slowest_link(cost, nodes)
    n_bytes = n_rows * row_bytes(cost)
    sums_s = shape.n_layer * sums_per_block * seconds(DEFAULT_SUM, cost.n_nodes, n_bytes, speed)
    head_s = cost.head_s(n_rows) * (max(parts) if is_head_shared else 1.0)
    whole = cost.whole_weights[shape.n_layer]
    weights = [int(whole + part * (cost.weights[shape.n_layer] - whole)) for part in parts]
    weights[0] += cost.own_bytes(0)
    return TensorPlan(
        tuple(node.name for node in cost.profile.nodes), tuple(parts), n_rows, max(stages) + sums_s + head_s, max(stages),
        sums_s, head_s, DEFAULT_SUM, tuple(weights), speed,
    )  # fmt: skip


def shares_of(speeds: Sequence[float], most: Sequence[float]) -> list[float]:
    """Parts that add up to 1, in proportion to `speeds`, none larger than its `most`. PlacementError if that cannot be."""
    if sum(most) < 1:
        raise PlacementError(
            f"the nodes together have memory for {sum(most):.0%} of the blocks: use a smaller format, or more nodes"
        )
    parts, full = [0.0] * len(speeds), [False] * len(speeds)
    while True:
        left = 1 - sum(part for part, is_full in zip(parts, full, strict=True) if is_full)
        whole = sum(speed for speed, is_full in zip(speeds, full, strict=True) if not is_full)
        over = False
        for i, speed in enumerate(speeds):
            if not full[i]:
                parts[i] = left * speed / whole if whole else 0.0
        for i, part in enumerate(parts):
            if not full[i] and part > most[i]:
                parts[i], full[i], over = max(0.0, most[i]), True, True
        if not over:
            return parts


def slowest_link(cost: CostModel, members: Sequence[int]) -> LinkSpeed:
    """Delay and rate of the slowest link among these nodes."""
    pairs = [(a, b) for a in members for b in members if a != b]
    if not pairs:
        return LinkSpeed(0.0, 1e9)
    ways = [
        cost.links.of(a, b) for a, b in pairs
    ]  # without hand-overs between threads: the computing thread sends and receives
    delay, rate = max(round_trip_s for round_trip_s, _ in ways) / 2, min(bytes_s for _, bytes_s in ways)
    return LinkSpeed(delay, rate)


def _most(cost: CostModel, i: int) -> float:
    """The largest share that node `i` has memory for."""
    whole = cost.whole[cost.n_layer]
    free = (
        cost.profile.nodes[i].memory_bytes
        - cost.fixed_bytes(i)
        - cost.activation_bytes(i, cost.workload.n_sequences, 1)
    )
    return max(0.0, (free - whole) / (cost.held[cost.n_layer] - whole))


def row_bytes(cost: CostModel) -> int:
    """Of one row of partial sums, in float32."""
    return 4 * cost.shape.row_bytes // weight_format(cost.shape.format).value_bytes
