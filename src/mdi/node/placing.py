"""Who holds which blocks in a run's first ring, by what the nodes measure of themselves."""

from __future__ import annotations

from collections.abc import Callable

from mdi.config import ClusterConfig
from mdi.machine.computing import Computing
from mdi.measure.planning import Model, choose, profile_cluster
from mdi.node.options import StarterOptions
from mdi.node.starter_weights import StarterWeights
from mdi.partition.model import Workload
from mdi.partition.placement import Placement
from mdi.partition.profile import ClusterProfile


def measured_placement(
    cluster: ClusterConfig, weights: StarterWeights, options: StarterOptions, computing: Computing,
    workload: Workload, method: str, run: str, check: Callable[[], None],
) -> tuple[ClusterProfile, Placement, int]:  # fmt: skip
    """What was measured, the placement, and frames in flight.

    Args:
        cluster: with the ports that the starter really has.
        computing: what the starter computes with.
        run: id of the run that is to be placed.
        check: called again and again meanwhile; what it raises ends the waiting.

    Raises:
        PlacementError: the model does not fit; MdiError: a node is not there or cannot measure itself.
    """
    profile = measured_cluster(cluster, weights, options, computing, run, check)
    model = Model(weights.model, weights.config, weights.config_hash, weights.dtype)
    placement, n_frames = choose(profile, model, method, workload, options.prefer_memory, computing.kv_dtype)
    return profile, placement, n_frames


def measured_cluster(
    cluster: ClusterConfig, weights: StarterWeights, options: StarterOptions, computing: Computing, run: str,
    check: Callable[[], None],
) -> ClusterProfile:  # fmt: skip
    """What the nodes are, and the links between them; see `measured_placement`."""
    model = Model(weights.model, weights.config, weights.config_hash, weights.dtype)
    return profile_cluster(cluster, model, computing, options, options.cache_dir, options.wait_s, check=check, run=run)
