"""A text in flight as the engine sees it: token ids, how they are continued, and what its reader hears. No text, no tensors.

The engine's loop and readers of texts do not wait for each other: commands stay in an `Inbox` until the loop reads them between
two frames, events in a queue of each request until its reader takes them. The reader's code never runs in the loop's thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mdi.errors import Code, UsageError

if TYPE_CHECKING:
    import numpy as np

    from mdi.engine.pooling import Pool
    from mdi.engine.prefix_tasks import PrefixTask

STREAM_STEP = 0x9E3779B97F4A7C15  # of SplitMix64


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence is continued.

    Attributes:
        n_tokens: new tokens at most.
        temperature: 0 is greedy.
        top_k: sample among the k most probable tokens; None is all.
        top_p: sample among the smallest set of tokens that has this probability together.
        seed: of the sequence's own random generator: its text does not depend on the others.
        eos_ids: tokens that end the sequence and are not part of it.
        stop_sequences: runs of tokens that do the same.
        min_p: leave tokens out that are less probable than this part of the best one's probability.
        presence_penalty: taken off the logit of each token that has been generated.
        frequency_penalty: the same, as often as it has been.
        repetition_penalty: logits of tokens that the text has, the prompt included, are divided by it, or multiplied if they
            are negative.
        logit_bias: (token, number that is added to its logit).
        n_logprobs: how many of the best tokens' probabilities come with each token, besides its own; None: none at all.
        suppressed: tokens that the model is not to write; what allows no other (a grammar) comes first.
    """

    n_tokens: int = 300
    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float = 1.0
    seed: int = 10137
    eos_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n_logprobs: int | None = None
    suppressed: tuple[int, ...] = ()

    @property
    def changes_logits(self) -> bool:
        has_penalty = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(has_penalty or self.logit_bias or self.suppressed)

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """`logit_bias` as arrays: tokens, and float32 numbers. Made once: each token of a text needs them."""
        import numpy as np

        return np.array([t for t, _ in self.logit_bias]), np.array([b for _, b in self.logit_bias], dtype=np.float32)

    def __post_init__(self) -> None:
        if self.n_tokens < 1:
            raise UsageError(f"the number of new tokens must be at least 1, got {self.n_tokens}", code=Code.VALUE)
        if not self.temperature >= 0:
            raise UsageError(f"temperature must be 0 (greedy) or more, got {self.temperature}", code=Code.VALUE)
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top-k must be at least 1, got {self.top_k}", code=Code.VALUE)
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be over 0 and at most 1, got {self.top_p}", code=Code.VALUE)
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p must be from 0 to 1, got {self.min_p}", code=Code.VALUE)
        if not self.repetition_penalty > 0:
            raise UsageError(f"the repetition penalty must be over 0, got {self.repetition_penalty}", code=Code.VALUE)


class Side(Protocol):
    """A network beside the blocks: stages.side.SideNetwork."""

    def __call__(self, x: np.ndarray, *seen: np.ndarray) -> np.ndarray:
        """float32 rows (M, n_embd) that went through all blocks, and the outputs of each tap of the run, the same -> rows for
        the head
        """


class TextAdapter(NamedTuple):
    """What texts need to know of the adapter that they are computed with.

    Attributes:
        sha256: of what it does.
        n_virtual: positions before those of a text, whose rows the nodes know.
        number: by which the nodes know it; 0: they do not.
        side: a side network, which is the starter's alone: the nodes know nothing of it.
    """

    sha256: str
    n_virtual: int = 0
    number: int = 0
    side: Side | None = None


NO_ADAPTER = TextAdapter("")


