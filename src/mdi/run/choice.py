"""The first ring of a run: its model, the weight format, and which nodes get which blocks, as the nodes measure themselves."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mdi.cancel import Cancel
from mdi.checkpoint.adapters import Adapter, adapter_names
from mdi.checkpoint.chunks import find_chunk
from mdi.checkpoint.mixtures import meant
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.shapes import packed_bytes
from mdi.checkpoint.weights import own_packing, warn_of_rounding
from mdi.control.client import ControlClient
from mdi.control.meeting import ASK_S
from mdi.control.swarm import weights_id
from mdi.errors import Code, NodeLostError, PlacementError, UsageError
from mdi.files import default_cache_dir
from mdi.host.computing import Computing, choose_computing
from mdi.host.device import check_format, choose_device, choose_dtype, load_torch
from mdi.host.resources import device_free_bytes, memory_bytes
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.format_maps import shown
from mdi.kernels.weight_formats import (
    AUTO,
    LAYOUTS,
    MIXTURES,
    NUMBER_BYTES,
    OWN,
    OWN_FORMAT,
    SMALLER,
    check_whole,
    held_bytes,
    weight_format,
)
from mdi.model.plain import ModelConfig
from mdi.model.spec import ModelSpec
from mdi.placement.cost import CostModel
from mdi.placement.model import ModelShape, Workload, model_shape
from mdi.placement.parallel import GROUPS, TENSOR, ParallelChoice, choose_measured, with_groups
from mdi.placement.plan import PlanReport, rescaled
from mdi.placement.planning import choose, format_blocks, profile_cluster
from mdi.placement.profile import UNLIMITED, ClusterProfile, left_over
from mdi.placement.tensor_plan import plan_tensor
from mdi.run.nodes import Losses, RollCall, StarterPorts, free_nodes
from mdi.run.swarm import Swarm, SwarmPart, with_chain
from mdi.run.texts import check_prompt, context_length
from mdi.spec.cluster import ClusterConfig, NodeConfig
from mdi.spec.combinations import NAMED_GROUPS, STAGES, TORCH, facts_of, refuse
from mdi.spec.extent import Extent
from mdi.spec.options import DEFAULT_PLACEMENT, Requested, StarterOptions
from mdi.spec.window import window_of
from mdi.stages.model_family import ModelFamily
from mdi.stages.starter_weights import StarterWeights
from mdi.tensor.group import Division, RingStage, SharingOut, division_by_hand, node_blocks, stages_of
from mdi.tensor.shares import why_not_shared_out
from mdi.text.texts import TextCodec
from mdi.units import duration, size

ALL_NODES = "all nodes"

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Measured:
    """What nodes have told of themselves while nothing ran there, and the model that they measured with."""

    nodes: tuple[NodeConfig, ...]
    profile: ClusterProfile
    shape: ModelShape

    def has(self, nodes: Sequence[NodeConfig]) -> bool:
        """Whether these are among them; names alone may be given anew."""
        known = {(node.name, node.addr, node.port_in) for node in self.nodes}
        return known.issuperset((node.name, node.addr, node.port_in) for node in nodes)


@dataclass(frozen=True)
class Neighbour:
    """Another model, which runs on the same nodes.

    Attributes:
        names: of the nodes of its ring, as it is now.
        measured: None if the nodes were not asked.
    """

    names: tuple[str, ...]
    measured: Measured | None


class NotKnownError(PlacementError):
    """What there is of the nodes is not known, so no smaller format fits either."""


class Choice:
    """The model of a run, and the nodes and the cut of its first ring.

    Args:
        family: of the model; None is litgpt's.
        ports: of the starter.
        swarm: whose nodes hold the blocks already; None: they get them.
        beside: models that run there already; what they leave of the nodes counts.

    Attributes:
        options: the user's, with what was chosen in the place of "auto".
        cluster: the nodes of the ring in its order, from `place` on; before, all of them.
        left_out: nodes that the placement gave no part, or that were lost before it.
        profile: what the nodes have measured, less what others take; None if they were not asked.
        measured: see Neighbour.
        held: the nodes that hold the blocks already; None: they get them.
        sharing: gives nodes shares of blocks; None if each has its blocks whole.
        extent: of the run, from `place` on.
        weights, spec, directory, codec: of the model, from `open` on: the weights with the cut, what it is, the
            folder, the tokenizer.
        computing: of the starter.
    """

    weights: StarterWeights
    spec: ModelSpec
    directory: Path
    codec: TextCodec
    computing: Computing

    def __init__(
        self, cluster: ClusterConfig, options: StarterOptions, family: ModelFamily | None, ports: StarterPorts, run: str,
        swarm: Swarm | None = None, beside: Sequence[Neighbour] = (),
    ) -> None:  # fmt: skip
        self.device = device = choose_device(options.device or cluster.starter.device)
        self._asked = Requested(device=device, dtype=options.dtype or cluster.starter.dtype)
        choose_dtype(self._asked.dtype, "float32", device)
        if window_of(options.weight_memory) is not None and options.n_frames is None:
            options = replace(options, n_frames=1)  # a frame is a pass over the weights: one carries all texts
        self._is_auto = options.quantize == AUTO
        if self._is_auto:
            options = with_format(options, None)
        check_whole(options.quantize, options.quantize_head)
        for form in (options.quantize, options.quantize_head):
            check_format(None if form == OWN else form, device)
        self.options = options
        self.cluster = cluster
        self.family = family or ModelFamily()
        self.left_out: list[NodeConfig] = []
        self.profile: ClusterProfile | None = None
        self.sharing: SharingOut | None = None
        self._extent = Extent()
        self.draft_bytes = 0
        self._ports = ports
        self._run = run
        self._swarm = swarm
        self._beside = tuple(beside)
        self.measured: Measured | None = None
        self.held: SwarmPart | None = None
        self._is_open = False

    def open(self) -> None:
        """Find the weights. Reports every mistake in them: MdiError."""
        options = self.options
        is_placed = options.placement not in (None, "even") and options.layers is None
        will_be_cut = self.cluster.n_nodes > 1 and (is_placed or self._swarm is not None)
        with contextlib.ExitStack() as stack:
            weights = self.family.open_weights(
                options.ckpt, options.chunk, nodes_of_chunks(options, self.cluster), options.layers,
                options.quantize, will_be_cut,
            )  # fmt: skip
            stack.callback(weights.close)
            names = adapter_names(options.named_adapters)  # none twice, whatever they are
            if options.in_peft_form:
                check_adapters(self.family, weights, options)
                weights.take_adapters([one for one in names if one.name not in options.sides])
            self.codec = self.family.open_codec(weights.directory, options.prompt_style)
            self.weights, self.spec = weights, weights.model.spec
            self.directory = weights.directory
            stack.pop_all()
        self._is_open = True
        warn_of_rounding(weights.model.name, weights.native, options.quantize)
        self._set_format(options.quantize)
        if weights.adapters:
            self._check_kernels()
        for one in weights.adapters:
            self.check_room(one)

    def check_adapters(self) -> None:
        """Raises UsageError if there can be no adapters."""
        check_adapters(self.family, self.weights, self.options)
        self._check_kernels()

    def _check_kernels(self) -> None:
        if self.computing.packing is None:
            refuse({"--adapter": "--adapter", TORCH: f"this node computes {self.computing.why_torch}"})

    def check_room(self, adapter: Adapter) -> None:
        """Raises UsageError if an adapter leaves no place for a text."""
        if adapter.n_virtual >= self.context_length:
            raise UsageError(
                f"--adapter {adapter.name}: its {adapter.n_virtual} rows leave no place for a text in a context of "
                f"{self.context_length}", code=Code.LENGTH,
            )  # fmt: skip

    def close(self) -> None:
        """Harmless if repeated."""
        if self._is_open:
            self._is_open = False
            self.codec.close()
            self.weights.close()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.cluster.nodes)

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence: the user's choice, else the model's context."""
        return context_length(self.spec, self.family.max_length(self.spec), self.options.sequence_length)

    @property
    def extent(self) -> Extent:
        return replace(self._extent, n_frames=self.options.n_frames)

    @property
    def cache_type(self) -> str:
        """What caches hold on this node."""
        return self.computing.cache_type(self.options.kv_dtype)

    @property
    def format(self) -> str:
        """The form of the weights on this node."""
        return self.computing.format

    @property
    def formats(self) -> tuple[str | None, str | None]:
        """Formats of the blocks and of the head as options have them: as requested or, with "auto", as chosen."""
        own = self.weights.own_formats
        blocks, head = (
            OWN if form == own is not None else form for form in (self.options.quantize, self.options.quantize_head)
        )
        return blocks, head

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises UsageError if the prompt is empty, does not fit the context, or has tokens that the model does not know."""
        check_prompt(prompt_ids, self.spec, self.context_length, self.directory)

    def _set_format(self, form: str | None) -> None:
        if form == OWN or self.options.quantize_head == OWN:
            head = self.options.quantize_head
            own = self.weights.own_formats  # None: of a file with one format, which is what no choice gives
            form = own if form == OWN else form
            self.options = replace(self.options, quantize=form, quantize_head=own if head in (OWN, None) else head)
        if form in MIXTURES:
            form = meant(form, self.weights.config)
            self.options = replace(self.options, quantize=form, quantize_head=form)
        self.weights.take_format(form, self.options.cache_dir or default_cache_dir())
        if self._is_auto:
            self.options = with_format(self.options, form)
        self.computing = starter_computing(self.family, self.weights, self._asked.over(self.options))
        self.computing.cache_type(self.options.kv_dtype)  # reports a mistake before nodes are asked

    def place(self, n_sequences: int, max_length: int, losses: Losses) -> None:
        """Decide which node gets which blocks, as the nodes measure themselves; after `open`.

        Blocks given by hand, an even placement and chunks that are there stay as they are, and nothing is measured. A node
        that is lost while it measures itself is left out, or a spare takes its place, unless options.fixed.

        Args:
            n_sequences: of the run, at the same time.
            max_length: tokens that the longest can reach.
            losses: end an attempt.

        Raises:
            PlacementError: the model does not fit; MdiError: a node was never there or cannot measure itself.
        """
        length = min(max_length, self.context_length)
        self._extent = Extent(length, n_sequences, kv_dtype=self.options.kv_dtype)
        self.draft_bytes = draft_bytes(self)
        work = Workload(n_sequences, length, replay_bytes=self.options.replay_bytes, draft_bytes=self.draft_bytes)
        while True:
            try:
                with losses.attempt() as attempt:
                    if self._swarm is not None:
                        return self._take_chain(self._swarm, attempt)
                    self._place(work, attempt)
                    if self._is_auto:
                        logger.info(told_choice(self.weights, self.computing.format))
                    return None
            except NodeLostError as e:
                if self.options.fixed:
                    raise
                there = without(self.cluster, e)
                self.left_out += [node for node in self.cluster.nodes if node.name == e.node]
                self.cluster = there

    def _take_chain(self, swarm: Swarm, cancel: Cancel) -> None:
        """The blocks stay where they are. PlacementError if some are nowhere."""
        weights = self.weights
        last = weights.spec(f"block.{weights.n_layer - 1}").sha256
        identity = weights_id(weights.model, last)
        arithmetic = self.computing.arithmetic("auto")
        self.held = part = swarm.choose(
            identity, arithmetic, weights.model.spec.allowed_cuts(), weights.model.name, cancel
        )
        weights.cut_anew((0, *(one.stop - one.start for one in part.chain)))
        self.cluster = cluster = with_chain(self.cluster, part)
        self.left_out = [node for node in part.nodes if node not in cluster.secondaries]
        logger.info("blocks %s, as the nodes hold them", format_blocks(self.names, weights.blocks))

    def _place(self, work: Workload, cancel: Cancel) -> None:
        weights, options = self.weights, self.options
        if (stages := self._chosen_stages(work, cancel)) is not None:
            return self._share_out(stages, work, cancel)
        in_kernels = self.computing.packing is not None and self._asked.dtype is None
        formats = formats_to_try(weights, in_kernels) if self._is_auto else [options.quantize]
        has_window = window_of(options.weight_memory) is not None  # then memory does not limit the placement
        is_cut = options.layers is not None or (options.placement is None and weights.is_cut_by_chunks)
        if (
            not self.cluster.secondaries
            or is_cut
            or options.placement == "even"
            or has_window
            or not self.family.is_placed
        ):
            if self._is_auto:  # the starter's own memory decides
                fit = (form for form in formats if fits_here(weights, form, self.device))
                self._set_format(next(fit, formats[-1]))
            if not self.cluster.secondaries and len(weights.blocks) > 1:
                weights.cut_anew((weights.n_layer,))  # it was cut for nodes that were lost
            elif self.cluster.secondaries:
                how = "as --layers says" if options.layers else "as its chunks are" if is_cut else "shared out evenly"
                logger.info("blocks %s, %s", format_blocks(self.names, weights.blocks), how)
            return
        first_that_fits(formats, lambda form: self._place_in(form, work, cancel))

    def _chosen_stages(self, work: Workload, cancel: Cancel) -> tuple[RingStage, ...] | None:
        """See `chosen_stages`; with `--parallel auto` nodes measure themselves, unless the cut is made by hand."""
        options, weights = self.options, self.weights
        is_measured = options.placement != "even" and options.layers is None
        return chosen_stages(
            options, self.family.kernel_config(weights.config), self.computing, self.cluster, work.n_sequences,
            (lambda: faster_way(self._profiled(cancel), weights, options, self.computing, work)) if is_measured else None,
        )  # fmt: skip

    def _share_out(self, stages: tuple[RingStage, ...], work: Workload, cancel: Cancel) -> None:
        """Give the nodes of each stage shares of its blocks."""
        weights, options = self.weights, self.options
        division = divide(stages, weights, options, self.computing, self.names, work, lambda: self._profiled(cancel))
        if options.n_frames is None and len(division.stages) > 1:
            self.options = options = replace(options, n_frames=len(division.stages))
        assert self.computing.packing is not None
        ring_port = self._ports.with_ports(self.cluster).starter.port_in
        self.sharing = SharingOut(weights.config, ring_port, options.parallel, self.computing.packing.untied, division)
        weights.take_blocks(node_blocks(division.stages, division.counts))
        self._keep_nodes([name for stage in division.stages for name in stage.members])

    def _keep_nodes(self, names: Sequence[str]) -> None:
        """The nodes of the ring, in its order; the others are left out."""
        nodes = {node.name: node for node in self.cluster.nodes}
        self.cluster = replace(self.cluster, secondaries=tuple(nodes[name] for name in names[1:]))
        self.left_out += [node for name, node in nodes.items() if name not in names]

    def _profiled(self, cancel: Cancel) -> ClusterProfile:
        """The nodes' measurements of themselves, in the format of the run."""
        if self.profile is None or self.profile.format != self.computing.format:
            shape = model_shape(self.weights.config, self.computing.format, self.cache_type)
            if self._beside:
                found = self._left_over(shape)
            else:
                here = self._ports.with_ports(self.cluster)
                found = measured_cluster(here, self.weights, self.options, self.computing, self._run, cancel)
                self.measured = Measured(self.cluster.nodes, found, shape)
            has_window = window_of(self.options.weight_memory) is not None
            self.profile = _without_limits(found) if has_window else found
        return self.profile

    def _left_over(self, shape: ModelShape) -> ClusterProfile:
        """The nodes as the other models leave them: at work, they cannot be measured. NotKnownError if they never were."""
        found = next((one.measured for one in self._beside if one.measured is not None), None)
        secondaries = self.cluster.secondaries
        clients = [ControlClient(node, self.cluster.keys) for node in secondaries]
        answers = RollCall()(clients, frozenset(), ASK_S).answers
        if found is None or not found.has(secondaries) or len(answers) < len(secondaries):
            raise NotKnownError("what other models leave of the nodes is not known")
        free = {self.cluster.starter.name: max(0, self._ports.caches.available(self.device))}
        free |= {name: answer.available_bytes for name, answer in answers.items()}
        left = left_over(found.profile, free, Counter(name for one in self._beside for name in one.names))
        self.measured = found
        return rescaled(left, shape, found.shape)[0]

    def _place_in(self, form: str | None, work: Workload, cancel: Cancel) -> None:
        """Measure, plan and cut with weights in a format. Raises PlacementError if they do not fit."""
        self._set_format(form)
        report = planned_ring(self._profiled(cancel), self.weights, self.options, self.computing, work)
        placement, n_frames = report.placement, len(report.nodes) + report.more_frames
        if self.options.n_frames is None and report.more_frames:
            self.options = replace(self.options, n_frames=n_frames)
        self.weights.cut_anew(placement.counts)
        self._keep_nodes(placement.names)


