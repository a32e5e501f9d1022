"""The loop of the starter: schedule, compute, send; receive, draw, update. It uses token ids, not text."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from mdi.engine.cohort import Beams, Chooser, Cohort, Ended
from mdi.engine.memory import CacheMemory
from mdi.engine.pooling import Pool
from mdi.engine.prefix_tasks import PrefixTask, RingPrefixes
from mdi.engine.replay import SentRows
from mdi.engine.sampling import Row, log_probs, on_host, sample, scores_of
from mdi.engine.scheduler import PromptPace, Scheduler
from mdi.engine.sequence import (
    FAILED,
    NO_ADAPTER,
    UNMATCHED,
    UNTRUE,
    Constraint,
    Ends,
    Event,
    Events,
    Inbox,
    Plan,
    PlannedSlice,
    Request,
    SamplingParams,
    Sequence,
    Side,
    TakeRows,
    TextAdapter,
    TokenLogprobs,
)
from mdi.engine.speculation import Speculation
from mdi.engine.worker import StarterFrameStage, StarterRows, TappedStage
from mdi.errors import Code, EngineError, RingEndedError, RingError, UsageError
from mdi.kernels.slices import Slice, SliceTable, with_adapter
from mdi.net.ring import Ring
from mdi.net.wire import Frame, FrameType
from mdi.spec.combinations import refuse

logger = logging.getLogger(__name__)

KEEP_AGAIN_S = 0.5  # after nodes had enough to write
CERTAIN_ROWS = 16  # of a text in a frame, of tokens that were not drawn
SCORED_ROWS = 64  # whose logits are in memory at the same time, of a text that is scored
NOT_FINITE = (
    "that are not finite: most likely float16 overflowed on a node (use --dtype float32 or bfloat16 there), or weights are "
    "damaged"
)


# A row from which a token is drawn: its sequence, its place among the rows of its slice, the token whose row it is, and how it
# is drawn. All places but the first count only if that token was drawn from the row before.
_Wanted = tuple[int, int, int, Row]


class Verifier(Protocol):
    """Has random rows computed again: run.verify.RowVerifier. The loop's thread calls it, and must not wait."""

    def returned(self, seq_id: int, start: int, rows: Any) -> None:
        """All rows of a text from its first one up to these are right or wrong for good.

        Args:
            rows: the last of them, from position `start` on, as they came from the last node: (n, n_embd).
        """

    def holds(self, seq_id: int) -> bool:
        """Whether a text that ends now is to be verified before its reader hears of its end; `release` follows then."""

    def judge(self, seq_id: int, position: int, row: Any) -> bool:
        """Have all rows of a text up to this one computed again, and wait for that as long as the ring is whole: whether a node
        was found to compute nonsense.
        """

    def forget(self, seq_id: int) -> None:
        """A text is over, and is not verified any more."""

    @property
    def is_untrue(self) -> bool:
        """Whether a node of the ring was found to compute nonsense."""

    def begin(self) -> Mapping[int, int]:
        """A new ring begins. Returns of each text that has rows of the last one that may be wrong, how many, from the first on,
        still count; it is not verified any more.
        """


class _NotFiniteError(EngineError):
    """Of the text `seq_id`, no token can be drawn."""

    def __init__(self, seq_id: int, message: str) -> None:
        super().__init__(message)
        self.seq_id = seq_id


