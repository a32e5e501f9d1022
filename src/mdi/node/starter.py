"""The starter node: cuts the model, configures the secondaries, closes the ring and drives the generation.

One `StarterNode` is one run: `open`, `prepare`, `start`, then `submit` and `generate` as often as one likes, `end`, `close`.
From `start` to `end` the engine runs in its own thread; who asked for a text reads it. A ring of one node has no ports.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from mdi.config import ClusterConfig, NodeConfig
from mdi.control.client import ControlClient
from mdi.control.requested import Requested
from mdi.engine.scheduler import Scheduler
from mdi.engine.sent_rows import SentRows
from mdi.engine.sequence import SamplingParams
from mdi.engine.starter_engine import StarterEngine
from mdi.machine.device import check_format, choose_device, choose_dtype
from mdi.measure.planning import told_blocks
from mdi.measure.window_plan import without_limits
from mdi.node.driver import EngineThread
from mdi.node.format_choice import first_that_fits, fits_here, formats_to_try, starter_computing, with_format
from mdi.node.model_family import ModelFamily
from mdi.node.options import StarterOptions
from mdi.node.parallel_choice import chosen_stages, nodes_of_chunks
from mdi.node.placing import divide, faster_way, measured_cluster, planned_ring
from mdi.node.prompt_limits import check_prompt, context_length
from mdi.node.ring_recovery import RingRecovery
from mdi.node.run_rings import RunBasis, RunRings
from mdi.node.run_texts import Texts
from mdi.node.sample import OnText, Record, Sample, SampleReader
from mdi.node.sharing_out import SharingOut
from mdi.node.starter_ports import StarterPorts
from mdi.node.starter_report import OpenModel, StarterReport
from mdi.node.teardown import dismiss
from mdi.node.windowed import prompt_rows
from mdi.partition.model import Workload
from mdi.partition.profile import ClusterProfile
from mdi.recovery.joins import Newcomers, nobody
from mdi.tensor.ring_stages import RingStage
from mdi.weight_formats import AUTO
from mdi.window.window_options import window_of

logger = logging.getLogger("mdi")


class StarterNode(StarterReport):
    """See the module.

    Args:
        newcomers: nodes that have been heard of, beside those of the cluster.
        ports: open ones that it shares with other runs of this process; None opens its own.
    """

    def __init__(
        self, cluster: ClusterConfig, options: StarterOptions, family: ModelFamily | None = None,
        newcomers: Newcomers = nobody, ports: StarterPorts | None = None,
    ) -> None:  # fmt: skip
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
        self._newcomers = newcomers
        self._left_out: list[NodeConfig] = []  # that the placement gave no part
        self._profile: ClusterProfile | None = None
        self._given_ports = self._ports = ports
        self._make_own: SharingOut | None = None  # of this node's stage, where that is not just its blocks
        self._n_sequences: int | None = None  # at the same time, if that is known

    def __enter__(self) -> StarterNode:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Bind the ports, if there are none, and find the weights; everything wrong with them is told here.

        Raises:
            MdiError
        """
        self._ports = self._given_ports or StarterPorts()
        self._ports.add(self, self.cluster)
        options = self._options
        will_be_cut = self.cluster.n_nodes > 1 and options.placement not in (None, "even") and options.layers is None
        with contextlib.ExitStack() as stack:
            weights = self._family.open_weights(
                options.ckpt, options.chunk, nodes_of_chunks(options, self.cluster), options.layers,
                options.quantize, will_be_cut,
            )  # fmt: skip
            stack.callback(weights.close)
            codec = self._family.open_codec(weights.directory, options.prompt_style)
            self._model = OpenModel(weights, self._family.config(weights.config), weights.directory, codec)
            stack.pop_all()
        self._take_format(options.quantize)

    def _take_format(self, form: str | None) -> None:
        if self._is_auto:
            self._options = with_format(self._options, form)
        self._computing = starter_computing(self._family, self.weights, self._own.over(self._options))

    @property
    def context_length(self) -> int:
        """Tokens that a sequence may have: what the user asked for, else what the model was made for."""
        return context_length(self.config, self._family.max_length(self.config), self._options.sequence_length)

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises UsageError if the prompt is empty, does not fit the context, or has tokens that the model does not know."""
        check_prompt(prompt_ids, self.config, self.context_length, self.directory)

    def place(self, n_sequences: int, max_length: int, check: Callable[[], None] = lambda: None) -> None:
        """Decide who holds which blocks, by what the nodes measure of themselves; between `open` and `prepare`.

        Blocks given by hand, an even placement and chunks that are there stay as they are, and nothing is measured.

        Args:
            n_sequences: of the run, at the same time.
            max_length: tokens that the longest can reach.
            check: called again and again meanwhile; what it raises ends the waiting.

        Raises:
            PlacementError: the model does not fit; MdiError: a node is not there or cannot measure itself.
        """
        weights, options = self.weights, self._options
        self._n_sequences = n_sequences
        work = Workload(n_sequences, min(max_length, self.context_length), replay_bytes=options.replay_bytes)
        if (stages := self._chosen_stages(work, check)) is not None:
            return self._share_out(stages, work, check)
        formats = formats_to_try(weights) if self._is_auto else [options.quantize]
        has_window = window_of(options.weight_memory) is not None  # then memory does not limit who holds what
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
            if self.cluster.secondaries:
                logger.info("blocks %s; nothing was measured", told_blocks(self.names, weights.blocks))
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
        division = divide(stages, weights, options, self.computing, self.names, work, lambda: self._profiled(check))
        if options.n_frames is None and len(division.stages) > 1:
            self._options = options = replace(options, n_frames=len(division.stages))
        self._make_own = SharingOut(
            self._family, self.config, self._cluster_here.starter.port_in, options, weights, self.computing, division
        )
        self._take_nodes([name for stage in division.stages for name in stage.members])

    def _take_nodes(self, names: Sequence[str]) -> None:
        """The nodes of the ring, in its order; the others are left out."""
        nodes = {node.name: node for node in self.cluster.nodes}
        self.cluster = replace(self.cluster, secondaries=tuple(nodes[name] for name in names[1:]))
        self._left_out = [node for name, node in nodes.items() if name not in names]

    def _profiled(self, check: Callable[[], None]) -> ClusterProfile:
        """What the nodes measure of themselves, in the format of the run."""
        if self._profile is None or self._profile.format != self.computing.format:
            found = measured_cluster(
                self._cluster_here, self.weights, self._options, self.computing, self.run_id, check
            )
            has_window = window_of(self._options.weight_memory) is not None
            self._profile = without_limits(found) if has_window else found
        return self._profile

    @property
    def _cluster_here(self) -> ClusterConfig:
        """With the ports that this node really has."""
        ports = self._ports
        assert ports is not None and ports.listener is not None and ports.control is not None
        here = replace(self.cluster.starter, port=ports.control.port, port_in=ports.listener.port)
        return replace(self.cluster, starter=here)

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

    def prepare(self, max_length: int, check: Callable[[], None] = lambda: None) -> None:
        """Get all nodes ready: weights where they belong, stages built.

        Args:
            max_length: tokens that the longest sequence of the run can reach.
            check: called again and again meanwhile; what it raises ends the waiting.

        Raises:
            MdiError: a node is not there or cannot; those that are have been told that the run is off.
        """
        self._state = "LOADING"
        if self.cluster.secondaries:
            logger.info("loading %s on %d nodes", self.weights.model, self.cluster.n_nodes)
        self.max_length = min(max_length, self.context_length)
        assert self._ports is not None
        basis = RunBasis(
            self._family, self.config, self._options, self.computing, self.weights, self.max_length, self._n_sequences,
            self._process, self._ports.listener, self._ports.caches, self._make_own,
        )  # fmt: skip
        cluster = self._cluster
        self.rings = rings = RunRings(basis, cluster, self._epoch)
        if not self._options.fixed and cluster.secondaries and self._family.is_placed:
            nodes = (*cluster.spares, *cluster.secondaries, *self._left_out)
            workload = Workload(self._n_sequences or 1, self.max_length, replay_bytes=self._options.replay_bytes)
            self.recovery = RingRecovery(
                rings, self.weights, nodes, self._profile, self._options.silence_s, workload, check, self._newcomers
            )
        (self.recovery or rings).prepare(check)
        self._state = "READY"

    def start(self) -> None:
        """Close the ring; from here on sequences can be submitted."""
        rings, options = self.rings, self._options
        assert rings is not None and rings.preparation is not None
        recorder = None
        if self.run_trace is not None:
            recorder = self.run_trace.recorder
            self.run_trace.read_clocks(self.clients)
        ring = (self.recovery or rings).form()
        scheduler = self._family.scheduler(self.config, self.cluster.n_nodes) or Scheduler(
            chunk_rows=prompt_rows(options.weight_memory, self.config), memory=rings.preparation.memory
        )
        engine = StarterEngine(
            rings.preparation.stage, scheduler, self.max_length, rings.preparation.own.rows, options.wire_dtype
        )
        engine.sent = SentRows(self.replay_bytes)
        self._state = "RUNNING"
        self._texts = Texts(engine, self.codec, self.max_length)
        if recorder is not None:
            recorder.texts = engine.texts
        keeper = None
        if self.recovery is not None:
            self.recovery.begin(engine)
            keeper = self.recovery.keeper
        self._driver = EngineThread(engine, ring, self.cluster.starter.name, recorder, keeper)

    def submit(
        self, prompt: str, prompt_ids: Sequence[int], params: SamplingParams, stop: Sequence[str] = (),
        on_text: OnText | None = None, reader: SampleReader | None = None, before: Sequence[int] = (),
        finish_reason: str | None = None,
    ) -> Sample:  # fmt: skip
        """Queue a sample, from any thread; see `Texts.submit` for arguments and errors."""
        self.check_prompt(prompt_ids)
        assert self._texts is not None
        return self._texts.submit(prompt, prompt_ids, params, stop, on_text, reader, before, finish_reason)

    def record_to(self, record: Record) -> None:
        """Have somebody told of what each sample gains that `generate` reads; after `start`."""
        assert self._texts is not None
        self._texts.reader.record = record

    def generate(self) -> None:
        """Read all samples that were submitted without a reader, until they have ended.

        Raises:
            MdiError: what ended the engine before: a lost node, out of memory.
        """
        assert self._texts is not None
        self._texts.read()
        self.raise_failure()

    @property
    def failed(self) -> bool:
        """Whether the engine has ended by an error: no text goes on, and none begins."""
        return self._driver is not None and self._driver.failure is not None

    def raise_failure(self) -> None:
        """Raise what ended the engine, if it was an error."""
        if self._driver is not None and self._driver.failure is not None:
            self.mark_broken()
            raise self._driver.failure

    def end(self, leave: bool = False) -> None:
        """End the run on all nodes and collect what they measured.

        With `leave`, end the processes of all secondaries too, those that the placement left out among them.
        """
        if self.recovery is not None:
            self.recovery.close()
        if self._driver is not None:
            self._driver.close()
        if self.rings is not None and self.rings.is_open:
            if self.run_trace is not None:
                self.run_trace.read_clocks(self.clients)
            self.secondary_metrics = self.rings.end(leave, patient=self._state != "BROKEN")
        if leave:
            others = [node for node in (*self._left_out, *self._cluster.spares) if node not in self.cluster.secondaries]
            dismiss([ControlClient(node, self._cluster.keys) for node in others], self.run_id, leave, patient=False)
        self._state = "IDLE"

    def close(self) -> None:
        """Give everything back; harmless if repeated."""
        if self.rings is not None and self.rings.is_open:
            self._state = "BROKEN"
            self.end()
        if self._ports is not None:
            self._ports.remove(self)
            if self._given_ports is None:
                self._ports.close()
        if self._model is not None:
            self.weights.close()
        if self.rings is not None:
            self.rings.close()
        self._ports = None

    def mark_broken(self) -> None:
        """A node was lost: do not wait long for any of them."""
        self._state = "BROKEN"