# Nodes and blocks


def check_adapters(family: ModelFamily, weights: StarterWeights, options: StarterOptions) -> None:
    """Raises UsageError for what adapters cannot be used with."""
    config = family.kernel_config(weights.config)
    if config is None or (why_not := why_not_in_kernels(config)) is not None:
        what = "a model that is not litgpt's" if config is None else f"a model with {why_not}"
        raise UsageError(f"--adapter: {what} is not computed by the kernels, which adapters need")
    refuse(facts_of(options), "--adapter")


def check_hot_spares(options: StarterOptions, cluster: ClusterConfig, is_swarm: bool) -> None:
    """Raises UsageError for what hot spares cannot be used with."""
    if not (wanted := options.hot_spare):
        return
    told = f"--hot-spare {','.join(wanted)}"
    found = {"--swarm": is_swarm, NAMED_GROUPS: cluster.n_stages < cluster.n_nodes}
    refuse(facts_of(options) | {fact: fact for fact, is_so in found.items() if is_so}, "--hot-spare")
    names = [node.name for node in cluster.secondaries]
    unknown = [name for name in wanted if name not in ("auto", *names)]
    if unknown or len(wanted) > len(names):
        raise UsageError(
            f"{told}: expected auto, or some of {', '.join(names) or 'the secondaries, but there are none'}"
        )
    if len(wanted) > len(cluster.spares):
        raise UsageError(
            f'{told} needs {len(wanted)} spares, but there are {len(cluster.spares)}: mark them with "spare": true in the '
            "nodes file, or give --spares to local-ring"
        )