class StarterEngine:
    """Drives the generation of all sequences over one ring after the other, rings of one node included.

    `run` belongs to one thread. `submit`, `cancel` and `close` may be called from any, at any time, and never wait for it.

    Args:
        stage: the starter's own part of the model, loaded and prepared.
        scheduler: chooses the rows of the frames; knows the nodes' memory for caches.
        max_length: tokens that a sequence may reach, prompt included.
        rows: as the stage has them.
        wire: number format of rows on the links (net.wire.WIRE_DTYPES).
        taps: blocks whose outputs come back with the rows that need logits.

    Attributes:
        stage, memory: the starter's own part in the next ring, and its nodes' memory for caches; set between two runs.
        pace: how many prompt rows may go beside decoding texts; None: no limit. Set before texts come.
        adapters: by their names; "": of texts that name none. A new table comes with each change.
            Set before texts come.
        speculation: guesses tokens; None: nobody does. Set before texts come.
        n_frames, may_guess, is_deep: frames of the next ring without guesses, None: as many as it holds; whether its nodes give
            rows the same bits in any company; whether a text may have several frames in flight. Set between two runs.
        kept: positions of each sequence whose rows can be replayed to the nodes that have lost their caches, while all others
            have theirs; None if no node has caches. Set between two runs.
        sent: rows that were sent to the next node; `fills_replays` says whether that node needs them again.
        has_fresh: whether there are nodes without caches at all.
        verifier: computes rows again; None: nobody does. Set before texts come.
        last_token_s, first_token_s: time.perf_counter() of the last token of all, and of the first over this ring.
    """

    def __init__(
        self, stage: StarterFrameStage, scheduler: Scheduler, max_length: int, rows: StarterRows, wire: str = "auto",
        taps: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.stage = stage
        self._taps = taps
        self.scheduler = scheduler
        self._max_length = max_length
        self._rows = rows
        self._wire = wire
        self._inbox = Inbox()
        self._live: dict[int, Request] = {}
        self._cohorts: dict[int, Cohort] = {}  # by each of their texts
        self._n_constrained = 0  # texts that came with a constraint
        self._complete: list[Cohort] = []  # have all logits of this step
        self._ids = itertools.count()
        self.adapters: Mapping[str, TextAdapter] = {}
        self._ring: Ring | None = None  # the one that was run last
        self._closing = False
        self._left: int | None = None  # epoch of the ring that is to be left
        self.last_token_s: float | None = None
        self.first_token_s: float | None = None
        self.kept: Mapping[int, int] | None = None
        self.sent = SentRows(0)
        self.fills_replays = self.has_fresh = False
        self.memory: CacheMemory | None = scheduler.memory
        self.verifier: Verifier | None = None
        self._withheld: dict[int, tuple[Request, Event]] = {}  # the ends of texts that are being verified
        self.pace: PromptPace | None = None
        self._speculation: Speculation | None = None
        self.n_frames: int | None = None
        self.may_guess = self.is_deep = True
        self.compute_s = 0.0
        self.n_tokens = 0  # generated so far, of all sequences

    def submit(
        self, prompt_ids: Iterable[int], params: SamplingParams, ends: Ends | None = None, events: Events | None = None,
        generated: Iterable[int] = (), constraint: Constraint | None = None, owner: str | None = None,
        is_guessed: bool = True, prediction: Iterable[int] = (), adapter: str = "",
    ) -> Request:  # fmt: skip
        """Queue a sequence.

        Args:
            generated: tokens that it has already, of an earlier run; its next one is drawn as it would have been then.
            ends: sees each token and may end the sequence, see `Ends`.
            events: queue for its events; None makes one.
            constraint: what its tokens may be; None any.
            owner, is_guessed, prediction: see Sequence.
            adapter: name of the one that it is computed with; "": none.

        Raises:
            UsageError: there is no such adapter, the prompt is empty or does not fit, or no node's caches could ever hold the
                sequence.
            EngineError: the engine has ended.
        """
        sequence = self._sequence(tuple(prompt_ids), params, owner, adapter)
        sequence.ids += generated
        sequence.is_guessed, sequence.prediction = is_guessed, tuple(prediction)
        request = Request(sequence, events, ends, self.cancel, constraint)
        self._queue([request])
        return request

    def submit_rows(
        self, prompt_ids: Iterable[int], read_from: int, take_rows: TakeRows, events: Events | None = None,
        adapter: str = "",
    ) -> Request:  # fmt: skip
        """Queue a text whose rows are wanted instead of tokens, once each and in order, from position `read_from` on.

        Args:
            take_rows: gets the position of the first of some rows, and the rows: float32 (1 + taps, rows, n_embd), those that
                went through all blocks first. Called in the engine's thread, so it must be short.
            adapter: as in `submit`.

        Raises:
            as `submit`.
        """
        request = self._rows_request(tuple(prompt_ids), read_from, take_rows, events, adapter)
        self._queue([request])
        return request

    def submit_pooled(
        self, ids: Iterable[int], pooling: str, events: Events | None = None, adapter: str = ""
    ) -> Request:
        """Queue a text of whose rows, behind the final norm, one is to be made: `Request.pooled`.

        Args:
            pooling: one of spec.options.POOLINGS.
            adapter: as in `submit`.

        Raises:
            as `submit`.
        """
        text = tuple(ids)
        pool, side = Pool(pooling, len(text)), self.adapters.get(adapter, NO_ADAPTER).side

        def take(first: int, rows: np.ndarray) -> None:
            own = self._rows.of_array(rows[0] if side is None else side(*rows))
            pool.take(self._rows.array(self.stage.final_norm(own)))

        request = self._rows_request(text, pool.read_from, take, events, adapter)
        request.pooled = pool
        self._queue([request])
        return request

    def _rows_request(
        self, prompt: tuple[int, ...], read_from: int, take_rows: TakeRows, events: Events | None, adapter: str,
        owner: str | None = None, n_logprobs: int | None = None,
    ) -> Request:  # fmt: skip
        sequence = self._sequence(prompt, SamplingParams(1, n_logprobs=n_logprobs), owner, adapter)
        n_virtual = sequence.n_virtual
        if not 0 <= read_from < sequence.n_prompt - n_virtual:
            n = sequence.n_prompt - n_virtual
            raise UsageError(f"rows from position {read_from} on of a text of {n} tokens", code=Code.VALUE)
        sequence.read_from, sequence.is_guessed = n_virtual + read_from, False
        request = Request(sequence, events, None, self.cancel)
        request.read_rows(sequence.read_from, lambda first, rows: take_rows(first - n_virtual, rows))
        return request

    def submit_scores(
        self,
        ids: Iterable[int],
        events: Events | None = None,
        adapter: str = "",
        n_best: int = 0,
        owner: str | None = None,
    ) -> Request:
        """Queue a text whose log probabilities are wanted: of each of its tokens but the first, once each and in order.
        They come as the `logprobs` of events, natural logarithms.

        Args:
            adapter, owner: as in `submit`.
            n_best: of the best tokens at each place, too, of so many.

        Raises:
            UsageError: the text has fewer than two tokens; else as `submit`.
        """
        text = tuple(ids)
        if len(text) < 2:
            raise UsageError(f"a text of {len(text)} tokens cannot be scored: it takes two", code=Code.EMPTY)
        request = self._rows_request(text[:-1], 0, lambda first, rows: None, events, adapter, owner, n_best)
        request.sequence.behind = (*request.sequence.prompt_ids[1:], text[-1])
        self._queue([request])
        return request

    def submit_beams(
        self, prompt_ids: Iterable[int], params: SamplingParams, beams: Beams, events: Events | None = None,
        constraint: Constraint | None = None, owner: str | None = None, chooser: Chooser | None = None,
        is_stopped: Callable[[list[int]], bool] | None = None, adapter: str = "",
    ) -> list[Request]:  # fmt: skip
        """Queue a prompt whose best continuations are searched; how tokens are drawn (temperature, seed) has no effect.

        Args:
            constraint, owner, adapter: as in `submit`.
            chooser: which texts go on, see engine.cohort; None is that of `beams`.
            is_stopped: whether generated tokens have a stop string in them.

        Returns:
            one for each beam. They end together, each with one event: the best text first.

        Raises:
            as `submit`.
        """
        if self.verifier is not None:
            refuse(["--beams", "--verify"])
        prompt = tuple(prompt_ids)
        texts = [self._sequence(prompt, params, owner, adapter) for _ in range(beams.n)]
        for text in texts:
            text.cohort = tuple(texts)
        requests = [Request(text, events, None, self.cancel) for text in texts]
        cohort = Cohort(texts, beams, chooser, constraint, is_stopped)
        self._queue(requests, cohort)
        return requests

    def _sequence(
        self, prompt: tuple[int, ...], params: SamplingParams, owner: str | None, adapter: str = ""
    ) -> Sequence:  # fmt: skip
        if adapter and adapter not in self.adapters:
            raise UsageError(f"there is no adapter {adapter[:100]!r}", code=Code.ADAPTER)
        if not prompt:
            raise UsageError("a prompt without any token cannot be continued", code=Code.EMPTY)
        n_virtual = self.n_virtual(adapter)
        if n_virtual + len(prompt) > self._max_length:
            behind = f" behind {n_virtual} rows of {adapter}" if n_virtual else ""
            raise UsageError(
                f"the prompt has {len(prompt)} tokens{behind}, but a sequence can have {self._max_length} (--sequence-length)",
                code=Code.LENGTH,
            )
        own = self.adapters.get(adapter, NO_ADAPTER)
        seq_id, sha256 = with_adapter(own.number, next(self._ids)), own.sha256
        prompt = prompt[:1] * n_virtual + prompt  # a token that is there anyway: penalties see no other one
        return Sequence(seq_id, prompt, params, self._max_length, owner=owner, adapter=sha256, n_virtual=n_virtual)

    def n_virtual(self, adapter: str) -> int:
        """Positions that an adapter takes before those of a text; 0 without one."""
        return self.adapters.get(adapter, NO_ADAPTER).n_virtual

    def _queue(self, requests: list[Request], cohort: Cohort | None = None) -> None:
        if (reason := self.scheduler.refusal(requests[0].sequence)) is not None:
            raise UsageError(reason, code=Code.MEMORY)
        if not self._inbox.put(partial(self._admit, requests, cohort)):
            raise EngineError("no more texts are generated: the run is over")
        self._wake()

    def cancel(self, seq_id: int, reason: str = "cancelled") -> None:
        """Have a sequence ended; its last event carries `reason`. One that has ended already is left alone."""
        if self._inbox.put(partial(self._end, seq_id, reason)):
            self._wake()

    @property
    def prefixes(self) -> RingPrefixes | None:
        """What the nodes of the next ring have on their disks; None: nothing. Set between two runs."""
        return self.scheduler.ring_prefixes

    @prefixes.setter
    def prefixes(self, prefixes: RingPrefixes | None) -> None:
        self.scheduler.ring_prefixes = prefixes

    @property
    def speculation(self) -> Speculation | None:
        return self._speculation

    @speculation.setter
    def speculation(self, speculation: Speculation | None) -> None:
        self._speculation = speculation
        self.scheduler.guesser = speculation if self.may_guess else None

    @property
    def guesses(self) -> tuple[int, int]:
        """Guessed tokens of all texts so far, and those of them that were drawn."""
        return self.scheduler.n_guessed, self.scheduler.n_confirmed

    def texts(self) -> tuple[int, int, int]:
        """How many sequences run, how many wait for cache memory, and how often one had to give its caches back."""
        scheduler = self.scheduler
        return scheduler.n_running, scheduler.n_waiting, scheduler.n_preempted

    @property
    def cache_use(self) -> list[tuple[str, int, int]]:
        """Of each node whose caches have a limit: its name, bytes of cache that are used, and the limit."""
        memory, used = self.scheduler.memory, self.scheduler.used
        nodes = () if memory is None else memory.nodes
        return [(node.name, n, node.limit_bytes) for node, n in zip(nodes, used, strict=False)]

    @property
    def n_reused(self) -> int:
        """Tokens of prompts that did not have to be computed, because an earlier text had begun with them."""
        return self.scheduler.n_reused

    def close(self) -> None:
        """Let `run` return; the sequences in flight stay unfinished."""
        self._closing = True
        self._wake()

    def leave(self, epoch: int) -> None:
        """Let `run` of the ring with this epoch return after its present frame. From any thread, also before it begins."""
        self._left = epoch
        self._wake()

    @property
    def is_closing(self) -> bool:
        return self._closing

    @property
    def in_flight(self) -> dict[int, tuple[int, int]]:
        """Positions of each sequence in the frames that are under way, or were when the ring was over."""
        return self.scheduler.in_flight

    @property
    def n_known(self) -> dict[int, int]:
        """Tokens that each sequence has so far, those of its prompt included; between two runs."""
        return {seq_id: len(request.sequence.ids) for seq_id, request in self._live.items()}

    @property
    def n_rounds_left(self) -> int:
        """Rounds that the longest text may still need, if its next guesses are as good as those so far. From any thread."""
        sequences = [request.sequence for request in list(self._live.values())]
        return max((one.n_rounds_left for one in sequences), default=0)

    @property
    def is_isolating(self) -> bool:
        """Whether texts are to run one by one."""
        return self.scheduler.is_isolating

    def isolate(self, seq_ids: Iterable[int]) -> None:
        """Over the next ring, let no two of these run at the same time before they have their next tokens; between two runs."""
        self.scheduler.isolate(seq_ids)

    def run(self, ring: Ring, until_idle: bool = True) -> None:
        """Generate until nothing is left to do, or, with `until_idle` false, until `close`; in any case until `leave`.

        Over another ring than the last time, all sequences continue from their token ids.

        Args:
            ring: formed; a LoopbackRing if there are no other nodes.

        Raises:
            NodeLostError, RingError: the ring broke; the sequences can continue over another one.
            EngineError: the ring was stopped by another node, or gave back what cannot be.
        """
        if ring is not self._ring:
            self._ring = ring
            self.first_token_s = None
            n_frames = min(self.n_frames or ring.capacity, ring.capacity)  # a group that is the whole ring holds one
            if self._speculation is not None:
                self._speculation.begin_ring(ring.n_nodes, self.is_deep)
                self.scheduler.guesser = self._speculation if self.may_guess else None
            self._complete.clear()
            for cohort in self._cohorts.values():
                cohort.forget()
            kept, self.kept = self.kept, None
            if kept is None:
                self._deliver(self.scheduler.rewind(n_frames, self.memory, ring.capacity))
                self.stage.caches.clear()
                self.sent.clear()
            else:
                self._deliver(self.scheduler.resume(n_frames, self.memory, kept, self.has_fresh, ring.capacity))
                if self.fills_replays:
                    self.sent.hold()
            if self.verifier is not None:
                self._retract(self.verifier)
        try:
            while not (self._closing or self._left == ring.epoch):
                for command in self._inbox.take():
                    command()
                if until_idle and not self.scheduler.has_work:
                    return
                self._step(ring)
        except RingEndedError:
            if not self._closing:
                raise EngineError("the run was stopped before its sequences were finished") from None

    def end_all(self, reason: str = FAILED) -> None:
        """End the remaining sequences after the last run: each reader gets a last event, and no new text is accepted."""
        self._inbox.close()
        for command in self._inbox.take():
            command()
        for seq_id in list(self._live):
            self._end(seq_id, reason)
        for seq_id, (request, event) in list(self._withheld.items()):  # they are not verified
            self._withheld[seq_id] = request, replace(event, tokens=(), finish_reason=FAILED, logprobs=())
            self._release(seq_id)

    def release(self, seq_id: int) -> None:
        """A text that has ended is verified: its reader may hear of its end. From any thread."""
        if self._inbox.put(partial(self._release, seq_id)):
            self._wake()

    def _step(self, ring: Ring) -> None:
        speculation, begin = self._speculation, time.perf_counter()
        for plan in iter(self.scheduler.schedule, None):
            if self.pace is not None:
                self.pace.sent(plan, time.perf_counter())
            if plan.task is not None:
                assert self.scheduler.ring_prefixes is not None
                if plan.task.goes_ahead:
                    ring.send(plan.task.frame(ring.epoch, plan.number))
                answered = self.scheduler.ring_prefixes.answer(plan.task)
                if not plan.task.goes_ahead:
                    ring.send(answered.frame(ring.epoch, plan.number))
                begin = time.perf_counter()
                continue
            if speculation is not None and (not plan.is_plain or speculation.is_watching(plan.number)):
                now = time.perf_counter()
                self.compute_s += now - begin  # guesses among them
                speculation.sent(plan, now, now - begin)
            ring.send(self._compute(plan, ring))
            begin = time.perf_counter()
        frame = ring.recv(KEEP_AGAIN_S if self.scheduler.keeps_later else None)
        if frame is None:
            self.scheduler.keeps_later = False
        elif frame.is_task:
            took_s = 0.0 if self.pace is None else self.pace.returned(frame.number, time.perf_counter())
            self.scheduler.answered(frame.number, PrefixTask.of(frame), took_s)
            ring.release(frame)
        else:
            tokens = self._draw(frame, ring, *self.scheduler.due(frame.number))
            self._deliver(self.scheduler.update(frame.number, tokens))
            if self._n_constrained and self.scheduler.guesser is not None:
                self._take_certain(tokens)
            while self._complete:
                self._choose(self._complete.pop())
            if speculation is not None and frame.number in speculation.under_way:
                n_drawn = sum(map(len, tokens.values()))
                speculation.returned(frame.number, time.perf_counter(), self.compute_s, n_drawn)
            if self.pace is not None:
                self.pace.returned(frame.number, time.perf_counter())
                self.scheduler.doubling_rows, self.scheduler.row_s = self.pace.doubling_rows, self.pace.row_s

    def _compute(self, plan: Plan, ring: Ring) -> Frame:
        """Embed the rows of a plan, and run the starter's own blocks over them."""
        begin = time.perf_counter()
        self.stage.caches.rearrange(plan.freed, plan.copies)
        slices = SliceTable([Slice(s.seq_id, s.start, s.n_rows, s.n_logits) for s in plan.slices])
        if plan.is_replay:
            return self._replay(plan, slices, ring)
        ids = [token for s in plan.slices for token in s.ids]
        x = self.stage.embed(self._rows.ids(ids), slices) if ids else self._rows.zeros(0, self.stage.row_in.width)
        is_alone = ring.n_nodes == 1  # nothing travels
        tapped = TappedStage(self.stage, self._rows, self._taps, 0, getattr(self.stage, "stop", 0))
        frame = tapped(self._frame(plan, slices, ring), x, is_alone, "auto" if is_alone else self._wire)
        if not is_alone:
            self.sent.add(frame, self.stage.row_out.is_skipped)
        self.compute_s += time.perf_counter() - begin
        return frame

    def _replay(self, plan: Plan, slices: SliceTable, ring: Ring) -> Frame:
        """The frame of a replay, with its rows if the next node is to have them."""
        frame = self._frame(plan, slices, ring)
        self.sent.add(frame)
        return self.sent.fill(frame) if self.fills_replays else frame

    @staticmethod
    def _frame(plan: Plan, slices: SliceTable, ring: Ring) -> Frame:
        """Without rows."""
        return Frame(
            FrameType.BATCH, ring.epoch, plan.number, slices=slices, freed=plan.freed, copies=plan.copies,
            is_replay=plan.is_replay,
        )  # fmt: skip

    def _draw(self, frame: Frame, ring: Ring, plan: Plan, are_live: list[bool]) -> dict[int, list[int]]:
        """Final norm, head and sampling for the rows that came back: new tokens by seq_id. Rows that do not count any more are
        left out before anything is computed from them.
        """
        begin = time.perf_counter()
        tokens: dict[int, list[int]] = {}
        if n_wanting := frame.slices.n_logits:
            x = self._rows.read(frame, self.stage.returned_width)
            if len(x) != n_wanting * (1 + len(self._taps)):
                blocks = f" and {len(self._taps)} blocks: do all nodes have the same version?" if self._taps else ""
                raise EngineError(f"{len(x)} rows came back for {n_wanting} tokens{blocks}")
            x_back = x[:n_wanting]
            x, seen = x[:n_wanting], [x[i * n_wanting : (i + 1) * n_wanting] for i in range(1, 1 + len(self._taps))]
            wanted: list[_Wanted] = []
            places: list[int] = []
            # Where it is shared, the group's other nodes compute all of these rows, too.
            logits = self.stage.head(x) if self.stage.is_head_shared else None
            at = 0
            for part, is_live in zip(plan.slices, are_live, strict=True):
                if is_live and self._live[part.seq_id].sequence.read_from is not None:
                    end = at + part.n_logits
                    own = [rows[at:end] for rows in (x, *seen)]
                    if self._live[part.seq_id].sequence.behind:
                        self._score(part, own, None if logits is None else logits[at:end])
                    else:
                        self._hand_over(part, own)
                    tokens[part.seq_id] = []
                elif is_live:
                    found = self._wanted_of(part)
                    wanted += found
                    places += range(at, at + len(found))
                at += part.n_logits
            if at != n_wanting:
                raise EngineError(f"{n_wanting} rows came back for {at} tokens")
            if wanted and (sides := self._sides()):
                x, seen, places = x[places], [rows[places] for rows in seen], list(range(len(places)))
                self._add_sides(sides, [seq_id for seq_id, *_ in wanted], x, seen)
            try:
                if wanted and logits is not None:
                    tokens |= self._sampled(*self._finite(logits[places], wanted, "the head gave logits"))
                elif wanted:
                    x, wanted = self._finite(
                        x if len(wanted) == len(x) else x[places], wanted, "the blocks returned numbers"
                    )
                    tokens |= self._sampled(*self._finite(self.stage.head(x), wanted, "the head gave logits"))
            except _NotFiniteError as e:
                if self.verifier is not None:
                    if self._is_untrue(self.verifier, plan, e.seq_id, x_back):
                        raise RingError(str(e)) from None
                    ring.recv(
                        0
                    )  # raises if a node was lost meanwhile: nobody knows, and another ring computes the text
                raise
            if self.verifier is not None:
                self._note_returned(self.verifier, plan, are_live, x_back, tokens)
        ring.release(frame)
        self.compute_s += time.perf_counter() - begin
        return tokens

    def _add_sides(self, sides: Mapping[str, Side], seq_ids: Iterable[int], x: Any, seen: list[Any]) -> None:
        """Put what side networks make of the rows of their texts in the rows' places; `seq_ids` says whose each row is."""
        places: dict[str, list[int]] = {}
        for i, seq_id in enumerate(seq_ids):
            places.setdefault(self._live[seq_id].sequence.adapter, []).append(i)
        for sha256, at in places.items():
            if (side := sides.get(sha256)) is not None:
                x[at] = self._rows.of_array(side(*(self._rows.array(rows[at]) for rows in (x, *seen))))

    def _sides(self) -> dict[str, Side]:
        """Side networks, by the hashes that texts name them with."""
        return {one.sha256: one.side for one in self.adapters.values() if one.side is not None}

    def _score(self, part: PlannedSlice, rows: list[Any], logits: Any) -> None:
        """Give the reader of a slice the log probabilities of the tokens behind its rows, computed from some rows at a time.

        Args:
            rows: as for `_hand_over`.
            logits: of the rows; None: they are computed here.
        """
        request = self._live[part.seq_id]
        first = part.start + part.n_rows - part.n_logits
        behind = request.sequence.behind[first : first + part.n_logits]
        if sides := self._sides():
            rows[0] = self._rows.joined([rows[0]])  # a copy: a received frame cannot be written to
            self._add_sides(sides, [part.seq_id] * part.n_logits, rows[0], rows[1:])
        if not self._rows.are_finite(rows[0]):
            raise EngineError(f"the blocks returned {NOT_FINITE}")
        n_best, found = request.sequence.params.n_logprobs or 0, list[TokenLogprobs]()
        for begin in range(0, part.n_logits, SCORED_ROWS):
            some = slice(begin, begin + SCORED_ROWS)
            values = self.stage.head(rows[0][some]) if logits is None else logits[some]
            if not self._rows.are_finite(values):
                raise EngineError(f"the head gave logits {NOT_FINITE}")
            found += scores_of(values, behind[some], n_best)
        request.take_scores(first, found)

    def _hand_over(self, part: PlannedSlice, rows: list[Any]) -> None:
        """Give the rows of a slice to the reader who wants them: those that went through all blocks, then those of each tap."""
        if not all(map(self._rows.are_finite, rows)):
            raise EngineError(f"the blocks returned {NOT_FINITE}")
        request = self._live[part.seq_id]
        first = part.start + part.n_rows - part.n_logits
        request.take_rows(first, np.stack([self._rows.array(one) for one in rows]))

    @staticmethod
    def _is_untrue(verifier: Verifier, plan: Plan, seq_id: int, rows: Any) -> bool:
        """Whether the rows of a text are wrong, because a node computes nonsense."""
        at = 0
        for part in plan.slices:
            if part.seq_id == seq_id:
                return verifier.judge(seq_id, part.start + part.n_rows - part.n_logits, rows[at])
            at += part.n_logits
        return False

    def _note_returned(
        self, verifier: Verifier, plan: Plan, are_live: list[bool], rows: Any, tokens: Mapping[int, list[int]]
    ) -> None:
        """Tell which rows are those of tokens that are known: not the rows of guesses that were wrong."""
        at = 0
        for part, is_live in zip(plan.slices, are_live, strict=True):
            n = len(tokens.get(part.seq_id, ())) if is_live else 0
            if n:
                verifier.returned(part.seq_id, part.start + part.n_rows - part.n_logits, rows[at : at + n])
            at += part.n_logits

    def _wanted_of(self, part: PlannedSlice) -> list[_Wanted]:
        """How the rows of a slice are drawn, if all its guesses are right; fewer rows where the constraint allows nothing more.
        If it fails for the first row, the sequence ends.
        """
        request = self._live[part.seq_id]
        sequence, constraint = request.sequence, request.constraint
        ids: list[int] = sequence.ids
        wanted: list[_Wanted] = []
        for i, token in enumerate(part.ids[part.n_rows - part.n_logits :]):
            allowed = None
            if i and sequence.params.changes_logits:
                ids = [*ids, token]
            if constraint is not None:
                try:
                    if i:
                        constraint = constraint.copy() if i == 1 else constraint
                        if constraint.take(token):
                            break
                    allowed = constraint.allowed() if i else request.allowed()
                except Exception:  # of a grammar: its own sequence ends, and no other
                    if not i:
                        logger.exception("a sequence is ended, because its grammar failed")
                        self._end(part.seq_id, UNMATCHED)
                    break
            n_drawn = part.start + part.n_rows - part.n_logits + i + 1 - sequence.n_prompt
            wanted.append((part.seq_id, i, token, Row(sequence.params, n_drawn, ids, sequence.n_prompt, allowed)))
        return wanted

    def _finite(self, x: Any, wanted: list[_Wanted], what: str) -> tuple[Any, list[_Wanted]]:
        """The rows of each slice before the first that has a number that is not finite: a wrong guess may give some.

        Args:
            x: (len(wanted), any)

        Raises:
            EngineError: it is the first row of a slice, which is none of a guess. `what` says where `x` comes from.
        """
        if self._rows.are_finite(x):
            return x, wanted
        kept, damaged = [], set()
        for at, (seq_id, place, _, _) in enumerate(wanted):
            if seq_id not in damaged and self._rows.are_finite(x[at : at + 1]):
                kept.append(at)
            elif place:
                damaged.add(seq_id)
            else:
                raise _NotFiniteError(seq_id, f"{what} {NOT_FINITE}")
        return x[kept], [wanted[at] for at in kept]

    def _sampled(self, logits: Any, wanted: list[_Wanted]) -> dict[int, list[int]]:
        """New tokens by seq_id: one for each row of a slice, up to the first one behind which another token was guessed."""
        tokens: dict[int, list[int]] = {}
        if self._cohorts and any(seq_id in self._cohorts for seq_id, *_ in wanted):
            logits = on_host(logits)
            for at, (seq_id, *_) in enumerate(wanted):
                if (cohort := self._cohorts.get(seq_id)) is not None:
                    tokens[seq_id] = []
                    if cohort.take(seq_id, logits[at]):
                        self._complete.append(cohort)
            alone = [at for at, (seq_id, *_) in enumerate(wanted) if seq_id not in tokens]
            if not alone:
                return tokens
            logits, wanted = logits[alone], [wanted[at] for at in alone]
        rows = [row for _, _, _, row in wanted]
        if any([row.params.n_logprobs is not None for row in rows]):
            logits = on_host(logits)  # once for both
        for at, ((seq_id, place, guess, row), token) in enumerate(zip(wanted, sample(logits, rows), strict=True)):
            own = tokens.setdefault(seq_id, [])
            if place and (len(own) < place or own[-1] != guess):
                continue  # behind a wrong guess
            own.append(token)
            if row.params.n_logprobs is not None:
                self._live[seq_id].keep_logprobs(row.n_drawn, log_probs(logits[at], token, row.params.n_logprobs))
        return tokens

    def _take_certain(self, seq_ids: Iterable[int]) -> None:
        """Give texts the tokens that their constraints leave no choice about. Their rows go out with that of the one before."""
        for seq_id in seq_ids:
            while (request := self._live.get(seq_id)) is not None and (token := self._certain(request)) is not None:
                self._deliver(self.scheduler.accept_certain(seq_id, token))

    @staticmethod
    def _certain(request: Request) -> int | None:
        """The only token that may follow, whose log probability nobody wants to know; no row behind it is under way."""
        sequence = request.sequence
        has_draws = request.constraint is None or sequence.params.n_logprobs is not None
        if has_draws or sequence.cohort or sequence.guessed or not 0 < sequence.n_to_send < CERTAIN_ROWS:
            return None
        try:
            allowed = request.allowed()
        except Exception:  # of a grammar: the row of the last token ends its sequence
            return None
        return int(allowed.argmax()) if np.count_nonzero(allowed) == 1 else None

    # Commands

    def _admit(self, requests: list[Request], cohort: Cohort | None) -> None:
        for request in requests:
            self._live[request.seq_id] = request
            self._n_constrained += request.constraint is not None
            if cohort is not None:
                self._cohorts[request.seq_id] = cohort
            elif self._speculation is not None and request.sequence.is_guessed:
                self._speculation.begin(request.sequence, request.constraint)
            self.scheduler.submit(request.sequence)

    def _end(self, seq_id: int, reason: str) -> None:
        request = self._live.get(seq_id)
        unit = () if request is None else request.sequence.unit
        for event in [self.scheduler.cancel(one.seq_id, reason) for one in unit]:
            if event is not None:
                self._deliver([event])

    def _choose(self, cohort: Cohort) -> None:
        """All rows of a cohort are back: go on with the texts that are chosen, or hand the best ones to their readers."""
        try:
            choices = cohort.choose()
        except Exception:  # of the chooser or of the reader: its own texts end, and no other
            logger.exception("beams are ended, because choosing among them failed")
            self._end(cohort.texts[0].seq_id, FAILED)
            return
        if choices:
            self.scheduler.regroup(cohort.texts, [(choice.parent, choice.token) for choice in choices])
            return
        found: list[Ended | None] = [*cohort.ended]
        for text, ended in itertools.zip_longest(cohort.texts, found):
            reason = UNMATCHED if ended is None else ended.reason
            self.scheduler.cancel(text.seq_id, reason)
            if ended is not None and text.params.n_logprobs is not None:
                for number, logprobs in enumerate(ended.logprobs):
                    self._live[text.seq_id].keep_logprobs(number, logprobs)
            self._deliver([Event(text.seq_id, () if ended is None else ended.tokens, reason)])

    def _deliver(self, events: list[Event]) -> None:
        """Deliver events to their readers. A text that its reader's own condition ends leaves the scheduler."""
        now = time.perf_counter()
        for event in events:
            seq_id, tokens, reason = event.seq_id, event.tokens, event.finish_reason
            request = self._live.get(seq_id)
            if request is None:
                continue  # the token before ended it, by its reader's condition
            if reason is None and (reason := self._own_end(request, tokens, event.drawn)) is not None:
                end = self.scheduler.cancel(seq_id, reason)
                if end is not None and request.is_full:
                    tokens += end.tokens  # that were withheld
            if not tokens and reason is None:
                continue
            if tokens:
                self.n_tokens += len(tokens)
                self.last_token_s = now
                self.first_token_s = self.first_token_s or now
            if reason is not None:
                del self._live[seq_id]
                self._cohorts.pop(seq_id, None)
                if self._speculation is not None:
                    self._speculation.forget(request.sequence)
            logprobs = () if request.sequence.params.n_logprobs is None else request.logprobs_of_next(len(tokens))
            event = Event(seq_id, tokens, reason, now, logprobs)
            is_whole = reason in ("eos", "stop", "length") and not request.sequence.cohort
            if is_whole and self.verifier is not None and self.verifier.holds(seq_id):
                self._withheld[seq_id] = request, event
                self.scheduler.pinned.add(seq_id)
            else:
                if self.verifier is not None and reason is not None:
                    self.verifier.forget(seq_id)
                request.events.put(event)

    def _release(self, seq_id: int) -> None:
        self.scheduler.pinned.discard(seq_id)
        if (held := self._withheld.pop(seq_id, None)) is not None:
            request, event = held
            request.events.put(event)

    def _retract(self, verifier: Verifier) -> None:
        """Over a new ring: end the texts of which tokens were drawn from rows that may be wrong, for their readers to go on."""
        right = verifier.begin()
        for seq_id, (request, _) in list(self._withheld.items()):
            if (n_right := right.get(seq_id)) is not None:
                self._withheld[seq_id] = request, self._untrue(request, n_right)
            self._release(seq_id)
        for seq_id, request in list(self._live.items()):
            sequence, n_right = request.sequence, right.get(seq_id)
            if n_right is None or len(sequence.ids) <= max(sequence.n_prompt, n_right + 1):
                continue
            self.scheduler.cancel(seq_id, UNTRUE)
            del self._live[seq_id]
            if self._speculation is not None:
                self._speculation.forget(sequence)
            request.events.put(self._untrue(request, n_right))

    @staticmethod
    def _untrue(request: Request, n_right: int) -> Event:
        sequence = request.sequence
        return Event(sequence.seq_id, (), UNTRUE, time.perf_counter(), n_kept=max(0, n_right + 1 - sequence.n_prompt))

    @staticmethod
    def _own_end(request: Request, tokens: tuple[int, ...], drawn: int | None) -> str | None:
        try:
            return "stop" if request.is_met_by(tokens, drawn) else None
        except Exception:  # of the reader: its own sequence ends, and no other
            logger.exception("a sequence is ended, because the check for its end failed")
            return FAILED if request.constraint is None else UNMATCHED

    def _wake(self) -> None:
        ring = self._ring
        if ring is not None:
            ring.wake()