@dataclass(eq=False)
class Sequence:
    """State of one sequence on the starter.

    Attributes:
        ids: prompt and generated tokens so far.
        n_sent: positions whose rows have gone into the ring, those of guesses included.
        guessed: guesses of the tokens behind `ids` whose rows are under way; no drawn token is there yet.
        n_flying: frames under way whose rows still count.
        n_misses: how often a drawn token was another one than the guess; rows that were sent before that are void.
        n_searched: ids that were searched for guesses: no source has any up to there.
        n_reached: position behind the furthest row that the nodes got since they have caches of it.
        n_guessed, n_confirmed: guesses that were sent so far, and those that were drawn; the prediction's among them are
            n_predicted and n_accepted, once it has ended.
        n_reused: tokens of the prompt that an ended sequence's caches held when this one began.
        n_withheld: generated tokens at the end of `ids` that may become a stop sequence, and are not delivered yet.
        n_evictions: how often it has lost its caches; what was sent before comes back out of date.
        finish_reason: "eos", "stop", "length" or "cancelled" once it has ended.
        n_positions: cache positions that it can need at most: the last token is never sent.
        owner: only its texts may continue from the caches of the ended sequence; None frees them at once.
        adapter: hash of the adapter that its rows are computed with; "": none.
        n_virtual: tokens at the beginning of the prompt that stand for rows of the adapter, and are not part of the text.
        is_guessed: whether its tokens may be guessed.
        prediction: ids of a text that it probably repeats in parts.
        cohort: all texts that are continued together with it, itself included; () if it is alone (engine.cohort).
        siblings: running texts with the same rows of the same prompt, in the order in which they came, and itself.
        read_from: the first position whose rows are wanted, instead of tokens: it ends when the last one is back. None: tokens
            are drawn.
        behind: of a text that is scored, for each position the token that stands behind it; instead of the rows, its reader
            gets these tokens' log probabilities, and those of the best ones, as many as `params` says.
    """

    seq_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_length: int
    ids: list[int] = field(default_factory=list)
    n_sent: int = 0
    n_reused: int = 0
    n_withheld: int = 0
    n_evictions: int = 0
    finish_reason: str | None = None
    owner: str | None = None
    adapter: str = ""
    n_virtual: int = 0
    is_guessed: bool = True
    prediction: tuple[int, ...] = ()
    guessed: deque[int] = field(default_factory=deque)
    n_flying: int = 0
    n_misses: int = 0
    n_searched: int = 0
    n_reached: int = 0
    n_guessed: int = 0
    n_confirmed: int = 0
    n_predicted: int = 0
    n_accepted: int = 0

    n_prompt: int = field(init=False)
    n_positions: int = field(init=False)
    cohort: tuple[Sequence, ...] = ()
    siblings: list[Sequence] = field(init=False, default_factory=list)
    read_from: int | None = None
    behind: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ids:
            self.ids = list(self.prompt_ids)
        self.n_prompt = len(self.prompt_ids)
        self.n_positions = min(self.max_length, self.n_prompt + self.params.n_tokens - 1)

    @property
    def generated(self) -> list[int]:
        return self.ids[self.n_prompt :]

    @property
    def kept_for(self) -> str | None:
        """Texts for which this is the same may continue from its caches once it has ended: its owner's with its adapter."""
        return None if self.owner is None else f"{self.adapter}/{self.owner}"

    @property
    def prompt_key(self) -> tuple[str | None, str, tuple[int, ...]]:
        """Running texts for which this is the same have the same rows of their prompts, and may share them."""
        return self.owner, self.adapter, self.prompt_ids

    @property
    def unit(self) -> tuple[Sequence, ...]:
        """Its cohort, which runs and waits as a whole, or itself."""
        return self.cohort or (self,)

    @property
    def n_shared(self) -> int:
        """Positions of its prompt that it need not compute itself; the last row of all gives the next token."""
        return min(self.n_prompt, self.first_wanted)

    @property
    def first_wanted(self) -> int:
        """The first position whose row comes back: that of the last known token, unless rows are wanted."""
        return len(self.ids) - 1 if self.read_from is None else self.read_from

    @property
    def n_to_send(self) -> int:
        return len(self.ids) - self.n_sent

    @property
    def n_rounds_left(self) -> int:
        """Rounds until it has all tokens that it may get, if as many of them are guessed as so far."""
        n_left, n_drawn = self.n_positions + 1 - len(self.ids), len(self.ids) - self.n_prompt
        return -(-n_left * (n_drawn - self.n_confirmed) // n_drawn) if 0 < self.n_confirmed < n_drawn else n_left

    @property
    def in_prefill(self) -> bool:
        """Whether rows of tokens that are known are still to be sent; a rewound text is a prompt as a whole."""
        return self.n_sent < len(self.ids)

    @property
    def n_cached(self) -> int:
        """Cache positions that it takes once all tokens that are known have been sent; guesses may have taken more."""
        return max(min(len(self.ids), self.n_positions), self.n_reached)

    def begin_behind(self, n: int) -> int:
        """Its first `n` positions are in caches already. Returns `n`."""
        self.n_sent = n
        if not self.n_evictions:
            self.n_reused = n
        return n

    def rewind(self) -> None:
        """Its caches are gone: from now on it is a prompt of all its tokens so far."""
        self.return_to(0)
        self.n_reached = 0
        self.n_evictions += 1

    def return_to(self, n: int) -> None:
        """The rows from position `n` on do not count any more: guesses of which something was wrong, or lost ones."""
        self.n_sent = min(self.n_sent, n)
        self.n_flying = 0
        if self.guessed:
            self.guessed.clear()
            self.n_misses += 1

    def guess(self, tokens: Iterable[int]) -> None:
        """Send rows for guesses of the next tokens behind `guessed`."""
        n_before = len(self.guessed)
        self.guessed.extend(tokens)
        self.n_guessed += len(self.guessed) - n_before

    def accept_drawn(self, token: int) -> tuple[int, ...]:
        """Accept the next drawn token. If it is the first guess, the rows behind it count, else they do not."""
        new = self.accept(token)
        if not self.guessed:
            return new  # behind a stop sequence, `n_sent` still says how far the nodes' caches reach
        if self.guessed[0] == token:
            self.n_confirmed += 1
            if self.finish_reason is None:
                self.guessed.popleft()
                return new
        self.return_to(len(self.ids) - 1)
        return new

    def accept(self, token: int) -> tuple[int, ...]:
        """Accept a new token. Sets `finish_reason` when this ends the sequence.

        Returns:
            The tokens that are now known to be part of the text: none while they may become a stop sequence, several when
            they did not. An EOS or a stop sequence is never among them.
        """
        if token in self.params.eos_ids:
            return self.end("eos")
        self.ids.append(token)
        self.n_withheld += 1
        stops = self.params.stop_sequences
        if stops and (n_stop := self._n_stop(complete=True)):
            del self.ids[-n_stop:]
            self.n_withheld -= n_stop
            return self.end("stop")
        if len(self.ids) - self.n_prompt >= self.params.n_tokens or len(self.ids) >= self.max_length:
            return self.end("length")
        return self._deliver(self._n_stop(complete=False) if stops else 0)

    def end(self, reason: str) -> tuple[int, ...]:
        """Set `finish_reason`; returns the tokens that were withheld."""
        self.finish_reason = reason
        return self._deliver(0)

    def _deliver(self, n_kept: int) -> tuple[int, ...]:
        """All withheld tokens but the last `n_kept`."""
        begin, stop = len(self.ids) - self.n_withheld, len(self.ids) - n_kept
        self.n_withheld = n_kept
        return tuple(self.ids[begin:stop])

    def _n_stop(self, complete: bool) -> int:
        """How many tokens at the end form a stop sequence, or else the beginning of one; 0 if none do.

        Only withheld tokens can: no stop sequence can begin before them.
        """
        longest = 0
        for stop in self.params.stop_sequences:
            lengths = (len(stop),) if complete else range(1, len(stop))
            for n in lengths:
                if longest < n <= self.n_withheld and tuple(self.ids[-n:]) == stop[:n]:
                    longest = n
        return longest


class PlannedSlice(NamedTuple):
    """Rows of one sequence that go into a frame: a `slices.Slice`, which all nodes see, with what only the starter needs: the
    ids, `n_evictions` and `n_misses` of the sequence, how many of the rows, the last ones, are guesses, and whether the others
    belong to a prompt.
    """

    seq_id: int
    start: int
    n_rows: int
    n_logits: int
    ids: tuple[int, ...]
    n_evictions: int = 0
    n_misses: int = 0
    n_guessed: int = 0
    is_prompt: bool = False


@dataclass(frozen=True)
class Plan:
    """One frame to send: its number, its slices, the sequences whose caches are to be freed before, and then those that
    begin with a copy of another one's (sequence, new sequence).

    A replay has rows that only the nodes need which have lost their caches (net.wire.Frame). With `is_guessed` it has guesses
    alone, with `is_plain` only last tokens, without guesses. With a task it has nothing else.
    """

    number: int
    slices: tuple[PlannedSlice, ...]
    freed: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()
    is_replay: bool = False
    is_guessed: bool = False
    is_plain: bool = False
    task: PrefixTask | None = None


@dataclass(frozen=True)
class Event:
    """An event of a sequence: its text has grown, it has ended, or both.

    Attributes:
        tokens: new ones; tokens that may become a stop sequence come together, once they cannot any more.
        finish_reason: set in the last event of a sequence: "eos", "stop", "length", or the reason given to end it.
        time_s: time.perf_counter() when it happened; the scheduler, which has no clock, leaves it 0.
        logprobs: of each token, if its sequence asks for them: its own, and those of the best tokens. Of a text that is
            scored, without tokens: of its next ones.
        n_kept: with the reason UNTRUE: generated tokens, from the first on, that are right as far as it is known.
        drawn: the token that was drawn, also if it is withheld. Readers do not get it.
    """

    seq_id: int
    tokens: tuple[int, ...]
    finish_reason: str | None
    time_s: float = field(default=0.0, compare=False)
    logprobs: tuple[tuple[float, list[tuple[int, float]]], ...] = ()
    n_kept: int = 0
    drawn: int | None = field(default=None, compare=False)


# Sees each new token in the loop's thread, before the next frame is made; True ends the sequence with the reason "stop".
# It must be short; its exceptions end the sequence with the reason FAILED.
Ends = Callable[[int], bool]
Events = queue.SimpleQueue[Event]
TakeRows = Callable[[int, Any], None]  # see StarterEngine.submit_rows

# Of one token: the logarithm of its probability, and those of the best tokens.
TokenLogprobs = tuple[float, list[tuple[int, float]]]

# finish_reason of a sequence that could not go on: the loop ended or its `Ends` raised; its `Constraint` raised
FAILED, UNMATCHED = "failed", "unmatched"
# of one whose last tokens may be wrong, because a node computed nonsense: its reader submits it again, with what is right
UNTRUE = "untrue"


class Constraint(Protocol):
    """Restricts which tokens may come next. Called in the loop's thread; it gets each token before the next question, those
    that are withheld among them.
    """

    def allowed(self) -> Any:
        """bool array (vocabulary). What it raises, here and in `take`, ends the sequence as UNMATCHED."""

    def take(self, token: int) -> bool:
        """The next token; True if nothing may follow it."""

    def copy(self) -> Constraint:
        """A constraint in the same state, for tokens that are guessed."""

    def n_valid(self, tokens: list[int]) -> int:
        """How many of these tokens, from the first on, may follow one after the other. The state stays."""

    def forced(self) -> list[int]:
        """Tokens that will most probably follow, because hardly anything else may. The state stays."""


class Request:
    """One sequence as its reader sees it: its events in order, the last of which has a finish_reason.

    Left as a context manager before that, it is cancelled: so a reader that raises ends its own sequence and no other.

    Attributes:
        seq_id: the same in all its events.
        events: at most one for each new token, and one for the end; several requests may share a queue and a reader.
        is_full: whether its constraint lets nothing follow.
        pooled: of a text whose rows are pooled; complete with its last event.
    """

    def __init__(
        self, sequence: Sequence, events: Events | None, ends: Ends | None, cancel: Callable[[int, str], None],
        constraint: Constraint | None = None,
    ) -> None:  # fmt: skip
        self.seq_id = sequence.seq_id
        self.events: Events = queue.SimpleQueue() if events is None else events
        self._sequence = sequence
        self._ends = ends
        self._cancel = cancel
        self._is_over = False
        self.constraint = constraint
        self.is_full = False
        self.pooled: Pool | None = None
        self._allowed: Any = None
        self._logprobs: dict[int, TokenLogprobs] = {}  # of tokens that were drawn and not delivered, by their number
        self._n_given = len(sequence.generated)
        self._next_row = 0
        self._take_rows: TakeRows = lambda first, rows: None

    def cancel(self, reason: str = "cancelled") -> None:
        """End the sequence soon; its last event has `reason`, unless it ends by itself before. Never waits."""
        self._cancel(self.seq_id, reason)

    @property
    def n_reused(self) -> int:
        """Tokens of its prompt that did not have to be computed; from its first event on."""
        return max(0, self._sequence.n_reused - self._sequence.n_virtual)

    @property
    def n_prompt(self) -> int:
        """Positions before that of its first new token, with those of its adapter's rows."""
        return self._sequence.n_prompt

    def __iter__(self) -> Iterator[Event]:
        """The events, up to the last one. Not for requests that share a queue."""
        while not self._is_over:
            event = wait_for_event(self.events)
            self._is_over = event.finish_reason is not None
            yield event

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            self.cancel()

    # Of the loop

    def read_rows(self, first: int, take: TakeRows) -> None:
        """The reader wants rows from position `first` on."""
        self._next_row, self._take_rows = first, take

    def take_rows(self, first: int, rows: Any) -> None:
        """Rows (any, n, any) from position `first` on; after a loss some come again, with the same numbers."""
        n_known = self._next_row - first
        if n_known < rows.shape[1]:
            self._take_rows(self._next_row, rows[:, n_known:])
            self._next_row = first + rows.shape[1]

    def take_scores(self, first: int, scores: list[TokenLogprobs]) -> None:
        """Of the tokens behind the rows from position `first` on; the same holds."""
        new = scores[max(0, self._next_row - first) :]
        if new:
            self._next_row = first + len(scores)
            self.events.put(Event(self.seq_id, (), None, time.perf_counter(), tuple(new)))

    @property
    def sequence(self) -> Sequence:
        """The sequence itself; only the loop's thread may look at it."""
        return self._sequence

    def allowed(self) -> Any:
        """The tokens that its constraint allows; the same array until the next token."""
        if self._allowed is None and self.constraint is not None:
            self._allowed = self.constraint.allowed()
        return self._allowed

    def is_met_by(self, tokens: tuple[int, ...], drawn: int | None) -> bool:
        """Whether the reader's own condition ends the sequence.

        Args:
            tokens: that are delivered; drawn: the newest one, which may be withheld.
        """
        self._allowed = None
        if self.constraint is not None and drawn is not None:
            self.is_full = self.constraint.take(drawn)
        return self.is_full or (self._ends is not None and any([self._ends(token) for token in tokens]))

    def keep_logprobs(self, number: int, logprobs: TokenLogprobs) -> None:
        """Called for the sequence's new token `number`, from 0 on; a lost token is drawn again."""
        self._logprobs[number] = logprobs

    def logprobs_of_next(self, n: int) -> tuple[TokenLogprobs, ...]:
        """Of the next `n` tokens that are delivered."""
        numbers = range(self._n_given, self._n_given + n)
        self._n_given += n
        return tuple(self._logprobs.pop(number) for number in numbers)


def wait_for_event(events: Events) -> Event:
    """The next event, however long that takes. Uses a timeout inside, so that Ctrl-C works on every system."""
    while True:
        try:
            return events.get(timeout=1.0)
        except queue.Empty:
            continue


class Inbox:
    """Commands that wait for the loop. The lock is held for an append only."""

    def __init__(self) -> None:
        self._commands: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._closed = False

    def put(self, command: Callable[[], None]) -> bool:
        """False if it came too late: it will not be done."""
        with self._lock:
            if not self._closed:
                self._commands.append(command)
            return not self._closed

    def take(self) -> list[Callable[[], None]]:
        """Commands since the last call, in order."""
        with self._lock:
            taken, self._commands = self._commands, []
            return taken

    def close(self) -> None:
        with self._lock:
            self._closed = True


def seed_of(seed: int, index: int) -> int:
    """Seed of sample `index` of a run: samples of the same prompt must differ, runs of the same seed must not."""
    return (seed * STREAM_STEP + index * 0xD1B54A32D192ED03) % (1 << 63)