def measured_cluster(
    cluster: ClusterConfig, weights: StarterWeights, options: StarterOptions, computing: Computing, run: str,
    cancel: Cancel,
) -> ClusterProfile:  # fmt: skip
    """The nodes' measurements, and those of the links between them.

    Args:
        cluster: with the ports that the starter really has.
        computing: what the starter computes with.
        run: id of the run to place.

    Raises:
        MdiError: a node is not there or cannot measure itself.
    """
    return profile_cluster(
        cluster, weights.model, computing, options, options.cache_dir, options.wait_s, cancel, run=run
    )


def without(cluster: ClusterConfig, error: NodeLostError) -> ClusterConfig:
    """The nodes of a run without blocks yet, after a loss: a spare that answers takes the lost node's place.

    Raises:
        NodeLostError: `error`, where it is about no secondary, or about one that was never there and no spare is.
    """
    free = free_nodes([ControlClient(node, cluster.keys) for node in cluster.spares])
    spare = next((node for node in cluster.spares if node.name in free), None)
    is_known = any(node.name == error.node for node in cluster.secondaries)
    if not is_known or (error.code is Code.ABSENT and spare is None):
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
    method = options.placement or DEFAULT_PLACEMENT
    has_groups = any(
        node.group for node in profile.nodes
    )  # whose starter has the embedding beside its share of the head
    tied_type = None if has_groups else table_type(weights, computing)
    return choose(profile, weights.model, method, workload, computing.cache_type(options.kv_dtype), tied_type)


