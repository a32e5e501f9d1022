"""From running nodes to a placement: measures them, and passes the numbers to `mdi.placement.plan`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mdi.block_ranges import span
from mdi.cancel import Cancel
from mdi.checkpoint.store import BlockStore
from mdi.control.messages import ProfileRequest
from mdi.control.server import open_ports
from mdi.errors import CheckpointError
from mdi.files import default_cache_dir
from mdi.host.computing import Computing, choose_computing
from mdi.host.device import choose_device
from mdi.kernels.format_maps import shown
from mdi.kernels.weight_formats import SMALLER
from mdi.model.plain import ModelConfig
from mdi.placement.cluster_measurement import ClusterMeasurement
from mdi.placement.model import ModelShape, Workload, model_shape
from mdi.placement.plan import PlanReport, left_out_lines, plan
from mdi.placement.profile import ClusterProfile, NodeProfile
from mdi.placement.profiler import Profiler
from mdi.placement.profiling import Subject
from mdi.spec.cluster import ClusterConfig
from mdi.spec.model_id import ModelId
from mdi.spec.options import Requested

logger = logging.getLogger("mdi")


def profile_request(
    model: ModelId, computing: Computing, asked: Requested, fresh: bool = False, run: str | None = None
) -> ProfileRequest:
    """How a node is to measure itself; see `profile_cluster`."""
    # Device and threads are each node's own; what caches hold has no part in what is measured, and must not be in its way.
    alike = Requested(dtype=asked.dtype, quantize=computing.quantize)
    return ProfileRequest(model, fresh, run=run, **vars(alike))


def profile_cluster(
    cluster: ClusterConfig,
    model: ModelId,
    computing: Computing,
    asked: Requested,
    cache_dir: Path | None,
    wait_s: float,
    cancel: Cancel,
    fresh: bool = False,
    run: str | None = None,
) -> ClusterProfile:
    """Measure all nodes and the links between them; raises as `ClusterMeasurement`.

    Args:
        cluster: with the ports that are really listened on, the starter's too.
        computing: of the starter; `asked` is what the other nodes compute with, in its format.
        cache_dir: folder for the starter's own measurements; None: this process's cache folder.
        fresh: measure again, whatever is kept.
        run: id of the run to place; None is only a plan.
    """
    folder = cache_dir or default_cache_dir()
    profiler = Profiler(cluster.starter.name, folder)
    subject = Subject(model.config, model.config_hash, computing, with_head=True)

    def own() -> NodeProfile:
        try:
            return profiler.profile(subject, BlockStore(folder), fresh, cancel)
        except CheckpointError as e:
            raise CheckpointError(f"{cluster.starter.name} cannot measure itself: {e}") from None

    request = profile_request(model, computing, asked, fresh, run)
    measurement = ClusterMeasurement(cluster, request, own, wait_s, cancel, subject.computing.format)
    nodes, links = measurement.run()
    for name, other in measurement.formats.items():
        if other != subject.computing.format:
            logger.info(
                "%s holds its blocks in %s: the plan counts them as %s",
                name,
                shown(other),
                shown(subject.computing.format),
            )
    groups = {node.name: node.group or "" for node in cluster.nodes}
    nodes = tuple(replace(node, group=groups[node.name]) for node in nodes)
    return ClusterProfile(nodes, links, model.name, model.config_hash, subject.computing.format)


def measure_live(
    cluster: ClusterConfig,
    model: ModelId,
    asked: Requested,
    cache_dir: Path,
    wait_s: float,
    fresh: bool,
    cancel: Cancel,
) -> ClusterProfile:
    """As `profile_cluster`, where no starter runs: its ports are open just for this. UsageError if they cannot be."""
    node = cluster.starter
    own = replace(asked, device=choose_device(node.device), dtype=asked.dtype or node.dtype)
    computing = choose_computing(model.config, own, model.dtype, is_rounded=model.is_rounded)
    with contextlib.ExitStack() as stack:
        if cluster.secondaries:
            port, port_in = stack.enter_context(open_ports(node, cluster.keys))
            cluster = replace(cluster, starter=replace(node, port=port, port_in=port_in))
        return profile_cluster(cluster, model, computing, asked, cache_dir, wait_s, cancel, fresh)


def choose(
    profile: ClusterProfile, model: ModelId, method: str, workload: Workload, kv_dtype: str, tied_type: str | None = None
) -> PlanReport:  # fmt: skip
    """The plan of a run in a few lines.

    Args:
        kv_dtype: what caches hold.
        tied_type: see `model_shape`.

    Raises:
        PlacementError: the model does not fit.
    """
    shape = model_shape(model.config, profile.format, kv_dtype, tied_type)
    report = plan(
        profile,
        shape,
        workload,
        method=method,
        measured=shape,
        smaller=smaller_shapes(model.config, shape, tied_type),
    )
    for line in plan_lines(report):
        logger.info("%s", line)
    return report


def smaller_shapes(config: ModelConfig, shape: ModelShape, tied_type: str | None = None) -> list[ModelShape]:
    """The model in the formats that take less and that this version has, for advice."""
    others = (model_shape(config, name, shape.kv_dtype, tied_type) for name in SMALLER if name != shape.format)
    return [other for other in others if other.weight_bytes < shape.weight_bytes]


def format_blocks(names: Sequence[str], blocks: Sequence[tuple[int, int]]) -> str:
    """The blocks of each node, as "starter 0-3, secondary0 4-11"."""
    pairs = zip(names, blocks, strict=True)
    return ", ".join(f"{name} {span(start, stop)}" for name, (start, stop) in pairs)


def plan_lines(report: PlanReport) -> list[str]:
    """Log lines about a plan at the beginning of a run."""
    ranges = format_blocks([node.name for node in report.nodes], [(node.start, node.stop) for node in report.nodes])
    lines = [f"placement {report.placement.method}: blocks {ranges}; about {report.tokens_s:.3g} tokens/s expected"]
    return [*lines, *report.notes, *left_out_lines(report.placement)]
