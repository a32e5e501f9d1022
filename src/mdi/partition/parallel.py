"""The best use of nodes: a ring, every block on all of them, or a ring of groups; by texts, links and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mdi.errors import PlacementError
from mdi.partition.cost import CostModel
from mdi.partition.group_profile import merged
from mdi.partition.grouping import Grouping, fastest_grouping
from mdi.partition.methods import place
from mdi.partition.model import ModelShape, Workload
from mdi.partition.profile import ClusterProfile
from mdi.partition.tensor_plan import TensorPlan, plan_tensor
from mdi.units import duration, size

RING, TENSOR, GROUPS = "ring", "tensor", "groups"


@dataclass(frozen=True)
class ParallelChoice:
    """The choice of `--parallel auto`, and its reason.

    Attributes:
        mode: RING, of nodes or of the groups that the user named; TENSOR; GROUPS: a ring of the groups of `grouping`.
        ring_tokens_s, tensor_tokens_s: of all texts together; None where the model does not fit.
        tensor: of these texts, where it fits.
        grouping: the best one, where nodes are in no group yet and the model fits one.
    """

    mode: str
    reason: str
    ring_tokens_s: float | None
    tensor_tokens_s: float | None
    tensor: TensorPlan | None
    grouping: Grouping | None

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["tensor"]
        return fields


def choose_measured(profile: ClusterProfile, shape: ModelShape, workload: Workload) -> ParallelChoice:
    """The fastest of the best ring of a cluster's nodes or groups, and the other ways; needs at least two nodes.

    Raises:
        PlacementError: the model fits none.
    """
    stages, _ = merged(profile, shape, workload)
    cost = CostModel(stages, shape, workload)
    try:
        placement = place(cost)
    except PlacementError as e:
        return choose_parallel(profile, shape, workload, e)
    return choose_parallel(profile, shape, workload, cost.predict(placement.order, placement.counts).tokens_s)


def choose_parallel(
    profile: ClusterProfile, shape: ModelShape, workload: Workload, ring: float | PlacementError
) -> ParallelChoice:
    """The fastest of a ring, of shares on all nodes, and of a ring of groups, which is tried where the user named none.

    Args:
        ring: tokens per second of all texts together as a ring, or why the model does not fit one.

    Raises:
        PlacementError: it fits none.
    """
    tensor = _tensor(profile, shape, workload)
    has_groups = any(node.group for node in profile.nodes)
    return _fastest(ring, tensor, None if has_groups else fastest_grouping(profile, shape, workload), workload)


def of_two(ring: float, tensor: TensorPlan, workload: Workload) -> ParallelChoice:
    """As `choose_parallel`, of a ring with so many tokens per second, and of shares on all nodes."""
    return _fastest(ring, tensor, None, workload)


def _fastest(
    ring: float | PlacementError, tensor: TensorPlan | PlacementError, grouping: Grouping | None, workload: Workload
) -> ParallelChoice:
    speeds = {RING: ring, TENSOR: tensor.tokens_s if isinstance(tensor, TensorPlan) else tensor}
    if grouping is not None:
        speeds[GROUPS] = grouping.tokens_s
    rates = {mode: rate for mode, rate in speeds.items() if not isinstance(rate, PlacementError)}
    if not rates:
        assert isinstance(ring, PlacementError)
        raise ring
    best = max(rates, key=lambda mode: rates[mode])
    plan = tensor if isinstance(tensor, TensorPlan) else None
    reason = "; ".join(_reasons(best, speeds, workload, plan, grouping))
    return ParallelChoice(best, reason, rates.get(RING), rates.get(TENSOR), plan, grouping)


def _tensor(profile: ClusterProfile, shape: ModelShape, workload: Workload) -> TensorPlan | PlacementError:
    try:
        return plan_tensor(CostModel(profile, shape, workload))
    except PlacementError as e:
        return e


def _reasons(
    best: str, speeds: dict[str, float | PlacementError], workload: Workload, tensor: TensorPlan | None,
    grouping: Grouping | None,
) -> list[str]:  # fmt: skip
    """In words: the speed of each way, and what makes the difference."""
    words = {RING: "as a ring", TENSOR: "with every block on all nodes", GROUPS: "as a ring of groups"}
    rates = [f"{rate:.3g} {words[mode]}" for mode, rate in speeds.items() if not isinstance(rate, PlacementError)]
    texts = "one text" if workload.n_sequences == 1 else f"{workload.n_sequences} texts"
    told = [f"tokens/s for {texts}: {', '.join(rates)}"]
    told += [f"{words[mode]} it does not fit: {e}" for mode, e in speeds.items() if isinstance(e, PlacementError)]
    if best == GROUPS and grouping is not None:
        told.append(
            f"links within a group take at most {duration(grouping.within_s)}, others at least {duration(grouping.between_s)}: "
            f"the stages are {', '.join(grouping.used)}"
        )
    elif tensor is not None:
        told.append(
            f"{duration(tensor.sums_s)} of {duration(tensor.token_s)} a token with every block on all nodes are sums over "
            f"links of {duration(tensor.link.delay_s)} and {size(int(tensor.link.bytes_s))}/s"
        )
    return told