def faster_way(
    profile: ClusterProfile, weights: StarterWeights, options: StarterOptions, computing: Computing, workload: Workload,
) -> ParallelChoice:  # fmt: skip
    """A ring of nodes or groups, or all blocks on all nodes. PlacementError if the model fits none."""
    kv_dtype = computing.cache_type(options.kv_dtype)
    return choose_measured(profile, model_shape(weights.config, computing.format, kv_dtype), workload)


def divide(
    stages: tuple[RingStage, ...], weights: StarterWeights, options: StarterOptions, computing: Computing,
    names: Sequence[str], workload: Workload, measured: Callable[[], ClusterProfile],
) -> Division:  # fmt: skip
    """Give each node its share of its blocks in the first ring.

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
        return division_by_hand(stages, weights.config, weights.blocks, options.parallel, names)
    if len(stages) == 1:
        shape = model_shape(weights.config, computing.format, computing.cache_type(options.kv_dtype))
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


# Ring or shares


def stages_in(cluster: ClusterConfig) -> tuple[RingStage, ...]:
    """The stages of a ring, as its nodes file has them."""
    return stages_of({node.name: node.group for node in cluster.nodes})


def chosen_stages(
    options: StarterOptions, config: ModelConfig | None, computing: Computing, cluster: ClusterConfig,
    n_sequences: int, choose: Callable[[], ParallelChoice] | None,
) -> tuple[RingStage, ...] | None:  # fmt: skip
    """The stages of the ring, if some are groups, one of all nodes with `--parallel tensor`; None if each node is its own.

    With `--parallel auto` these are the groups of the nodes file, one group of all nodes, or groups by measurement.

    Args:
        config: of the model; None of a model that the kernels do not have.
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
    why_not = "a model with adapters" if options.in_peft_form else _why_not_shared(config, computing)
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
        refuse(["--head", STAGES])
    return stages


