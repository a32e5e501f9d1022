"""A run of one model at its starter: opened, its nodes are found, the blocks placed and loaded, and the ring is closed.

`with Run(...) as run`, then `submit` and `read` as often as needed, in any order and from any thread; `close` ends it. From
`open` to `close` a thread forms rings and another one computes (`RingLoop`); who asked for a text reads it.
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

import mdi
from mdi.cancel import Cancel
from mdi.checkpoint.adapters import Adapter, AdapterName
from mdi.checkpoint.model_store import InUse
from mdi.control.client import ControlClient
from mdi.control.messages import CONTROL_VERSION, MOST_TAPS
from mdi.control.server import StatusOnly
from mdi.engine.cohort import Beams
from mdi.engine.replay import SentRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import Events, Request, SamplingParams, Side, TakeRows, TextAdapter
from mdi.engine.speculation import Speculation, most_rows_of
from mdi.engine.starter import StarterEngine
from mdi.errors import Code, ControlError, MdiError, NodeLostError, UsageError
from mdi.host.threads import host_of, n_threads
from mdi.kernels.blocks import MOST_ADAPTERS
from mdi.metrics import NodeMetrics, RunMetrics
from mdi.placement.model import Workload, model_shape
from mdi.placement.planning import profile_request
from mdi.placement.profile import NodeProfile
from mdi.run.choice import Choice, Neighbour, check_hot_spares, table_type
from mdi.run.cut import MovingCut
from mdi.run.drafting import draft_memory, open_draft
from mdi.run.form import Basis, Former, Ring
from mdi.run.identity import RingArithmetic, base_of, identity_of
from mdi.run.loop import Change, Joins, Lookout, RingLoop, SlowLinks, SlowNodes
from mdi.run.nodes import Losses, NodeSource, StarterPorts, dismiss
from mdi.run.passes import Passes
from mdi.run.policy import Cut, Policy, Stage, with_hot_spares
from mdi.run.report import differing, measured_here, metrics_of_run
from mdi.run.short_nodes import ShortNodes
from mdi.run.swarm import SwarmLook
from mdi.run.texts import OnText, Record, RunTexts, Sample, SampleReader
from mdi.run.trace import RunTrace, Trace
from mdi.run.verify import RowVerifier
from mdi.spec.cluster import ClusterConfig
from mdi.spec.combinations import GRADIENTS, GUESSES, MANY, SIDES, TOGETHER, TORCH, facts_of, refuse
from mdi.spec.extent import N_TEXTS, Extent
from mdi.spec.options import DEFAULT_PLACEMENT, StarterOptions, is_side
from mdi.spec.window import window_of
from mdi.stages.building import prompt_rows
from mdi.stages.model_family import ModelFamily
from mdi.stages.side import LM, SideNetwork, check_base, read_side
from mdi.terminal import reporting

CHANGE_LOOK_S = 0.5  # how often it is looked whether a run has ended that is to have other adapters
N_RING_BITS = 20  # of a ring's id, the lowest ones, count the rings of its run; the others are the run's

logger = logging.getLogger("mdi")


class Run(StatusOnly):
    """Left with an error, or not: the run is ended on all nodes, and everything is given back.

    What it measured can still be asked afterwards. A run is opened once.

    Args:
        nodes: the nodes of the run; they outlive it.
        options: the user's choices.
        n_tokens: that a text may have beyond the longest prompt.
        prompts: texts that will be submitted, or their ids; placement and caches are made for these.
        n_texts: at the same time; None: as many as prompts, or any number.
        family: makes that of the model; None is litgpt's.
        leave: end the processes of all secondaries as well, once the run is left without an error.
        on_close: called when the run begins to end.
        ports: that it shares with other runs of this process; None: its own.
        cancel: of the command; its end ends the run.
        taps: blocks, rising, whose outputs `submit_rows` gives besides those of the last one; a side network brings its own.
        gradients: nodes whose blocks have no gradients (`passes`) are refused before they get weights.
        beside: models that run on the same nodes.

    Attributes:
        model: what it generates with; from `open` on.
        prompt_ids: of `prompts`, once it is open.
        was_open: whether the ring has been closed, now or before.
        extent: of the run; from `open` on.
        secondary_metrics: what each secondary measured, once the run has ended.
        verifier: computes rows of other nodes again; None: nobody does.
        trace_of: records frames; None where nothing is recorded.
    """

    model: Choice
    engine: StarterEngine

    def __init__(
        self, nodes: NodeSource, options: StarterOptions, n_tokens: int, prompts: Sequence[str | Sequence[int]] = (),
        n_texts: int | None = None, family: Callable[[], ModelFamily] | None = None, leave: bool = False,
        on_close: Callable[[], None] = lambda: None, ports: StarterPorts | None = None,
        cancel: Cancel | None = None, taps: Sequence[int] = (), gradients: bool = False,
        beside: Sequence[Neighbour] = (),
    ) -> None:  # fmt: skip
        self._nodes, self._beside = nodes, beside
        self._taps, self._gradients = tuple(taps), gradients
        self._sides: dict[str, SideNetwork] = {}  # by their names; "": of all texts
        self.options = options
        self._n_tokens = n_tokens
        self._prompts = prompts
        self._n_texts = n_texts or len(prompts) or N_TEXTS
        self._family = family
        self._leave = leave
        self._on_close = on_close
        self._ports, self._has_own_ports = ports or StarterPorts(), ports is None
        self._id = secrets.randbits(64 - N_RING_BITS) << N_RING_BITS
        self._process = secrets.token_hex(8)
        self._cancel = Cancel(parent=cancel)
        self._state = "IDLE"
        self._cluster: ClusterConfig | None = None
        self._former: Former | None = None
        self._loop: RingLoop | None = None
        self._lookout: Lookout | None = None
        self._texts: RunTexts | None = None
        self.verifier: RowVerifier | None = None
        self._is_open = self.was_open = False
        self._in_use: InUse | None = None
        self._has_model = False
        self.prompt_ids: list[list[int]] = []
        self.extent = Extent()
        self.secondary_metrics: list[dict[str, Any]] = []
        self.run_trace = RunTrace(options.n_spans) if options.n_spans else None

    # Opening

    def open(self, cancel: Cancel | None = None) -> None:
        """Raises MdiError; nothing is left open then.

        Args:
            cancel: its end ends the run until it is open, with its error.
        """
        outer = cancel or Cancel()
        try:
            with outer.waking(lambda: self._cancel.cancel(outer.error)), reporting(self._waiting_for):
                self._open()
        except BaseException:
            self._on_close()
            self._state = "BROKEN"
            self.end_on_nodes(leave=False)
            raise
        self._is_open = self.was_open = True

    def _open_sides(self, model: Choice) -> None:
        """Read the side networks, if there are some, and refuse what cannot give the outputs of single blocks."""
        for name, folder in self.options.sides.items():
            self._sides[name] = read_side(folder, n_threads())
            shape = self._sides[name].shape
            check_base(shape, base_of(model.weights), model.spec, folder)
            if shape.head != LM:
                raise UsageError(
                    f"--adapter {folder}: it tells {len(shape.labels)} classes apart, and writes no text",
                    code=Code.FLAGS,
                )
        if self._sides:
            self._taps = tuple(sorted({tap for side in self._sides.values() for tap in side.shape.taps}))
        if len(self._taps) > MOST_TAPS:
            raise UsageError(
                f"--adapter: side networks read the outputs of {len(self._taps)} blocks; a run gives those of {MOST_TAPS}",
                code=Code.FLAGS,
            )
        if self._sides or self._taps:
            refuse({**facts_of(self.options), SIDES: SIDES}, SIDES)

    def _check_verified(self, model: Choice) -> None:
        """Refuse what leaves nothing to compare bit by bit, before any node is asked. Raises UsageError."""
        facts = facts_of(model.options)
        if self.cluster.n_nodes > 1:
            facts[MANY] = MANY
        if self._taps:
            facts[SIDES] = SIDES
        if model.computing.packing is None:
            facts[TORCH] = f"this node computes {model.computing.why_torch}"
        refuse(facts, "--verify")

    def check_columns(self, model: Choice) -> None:
        """Refuse what knows rows of hidden alone, and of all blocks, before any node is asked. Raises UsageError."""
        spec, asked = model.spec, {"side networks": self._taps, "training over a ring": self._gradients}
        is_plain = spec.widest_row == spec.width and spec.skipped_from == spec.n_layer
        refused = [what for what, is_asked in asked.items() if is_asked and not is_plain]
        if model.options.verify and spec.skipped_from < spec.n_layer:
            refused.append("--verify")
        if refused:
            what = f"its rows have columns besides hidden or skip blocks, which {' and '.join(refused)} cannot use"
            raise UsageError(f"{spec.name}: {what}", code=Code.FLAGS)

    def _waiting_for(self) -> str:
        """The step of opening, for a user who waits."""
        path = self.options.ckpt or self.options.chunk
        if self._cluster is None:
            return "looking for the nodes"
        return (
            f"{'planning' if self._state == 'PLANNING' else 'loading'} {path.name if path is not None else 'the model'}"
        )

    def _open(self) -> None:
        if (path := self.options.ckpt or self.options.chunk) is not None and path.exists():
            self._in_use = InUse(path)
        cluster = self._cluster = self._nodes.cluster()
        family = None if self._family is None else self._family()
        check_hot_spares(self.options, cluster, is_swarm=self._nodes.swarm is not None)
        model = Choice(cluster, self.options, family, self._ports, self.run_id, self._nodes.swarm, self._beside)
        self._ports.add(self, cluster)
        model.open()
        self.model, self._has_model = model, True
        self._open_sides(model)
        self._check_verified(model)
        self.check_columns(model)
        self.prompt_ids = [self._ids(index, prompt) for index, prompt in enumerate(self._prompts)]
        n_virtual = max((one.n_virtual for one in model.weights.adapters), default=0)
        length = n_virtual + max(map(len, self.prompt_ids), default=0) + self._n_tokens
        losses = Losses(self._cancel)
        with self._nodes.watched(losses):
            self._state = "PLANNING" if cluster.secondaries else "LOADING"
            model.place(self._n_texts, length, losses)
            if self._gradients and model.sharing is not None:
                refuse([GRADIENTS, TOGETHER])
            if self._taps and model.sharing is not None:
                refuse([SIDES, TOGETHER])
            self.extent = model.extent
            self._state = "LOADING"
            if model.cluster.secondaries:
                logger.info("loading %s on %d nodes", model.weights.model.name, model.cluster.n_nodes)
            loop, cut = self._make_loop(model, losses)
            if model.held is not None and not self.options.fixed:
                # Nodes may leave and come while the first ring is formed. They have their blocks already, which says in which
                # order they stand: slow links change nothing.
                look = SwarmLook(loop, model.held, self._cancel)
                self._lookout = Lookout(look, lambda: loop.running, loop.put, self._cancel)
            ring = loop.next_ring(None)
        if self._in_use is not None:
            self._in_use.show([f"{node.name} {node.addr}" for node in self.cluster.secondaries])
        self._start(loop, cut, ring)

    def _ids(self, index: int, prompt: str | Sequence[int]) -> list[int]:
        """Raises UsageError if the prompt does not fit the context."""
        ids = self.model.codec.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        try:
            self.model.check_prompt(ids)
        except UsageError as e:
            raise UsageError(f"prompt {index}: {e}") from None
        return ids

    def _make_loop(self, model: Choice, losses: Losses) -> tuple[RingLoop, MovingCut | None]:
        """The loop, and how blocks are cut again; None if the first ring is the only one."""
        options, weights, computing, cluster = model.options, model.weights, model.computing, model.cluster
        basis = Basis(
            self._id, model.family, options, computing, weights, self.extent, self._process,
            self._ports.listener, self._ports.caches, model.sharing, self._taps, model.held is not None, self._gradients,
            draft_memory(model, self.extent),
        )  # fmt: skip
        nodes = (*cluster.spares, *cluster.secondaries, *model.left_out)
        self._former = former = Former(basis, cluster, nodes)
        moving: MovingCut | None = None
        if not options.fixed and cluster.secondaries and model.family.is_placed:
            work = Workload(
                self.extent.n_sequences,
                self.max_length,
                replay_bytes=options.replay_bytes,
                draft_bytes=model.draft_bytes,
            )
            shape = model_shape(weights.config, computing.format, model.cache_type, table_type(weights, computing))
            part_bytes = fmean(weights.part_bytes(f"block.{i}") for i in range(weights.n_layer))
            moving = MovingCut(shape, model.profile, work, part_bytes, lambda: work.sequence_length)
        placed = [Stage(node.name, *span) for node, span in zip(cluster.nodes, weights.blocks, strict=True)]
        spares = [node.name for node in nodes if node.is_spare]
        stages = with_hot_spares(placed, options.hot_spare, spares)
        policy = Policy(
            stages, spares, self._cut_by(former, moving), options.silence_s,
            is_fixed=moving is None, is_measured=model.profile is not None or model.held is not None,
            held=None if model.held is None else model.held.replacing, hot=options.hot_spare,
        )  # fmt: skip
        clients = [ControlClient(node, cluster.keys) for node in nodes]
        self._loop = RingLoop(former, policy, clients, self._cancel, losses, cluster.starter.name)
        return self._loop, moving

    def _cut_by(self, former: Former, moving: MovingCut | None) -> Cut:
        def cut(holders: Sequence[Stage], most: Mapping[str, int]) -> tuple[int, ...] | None:
            if former.is_shared:  # they get new shares
                return (former.basis.weights.n_layer, *(0 for _ in holders[1:]))
            return None if moving is None else moving(holders, most)

        return cut

    def _start(self, loop: RingLoop, cut: MovingCut | None, ring: Ring) -> None:
        """Have the engine compute over the first ring; from here on sequences can be submitted."""
        model, options = self.model, self.model.options
        recorder = None
        if self.run_trace is not None:
            recorder = self.run_trace.recorder
            self.run_trace.read_clocks(self.clients)
        scheduler = model.family.scheduler(model.spec, self.cluster.n_nodes) or Scheduler(
            chunk_rows=prompt_rows(options.weight_memory, model.spec), memory=ring.memory
        )
        self.engine = engine = StarterEngine(
            ring.stage.at_starter, scheduler, self.max_length, ring.stage.rows, options.wire_dtype, self._taps
        )
        engine.adapters = self._text_adapters()
        engine.sent = SentRows(self.replay_bytes)
        engine.n_frames, engine.may_guess, engine.is_deep = ring.n_frames, ring.may_guess, ring.is_deep
        engine.speculation, engine.prefixes = self._speculation(model, ring), ring.prefixes
        engine.verifier = self._verifier(engine, loop)
        self._state = "RUNNING"
        self._texts = RunTexts(engine, model.codec, self.max_length)
        if recorder is not None:
            recorder.texts, recorder.prompt_rows = engine.texts, engine.scheduler.prompt_rows
        loop.start(engine, ring, recorder)
        if cut is not None:
            cut.n_rounds = lambda: engine.n_rounds_left
        if cut is not None and self._lookout is None:
            measure = self._measure if model.profile is not None else None
            spares = frozenset(name for name, client in loop.clients.items() if client.node.is_spare)
            joins = None if self.is_shared else Joins(loop, cut, spares, self._nodes.newcomers, measure, loop.ask)
            slow: list[SlowLinks | SlowNodes] = [] if self.is_shared else [SlowLinks(self.run_id, cut)]
            # They are cut again for the shortest round. Beside other models, a plan has times in which nodes wait for turns.
            if slow and options.placement in (None, DEFAULT_PLACEMENT) and not self._beside:
                slow.append(SlowNodes(self.run_id, cut))
            short = None if self.is_shared else ShortNodes(self.run_id, cut)
            self._lookout = Lookout(joins, lambda: loop.running, loop.put, self._cancel, slow, short)

    def _text_adapters(self) -> dict[str, TextAdapter]:
        of_nodes = {one.name: TextAdapter(one.sha256, one.n_virtual, one.number) for one in self.model.weights.adapters}
        return of_nodes | {
            name: TextAdapter(side.sha256, side=self._with_taps(side)) for name, side in self._sides.items()
        }

    def load_adapter(self, named: AdapterName) -> None:
        """From any thread, one at a time: a further adapter, of all nodes, which texts may choose from then on.

        Raises:
            MdiError: it is not served, or not with this run; or a node has no memory for it. All goes on as it was then.
        """
        model = self.model
        model.check_adapters()
        if model.options.verify or model.held is not None:
            what = "--verify" if model.options.verify else "nodes of a swarm"
            raise UsageError(f"with {what}, adapters are those that the run began with", code=Code.FLAGS)
        if is_side(f"={named.folder}"):
            why = "it is a side network, which a server must be started with: nodes send other rows for it"
            raise UsageError(f"adapter {named.name}: {why}", code=Code.FLAGS)
        if named.name in self.adapters:
            raise UsageError(f"there is an adapter {named.name} already", code=Code.ADAPTER)
        present = model.weights.adapters
        if len(present) == MOST_ADAPTERS:
            raise UsageError(f"{MOST_ADAPTERS} adapters are loaded: unload one of them", code=Code.ADAPTER)
        number = next(n for n in range(1, MOST_ADAPTERS + 1) if n not in {one.number for one in present})
        adapter = model.weights.open_adapter(named, number)
        model.check_room(adapter)
        self._change_adapters([*present, adapter])

    def unload_adapter(self, name: str) -> None:
        """From any thread, one at a time: no node has it any more, and no text may have it. Raises MdiError."""
        present = self.model.weights.adapters
        if name not in (one.name for one in present):
            raise UsageError(f"there is no adapter {name[:100]!r} that can be unloaded", code=Code.ADAPTER)
        kept = [one for one in present if one.name != name]
        before = self.engine.adapters
        self.engine.adapters = {known: one for known, one in before.items() if known != name}
        try:
            self._change_adapters(kept)
        except MdiError:
            self.engine.adapters = before
            raise

    def _change_adapters(self, adapters: Sequence[Adapter]) -> None:
        assert self._loop is not None
        change = Change(adapters)
        self._loop.put(change)
        while True:
            try:
                change.done.result(CHANGE_LOOK_S)
                break
            except FutureTimeout:
                self.raise_failure()
                self._cancel.check()
        self.engine.adapters = self._text_adapters()

    def _with_taps(self, side: SideNetwork) -> Side:
        """A side network that gets the outputs of all taps of the run."""
        at = [1 + self._taps.index(tap) for tap in side.shape.taps]
        return lambda *rows: side(rows[0], *(rows[i] for i in at))

    def _verifier(self, engine: StarterEngine, loop: RingLoop) -> RowVerifier | None:
        """Computes rows again, if that is wanted. Raises UsageError: this run gives nothing to compare."""
        former, options = self._former, self.model.options
        if not options.verify or former is None or self.cluster.n_nodes == 1:
            return None
        if former.held is None or not former.held.spec.arithmetic.is_certain:
            refuse({"--verify": "--verify", MANY: MANY, TORCH: "this node has no whole blocks in the kernels"})
        held = self.model.held

        def holders(stage: Stage, ring: Sequence[Stage]) -> list[str]:
            """Nodes outside of the ring first; of others that hold the blocks already, those of the ring."""
            used = {one.name for one in ring}
            found = [name for name, one in loop.clients.items() if one.node.is_spare and name not in used]
            if held is not None:
                found = [
                    name for name, one in held.present.items() if one.start <= stage.start and stage.stop <= one.stop
                ]
            able = [name for name in found if name != stage.name and loop.may_use(name) and name in loop.clients]
            return sorted(random.sample(able, len(able)), key=lambda name: name in used)

        self.verifier = verifier = RowVerifier(options.verify, former, loop.put, holders, self._cancel)
        loop.on_search, loop.on_left = verifier.leave_others, verifier.finish
        verifier.engine = engine
        return verifier

    def _speculation(self, model: Choice, ring: Ring) -> Speculation | None:
        """Guesses tokens, if that is wanted. Raises UsageError, CheckpointError: the small model cannot be used."""
        options = model.options
        if not options.guesses:
            return None
        if not self.engine.may_guess and options.draft != "auto":
            refuse({GUESSES: f"--draft {options.draft}", TORCH: TORCH})
        draft = None
        if options.draft != "auto":
            draft = open_draft(model, Path(options.draft), self.extent, self._cancel)
        has_window = window_of(options.weight_memory) is not None
        most_rows = most_rows_of(model.spec.has_experts, has_window)
        return Speculation(most_rows, draft, n_vocabulary=model.spec.n_rows)

    def _measure(self, client: ControlClient) -> NodeProfile:
        """A node that has come, as it measures itself. Raises MdiError."""
        model, node = self.model, client.node
        request = profile_request(model.weights.model, model.computing, model.options, run=self.run_id)
        answer = client.profile(request)
        profile = NodeProfile.from_json({**answer["profile"], "name": node.name}, f"the profile of {node.name}")
        return replace(profile, machine=host_of(node.addr))

    # Texts

    def submit(
        self, prompt: str, prompt_ids: Sequence[int], params: SamplingParams, stop: Sequence[str] = (),
        on_text: OnText | None = None, reader: SampleReader | None = None, before: Sequence[int] = (),
        finish_reason: str | None = None, adapter: str = "",
    ) -> Sample:  # fmt: skip
        """Have a text continued, whose events `read` takes, or `reader`; see `RunTexts.submit`. `Sample.cancel` ends it."""
        self.model.check_prompt(prompt_ids)
        assert self._texts is not None
        return self._texts.submit(prompt, prompt_ids, params, stop, on_text, reader, before, finish_reason, adapter)

    def submit_rows(
        self, prompt_ids: Sequence[int], read_from: int, take_rows: TakeRows, events: Events | None = None,
        adapter: str = "",
    ) -> Request:  # fmt: skip
        """Have the rows of a text computed, see `StarterEngine.submit_rows`."""
        self.model.check_prompt(prompt_ids)
        return self.engine.submit_rows(prompt_ids, read_from, take_rows, events, adapter)

    def submit_scores(self, ids: Sequence[int], events: Events | None = None, adapter: str = "") -> Request:
        """Have the log probabilities of a text computed, see `StarterEngine.submit_scores`."""
        self.model.check_prompt(ids)
        return self.engine.submit_scores(ids, events, adapter)

    def submit_beams(
        self, prompt: str, prompt_ids: Sequence[int], params: SamplingParams, beams: Beams, stop: Sequence[str] = (),
        on_texts: Sequence[OnText | None] = (None,), known: Sequence[tuple[Sequence[int], str | None]] = (),
        adapter: str = "",
    ) -> list[Sample]:  # fmt: skip
        """Have the best texts of a prompt searched, which `read` takes; see `RunTexts.submit_beams`."""
        self.model.check_prompt(prompt_ids)
        assert self._texts is not None
        return self._texts.submit_beams(prompt, prompt_ids, params, beams, stop, on_texts, known, adapter)

    def record_to(self, record: Record) -> None:
        """Set a listener for the new tokens of each sample that `read` reads."""
        assert self._texts is not None
        self._texts.reader.record = record

    def read(self) -> None:
        """Until all texts that were submitted without a reader have ended.

        Raises:
            MdiError: what ended the run before: a lost node, out of memory.
        """
        assert self._texts is not None
        self._texts.read()
        self.raise_failure()

    @property
    def passes(self) -> Passes:
        """Forward and backward passes through blocks, in numpy. As a torch.nn.Module: `mdi_training.ring_blocks.RingBlocks`."""

        def ring() -> Ring:
            assert self.ring is not None, "open"
            return self.ring

        return Passes(self.run_id, ring, self.raise_failure, self._cancel)

    @property
    def failed(self) -> bool:
        """Whether an error has ended the run, so that no text continues or begins."""
        return self._loop is not None and self._loop.failure is not None

    def raise_failure(self) -> None:
        """Raise what has ended the run, if that was an error: MdiError."""
        if self._loop is not None and self._loop.failure is not None:
            self._state = "BROKEN"
            raise self._loop.failure

    # The end

    def close(self, error: BaseException | None = None) -> None:
        """End the run, and give everything back; harmless if repeated.

        Args:
            error: that was in the way, if one was.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._on_close()
        if isinstance(error, NodeLostError):  # do not wait long for any node
            self._state = "BROKEN"
        self.end_on_nodes(leave=self._leave and error is None)

    def __enter__(self) -> Run:
        self.open()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def end_on_nodes(self, leave: bool) -> None:
        """End the run on all nodes, and collect what they measured; also if it was opened in part."""
        former = self._former
        try:
            if former is not None and former.is_known and self.run_trace is not None:
                self.run_trace.read_clocks(
                    self.clients
                )  # meanwhile the last frame, which only frees caches, goes round
            self._cancel.cancel()
            self._cancel.close()
            if self._lookout is not None:
                self._lookout.join()
                self._lookout = None  # it refers to this run, whose memory is to be free when it is forgotten
            if self._loop is not None:
                self._loop.close()
            if self.verifier is not None:
                self.verifier.close()
            if former is not None:
                former.close_links()
                if former.is_known:
                    self.secondary_metrics = dismiss(former.clients, self.run_id, leave, self._state != "BROKEN")
            if leave and self._cluster is not None:
                present = self.cluster.secondaries
                others = [node for node in (*self.model.left_out, *self._cluster.spares) if node not in present]
                keys = self._cluster.keys
                dismiss([ControlClient(node, keys) for node in others], self.run_id, leave, patient=False)
            self._state = "IDLE"
        finally:
            if self._in_use is not None:
                self._in_use.close()
            self._ports.remove(self)
            if self._has_own_ports:
                self._ports.close()
            if self._has_model:
                self.model.close()
            if self._former is not None:
                self._former.close_stage()

    # What it is

    @property
    def run_id(self) -> str:
        """As the nodes know it."""
        return f"{self._id:016x}"

    @property
    def state(self) -> str:
        """IDLE, PLANNING, LOADING, RUNNING, ...: as nodes say theirs."""
        return "RECOVERING" if self._loop is not None and self._loop.is_recovering else self._state

    @property
    def cluster(self) -> ClusterConfig:
        """The nodes of the ring, as it is now."""
        if self._former is not None:
            return self._former.cluster
        assert self._cluster is not None
        return self.model.cluster if self._has_model else self._cluster

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.cluster.nodes)

    @property
    def neighbour(self) -> Neighbour:
        """What a run beside this one is to know of it."""
        return Neighbour(self.names, self.model.measured)

    @property
    def clients(self) -> list[ControlClient]:
        """Of the secondaries, in ring order."""
        return [] if self._former is None else list(self._former.clients)

    @property
    def ring(self) -> Ring | None:
        """The one that was closed last."""
        return None if self._former is None else self._former.ring

    @property
    def loop(self) -> RingLoop:
        """From `open` on."""
        assert self._loop is not None
        return self._loop

    @property
    def max_length(self) -> int:
        """Tokens that a text of the run may have."""
        return self.extent.max_length

    @property
    def is_shared(self) -> bool:
        """Whether nodes compute blocks together."""
        return self._former is not None and self._former.is_shared

    @property
    def identity(self) -> str:
        """See `identity_of`; once it is open."""
        model = self.model
        found = identity_of(model.weights, model.computing, model.options, self.extent)
        sides = " ".join(side.sha256 for side in self._sides.values())
        return hashlib.sha256(f"{found} {sides}".encode()).hexdigest() if sides else found

    @property
    def adapters(self) -> tuple[str, ...]:
        """Adapters that texts can choose by name; known once the run is open."""
        return tuple(name for name in self.engine.adapters if name)

    @property
    def arithmetic(self) -> RingArithmetic:
        """Of the present ring."""
        assert self.ring is not None
        return self.ring.arithmetic

    @property
    def replay_bytes(self) -> int:
        """Room for the rows that this node has sent; from `open` on."""
        cannot_recover = self.model.options.fixed or self.cluster.n_nodes == 1 or not self.model.family.is_placed
        return 0 if cannot_recover or self.is_shared else self.model.options.replay_bytes

    # What it does

    @property
    def samples(self) -> list[Sample]:
        """All that were submitted."""
        return [] if self._texts is None else self._texts.samples

    @property
    def n_recoveries(self) -> int:
        """How often blocks of a lost node have moved."""
        return 0 if self._loop is None else len(self._loop.recoveries)

    @property
    def trouble(self) -> str:
        """Why no text goes on, in words; "" while the ring is closed."""
        return "" if self._loop is None else self._loop.policy.trouble

    def metrics(self) -> RunMetrics:
        """The measurements of the run, so far or in all."""
        duration_s = 0.0 if self._texts is None else self._texts.duration_s
        model = self.model if self._has_model else None
        found = metrics_of_run(
            model, self.names, self.samples, self.measured(), self.secondary_metrics, duration_s,
            [] if self._loop is None else self._loop.recoveries, self.may_differ_from,
            self.options.draft_inexact and self._former is not None and not self._former.has_fixed_rows,
        )  # fmt: skip
        return found if self.verifier is None else replace(found, verified=self.verifier.verified.to_json())

    def measured(self) -> NodeMetrics | None:
        """The work of this node in the run so far; None before the ring is closed."""
        former = self._former
        if former is None or former.ring is None or self._texts is None:
            return None
        return measured_here(self.names[0], self.model.weights.blocks[0], former, self.engine)

    def may_differ_from(self, sample: Sample) -> int | None:
        found = differing(self._loop.differs_from if self._loop is not None else {}, [sample])
        known = [sample.may_differ_from, *(one["token"] for one in found)]
        return min((n for n in known if n is not None), default=None)

    def trace(self) -> Trace | None:
        """The frames of the run on all nodes, once it has ended; None if they were not recorded."""
        if self.run_trace is None:
            return None
        n_tokens = 0 if self._texts is None else self.engine.n_tokens
        measured = self.secondary_metrics or [{}] * (self.cluster.n_nodes - 1)
        weights = self.model.weights
        return self.run_trace.trace(weights.model.name, self.cluster.nodes, weights.blocks, measured, n_tokens)

    def status(self, run: str | None) -> dict[str, Any]:
        return {
            "name": self.cluster.starter.name,
            "version": mdi.__version__,
            "control_version": CONTROL_VERSION,
            "process": self._process,
            "state": self.state,
            "clock_s": time.time(),
            "model": self.model.weights.model.name if self._has_model else None,
            "n_nodes": self.cluster.n_nodes,
            "samples": [{"n_tokens": s.n_reached, "finish_reason": s.finish_reason} for s in list(self.samples)],
        }

    def check_echo(self) -> None:
        if self._state == "RUNNING":
            raise ControlError("the starter is in the middle of a run", 409, code=Code.BUSY)
