"""Chooses the rows of the next frame. Pure: values in, values out; no torch, no sockets, no clock.

The two methods are `schedule` (which rows leave now) and `update` (which tokens came back). With N nodes, N frames are in
flight, so that every node has one to compute (recurrent pipelining, MDI-LLM thesis, section 3.3.2), and each frame carries
its share of all sequences, so that a node reads its weights once for many rows.

How many frames. With N nodes, a stage time t and a transfer time T per hop, a frame is back after N (t + T), so N frames keep
a node busy for t / (t + T) of the time. With one more frame, each has N / (N + 1) of the rows and a stage time t', and every
sequence has its token after max((N + 1) t', N (t' + T)): this pays if fewer rows take less time. The cost model compares both
(`mdi.placement.plan`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from mdi.engine.memory import KEPT_SHARE, CacheMemory, Kept, Prefixes
from mdi.engine.prefix_tasks import FETCH, FILL, FILLED, FIND, KEEP, OWNERS, PrefixTask, RingPrefixes
from mdi.engine.prices import Prices
from mdi.engine.replay import Replays
from mdi.engine.sequence import Event, Plan, PlannedSlice, Sequence
from mdi.errors import Code, EngineError
from mdi.model.caches import CHUNK_ROWS, PAGE, SLACK, UNKNOWN

DECODE_ROWS = 4096  # most sequences in a frame; with a chunk, well below the limit of a link (net.wire.FRAME_ROWS)
SNAPSHOT_EVERY = 4096  # tokens of a prompt
SNAPSHOTS = 1 << 47  # ids of sequences from here on are those of snapshots; above are bits of adapters
LEAST_FROM_DISK = 2  # pages more than memory has, for which nodes are asked
FETCH_ROUNDS = 64  # for one run of a text, in which nodes get files from each other
AHEAD_POSITIONS = 2 * PAGE  # how much all sequences can grow after one was admitted, before one must be evicted

# Guesses of one text that are under way, at most: any cache can be cut by SLACK positions, and a prefix of the ended text is to
# be cut somewhere, too.
MOST_GUESSES = SLACK // 2

PREFILL_SLOWDOWN = 0.6  # prompt rows may make a decoding frame 60 % slower
FIRST_ROWS = 16  # before anything was measured
LEAST_ROWS = 4
MANY_ROWS = 32  # of prompts in a frame, from which on a row costs what it costs in a long prompt
WEIGHT = 0.2  # of the newest frame that has prompt rows alone
GROWTH, SHRINKAGE = 1.1, 0.7  # most change of the number by one frame


class Guesser(Protocol):
    """Guesses the next tokens of texts: engine.speculation.Speculation."""

    def limits(self, sequence: Sequence, n_places: int, n_texts: int, n_beside: int) -> tuple[int, int]:
        """The frames of a text that may be under way, and the rows that each may have. Nothing is guessed with (1, 1).

        Args:
            n_places: frames that the ring has for this text; n_texts: that decode.
            n_beside: rows of other texts in its next frame.
        """

    def propose(self, sequence: Sequence, n: int) -> list[int]:
        """At most `n` tokens that may follow `ids` and `guessed` of a sequence; they are sent."""

    def judge(self, sequence: Sequence, n_right: int, is_wrong: bool) -> None:
        """So many of its oldest guesses were drawn; with `is_wrong`, the next one was not. `guessed` has those that count."""


class Scheduler:
    """Spreads sequences over frames.

    A text may have several frames under way: the one with its last token, and others with guesses of its next ones. The
    starter draws a token from each row, as always, and goes on behind the last guess that was right. Two things are counted:
    the frames in the ring, of which each that is back leaves a place; and those of a text whose rows count
    (`Sequence.n_flying`), which are none as soon as a guess was wrong. What is back later for such a text is void.

    Caches count as they are used. A sequence is admitted if it and all running ones have memory for AHEAD_POSITIONS
    more tokens. When they have grown beyond what a node holds, the newest sequence is evicted: its caches are
    freed, and it waits, before all others, to be admitted again as a prompt of all its tokens. So the oldest sequences
    always run, the oldest of all is never evicted, and every sequence ends. Caches of ended sequences stay for new ones
    of the same owner with the same beginning, until the memory is needed. Of running sequences of one owner with the same
    prompt, the first one computes it, and the others continue from a copy of its caches.

    Args:
        n_frames: frames in flight at most; the number of nodes, or more where transfers take long (see the module).
        chunk_rows: prompt rows that one frame takes at most.
        memory: the nodes' memory for caches; None is unlimited.
        decode_rows: decoding sequences in a frame at most.
        kept_share: of each node's memory for caches, for those of ended sequences.

    Attributes:
        guesser: guesses tokens; None: nobody does.
        pinned: ended sequences whose rows the nodes keep until they are verified.
        n_places: frames in flight at most, those with guesses alone included.
    """

    n_frames: int
    n_places: int
    memory: CacheMemory | None
    _use: CacheUse
    _prefixes: Prefixes | None

    def __init__(
        self, n_frames: int = 1, chunk_rows: int = CHUNK_ROWS, memory: CacheMemory | None = None,
        decode_rows: int = DECODE_ROWS, kept_share: float = KEPT_SHARE,
    ) -> None:  # fmt: skip
        self.chunk_rows = chunk_rows
        self.doubling_rows: float | None = None  # see PromptPace; None lets prompts in as fast as they can
        self.decode_rows = decode_rows
        self._kept_share = kept_share
        self._waiting: deque[Sequence] = deque()  # oldest first
        self._running: dict[int, Sequence] = {}  # have caches; oldest first, and before all that wait
        self._ready: deque[Sequence] = deque()  # a new token, to be sent
        self._prefilling: deque[Sequence] = deque()
        self._replays = Replays()
        self._in_flight: deque[Plan] = deque()
        self._n_bare = 0  # of these, with guesses alone
        self._freed: list[int] = []
        self.ring_prefixes: RingPrefixes | None = None  # that its nodes have on their disks; set between two runs
        self._tasks: deque[PrefixTask] = deque()
        self._has_asked = False  # in the last frame: tasks and rows take turns
        self._fetch_s = (0, 0), 0.0  # the text whose files are under way, and how long it has waited for them
        self._asking: dict[int, Sequence] = {}  # whose beginnings nodes look for on their disks, or read
        self._n_snapshots = 0
        self._snapshots: list[tuple[int, int]] = []  # copies that come with the next frame
        self.keeps_later = False  # nodes have enough to write at present
        self.row_s: float | None = None  # see PromptPace
        self._by_prompt: dict[
            tuple[str | None, str, tuple[int, ...]], list[Sequence]
        ] = {}  # running ones; see `siblings`
        self._suspects: set[int] = set()
        self._copies: list[tuple[int, int]] = []
        self._has_grown = False  # the caches of running sequences, since it was seen that all nodes hold them
        self._has_replayed = False  # in the last frame: replays and other rows take turns
        self._ahead: list[int] | None = None  # bytes that all may grow to, with guesses of the next frame
        self.n_plans = 0
        self.guesser: Guesser | None = None
        self.pinned: set[int] = set()
        self.n_guessed = self.n_confirmed = 0  # guesses that were sent, and those that were drawn
        self.n_reused = 0  # tokens of prompts that did not have to be computed
        self.n_preempted = 0  # how often a sequence had to give its caches back
        self._take_ring(n_frames, memory)

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def in_flight(self) -> dict[int, tuple[int, int]]:
        """Positions of known tokens, half-open, of each sequence in the frames that are under way and still count."""
        spans: dict[int, tuple[int, int]] = {}
        plans = (plan for plan in self._in_flight if not plan.is_replay)
        for part in (part for plan in plans for part in plan.slices if self._is_current(part)):
            start, stop = spans.get(part.seq_id, (part.start, part.start))
            end = min(part.start + part.n_rows, len(self._running[part.seq_id].ids))
            spans[part.seq_id] = (min(start, part.start), max(stop, end))
        return spans

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._in_flight or self._freed)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Sequences without cache memory at present, and those that have just come."""
        return len(self._waiting)

    @property
    def used(self) -> tuple[int, ...]:
        """Bytes of cache on each node that the running sequences take; () without a limit."""
        return tuple(self._use.total)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it enters as soon as there is cache memory for it. Others drop last what it will begin with."""
        self._waiting.append(sequence)
        if (found := self._found_in_memory(sequence)) is not None and self._prefixes is not None:
            self._prefixes.wanted[sequence.seq_id] = found[0]

    def refusal(self, sequence: Sequence) -> str | None:
        """Why the sequence could not be admitted even if it were alone; None if it could."""
        return None if self.memory is None else self.memory.refusal(sequence.n_positions, len(sequence.unit))

    def cancel(self, seq_id: int, reason: str = "cancelled") -> Event | None:
        """End a sequence now; None if it has ended already."""
        for sequence in self._waiting:
            if sequence.seq_id == seq_id:
                self._waiting.remove(sequence)
                self._want_nothing(sequence)
                return Event(seq_id, sequence.end(reason), reason)
        running = self._running.get(seq_id)
        if running is None:
            return None
        tokens = running.end(reason)
        self._leave(running)
        return Event(seq_id, tokens, reason)

    @property
    def is_isolating(self) -> bool:
        return bool(self._suspects)

    def isolate(self, seq_ids: Iterable[int]) -> None:
        """After the next rewind, let no two of these run at the same time before they have their next tokens."""
        self._suspects.update(seq_ids)

    def rewind(self, n_frames: int, memory: CacheMemory | None, n_places: int = 0) -> list[Event]:
        """Continue over another ring, whose nodes have no caches: all running sequences begin again, with all their tokens.

        Frames in flight on the old ring are forgotten. Frame numbers continue, so that a late frame is not mistaken for
        one of the new ring.

        Returns:
            the ends of the sequences that the new ring could not hold even one by one, with the reason "memory".
        """
        self._in_flight.clear()
        self._n_bare = 0
        for sequence in self._running.values():
            sequence.rewind()
        if self._suspects:  # all are let in again, of these one by one
            self._waiting.extendleft(reversed(self._running.values()))
            self._running.clear()
            self._by_prompt.clear()
        self._prefilling.clear()
        self._ready.clear()
        self._replays.clear()
        self._copies = []
        self._take_ring(n_frames, memory, n_places)
        for sequence in self._running.values():
            self._begin(sequence)
        events = self._end_misfits()
        self._freed = []
        return events

    def resume(
        self,
        n_frames: int,
        memory: CacheMemory | None,
        kept: Mapping[int, int],
        has_fresh: bool = True,
        n_places: int = 0,
    ) -> list[Event]:
        """Continue over another ring. Most of its nodes have their caches; the others get theirs by replays.

        A sequence is continued behind the last position that came back, or an earlier one to which the nodes can cut their
        caches. One that cannot be replayed, or not be cut, begins again on all nodes. Returns what `rewind` does.

        Args:
            kept: positions of each sequence, from the first on, whose rows can be replayed.
            has_fresh: whether there are nodes without caches at all.
        """
        begun, flying = self._replays.unfinished(self._in_flight), self.in_flight
        copies = [pair for plan in self._in_flight for pair in plan.copies] + self._copies
        begun |= {new_id for _, new_id in copies}
        freed = [seq_id for plan in self._in_flight for seq_id in plan.freed] + self._freed
        if self._prefixes is not None:
            freed += [self._prefixes.drop_oldest() for _ in range(len(self._prefixes))]
        last_starts = {
            part.seq_id: part.start for plan in self._in_flight if not plan.is_replay for part in plan.slices
        }
        self._in_flight.clear()
        self._n_bare = 0
        for queue in (self._ready, self._prefilling, self._replays):
            queue.clear()
        for sequence in self._running.values():
            n_done = min(flying.get(sequence.seq_id, (sequence.n_sent, 0))[0], len(sequence.ids) - 1)
            has_rows = sequence.seq_id not in begun and 0 < n_done <= kept.get(sequence.seq_id, 0)
            n_passed = max(last_starts.get(sequence.seq_id, 0), sequence.n_reached)
            if has_rows and (n := _cut_to(memory, n_passed, n_done)):
                sequence.n_reached = max(sequence.n_reached, sequence.n_sent)  # a node may have these rows
                sequence.return_to(n)
                if has_fresh:
                    self._replays.add(sequence)
                else:
                    self._go_on(sequence)
            else:
                freed.append(sequence.seq_id)
                sequence.rewind()
                self._prefilling.append(sequence)
        self._copies = []
        self._take_ring(n_frames, memory, n_places)
        events = self._end_misfits()
        self._freed = list(dict.fromkeys([*freed, *self._freed]))
        return events

    def _end_misfits(self) -> list[Event]:
        misfits = [one for one in (*self._running.values(), *self._waiting) if self.refusal(one) is not None]
        return [event for one in misfits if (event := self.cancel(one.seq_id, "memory")) is not None]

    def schedule(self) -> Plan | None:
        """The next frame, or None if enough are in flight or nothing is ready."""
        n_known = len(self._in_flight)
        if n_known >= (self.n_frames if self.guesser is None else self.n_places):
            return None
        self.keeps_later = self.keeps_later and not self._running
        if self._has_grown:
            while not self._holds(self._use.total):
                self._preempt(next(reversed(self._running.values())))
            self._has_grown = False
        self._ahead = None
        if self._waiting:
            self._admit()
        for sequence in filter(self._awaits_prefix, self._prefilling):
            self._fork(sequence)
        has_place = n_known - self._n_bare < self.n_frames
        if has_place and not self._has_asked and (asking := self._ask()) is not None:
            return asking
        slices: list[PlannedSlice] = []
        is_replay, is_plain, n_guessed = False, False, self.n_guessed
        if has_place:
            if self._has_replayed or not self._replays:
                slices, prompts = self._decode_slices(), self._prefill_slices()
                is_plain = not prompts and self.n_guessed == n_guessed
                slices += prompts
            self._has_replayed = is_replay = not slices and bool(self._replays)
            slices = self._replay_slices() if is_replay else slices
            if not slices and (asking := self._ask()) is not None:
                return asking
        is_guessed = not slices and self.guesser is not None
        if is_guessed:
            slices = self._guess_slices()
        freed = tuple(seq_id for seq_id in self._freed if seq_id not in self.pinned)
        if not slices and not (freed and not self._in_flight):
            if self._in_flight or self._running or (task := self._task_to_keep()) is None:
                return None
            return self._planned(Plan(self.n_plans, (), (), task=task))
        self._has_asked = False
        for part in slices:
            if part.n_logits:
                self._running[part.seq_id].n_flying += 1
        is_guessed = is_guessed and bool(slices)
        copies = tuple(pair for pair in self._copies if pair[1] < SNAPSHOTS or pair[1] not in freed)
        self._freed = [seq_id for seq_id in self._freed if seq_id in self.pinned]
        self._copies, self._snapshots = self._snapshots, []
        self._n_bare += is_guessed
        return self._planned(Plan(self.n_plans, tuple(slices), freed, copies, is_replay, is_guessed, is_plain))

    def _ask(self) -> Plan | None:
        """A frame with the next task. Files come last, and one frame with them at a time: no other text waits for them."""
        task = min(self._tasks, key=lambda one: one.kind == FETCH, default=None)
        are_files = task is not None and task.kind == FETCH
        if task is None or (are_files and any(plan.task and plan.task.kind == FETCH for plan in self._in_flight)):
            return None
        self._tasks.remove(task)
        self._has_asked = True
        return self._planned(Plan(self.n_plans, (), (), task=task))

    def _planned(self, plan: Plan) -> Plan:
        self.n_plans += 1
        self._in_flight.append(plan)
        return plan

    def prompt_rows(self, number: int) -> int:
        """Rows of prompts, and those that are replayed, in a frame that is under way."""
        return sum(
            part.n_rows
            for plan in self._in_flight
            if plan.number == number
            for part in plan.slices
            if part.is_prompt or plan.is_replay
        )

    def due(self, number: int) -> tuple[Plan, list[bool]]:
        """The plan of a frame that is back, and for each slice whether tokens are to be drawn from it: not in the middle of a
        prompt, of a text that has ended or lost its caches, and behind a guess that was wrong.

        Args:
            number: of the frame; frames return in the order in which they left.

        Raises:
            EngineError: it is not the frame that is due.
        """
        due = self._in_flight[0] if self._in_flight else None
        if due is None or due.number != number:
            words = f"frame {number} came back, expected " + (f"frame {due.number}" if due else "none")
            raise EngineError(words, Code.WIRE)
        running = self._running.get
        return due, [
            part.n_logits > 0
            and (one := running(part.seq_id)) is not None
            and one.n_evictions == part.n_evictions
            and one.n_misses == part.n_misses
            for part in due.slices
        ]

    def update(self, number: int, tokens: Mapping[int, Iterable[int]]) -> list[Event]:
        """Take the tokens that were sampled from a returned frame.

        Args:
            number: see `due`.
            tokens: new tokens by seq_id, for each slice from which tokens are drawn: of its rows, from the first on, up to the
                first that is no guess at the latest. With fewer, the other rows are void.

        Returns:
            an event of each token, as if it had come alone; without any token if it is withheld.

        Raises:
            EngineError: it is not the frame that is due, or not with the tokens that it went out for.
        """
        plan, are_live = self.due(number)
        if plan.task is not None:
            raise EngineError(f"frame {number} came back without the task that it was sent with", Code.WIRE)
        live = list(itertools.compress(plan.slices, are_live))
        if not {part.seq_id for part in live} <= tokens.keys() <= {p.seq_id for p in plan.slices if p.n_logits}:
            raise EngineError(f"frame {number} came back with other sequences than it was sent with")
        self._in_flight.popleft()
        self._n_bare -= plan.is_guessed
        events = []
        for part in live:
            events += self._accept_drawn(self._running[part.seq_id], part, tokens[part.seq_id])
        return events

    def accept_certain(self, seq_id: int, token: int) -> list[Event]:
        """A token needs no draw: it follows the last one of a text, whose row was not sent yet. It counts as a right guess."""
        sequence = self._running[seq_id]
        new = sequence.accept_drawn(token)
        sequence.n_guessed, sequence.n_confirmed = sequence.n_guessed + 1, sequence.n_confirmed + 1
        self.n_guessed, self.n_confirmed = self.n_guessed + 1, self.n_confirmed + 1
        if sequence.finish_reason:
            self._leave(sequence)
        else:
            self._count(sequence)
        return [Event(seq_id, new, sequence.finish_reason, drawn=token)]

    def regroup(self, texts: Collection[Sequence], choices: Collection[tuple[int, int]]) -> None:
        """Continue a cohort whose rows are all back: each text with the ids and caches of one of them, and a token behind it.

        Args:
            choices: for each text, the place of the one that it continues, and the token.
        """
        before = [(one.seq_id, one.ids) for one in texts]
        for one, (place, token) in zip(texts, choices, strict=True):
            source, ids = before[place]
            if source != one.seq_id:
                self._copies.append((source, one.seq_id))
            one.ids = [*ids, token]
            self._count(one)
            self._ready.append(one)

    def _accept_drawn(self, sequence: Sequence, part: PlannedSlice, tokens: Iterable[int]) -> list[Event]:
        self._suspects.discard(part.seq_id)
        events, n_drawn, n_before = [], 0, sequence.n_confirmed
        sequence.n_flying -= 1
        if sequence.cohort:
            return []  # see `regroup`
        if sequence.read_from is not None:
            if part.start + part.n_rows < len(sequence.ids):
                return []
            sequence.end("length")
            self._leave(sequence)
            return [Event(part.seq_id, (), "length")]
        has_guesses = bool(sequence.guessed)
        for token in tokens:
            new = sequence.accept_drawn(token)
            n_drawn += 1
            events.append(Event(part.seq_id, new, sequence.finish_reason, drawn=token))
            if sequence.finish_reason or sequence.n_misses != part.n_misses:
                break
        if n_drawn < part.n_logits and sequence.n_misses == part.n_misses:
            sequence.return_to(len(sequence.ids) - 1)
        if has_guesses:
            n_right = sequence.n_confirmed - n_before
            self.n_confirmed += n_right
            if self.guesser is not None:
                self.guesser.judge(sequence, n_right, n_right < n_drawn and sequence.n_misses != part.n_misses)
        if sequence.finish_reason:
            self._leave(sequence)
        else:
            self._count(sequence)
            if sequence.in_prefill:  # else the row of its last token is under way: it was guessed
                self._ready.append(sequence)
        return events

    def _take_ring(self, n_frames: int, memory: CacheMemory | None, n_places: int = 0) -> None:
        self.n_frames, self.n_places = n_frames, max(n_frames, n_places)
        self.memory = memory
        self._use = CacheUse(memory)
        seed = "" if self.ring_prefixes is None else self.ring_prefixes.seed
        self._prefixes = None if memory is None else Prefixes(memory, self._kept_share, seed)
        self._tasks.clear()
        self._asking.clear()
        if self.ring_prefixes is not None and self.ring_prefixes.owners:
            self._tasks.append(self.ring_prefixes.owners)
        for sequence in self._running.values():
            self._count(sequence)

    def _admit(self) -> None:
        """Admit sequences that fit."""
        while self._waiting:
            unit = self._waiting[0].unit
            if unit[0].seq_id in self._suspects and not self._suspects.isdisjoint(self._running):
                return
            if not self._holds(self._use.ahead([*self._running.values(), *unit])):
                return  # first come, first served
            for sequence in unit:  # which stand one after the other
                self._waiting.popleft()
                self._want_nothing(sequence)
                self._running[sequence.seq_id] = sequence
                self._count(sequence)
                sequence.siblings = self._by_prompt.setdefault(sequence.prompt_key, [])
                self._begin(sequence)
                sequence.siblings.append(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """Let it in without anything in caches: behind the prompt of another one, what is kept, or from its first token."""
        earlier = itertools.takewhile(lambda one: one is not sequence, sequence.siblings)
        if any(self._can_lend(other, sequence) for other in earlier):
            self._prefilling.append(sequence)
        elif (task := self._task_to_find(sequence, n_rounds=FETCH_ROUNDS)) is not None:
            self._asking[sequence.seq_id] = sequence
            self._tasks.append(task)
        else:
            self._reuse(sequence)
            self._prefilling.append(sequence)

    def _can_lend(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether another one's caches have the prompt that this one can share, or will have it."""
        n, n_reached = sequence.n_shared, max(other.n_sent, other.n_reached)
        if n < PAGE or other in self._replays:
            return False
        return n_reached <= n or _cut_to(self.memory, n_reached, n) == n

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether it computes nothing yet, because another one's frames already bring its prompt."""
        return not sequence.n_sent and any(
            (one.n_sent or one.seq_id in self._asking) and self._can_lend(one, sequence) for one in sequence.siblings
        )

    def _fork(self, sequence: Sequence) -> None:
        """Begin behind the prompt, if another one has sent that."""
        coming = {new_id for _, new_id in self._copies}
        for other in sequence.siblings:
            if other.n_sent >= sequence.n_shared and other.seq_id not in coming and self._can_lend(other, sequence):
                self._copies.append((other.seq_id, sequence.seq_id))
                self.n_reused += sequence.begin_behind(sequence.n_shared)
                return

    def _reuse(self, sequence: Sequence) -> None:
        """Begin behind the part that this sequence has in common with an ended one."""
        if (found := self._found_in_memory(sequence)) is not None:
            source, n = found
            pending = {new_id: old for old, new_id in self._copies}  # what is not copied yet is still the same there
            self._copies.append((pending.get(source, source), sequence.seq_id))
            self.n_reused += sequence.begin_behind(n)

    def _found_in_memory(self, sequence: Sequence) -> tuple[int, int] | None:
        """See `Prefixes.find`."""
        if self._prefixes is None or sequence.kept_for is None:
            return None
        before = sequence.ids[: sequence.first_wanted + 1]  # from that row on, all are wanted
        return self._prefixes.find(sequence.kept_for, before)

    def _want_nothing(self, sequence: Sequence) -> None:
        """It waits no more."""
        if self._prefixes is not None:
            self._prefixes.wanted.pop(sequence.seq_id, None)

    # Prefixes on the nodes' disks

    def _task_to_find(
        self, sequence: Sequence, n_pages: int | None = None, n_rounds: int = 0
    ) -> PrefixTask | None:  # fmt: skip
        """To look for a beginning of a text, if it can be longer than what is in memory; the starter has looked already.

        Args:
            n_pages: of the beginning, at most; None: any number.
            n_rounds: in which nodes may get from others what they lack of it.
        """
        files = self.ring_prefixes
        if files is None or self._prefixes is None or sequence.kept_for is None:
            return None
        keys = self._prefixes.keys(sequence.kept_for, sequence.ids[: sequence.first_wanted])[:n_pages]
        in_memory = self._found_in_memory(sequence)
        n_here = 0 if in_memory is None else in_memory[1] // PAGE
        if len(keys) < n_here + LEAST_FROM_DISK:
            return None
        possible = (1 << len(keys)) - (1 << (n_here + LEAST_FROM_DISK - 1))
        task = files.task(
            FIND,
            sequence.kept_for,
            keys,
            seq_id=sequence.seq_id,
            n_evictions=sequence.n_evictions,
            ends=f"{possible:x}",
            n_rounds=n_rounds,
        )
        found = files.answer(task)
        return task if found.possible or found.some != "0" else None

    def answered(self, number: int, task: PrefixTask, took_s: float = 0.0) -> None:
        """A frame with a task is back. Raises EngineError: it is not the frame that is due.

        Args:
            took_s: seconds that it took, see PromptPace.
        """
        plan, _ = self.due(number)
        asked = plan.task
        if asked is None or asked.kind != task.kind:
            raise EngineError(f"frame {number} came back with another task than it was sent with", Code.WIRE)
        self._in_flight.popleft()
        # Only answers are taken from what came back.
        ends = f"{asked.possible & task.possible:x}"
        some = f"{(asked.possible if asked.kind == FIND else int(asked.some, 16)) & int(task.some, 16):x}"
        answered = replace(
            asked, ends=ends, is_done=task.is_done, row_read_s=task.row_read_s, some=some, wanted=task.wanted,
            files=task.files,
        )  # fmt: skip
        if asked.kind == KEEP:
            self._note_kept(answered)
            return
        sequence = self._asking.get(asked.seq_id) if asked.kind in (FIND, FILL, FILLED, FETCH) else None
        if sequence is None or sequence.n_evictions != asked.n_evictions:
            return
        if asked.kind == FETCH and (more := self._next_round(sequence, asked, answered, took_s)) is not None:
            return self._tasks.appendleft(more)
        self._go_on_with(sequence, answered)

    def _next_round(self, sequence: Sequence, asked: PrefixTask, task: PrefixTask, took_s: float) -> PrefixTask | None:
        """Of FETCH; None: no more files come, or those so far took longer than computing what they are for."""
        text, (whose, before_s) = (sequence.seq_id, sequence.n_evictions), self._fetch_s
        waited_s = took_s + (before_s if whose == text else 0.0)
        self._fetch_s = text, waited_s
        is_slow = self.row_s is not None and waited_s > self._n_gained(sequence, task.possible, task.stop) * self.row_s
        if not task.is_done or is_slow or asked.n_rounds <= 1:
            return None
        task = replace(task, n_rounds=asked.n_rounds - 1)
        if not task.wanted:  # all nodes have all up to there
            return None if task.is_end else self._up_to_next_run(task)
        return task if (task.wanted, task.files) != (asked.wanted, asked.files) else None

    @staticmethod
    def _up_to_next_run(task: PrefixTask) -> PrefixTask:
        """FETCH the files of the next run, so that whatever has come is the beginning of a text."""
        n_pages, n_some = task.run_pages * (task.stop // PAGE // task.run_pages + 1), int(task.some, 16).bit_length()
        stop, is_end = PAGE * min(n_pages, n_some), n_pages >= n_some
        return replace(task, kind=FETCH, stop=stop, is_end=is_end, n_rounds=FETCH_ROUNDS)

    def _n_gained(self, sequence: Sequence, possible: int, stop: int) -> int:
        """Positions before `stop` that are in no memory, and behind the ends that are possible."""
        in_memory = self._found_in_memory(sequence)
        return stop - max(PAGE * possible.bit_length(), 0 if in_memory is None else in_memory[1])

    def _go_on_with(self, sequence: Sequence, task: PrefixTask) -> None:
        n_some, n_all = int(task.some, 16).bit_length(), task.possible.bit_length()
        if task.kind == FIND and task.n_rounds and n_some >= n_all + LEAST_FROM_DISK:
            self._tasks.append(self._up_to_next_run(replace(task, stop=PAGE * n_all)))
            return
        if task.kind == FETCH and (again := self._task_to_find(sequence)) is not None:
            return self._tasks.append(again)
        if task.kind == FIND and self._is_worth_reading(sequence, task):
            stop = PAGE * task.possible.bit_length()
            if sequence.seq_id in self._freed:  # after another FILL; every node frees it before it fills
                self._freed.remove(sequence.seq_id)  # and no later frame may free what is filled
            self._tasks.append(replace(task, kind=FILL, stop=stop))
            return
        if task.kind == FILL:
            return self._tasks.append(replace(task, kind=FILLED))
        if task.kind == FILLED and not task.is_done:  # what was damaged is gone: a shorter one may be whole
            self._freed.append(sequence.seq_id)
            if (again := self._task_to_find(sequence, task.stop // PAGE - 1)) is not None:
                return self._tasks.append(again)
        del self._asking[sequence.seq_id]
        if task.kind == FILLED and task.is_done:
            self.n_reused += sequence.begin_behind(task.stop)
        else:
            self._reuse(sequence)
        self._prefilling.append(sequence)

    def _is_worth_reading(self, sequence: Sequence, task: PrefixTask) -> bool:
        """Whether the nodes read the longest end faster than they compute what is not in memory of it."""
        n = PAGE * task.possible.bit_length()
        return n > 0 and (self.row_s is None or n * task.row_read_s < self._n_gained(sequence, 0, n) * self.row_s)

    def _task_to_keep(self) -> PrefixTask | None:
        """The next run of an ended text that is in the nodes' memory and not on their disks; the newest text comes first."""
        files = self.ring_prefixes
        if files is None or self._prefixes is None or self.keeps_later:
            return None
        if (found := self._prefixes.unwritten(LEAST_FROM_DISK)) is None:
            return None
        kept, begin = found
        end = min(begin + files.run_pages, len(kept.keys))
        return files.task(
            KEEP, kept.owner, kept.keys[:end], seq_id=kept.seq_id, start=begin * PAGE, stop=end * PAGE,
            is_end=end == len(kept.keys),
        )  # fmt: skip

    def _note_kept(self, task: PrefixTask) -> None:
        self.keeps_later = not task.is_done
        if task.is_done and self._prefixes is not None:
            self._prefixes.note_written(task.seq_id, task.stop // PAGE)

    def _count(self, sequence: Sequence) -> None:
        self._has_grown |= self._use.count(sequence)

    def _holds(self, n_bytes: list[int]) -> bool:
        """Whether all nodes can hold so much for the running sequences; kept caches of ended ones are dropped for it."""
        if self.memory is None or self._prefixes is None:
            return True
        if not self.memory.holds(n_bytes):
            return False
        while not self.memory.holds([n + kept for n, kept in zip(n_bytes, self._prefixes.total, strict=True)]):
            self._freed.append(self._prefixes.drop_oldest())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Put out the one that came last: it gives its caches back, and is the first to be let in again."""
        for one in reversed(sequence.unit):
            self._leave(one)
            one.rewind()
            self.n_preempted += 1
            self._waiting.appendleft(one)

    def _leave(self, sequence: Sequence) -> None:
        """It runs no more; its caches are freed with the next frame, or kept if it has ended.

        Others that wait for its prompt continue from them.
        """
        for other in filter(self._awaits_prefix, sequence.siblings):
            self._fork(other)
        sequence.siblings.remove(sequence)
        if not sequence.siblings:
            del self._by_prompt[sequence.prompt_key]
        if self._asking.pop(sequence.seq_id, None) is not None:  # nothing is filled that nobody frees
            self._tasks = deque(one for one in self._tasks if one.kind == OWNERS or one.seq_id != sequence.seq_id)
        for queue in (self._ready, self._prefilling):
            if sequence in queue:
                queue.remove(sequence)
        self._replays.drop(sequence)
        del self._running[sequence.seq_id]
        self._suspects.discard(sequence.seq_id)
        self._use.drop(sequence)
        is_coming = any(new_id == sequence.seq_id for _, new_id in self._copies)
        self._copies = [pair for pair in self._copies if pair[1] != sequence.seq_id]
        is_short = is_coming or sequence.n_sent < PAGE
        if self._prefixes is None or sequence.kept_for is None or not sequence.finish_reason or is_short:
            self._freed.append(sequence.seq_id)
            return
        n_known, n_reached = min(sequence.n_sent, len(sequence.ids)), max(sequence.n_sent, sequence.n_reached)
        ids, n_bytes = tuple(sequence.ids[:n_known]), self._use.needs(n_reached)
        self._freed += self._prefixes.add(Kept(sequence.seq_id, sequence.kept_for, ids, n_bytes, n_reached))

    def _is_current(self, part: PlannedSlice) -> bool:
        """Whether the sequence still runs, with the caches that this slice was meant for, and no guess before it was wrong."""
        sequence = self._running.get(part.seq_id)
        return sequence is not None and sequence.n_evictions == part.n_evictions and sequence.n_misses == part.n_misses

    def _decode_slices(self) -> list[PlannedSlice]:
        if not self._ready:
            return []
        n_slices = min(self._share(), len(self._ready))
        slices: list[PlannedSlice] = []
        cohort: tuple[Sequence, ...] = ()
        n_rows = 0
        while self._ready and (
            (len(slices) < n_slices and n_rows < self.decode_rows) or (cohort and self._ready[0].cohort is cohort)
        ):
            sequence = self._ready.popleft()  # a cohort stays together: it needs all of its rows to go on
            cohort = sequence.cohort
            n_known = sequence.n_to_send
            n_beside = n_rows + max(0, n_slices - len(slices) - 1)
            guesses = [] if self.guesser is None else self._guesses(sequence, n_known, n_beside)
            part = self._with_guesses(sequence, n_known, guesses) if guesses else next_slice(sequence, n_known)
            slices.append(part)
            n_rows += part.n_rows
        return slices

    @property
    def _n_decoding(self) -> int:
        return len(self._running) - len(self._prefilling) - len(self._replays) - len(self._asking)

    def _share(self) -> int:
        # The sequences of each frame that continue when it is back; not frames with guesses alone.
        flying = [
            sum([part.n_logits > part.n_guessed and self._is_current(part) for part in plan.slices])
            for plan in self._in_flight
        ]
        return min(next_share(self._n_decoding, [n for n in flying if n], self.n_frames), self.decode_rows)

    def _guess_slices(self) -> list[PlannedSlice]:
        """Rows of guesses alone, of texts whose last token is under way, if no other rows wait."""
        if self._waiting or self._ready or self._n_decoding > self.n_places // 2:
            return []
        slices = []
        for sequence in self._running.values():
            if sequence.n_flying and (guesses := self._guesses(sequence, 0, 0)):
                slices.append(self._with_guesses(sequence, 0, guesses))
        return slices

    def _with_guesses(self, sequence: Sequence, n_known: int, guesses: list[int]) -> PlannedSlice:
        part = next_slice(sequence, n_known, guesses)
        self.n_guessed += len(guesses)
        self._count(sequence)
        return part

    def _guesses(self, sequence: Sequence, n_known: int, n_beside: int) -> list[int]:
        """Guesses for the next slice of a sequence, behind so many known rows; none where their rows would be of no use, or
        take memory that texts will need.

        Args:
            n_beside: rows of other texts in its frame.
        """
        if len(sequence.ids) <= sequence.n_searched and not sequence.guessed:
            return []  # most come to here
        if self.guesser is None or not sequence.is_guessed or sequence.cohort:
            return []
        n_texts = max(1, self._n_decoding)
        n_flying, n_rows = self.guesser.limits(sequence, max(1, self.n_places // n_texts), n_texts, n_beside)
        if sequence.n_flying >= n_flying:
            return []
        begin = sequence.n_sent + n_known
        n_room = min(
            sequence.n_positions - begin, MOST_GUESSES - len(sequence.guessed), self.decode_rows // n_texts - n_known
        )
        n = min(n_rows - n_known, n_room)
        if n <= 0 or not self._has_room(sequence, begin + n):
            return []
        return self.guesser.propose(sequence, n)[:n]

    def _has_room(self, sequence: Sequence, end: int) -> bool:
        """Whether a sequence may have rows up to `end`, and all others could still grow, without any cache being dropped."""
        if self.memory is None or self._prefixes is None or end <= sequence.n_reached:
            return True
        if self._ahead is None:
            self._ahead = self._use.ahead(self._running.values())
        before = self._use.needs(min(sequence.n_cached + AHEAD_POSITIONS, sequence.n_positions))
        own = self._use.needs(min(end + AHEAD_POSITIONS, sequence.n_positions))
        ahead = [n - old + new for n, old, new in zip(self._ahead, before, own, strict=True)]
        has_room = self.memory.holds([n + kept for n, kept in zip(ahead, self._prefixes.total, strict=True)])
        if has_room:
            self._ahead = ahead
        return has_room

    def _prefill_slices(self) -> list[PlannedSlice]:
        if not self._prefilling:
            return []
        slices: list[PlannedSlice] = []
        budget, n_prompts = self.chunk_rows, len(self._prefilling)
        if self.doubling_rows is not None and (n_decoding := len(self._running) - n_prompts - len(self._asking)):
            budget = min(budget, rows_beside(self.doubling_rows, n_prompts, n_decoding))
        waiting: deque[Sequence] = deque()  # for the rest of a prompt that another one sends
        while self._prefilling and budget:
            sequence = self._prefilling[0]
            if self._awaits_prefix(sequence):
                waiting.append(self._prefilling.popleft())
                continue
            part = next_slice(sequence, min(budget, sequence.n_to_send), is_prompt=True)
            budget -= part.n_rows
            slices.append(part)
            if not sequence.in_prefill:
                self._prefilling.popleft()
            self._snapshot(sequence, part)
        self._prefilling.extendleft(reversed(waiting))
        return slices

    def _snapshot(self, sequence: Sequence, part: PlannedSlice) -> None:
        """Keep a copy of what a text has at the end of its prompt, and here and there in a long one, if it could not be cut to
        that later: the next turn may go on otherwise from there.
        """
        n = sequence.n_sent
        is_due = not sequence.in_prefill or part.start // SNAPSHOT_EVERY < n // SNAPSHOT_EVERY
        if not is_due or self._prefixes is None or sequence.kept_for is None or sequence.cohort or n < SLACK:
            return
        if _cut_to(self.memory, sequence.n_positions, n) == n:
            return
        self._n_snapshots += 1
        snapshot = SNAPSHOTS + self._n_snapshots
        gone = self._prefixes.add(Kept(snapshot, sequence.kept_for, tuple(sequence.ids[:n]), self._use.needs(n), n))
        self._freed += gone
        if snapshot not in gone:  # else its copy would come after the frame that frees it
            self._snapshots.append((sequence.seq_id, snapshot))  # behind the rows of this frame, before the next

    def _replay_slices(self) -> list[PlannedSlice]:
        """Rows that were sent before. A sequence with all of them continues, because frames do not overtake each other."""
        slices, restored = self._replays.take(self.chunk_rows)
        for sequence in restored:
            self._go_on(sequence)
        return slices

    def _go_on(self, sequence: Sequence) -> None:
        (self._ready if sequence.n_to_send == 1 else self._prefilling).append(sequence)


def _cut_to(memory: CacheMemory | None, end: int, n: int) -> int:
    """See `CacheMemory.cut_to`; without memory nothing is known of the nodes' caches."""
    return UNKNOWN.cut_to(end, n) if memory is None else memory.cut_to(end, n)


def next_slice(sequence: Sequence, n_rows: int, guesses: Collection[int] = (), is_prompt: bool = False) -> PlannedSlice:
    """The next rows of a sequence, which count as sent from now on: so many of known tokens, and then guesses.

    Each row from that of the last known token on asks for logits; where rows are wanted, each of these.
    """
    start = sequence.n_sent
    ids = (*sequence.ids[start : start + n_rows], *guesses)
    end = sequence.n_sent = start + len(ids)
    if guesses:
        sequence.guess(guesses)
        sequence.n_reached = max(sequence.n_reached, end)
    n_logits = max(0, end - max(start, sequence.first_wanted))
    lives = sequence.n_evictions, sequence.n_misses
    return PlannedSlice(sequence.seq_id, start, len(ids), n_logits, ids, *lives, len(guesses), is_prompt)


def next_share(n_decoding: int, flying: Collection[int], n_frames: int) -> int:
    """How many decoding sequences the next frame takes, so that all frames get the same number or one more.

    With few sequences some frames stay away: a round takes as long as the fullest one, whether the others are there or
    not, and the weights are read less often.

    Args:
        flying: those of each frame that is under way.
    """
    if not n_decoding:
        return 0
    fullest = -(-n_decoding // n_frames)
    n_used = -(-n_decoding // fullest)
    if len(flying) >= n_used:
        return 0  # one frame too many is under way: ready sequences join the next one
    size, n_larger = divmod(n_decoding, n_used)
    return size + 1 if sum(n > size for n in flying) < n_larger else size


class CacheUse:
    """The memory that the caches of running sequences take on each node, as a running sum.

    With `memory` None there is no limit, and nothing is counted.

    Attributes:
        total: bytes on each node.
    """

    def __init__(self, memory: CacheMemory | None) -> None:
        self._memory = memory
        self.total = [0] * (0 if memory is None else len(memory.nodes))
        self._used: dict[int, tuple[int, ...]] = {}  # of each running sequence

    def needs(self, length: int) -> tuple[int, ...]:
        """Bytes on each node that a sequence of `length` positions takes."""
        return () if self._memory is None else self._memory.needs(length)

    def count(self, sequence: Sequence) -> bool:
        """Count all known tokens: they are sent before the sequence can get new ones. Returns whether it takes more now."""
        if self._memory is None:
            return False
        before, now = self._used.get(sequence.seq_id), self._memory.needs(sequence.n_cached)
        if before != now:
            if before is not None:
                self._add(before, -1)
            self._add(now, 1)
            self._used[sequence.seq_id] = now
        return before != now

    def drop(self, sequence: Sequence) -> None:
        if self._memory is not None:
            self._add(self._used.pop(sequence.seq_id), -1)

    def ahead(self, sequences: Iterable[Sequence]) -> list[int]:
        """Bytes on each node that these take when all of them have grown by AHEAD_POSITIONS, or to their ends."""
        needs = [self.needs(min(one.n_cached + AHEAD_POSITIONS, one.n_positions)) for one in sequences]
        return [sum(node) for node in zip(*needs, strict=True)]

    def _add(self, n_bytes: tuple[int, ...], sign: int) -> None:
        for node, n in enumerate(n_bytes):
            self.total[node] += sign * n


class PromptPace:
    """How many prompt rows go into a frame while others decode. Belongs to the engine's thread.

    One prompt makes the others wait at most twice as long for their tokens. If more sequences wait for their first token than
    decode, they get more of the time in the same proportion.

    The cost of prompt rows depends on their number: kernels take rows in tiles, so a few more may cost nothing, or as much as a
    whole tile. So few rows say nothing about many: the number of rows follows the times of frames with about as many rows, up
    slowly and down fast. Pure: times come in as numbers.

    Attributes:
        doubling_rows: prompt rows that take as long as all decoding ones of a frame.
        row_s: seconds that one of many prompt rows adds to a prompt; None: there were none yet.
    """

    def __init__(self) -> None:
        self.doubling_rows = FIRST_ROWS / PREFILL_SLOWDOWN
        self.row_s: float | None = None
        self.under_way: dict[int, tuple[float, int, int]] = {}  # frame -> when, prompt rows, decoding rows
        self._last = 0.0
        self._decoding = Prices()  # of frames without prompt rows, by the texts in them

    def sent(self, plan: Plan, now_s: float) -> None:
        """A frame leaves."""
        n_prompt = sum(part.n_rows for part in plan.slices if part.is_prompt)
        self.under_way[plan.number] = now_s, n_prompt, sum(not part.is_prompt for part in plan.slices)

    def returned(self, number: int, now_s: float) -> float:
        """It is back; those of a lost ring never are, and are forgotten. Returns the seconds it took behind the one before,
        0 if nobody knows.
        """
        if (sent := self.under_way.pop(number, None)) is None:
            return 0.0  # it left before anybody looked
        sent_s, n_prompt, n_decoding = sent
        for earlier in [other for other in self.under_way if other < number]:
            del self.under_way[earlier]
        time_s = now_s - max(sent_s, self._last)  # frames follow each other; the first of them has gone the whole way
        self._last = now_s
        if not n_decoding:  # no decoding text waits for it
            if n_prompt >= MANY_ROWS:
                found = time_s / n_prompt
                self.row_s = found if self.row_s is None else self.row_s + WEIGHT * (found - self.row_s)
        elif not n_prompt:
            self._decoding.note(n_decoding, time_s)
        elif decode_s := self._decoding.of(n_decoding):
            self._follow(n_prompt, time_s / decode_s - 1)
        return time_s

    def _follow(self, n_prompt: int, slower: float) -> None:
        """So many rows made a frame so much slower."""
        most = GROWTH * self.doubling_rows
        found = n_prompt / slower if slower > n_prompt / most else most
        self.doubling_rows = max(found, SHRINKAGE * self.doubling_rows, LEAST_ROWS)


def rows_beside(doubling_rows: float, n_prompts: int, n_decoding: int) -> int:
    """Prompt rows that the next frame may take beside decoding ones."""
    return max(LEAST_ROWS, int(doubling_rows * max(PREFILL_SLOWDOWN, n_prompts / n_decoding)))