def _why_not_shared(config: ModelConfig | None, computing: Computing) -> str | None:
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


# Formats


def starter_computing(family: ModelFamily, weights: StarterWeights, asked: Requested) -> Computing:
    """Choose how the starter computes. Raises UsageError if the device does not support the user's choice."""
    formats = Requested(quantize=weights.quantize, quantize_head=weights.quantize_head)
    config = family.kernel_config(weights.config)
    model = weights.model
    computing = choose_computing(
        config, asked.over(formats), model.dtype, model.format, weights.tied_type, model.is_rounded
    )
    if computing.packing is None:
        load_torch(computing.why_torch or "this model")
    return computing


def table_type(weights: StarterWeights, computing: Computing) -> str | None:
    """See `model_shape`: number type of an embedding that is held as the head alone."""
    return weights.tied_type if computing.packing is not None and computing.packing.is_tied else None


def with_format(options: StarterOptions, form: str | None) -> StarterOptions:
    """The options with a format instead of "auto"."""
    head = form if options.quantize_head in (None, AUTO) else options.quantize_head
    return replace(options, quantize=form, quantize_head=head)


def formats_to_try(weights: StarterWeights, in_kernels: bool = True) -> list[str | None]:
    """For "auto": the first is taken if it fits, else the next smaller one. None: the checkpoint's numbers.

    Weights that are stored in packed formats keep them, as do files at their own bits. Numbers of 16 bits are rounded to 8,
    which takes half the memory and time, and changes texts little (docs/models.md has the perplexities).

    Args:
        in_kernels: whether the kernels compute, whose products with int8 are exact in whole numbers.
    """
    if weights.quantize is not None:
        return [weights.quantize]
    if not in_kernels:
        return [None, *SMALLER[1:]]
    if weights.own_formats is not None:
        least = weight_format(weights.own_formats).bits
        return [weights.own_formats, *(form for form in SMALLER[1:] if LAYOUTS[form].bits < least)]
    if weights.native == "mxfp4":  # nearly all of the model is, and keeps its numbers
        return [weights.native]
    if weights.native is not None:
        return [None, weights.native]
    return [*SMALLER[1:]] if NUMBER_BYTES.get(weights.model.dtype) == 2 else [None, *SMALLER[1:]]


