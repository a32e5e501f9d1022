"""Whether nodes are better used as a ring, or with every block on all of them: by texts, links and memory, with the reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mdi.errors import PlacementError
from mdi.partition.cost import CostModel
from mdi.partition.group_profile import merged
from mdi.partition.methods import place
from mdi.partition.model import ModelShape, Workload
from mdi.partition.profile import ClusterProfile
from mdi.partition.tensor_plan import TensorPlan, plan_tensor
from mdi.units import duration, size

RING, TENSOR = "ring", "tensor"


@dataclass(frozen=True)
class ParallelChoice:
    """What `--parallel auto` takes, and why.

    Attributes:
        ring_tokens_s, tensor_tokens_s: of all texts together; None where the model does not fit.
        tensor: of these texts, where it fits.
    """

    mode: str
    reason: str
    ring_tokens_s: float | None
    tensor_tokens_s: float | None
    tensor: TensorPlan | None

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["tensor"]
        return fields


def choose_measured(profile: ClusterProfile, shape: ModelShape, workload: Workload) -> ParallelChoice:
    """The faster of the best ring of a cluster's nodes, or groups, and of shares on all nodes, of which there are two at least.

    Raises:
        PlacementError: the model fits neither.
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
    """The faster of a ring and of shares on all nodes.

    Args:
        ring: tokens per second of all texts together as a ring, or why the model does not fit one.

    Raises:
        PlacementError: it fits neither.
    """
    try:
        tensor = plan_tensor(CostModel(profile, shape, workload))
    except PlacementError as e:
        if isinstance(ring, PlacementError):
            raise ring from None
        return ParallelChoice(RING, f"with every block on all nodes it does not fit: {e}", ring, None, None)
    if isinstance(ring, PlacementError):
        return ParallelChoice(TENSOR, f"as a ring it does not fit: {ring}", None, tensor.tokens_s, tensor)
    reason = (
        f"{tensor.tokens_s:.3g} tokens/s for {_texts(workload)} with every block on all nodes, {ring:.3g} as a ring; "
        f"{duration(tensor.sums_s)} of {duration(tensor.token_s)} a token are sums over links of "
        f"{duration(tensor.link.delay_s)} and {size(int(tensor.link.bytes_s))}/s"
    )
    return ParallelChoice(TENSOR if tensor.tokens_s > ring else RING, reason, ring, tensor.tokens_s, tensor)


def _texts(workload: Workload) -> str:
    return "one text" if workload.n_sequences == 1 else f"{workload.n_sequences} texts"
