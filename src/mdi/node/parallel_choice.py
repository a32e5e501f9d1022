"""How the nodes of a run compute one model: blocks of their own each, or a share of every block; and who gets which share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mdi.checkpoint.chunks import find_chunk
from mdi.config import ClusterConfig
from mdi.errors import UsageError
from mdi.machine.computing import Computing
from mdi.measure.model_shape import model_shape
from mdi.node.group_leader import GroupLeader
from mdi.node.model_family import ModelFamily
from mdi.node.options import ParallelOptions, StarterOptions
from mdi.node.own_stage import OwnStage
from mdi.node.starter_weights import StarterWeights
from mdi.partition.cost import CostModel
from mdi.partition.model import Workload
from mdi.partition.profile import ClusterProfile
from mdi.partition.tensor_plan import plan_tensor
from mdi.tensor.group import Group, Member
from mdi.tensor.shares import Shares, share_out, why_not_shared_out
from mdi.units import duration
from mdi.window.options import window_of

logger = logging.getLogger("mdi")


def is_tensor(
    options: StarterOptions, config: Mapping[str, Any] | None, computing: Computing, n_nodes: int, n_sequences: int
) -> bool:
    """Whether all nodes compute a share of every block.

    Args:
        config: litgpt's Config as a plain dict; None of a model that is none of litgpt's.
        computing: of the starter.

    Raises:
        UsageError: it was asked for, and cannot be.
    """
    mode = options.parallel.mode
    if mode == "ring" or n_nodes == 1:
        return False
    reason = "a model that is not litgpt's" if config is None else why_not_shared_out(config)
    if reason is None and computing.packing is None:
        reason = "a starter that computes in torch"
    if reason is None and window_of(options.weight_memory) is not None:
        reason = "a stage with a window (--window, --memory)"
    if mode == "tensor":
        if reason is not None:
            raise UsageError(f"--parallel tensor: {reason} cannot be shared out: use --parallel ring")
        return True
    if reason is None and n_sequences < n_nodes:
        logger.info(
            "--parallel auto: tensor, for fewer texts (%d) than nodes (%d) leave nodes of a ring idle",
            n_sequences,
            n_nodes,
        )
        return True
    why = reason or f"{n_sequences} texts keep all {n_nodes} nodes of a ring busy"
    logger.info("--parallel auto: ring, for %s", why)
    return False


def nodes_of_chunks(options: StarterOptions, n_nodes: int) -> int:
    """For how many nodes the chunks are cut that a run looks for: shares are cut out of those of any number of nodes."""
    if options.parallel.mode != "tensor" or options.ckpt is None or options.chunk is not None:
        return n_nodes
    return next(
        (n for n in (n_nodes, 1) if find_chunk(options.ckpt, n, "starter", options.quantize).is_file()), n_nodes
    )


def chosen_parts(options: ParallelOptions, names: Sequence[str], measured: Sequence[float] | None) -> dict[str, float]:
    """What each node's share is proportional to, by name: set by hand, else measured, else alike. UsageError."""
    if options.parts is not None and len(options.parts) != len(names):
        raise UsageError(f"--shares names {len(options.parts)} nodes, but there are {len(names)}")
    return dict(zip(names, options.parts or measured or [1.0] * len(names), strict=True))


def leaders(
    family: ModelFamily, config: Any, cluster: ClusterConfig, ring_port: int, options: StarterOptions, weights: StarterWeights,
    computing: Computing, measured: Sequence[float] | None = None,
) -> Callable[[ClusterConfig], OwnStage]:  # fmt: skip
    """What makes the starter's stage for some nodes of a run, all of them at first: that of a group, or, alone, of all blocks.

    Args:
        config: of the model, as the family has it.
        ring_port: the starter's own, as it really is.
        measured: what the share of each node of `cluster` is proportional to.

    Raises:
        UsageError: shares by hand that do not fit the nodes.
    """
    parts = chosen_parts(options.parallel, [node.name for node in cluster.nodes], measured)
    mean = sum(parts.values()) / len(parts)

    def leader(nodes: ClusterConfig) -> OwnStage:
        if nodes.n_nodes == 1:
            weights.give_all_blocks(1)
            return OwnStage(cluster.starter.name, family, config, options)
        each = [parts.get(node.name, mean) for node in nodes.nodes]
        return _leader(family, config, nodes, ring_port, options, weights, computing, each)

    return leader


def _leader(
    family: ModelFamily, config: Any, cluster: ClusterConfig, ring_port: int, options: StarterOptions, weights: StarterWeights,
    computing: Computing, parts: Sequence[float],
) -> GroupLeader:  # fmt: skip
    fields, parallel, packing = weights.config, options.parallel, computing.packing
    assert packing is not None
    if not any(parts):  # those that had all are lost
        parts = [1.0] * len(parts)
    shares = share_out(fields, parts, parallel.is_head_shared)
    weights.give_all_blocks(cluster.n_nodes)
    ports = [ring_port, *(node.port_in for node in cluster.secondaries)]
    members = tuple(Member(node.name, node.addr, port) for node, port in zip(cluster.nodes, ports, strict=True))
    logger.info("every block on all nodes: %s", told_shares(cluster, shares))
    group = Group(0, members, shares, packing, parallel.algorithm, parallel.reduce_dtype)
    return GroupLeader(cluster.starter.name, family, config, options, group, fields)


def measured_parts(
    profile: ClusterProfile, config: Mapping[str, Any], computing: Computing, workload: Workload
) -> tuple[float, ...]:
    """What each node's share is proportional to, by what the nodes measured of themselves. PlacementError if nothing fits."""
    shape = model_shape(config, computing.format, computing.kv_dtype)
    plan = plan_tensor(CostModel(profile, shape, workload))
    logger.info(
        "shares %s by the nodes' own measurements: %s for a token, %s of it sums (%s)",
        "/".join(f"{part:.0%}" for part in plan.parts), duration(plan.token_s), duration(plan.sums_s), plan.algorithm,
    )  # fmt: skip
    return plan.parts


def told_shares(cluster: ClusterConfig, shares: Shares) -> str:
    """In words, for the log."""
    bounds = zip(cluster.nodes, shares.heads, shares.heads[1:], shares.columns, shares.columns[1:], strict=False)
    return ", ".join(f"{node.name} {b - a} heads and {d - c} columns" for node, a, b, c, d in bounds)