def told_choice(weights: StarterWeights, form: str) -> str:
    """A line on the format that "auto" chose, and how to have another.

    Args:
        form: of the blocks in memory.
    """
    n_bytes = model_shape(weights.config, form, tied_type=weights.tied_type).weight_bytes
    exact = "float32" if weights.own_formats else OWN_FORMAT.get(weights.model.dtype, "float32")
    others = "" if form == exact else f" (--quantize {exact}: with its exact numbers)"
    parts, held = stage_parts(0, weights.blocks[0][1], starter=True), Packing(form, form).tied(weights.tied_type).head
    own, there = packed_bytes(weights.config, weights.model.name, parts, held), memory_bytes()
    share = f", {size(own)} of them in this node's {size(there)} of memory" if own > there / 2 else ""
    return f"{weights.model.name}: weights in {shown(form)}, {size(n_bytes)}{share}{others}"


def first_that_fits(formats: list[str | None], place: Callable[[str | None], None]) -> None:
    """Try one format after the other until one can be placed. Raises PlacementError if none can."""
    for form, smaller in _pairs(formats):
        try:
            return place(form)
        except PlacementError as e:
            if smaller is None or isinstance(e, NotKnownError):
                raise
            logger.info("the model does not fit in %s: trying %s", form or "the checkpoint's own numbers", smaller)


