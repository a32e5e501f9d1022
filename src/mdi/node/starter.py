"""The starter node: cuts the model, configures the secondaries, closes the ring and drives the generation.

One `StarterNode` is one run: `open`, `prepare`, `start`, then `submit` and `generate` as often as one likes, `end`, `close`.
From `start` to `end` the engine runs in its own thread; who asked for a text reads it. A ring of one node has no ports.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from mdi.config import ClusterConfig
from mdi.control.client import ControlClient
from mdi.engine.scheduler import Scheduler
from mdi.engine.sent_rows import SentRows
from mdi.engine.sequence import SamplingParams
from mdi.engine.starter_engine import StarterEngine
from mdi.node.driver import EngineThread
from mdi.node.model_family import ModelFamily
from mdi.node.parallel_choice import nodes_of_chunks
from mdi.node.prompt_limits import check_prompt
from mdi.node.ring_recovery import RingRecovery
from mdi.node.run_rings import RunBasis, RunRings
from mdi.node.run_texts import RunTexts
from mdi.node.sample import OnText, Record, Sample, SampleReader
from mdi.node.starter_placing import StarterPlacing
from mdi.node.starter_ports import StarterPorts
from mdi.node.starter_report import OpenModel
from mdi.node.teardown import dismiss
from mdi.node.windowed import prompt_rows
from mdi.recovery.joins import Newcomers, nobody
from mdi.spec.options import StarterOptions

logger = logging.getLogger("mdi")


class StarterNode(StarterPlacing):
    """See the module.

    Args:
        newcomers: nodes that were found besides those of the cluster.
        ports: open ones that it shares with other runs of this process; None opens its own.
    """

    def __init__(
        self, cluster: ClusterConfig, options: StarterOptions, family: ModelFamily | None = None,
        newcomers: Newcomers = nobody, ports: StarterPorts | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cluster, options, family, ports)
        self._newcomers = newcomers
        self._given_ports = ports

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
        """Bind the ports, if there are none, and find the weights. Reports every mistake in them.

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

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises UsageError if the prompt is empty, does not fit the context, or has tokens that the model does not know."""
        check_prompt(prompt_ids, self.config, self.context_length, self.directory)

    def prepare(self, max_length: int, check: Callable[[], None] = lambda: None) -> None:
        """Get all nodes ready: weights where they belong, stages built.

        Args:
            max_length: tokens that the longest sequence of the run can reach.
            check: called repeatedly meanwhile; its exceptions end the waiting.

        Raises:
            MdiError: a node does not answer or cannot take part; the others have been told that the run is over.
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
            self.recovery = RingRecovery(rings, nodes, self._profile, check, self._newcomers)
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
        self._texts = RunTexts(engine, self.codec, self.max_length)
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
        """Set a listener for the new tokens of each sample that `generate` reads; after `start`."""
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
        """Whether an error has ended the engine, so that no text continues or begins."""
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
