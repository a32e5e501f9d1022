"""How the nodes of a run compute one model: own blocks each, shares of all blocks, or stages that are groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from mdi.checkpoint.chunks import find_chunk
from mdi.config import ClusterConfig
from mdi.errors import UsageError
from mdi.machine.computing import Computing
from mdi.node.group_member import check_torch_sums
from mdi.partition.parallel import GROUPS, TENSOR, ParallelChoice
from mdi.partition.sum_cost import TORCH_SUMS
from mdi.spec.options import StarterOptions
from mdi.tensor.numbers import REDUCE_DTYPES
from mdi.tensor.ring_stages import RingStage, stages_of
from mdi.tensor.shares import why_not_shared_out

ALL_NODES = "all nodes"

logger = logging.getLogger("mdi")


def stages_in(cluster: ClusterConfig) -> tuple[RingStage, ...]:
    """The stages of a ring, as its nodes file has them."""
    return stages_of({node.name: node.group for node in cluster.nodes})


def chosen_stages(
    options: StarterOptions, config: Mapping[str, Any] | None, computing: Computing, cluster: ClusterConfig,
    n_sequences: int, choose: Callable[[], ParallelChoice] | None,
) -> tuple[RingStage, ...] | None:  # fmt: skip
    """The stages of the ring, if some are groups, one of all nodes with `--parallel tensor`; None if each node is its own.

    With `--parallel auto` these are the groups of the nodes file, one group of all nodes, or groups by measurement.

    Args:
        config: litgpt's Config as a plain dict; None of a model that is none of litgpt's.
        computing: of the starter.
        choose: what is better by what the nodes measure, called if that is to be known; None where nothing is measured.

    Raises:
        UsageError: it was asked for, and cannot be. PlacementError: the model does not fit.
    """
    mode, n_nodes = options.parallel.mode, cluster.n_nodes
    stages = stages_in(cluster)
    has_groups = any(stage.is_group for stage in stages)
    if n_nodes == 1 or (mode == "ring" and not has_groups):
        return None
    _check_sums(options, cluster)
    why_not = _why_not_shared(config, computing)
    whole = (RingStage(ALL_NODES, tuple(node.name for node in cluster.nodes)),)
    if mode == "tensor":
        if why_not is not None:
            raise UsageError(f"--parallel tensor: {why_not} cannot be shared out: use --parallel ring")
        return whole
    if mode == "auto":
        stages = _by_measure(why_not, stages, whole, n_sequences, choose)
    if not any(stage.is_group for stage in stages):
        return None
    if why_not is not None:
        raise UsageError(
            f'the nodes file has groups, but {why_not} cannot be shared out: leave "group" out for this model'
        )
    if options.parallel.is_head_shared and len(stages) > 1:
        raise UsageError("--head shared needs all nodes in one group: use --parallel tensor, or leave it out")
    return stages


def _check_sums(options: StarterOptions, cluster: ClusterConfig) -> None:
    """Raises UsageError for sums by torch that cannot be."""
    algorithm = options.parallel.algorithm
    if algorithm not in TORCH_SUMS:
        return
    check_torch_sums(algorithm)
    if cluster.keys is not None:
        raise UsageError(f"--reduce {algorithm} encrypts nothing: use another one in a cluster with a key")
    if options.parallel.reduce_dtype != REDUCE_DTYPES[0]:
        raise UsageError(f"--reduce {algorithm} sums in float32: leave --reduce-dtype out, or use another way")


def _why_not_shared(config: Mapping[str, Any] | None, computing: Computing) -> str | None:
    reason = "a model that is not litgpt's" if config is None else why_not_shared_out(config)
    if reason is None and computing.packing is None:
        reason = "a starter that computes in torch"
    return reason


def _by_measure(
    why_not: str | None, stages: tuple[RingStage, ...], whole: tuple[RingStage, ...], n_sequences: int,
    choose: Callable[[], ParallelChoice] | None,
) -> tuple[RingStage, ...]:  # fmt: skip
    """`stages`, `whole`, or other groups, by what the nodes measure; without that, by how many texts there are."""
    if why_not is not None:
        logger.info("--parallel auto: ring, because %s cannot be shared out", why_not)
        return stages
    n_nodes = len(whole[0].members)
    if choose is None:
        if n_sequences < n_nodes:
            logger.info("--parallel auto: tensor, because fewer texts (%d) than nodes (%d) leave nodes of a ring idle",
                        n_sequences, n_nodes)  # fmt: skip
            return whole
        logger.info("--parallel auto: ring, because %d texts keep all %d nodes of a ring busy", n_sequences, n_nodes)
        return stages
    choice = choose()
    logger.info("--parallel auto: %s; %s", choice.mode, choice.reason)
    if choice.mode == GROUPS and choice.grouping is not None:
        groups = choice.grouping.groups
        return stages_of({name: groups.get(name) for name in whole[0].members})
    return whole if choice.mode == TENSOR else stages


def nodes_of_chunks(options: StarterOptions, cluster: ClusterConfig) -> int:
    """For how many nodes the chunks are cut that a run looks for: shares are cut out of those of any number of nodes.

    Where there are none, shares of all blocks begin with a cut for one node: there may be more nodes than blocks.
    """
    stages, is_tensor = stages_in(cluster), options.parallel.mode == TENSOR
    n_stages = cluster.n_nodes if is_tensor else len(stages)
    is_shared = is_tensor or any(stage.is_group for stage in stages)
    if not is_shared or options.ckpt is None or options.chunk is not None or options.layers is not None:
        return n_stages
    found = (n for n in (n_stages, 1) if find_chunk(options.ckpt, n, "starter", options.quantize).is_file())
    return next(found, 1 if is_tensor else n_stages)