def fits_here(weights: StarterWeights, form: str | None, device: str) -> bool:
    """Whether the starter's own part of a cut that is given fits into the memory that is free."""
    parts = stage_parts(0, weights.blocks[0][1], starter=True)
    held = form or weights.model.format or own_packing(weights.model.dtype).blocks
    if held != weights.model.format:
        tied = Packing(held, held).tied(weights.tied_type if device == "cpu" else None)
        return packed_bytes(weights.config, weights.model.name, parts, tied.head) <= device_free_bytes(device)
    of_parts = [weights.part_bytes(part) for part in parts]
    return held_bytes(of_parts, weights.model.dtype, held, weights.model.format) <= device_free_bytes(device)


def _pairs(formats: list[str | None]) -> Iterator[tuple[str | None, str | None]]:
    yield from zip(formats, [*formats[1:], None], strict=True)


def _without_limits(profile: ClusterProfile) -> ClusterProfile:
    """The cluster as if memory limited nothing: windows are fitted into what there is."""
    return replace(profile, nodes=tuple(replace(n, memory_bytes=UNLIMITED, shared_bytes=0) for n in profile.nodes))


def draft_bytes(model: Choice) -> int:
    """The weights of the small model, which the plan counts for the starter; 0 without one.

    Raises:
        CheckpointError: it cannot be read.
    """
    folder = model.options.draft
    if folder in ("none", "auto"):
        return 0
    weights = model.family.open_weights(Path(folder), None, 1, None, None, False)
    try:
        return model_shape(weights.config, model.format, tied_type=table_type(weights, model.computing)).weight_bytes
    finally:
        weights.close()
