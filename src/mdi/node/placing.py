"""Which node gets which blocks in a run's first ring, as the nodes measure themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from mdi.config import ClusterConfig
from mdi.control.client import ControlClient
from mdi.errors import ABSENT, NodeLostError
from mdi.machine.computing import Computing
from mdi.measure.model_shape import model_shape
from mdi.measure.planning import Model, choose, profile_cluster
from mdi.node.sharing_out import Division, division_by_hand
from mdi.node.starter_weights import StarterWeights
from mdi.partition.cost import CostModel
from mdi.partition.grouping import with_groups
from mdi.partition.methods import DEFAULT_METHOD
from mdi.partition.model import Workload
from mdi.partition.parallel import ParallelChoice, choose_measured
from mdi.partition.plan import PlanReport
from mdi.partition.profile import ClusterProfile
from mdi.partition.tensor_plan import plan_tensor
from mdi.recovery.roll_call import free_nodes
from mdi.spec.options import StarterOptions
from mdi.tensor.ring_stages import RingStage
from mdi.units import duration

logger = logging.getLogger("mdi")


def measured_cluster(
    cluster: ClusterConfig, weights: StarterWeights, options: StarterOptions, computing: Computing, run: str,
    check: Callable[[], None],
) -> ClusterProfile:  # fmt: skip
    """What the nodes are, and the links between them.

    Args:
        cluster: with the ports that the starter really has.
        computing: what the starter computes with.
        run: id of the run to place.
        check: called repeatedly meanwhile; its exceptions end the waiting.

    Raises:
        MdiError: a node is not there or cannot measure itself.
    """
    return profile_cluster(
        cluster, model_of(weights), computing, options, options.cache_dir, options.wait_s, check=check, run=run
    )


def without(cluster: ClusterConfig, error: NodeLostError) -> ClusterConfig:
    """The nodes of a run without blocks yet, after a loss: a spare that answers takes the lost node's place.

    Raises:
        NodeLostError: `error`, where it is about no secondary, or about one that was never there and no spare is.
    """
    free = free_nodes([ControlClient(node, cluster.keys) for node in cluster.spares])
    spare = next((node for node in cluster.spares if node.name in free), None)
    is_known = any(node.name == error.node for node in cluster.secondaries)
    if not is_known or (error.code == ABSENT and spare is None):
        raise error
    place = () if spare is None else (spare,)
    logger.warning(
        "warning: %s; %s", error, f"{spare.name} takes its place" if spare else "the others go on without it"
    )
    return replace(
        cluster,
        secondaries=tuple(
            one for node in cluster.secondaries for one in (place if node.name == error.node else (node,))
        ),
        spares=tuple(node for node in cluster.spares if node is not spare),
    )


def planned_ring(
    profile: ClusterProfile, weights: StarterWeights, options: StarterOptions, computing: Computing, workload: Workload,
) -> PlanReport:  # fmt: skip
    """The ring of nodes, or of groups. PlacementError if the model does not fit."""
    method = options.placement or DEFAULT_METHOD
    return choose(profile, model_of(weights), method, workload, options.prefer_memory, computing.kv_dtype)


def faster_way(
    profile: ClusterProfile, weights: StarterWeights, computing: Computing, workload: Workload
) -> ParallelChoice:
    """A ring of nodes or groups, or all blocks on all nodes. PlacementError if the model fits none."""
    return choose_measured(profile, model_shape(weights.config, computing.format, computing.kv_dtype), workload)


def divide(
    stages: tuple[RingStage, ...], weights: StarterWeights, options: StarterOptions, computing: Computing,
    names: Sequence[str], workload: Workload, measured: Callable[[], ClusterProfile],
) -> Division:  # fmt: skip
    """Which node gets which share of which blocks in the first ring.

    Args:
        stages: some of them groups.
        names: of all nodes, as they are listed.
        measured: what nodes and links are, called if it is to be known.

    Raises:
        PlacementError: the model does not fit; MdiError: a node is not there or cannot measure itself.
    """
    by_chunks = not options.placement and weights.is_cut_by_chunks and len(weights.blocks) == len(stages)
    is_cut = len(stages) > 1 and (options.layers is not None or by_chunks)
    if options.parallel.parts is not None or options.placement == "even" or is_cut:
        return division_by_hand(stages, weights, options.parallel, names)
    if len(stages) == 1:
        shape = model_shape(weights.config, computing.format, computing.kv_dtype)
        return _of_all_blocks(CostModel(measured(), shape, workload), stages)
    groups = {name: stage.name for stage in stages if stage.is_group for name in stage.members}
    return _planned_groups(planned_ring(with_groups(measured(), groups), weights, options, computing, workload), stages)


def _planned_groups(report: PlanReport, stages: tuple[RingStage, ...]) -> Division:
    """The stages that a plan uses, in its order, and what each node's share is proportional to."""
    named = {stage.name: stage for stage in stages}
    parts = {name: part for group in report.groups for name, part in zip(group.members, group.parts, strict=True)}
    used = tuple(named[name] for name in report.placement.names)
    return Division(used, report.placement.counts, {name: parts.get(name, 1.0) for s in used for name in s.members})


def _of_all_blocks(cost: CostModel, stages: tuple[RingStage, ...]) -> Division:
    """Shares for all nodes. PlacementError if nothing fits."""
    plan = plan_tensor(cost)
    logger.info(
        "shares %s by the nodes' own measurements: %s for a token, %s of it sums (%s)",
        "/".join(f"{part:.0%}" for part in plan.parts), duration(plan.token_s), duration(plan.sums_s), plan.algorithm,
    )  # fmt: skip
    return Division(stages, (cost.n_layer,), dict(zip(plan.names, plan.parts, strict=True)))


def model_of(weights: StarterWeights) -> Model:
    return Model(weights.model, weights.config, weights.config_hash, weights.dtype)
