"""How many texts a cluster computes at once, each at a given pace: what LLaMPS counts ("Leftovers for LLaMA", table 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mdi.errors import PlacementError
from mdi.placement.cost import CostModel
from mdi.placement.methods import place
from mdi.placement.model import ModelShape, Workload
from mdi.placement.parallel import merged
from mdi.placement.profile import ClusterProfile
from mdi.placement.tensor_plan import plan_tensor

MOST = 4096  # texts that are tried


@dataclass(frozen=True)
class Clients:
    """Texts that a cluster computes at once.

    Attributes:
        n: of up to `length` tokens, each with `tokens_s` or more, as a ring.
        tensor_n: the same with every block on all nodes; None of one node.
        limit: why there are no more, in a word: "memory", "speed", or "" with MOST.
    """

    n: int
    tensor_n: int | None
    length: int
    tokens_s: float
    limit: str


def most_clients(
    profile: ClusterProfile, shape: ModelShape, workload: Workload, tokens_s: float, may_share: bool
) -> Clients:
    """The most texts of the workload's length.

    Args:
        tokens_s: that each text gets at least.
    """

    def ring(n: int) -> float:
        work = replace(workload, n_sequences=n)
        stages, _ = merged(profile, shape, work)
        cost = CostModel(stages, shape, work)
        placement = place(cost)
        return cost.predict(placement.order, placement.counts).tokens_s

    def shared(n: int) -> float:
        return plan_tensor(CostModel(profile, shape, replace(workload, n_sequences=n))).tokens_s

    n, limit = _most(ring, tokens_s)
    tensor_n = _most(shared, tokens_s)[0] if may_share and len(profile.nodes) > 1 else None
    return Clients(n, tensor_n, workload.sequence_length, tokens_s, limit)


def _most(speed: Callable[[int], float], tokens_s: float) -> tuple[int, str]:
    """The largest number whose texts are fast enough, and what stops the next one; more texts are never faster each."""

    def stops(n: int) -> str:
        try:
            return "" if speed(n) >= n * tokens_s else "speed"
        except PlacementError:
            return "memory"

    low, high, limit = 0, 1, ""
    while high <= MOST and not (limit := stops(high)):
        low, high = high, 2 * high
    while high - low > 1 and limit:
        middle = (low + high) // 2
        if found := stops(middle):
            high, limit = middle, found
        else:
            low = middle
    return low, limit
