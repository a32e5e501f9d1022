"""Decides for a starter which nodes get which blocks of a run, before the first ring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from mdi.config import ClusterConfig, NodeConfig
from mdi.control.messages import N_TEXTS
from mdi.errors import NodeLostError
from mdi.machine.device import check_format, choose_device, choose_dtype
from mdi.measure.planning import told_blocks
from mdi.measure.window_plan import without_limits
from mdi.node.format_choice import first_that_fits, fits_here, formats_to_try, starter_computing, with_format
from mdi.node.model_family import ModelFamily
from mdi.node.parallel_choice import chosen_stages
from mdi.node.placing import divide, faster_way, measured_cluster, planned_ring, without
from mdi.node.prompt_limits import context_length
from mdi.node.sharing_out import SharingOut
from mdi.node.starter_ports import StarterPorts
from mdi.node.starter_report import StarterReport
from mdi.partition.model import Workload
from mdi.partition.profile import ClusterProfile
from mdi.spec.options import Requested, StarterOptions
from mdi.tensor.ring_stages import RingStage
from mdi.weight_formats import AUTO
from mdi.window.window_options import window_of

logger = logging.getLogger("mdi")


class StarterPlacing(StarterReport):
    """The side of a StarterNode that gives nodes their parts. Raises UsageError for a format that its device has not."""

    def __init__(
        self, cluster: ClusterConfig, options: StarterOptions, family: ModelFamily | None, ports: StarterPorts | None
    ) -> None:
        device = choose_device(options.device or cluster.starter.device)
        self._own = Requested(device=device, dtype=options.dtype or cluster.starter.dtype)
        choose_dtype(self._own.dtype, "float32", device)
        if window_of(options.weight_memory) is not None and options.n_frames is None:
            options = replace(options, n_frames=1)  # a frame is a pass over the weights: one carries all texts
        self._is_auto = options.quantize == AUTO
        if self._is_auto:
            options = with_format(options, None)
        check_format(options.quantize, device)
        check_format(options.quantize_head, device)
        super().__init__(cluster, options, device)
        self._family = family or ModelFamily()
        self._left_out: list[NodeConfig] = []  # that the placement gave no part, or that were lost before it
        self._profile: ClusterProfile | None = None
        self._ports = ports
        self._make_own: SharingOut | None = None  # of this node's stage, where that is not just its blocks
        self._n_sequences = N_TEXTS  # at the same time

    def _take_format(self, form: str | None) -> None:
        if self._is_auto:
            self._options = with_format(self._options, form)
        self._computing = starter_computing(self._family, self.weights, self._own.over(self._options))

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence: the user's choice, else the model's context."""
        return context_length(self.config, self._family.max_length(self.config), self._options.sequence_length)

    def place(self, n_sequences: int, max_length: int, check: Callable[[], None] = lambda: None) -> None:
        """Decide which node gets which blocks, as the nodes measure themselves; between `open` and `prepare`.

        Blocks given by hand, an even placement and chunks that are there stay as they are, and nothing is measured. A node
        that is lost while it measures itself is left out, or a spare takes its place, unless options.fixed.

        Args:
            n_sequences: of the run, at the same time.
            max_length: tokens that the longest can reach.
            check: called repeatedly meanwhile; its exceptions end the waiting.

        Raises:
            PlacementError: the model does not fit; MdiError: a node was never there or cannot measure itself.
        """
        self._n_sequences = n_sequences
        length = min(max_length, self.context_length)
        work = Workload(n_sequences, length, replay_bytes=self._options.replay_bytes)
        while True:
            try:
                return self._place(work, check)
            except NodeLostError as e:
                if self._options.fixed:
                    raise
                there = without(self.cluster, e)
                self._left_out += [node for node in self.cluster.nodes if node.name == e.node]
                self.cluster = there

    def _place(self, work: Workload, check: Callable[[], None]) -> None:
        weights, options = self.weights, self._options
        if (stages := self._chosen_stages(work, check)) is not None:
            return self._share_out(stages, work, check)
        formats = formats_to_try(weights) if self._is_auto else [options.quantize]
        has_window = window_of(options.weight_memory) is not None  # then memory does not limit the placement
        is_cut = options.layers is not None or (options.placement is None and weights.is_cut_by_chunks)
        if (
            not self.cluster.secondaries
            or is_cut
            or options.placement == "even"
            or has_window
            or not self._family.is_placed
        ):
            if self._is_auto:  # the starter's own memory decides
                fit = (form for form in formats if fits_here(weights, form, self._device))
                self._take_format(next(fit, formats[-1]))
            if not self.cluster.secondaries and len(weights.blocks) > 1:
                weights.cut_anew((weights.n_layer,))  # it was cut for nodes that were lost
            elif self.cluster.secondaries:
                how = "as --layers says" if options.layers else "as its chunks are" if is_cut else "shared out evenly"
                logger.info("blocks %s, %s", told_blocks(self.names, weights.blocks), how)
            return
        first_that_fits(formats, lambda form: self._place_in(form, work, check))

    def _chosen_stages(self, work: Workload, check: Callable[[], None]) -> tuple[RingStage, ...] | None:
        """See `chosen_stages`; with `--parallel auto` nodes measure themselves, unless the cut is made by hand."""
        options, weights = self._options, self.weights
        is_measured = options.placement != "even" and options.layers is None
        return chosen_stages(
            options, self._family.kernel_config(weights.config), self.computing, self.cluster, work.n_sequences,
            (lambda: faster_way(self._profiled(check), weights, self.computing, work)) if is_measured else None,
        )  # fmt: skip

    def _share_out(self, stages: tuple[RingStage, ...], work: Workload, check: Callable[[], None]) -> None:
        """Give the nodes of each stage shares of its blocks."""
        weights, options = self.weights, self._options
        assert self._ports is not None
        division = divide(stages, weights, options, self.computing, self.names, work, lambda: self._profiled(check))
        if options.n_frames is None and len(division.stages) > 1:
            self._options = options = replace(options, n_frames=len(division.stages))
        self._make_own = SharingOut(
            self._family,
            self.config,
            self._ports.over(self.cluster).starter.port_in,
            options,
            weights,
            self.computing,
            division,
        )
        self._take_nodes([name for stage in division.stages for name in stage.members])

    def _take_nodes(self, names: Sequence[str]) -> None:
        """The nodes of the ring, in its order; the others are left out."""
        nodes = {node.name: node for node in self.cluster.nodes}
        self.cluster = replace(self.cluster, secondaries=tuple(nodes[name] for name in names[1:]))
        self._left_out += [node for name, node in nodes.items() if name not in names]

    def _profiled(self, check: Callable[[], None]) -> ClusterProfile:
        """What the nodes measure of themselves, in the format of the run."""
        assert self._ports is not None
        if self._profile is None or self._profile.format != self.computing.format:
            here = self._ports.over(self.cluster)
            found = measured_cluster(here, self.weights, self._options, self.computing, self.run_id, check)
            has_window = window_of(self._options.weight_memory) is not None
            self._profile = without_limits(found) if has_window else found
        return self._profile

    def _place_in(self, form: str | None, work: Workload, check: Callable[[], None]) -> None:
        """Measure, plan and cut with weights in a format. Raises PlacementError if they do not fit."""
        self._take_format(form)
        self._state = "PLANNING"
        report = planned_ring(self._profiled(check), self.weights, self._options, self.computing, work)
        placement, n_frames = report.placement, len(report.nodes) + report.more_frames
        if self._options.n_frames is None and report.more_frames:
            self._options = replace(self._options, n_frames=n_frames)
        self.weights.cut_anew(placement.counts)
        self._take_nodes(placement.names)
        self._state = "IDLE"
