"""Decides how many guesses of a text are under way, and which source makes them.

What guesses bring. A frame goes round in L seconds, the slowest stage takes t for its rows, and a frame has r rows. If a guess
is right with probability p, R = p / (1 - p) guesses are right in a row on average before one is wrong, and then one more token
is known, which was drawn instead. While they are right, a frame with r tokens is back every t seconds. Behind the wrong one a
new frame has to go all the way round. So R + 1 tokens take R t / r + L seconds:

    tokens/s = (R + 1) / (R t / r + L)

With D frames in flight, D < L / t, frames are back every L / D seconds: t is the larger one of both. With one frame of r rows,
the known token and r - 1 guesses, a round gives 1 + p + ... + p^(r - 1) tokens. (Compare arXiv 2504.04104 and 2511.11733.)

No more than L / t frames are in flight, of all texts together. With more, they would wait for the slowest stage, and behind
them the frame with the right token. So guesses that are always wrong cost nothing but the work of nodes that would wait.
L / t is rounded up from 0.85 of the next number on: measured times scatter by more than such a frame waits. A ring of N nodes
holds 2 N frames, whatever L is. Where nodes do not wait, because they share cores or each frame is a pass over the disk, one
frame is in flight.

Where texts fill the ring, or the only node, no node waits: each text has one frame in flight, which others have rows in.
A frame with n rows takes F(n) seconds. If all k texts of a frame are alike, it brings at most

    s = max over r of k (1 + p + ... + p^(r - 1)) / F(k r)

tokens per second. Guesses of a text beside m rows of others pay if they bring more for their time: its number of rows is the r
for which p + ... + p^(r - 1) - s (F(m + r) - F(m + 1)) is largest.

A guess takes time, too: on the first node that of its source counts in t, and before a frame leaves in L.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from mdi.engine.guesses import LONG, SHORT, DraftModel, Forced, Index, Repetition, Source
from mdi.engine.prices import WEIGHT, Prices
from mdi.engine.sequence import Constraint, Plan
from mdi.engine.sequence import Sequence as Text

logger = logging.getLogger(__name__)

MOST_ROWS, WINDOW_ROWS = 4, 8  # of a text in a frame; where each frame is a pass over the disk
N_JUDGED = 32  # guesses of a source whose rate counts
FIRST_PAUSE, LONGEST_PAUSE = 64, 1024  # tokens
PAYS = 1.02  # times as fast as without guesses, at least
SURE = 0.99  # more is not believed
N_ROUNDS = 3  # that are measured before anything is guessed
MEASURED_EACH = 1024  # tokens, one round is measured again without guesses: it grows with the text
FORGOTTEN_EACH = 1024  # frames, prices of further rows are learned again where each frame is measured
N_QUIET = 16  # frames of which two are measured while nothing is guessed
LOOK_EACH = 8  # tokens, repetitions are looked for while there are none, and few were right before
N_KNOWN = 16  # times that limits count before they are worked out again
N_OWN = 16  # frames in which this node's own time is measured
N_TRIAL = 32  # tokens after which the times with and without guesses are compared
N_CLEAR, CLEARLY = 8, 1.4  # tokens after which so many times the time without is enough to see it
MOST_SLOW = 2.0  # times the time without for its tokens: a frame that takes longer was held up by something else
TRIAL_FRAMES, CLEAR_FRAMES = 8, 2  # at least, before the one and the other: with many texts a frame has many tokens
TRIAL_PAUSE, LONGEST_TRIAL_PAUSE = 256, 2048  # frames
PROVEN = 0.6  # with this rate, shorter repetitions count
DEPTH_SLACK = 0.15  # by this part of a stage's time a right frame may wait: measured times scatter
N_OTHERS = 4  # ended texts of an owner in which repetitions are looked for
# Sources in the order in which they are asked, with the rate that is assumed before any guess was judged.
ASSUMED = {"grammar": 0.9, "prediction": 0.8, "lookup": 0.7, "draft": 0.7}


def most_rows_of(has_experts: bool, has_window: bool) -> int:
    """Rows of a text in a frame, at most.

    Args:
        has_experts: each further row reads other weights; has_window: the way of the weights from the disk is longer than all
            rows take.
    """
    return 1 if has_experts else WINDOW_ROWS if has_window else MOST_ROWS


def tokens_per_s(p: float, n_rows: int, n_frames: int, round_s: float, stage_s: float) -> float:
    """The speed of one text whose guesses are right with probability `p`: see the module."""
    p = min(p, SURE)
    if n_frames == 1:
        return float(sum(p**i for i in range(n_rows))) / round_s
    n_right = p / (1 - p)
    return (n_right + 1) / (n_right * max(stage_s, round_s / n_frames) / n_rows + round_s)


def most_frames(round_s: float, stage_s: float) -> int:
    """Frames that can be in flight without waiting for each other."""
    return max(1, int(round_s / stage_s + DEPTH_SLACK)) if stage_s > 0 else 1


class _Rate:
    """Whether a source's last guesses for a text were right, and its pauses."""

    def __init__(self, assumed: float) -> None:
        self._judged: deque[bool] = deque(maxlen=N_JUDGED)
        self._assumed = assumed
        self._pause = FIRST_PAUSE
        self.until = 0  # tokens that the text must have before the source is asked again
        self.n_guessed = self.n_confirmed = 0

    @property
    def rate(self) -> float:
        return (sum(self._judged) + 2 * self._assumed) / (len(self._judged) + 2)

    @property
    def is_known(self) -> bool:
        return len(self._judged) >= N_JUDGED // 2

    @property
    def is_judged(self) -> bool:
        """Whether the rate is not only assumed."""
        return bool(self._judged)

    def judge(self, n_right: int, is_wrong: bool) -> None:
        self._judged.extend([True] * n_right + [False] * is_wrong)
        self.n_confirmed += n_right

    def pause(self, n_tokens: int) -> None:
        """Give no guesses until the text is longer: at first a little, then twice as much each time.

        Right guesses do not make pauses short again: of sixteen texts on one node, whose guesses are right and do not pay, that
        took 4 % of the speed.
        """
        self.until = n_tokens + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._judged.clear()


@dataclass
class _Guessed:
    """A text: its sources, and which of them made each guess that is under way."""

    sources: dict[str, Source]
    rates: dict[str, _Rate]
    constraint: Constraint | None
    by: deque[str] = field(default_factory=deque)
    last: str = ""


class Speculation:
    """A `Guesser` of the scheduler. Belongs to the engine's thread, and has no clock: times come in as numbers.

    Args:
        most_rows: see `most_rows_of`.
        draft: the small model, if there is one.
        kinds: the sources that may be used, of ASSUMED.
        n_vocabulary: ids that the model knows; None: none is larger.
    """

    def __init__(
        self, most_rows: int = MOST_ROWS, draft: DraftModel | None = None, kinds: frozenset[str] = frozenset(ASSUMED),
        n_vocabulary: int | None = None,
    ) -> None:  # fmt: skip
        self.most_rows = most_rows
        self._draft = draft
        self._kinds = kinds
        self._n_vocabulary = n_vocabulary
        self._failed: set[str] = set()  # sources of which it was told that they failed
        self.texts: dict[int, _Guessed] = {}
        self._ended: dict[str, deque[Index]] = {}
        self.rounds, self.stages = Prices(), Prices()
        self._n_nodes = 1
        self.under_way: dict[int, _Flight] = {}  # frames that are watched
        self._n_guessed = 0  # of these, with guesses
        self._last: tuple[float, int, _Flight] | None = None  # when the last watched frame was back, and which it was
        self._is_deep = True
        self._number = 0  # of the newest frame
        self._kind = ""  # of the newest guesses
        self._guess_s: dict[str, float] = {}  # of one token, by its source
        self._own_s = 0.0  # that this node takes for a frame, with head, drawing and guessing
        # The frame at which `_own_s` was noted, and the busy time then; 0 is not known.
        self._noted, self._busy_s = 0, 0.0
        self._plain_s: dict[int, float] = {}  # of a token of any text, without guesses, by how many texts there are
        self._prompt = -1  # newest frame with prompt rows, or a replay
        self._trials = {kind: _Trial() for kind in ASSUMED}
        self._n_texts = 0  # that decode; 0 is not known
        self._n_beside = 0  # rows of others in the next text's frame
        self._is_full = False  # texts fill the ring, so that each has one frame, with rows of others in it
        # The limits for a rate, places, rows beside and a source, since the frame of this number.
        self._known: dict[tuple[float, int, int, str], tuple[int, int]] = {}
        self._known_at = 0
        self._priced_at = 0  # the frame since which prices of further rows are learned
        self._n_to_measure, self._n_since = N_ROUNDS, 0  # rounds without guesses; tokens since the last ones

    def begin_ring(self, n_nodes: int, is_deep: bool = True) -> None:
        """Times of another ring are other ones.

        Args:
            is_deep: whether a text may have several frames in flight.
        """
        self._n_nodes, self._is_deep = n_nodes, is_deep
        self.rounds.clear()
        self.stages.clear()
        self.under_way.clear()
        self._n_guessed = 0
        self._last = None
        self._own_s, self._noted, self._busy_s = 0.0, 0, 0.0
        self._plain_s.clear()
        self._known.clear()
        self._n_texts, self._is_full = 0, False
        self._trials = {kind: _Trial() for kind in ASSUMED}
        self._n_to_measure = N_ROUNDS

    def begin(self, text: Text, constraint: Constraint | None) -> None:
        """A text that will be generated."""
        sources: dict[str, Source] = {}
        if constraint is not None and "grammar" in self._kinds:
            sources["grammar"] = Forced(constraint)
        if text.prediction and "prediction" in self._kinds:
            predicted = Repetition([Index(text.prediction)], text.n_prompt)
            predicted.n_least = SHORT
            sources["prediction"] = predicted
        if "lookup" in self._kinds:
            others = () if text.owner is None else tuple(self._ended.get(text.owner, ()))
            sources["lookup"] = Repetition(others)
        if self._draft is not None and "draft" in self._kinds:
            sources["draft"] = self._draft.of(text)
        rates = {kind: _Rate(ASSUMED[kind]) for kind in sources}
        self.texts[text.seq_id] = _Guessed(sources, rates, constraint)

    # Of the scheduler

    def limits(self, sequence: Text, n_places: int, n_texts: int, n_beside: int = 0) -> tuple[int, int]:
        if n_texts != self._n_texts:
            self._set_n_texts(n_texts, n_places == 1 and n_texts > 1)
        if self._is_full and self.most_rows == 1:
            sequence.n_searched = len(sequence.ids) + LOOK_EACH - 1
            return 1, 1
        guessed = self.texts.get(sequence.seq_id)
        if guessed is None or self._n_to_measure or not self.rounds.n_noted:
            return 1, 1
        kind = guessed.last if sequence.guessed else self._source_for(guessed, sequence)
        if not kind:
            return 1, 1
        self._n_beside = n_beside
        rate = guessed.rates[kind]
        if self._number - self._known_at >= N_KNOWN:  # times change slowly
            self._known.clear()
            self._known_at = self._number
        key = rate.rate, n_places, n_beside, kind
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._best(rate.rate, n_places, kind)
        if found == (1, 1) and not sequence.guessed:
            if self._is_full and not rate.is_judged:  # a frame with fewer rows may have a place for its guesses
                sequence.n_searched = len(sequence.ids) + LOOK_EACH - 1
            else:
                rate.pause(len(sequence.ids))  # others may pay
        return found

    def _set_n_texts(self, n_texts: int, is_full: bool) -> None:
        """So many texts decode from now on. Times are measured again: the more often, the less is known of so many."""
        if is_full != self._is_full and self._n_nodes > 1:
            self.rounds.clear()  # frames wait for each other in a full ring
        self._n_texts, self._is_full = n_texts, is_full
        self._known.clear()
        is_known = n_texts in self._plain_s and self.rounds.n_noted
        self._n_to_measure = max(self._n_to_measure, 1) if is_known else N_ROUNDS

    def _best(self, p: float, n_places: int, kind: str) -> tuple[int, int]:
        """The fastest limits; (1, 1) where guesses do not pay."""
        if self._is_full:
            return 1, self._rows_beside(p, kind)
        best, found = PAYS * self._speed(0.0, 1, 1), (1, 1)
        for n_rows in range(1, self.most_rows + 1):
            n_frames = min(n_places, self._most_frames(n_rows, kind))
            speed = self._speed(p, n_rows, n_frames, kind)
            if speed > best:
                best, found = speed, (n_frames, n_rows)
        return found

    def _source_for(self, guessed: _Guessed, sequence: Text) -> str:
        """The source that may have guesses; "" without any. Each text without any comes here again and again: it has to be
        cheap.
        """
        n, is_looked_up = len(sequence.ids), True
        for kind, source in guessed.sources.items():
            if self._is_paused(kind, guessed.rates[kind], n):
                continue
            try:
                if source.learn(sequence.ids):
                    return kind
            except Exception as e:
                self._pause_failed(kind, guessed.rates[kind], n, e)
            is_looked_up &= kind == "lookup"
        sequence.n_searched = n
        if is_looked_up:
            rate = guessed.rates.get("lookup")
            is_proven = rate is not None and rate.is_known and rate.rate >= PROVEN
            sequence.n_searched += 0 if is_proven else LOOK_EACH - 1
        return ""

    def _is_paused(self, kind: str, rate: _Rate, n_tokens: int) -> bool:
        return n_tokens < rate.until or self._number < self._trials[kind].until

    def _speed(self, p: float, n_rows: int, n_frames: int, kind: str = "") -> float:
        round_s = self.rounds.of(n_rows) + self._guess_s.get(kind, 0.0) * (n_rows - 1)
        return tokens_per_s(p, n_rows, n_frames, round_s, self._stage_s(n_rows, kind))

    @property
    def _n_together(self) -> int:
        """Texts in a frame of a full ring."""
        return max(1, -(-self._n_texts // self._n_nodes))

    def _rows_beside(self, p: float, kind: str) -> int:
        """Rows of a text in a frame of a full ring: see the module."""
        n_texts, guess_s = self._n_together, self._guess_s.get(kind, 0.0)
        right = [sum(p**i for i in range(1, n_rows)) for n_rows in range(1, self.most_rows + 1)]
        speed = max(
            n_texts * (1 + more) / (self.rounds.of(n_texts * (1 + n)) + guess_s * n_texts * n)
            for n, more in enumerate(right)
        )
        plain_s = self.rounds.of(self._n_beside + 1)
        gains = [
            more - PAYS * speed * (self.rounds.of(self._n_beside + 1 + n) - plain_s + guess_s * n)
            for n, more in enumerate(right)
        ]
        return 1 + gains.index(max(gains))

    def _stage_s(self, n_rows: int, kind: str) -> float:
        if self._n_nodes == 1:
            return self.rounds.of(n_rows)
        own_s = self._own_s + self._guess_s.get(kind, 0.0) * n_rows
        return max(self.stages.of(n_rows, self.rounds.of(n_rows) / self._n_nodes), own_s)

    def _most_frames(self, n_rows: int, kind: str) -> int:
        most = most_frames(self.rounds.of(n_rows), self._stage_s(n_rows, kind)) if self._is_deep else 1
        return max(1, most // max(1, self._n_texts))  # texts share the ring

    def propose(self, sequence: Text, n: int) -> list[int]:
        guessed = self.texts[sequence.seq_id]
        stream = [*sequence.ids, *sequence.guessed]
        for kind, source in guessed.sources.items():
            rate = guessed.rates[kind]
            if self._is_paused(kind, rate, len(sequence.ids)):
                continue
            if rate.is_known and not self._pays(rate.rate, kind):
                rate.pause(len(sequence.ids))
                continue
            if isinstance(source, Repetition) and kind == "lookup":
                source.n_least = SHORT if rate.is_known and rate.rate >= PROVEN else LONG
            try:
                source.learn(sequence.ids)
                found = self._allowed(sequence, guessed.constraint, source.propose(stream, n))
            except Exception as e:
                self._pause_failed(kind, rate, len(sequence.ids), e)
                continue
            if found:
                guessed.by.extend([kind] * len(found))
                guessed.last = self._kind = kind
                rate.n_guessed += len(found)
                return found
        if not sequence.guessed:
            sequence.n_searched = len(sequence.ids)
        return []

    def _pause_failed(self, kind: str, rate: _Rate, n_tokens: int, error: Exception) -> None:
        """A source could not be asked. Its text goes on without it: a guess may cost time, and no more."""
        rate.pause(n_tokens)
        if kind not in self._failed:
            self._failed.add(kind)
            logger.warning(
                "warning: guesses by %s pause, because they failed: %s: %s", kind, type(error).__name__, error
            )

    def _pays(self, p: float, kind: str) -> bool:
        if not self.rounds.n_noted:
            return True  # nothing is known of this ring yet
        return self._best(p, 2 * self._n_nodes, kind) != (1, 1)

    def _allowed(self, sequence: Text, constraint: Constraint | None, found: list[int]) -> list[int]:
        """The guesses before the first one that can not be drawn, or that would end the text."""
        ends, n_ids = sequence.params.eos_ids, self._n_vocabulary
        bad = (i for i, token in enumerate(found) if token in ends or (n_ids is not None and token >= n_ids))
        n = next(bad, len(found))
        found = found[:n]
        if constraint is None or not found:
            return found
        n_pending = len(sequence.guessed)
        return found[: max(0, constraint.n_valid([*sequence.guessed, *found]) - n_pending)]

    def judge(self, sequence: Text, n_right: int, is_wrong: bool) -> None:
        guessed = self.texts.get(sequence.seq_id)
        if guessed is None:
            return
        for _ in range(n_right):
            guessed.rates[guessed.by.popleft()].judge(1, False)
        if is_wrong and guessed.by:
            guessed.rates[guessed.by[0]].judge(0, True)
        if not sequence.guessed:
            guessed.by.clear()

    def forget(self, sequence: Text) -> None:
        """A text has ended; its tokens are looked for repetitions in later texts of its owner."""
        self._n_texts = 0
        guessed = self.texts.pop(sequence.seq_id, None)
        if guessed is None:
            return
        if (rate := guessed.rates.get("prediction")) is not None:
            sequence.n_predicted, sequence.n_accepted = rate.n_guessed, rate.n_confirmed
        lookup = guessed.sources.get("lookup")
        for kind, source in guessed.sources.items():
            try:
                if sequence.owner is not None and source is lookup:
                    source.learn(sequence.ids)
                source.close()
            except Exception as e:
                self._pause_failed(kind, guessed.rates[kind], 0, e)
        if sequence.owner is not None and isinstance(lookup, Repetition):
            self._ended.setdefault(sequence.owner, deque(maxlen=N_OTHERS)).appendleft(lookup.own)

    # Times

    def is_watching(self, number: int) -> bool:
        """Whether this frame, with last tokens alone, is to be told of: most of a text that nobody guesses are not."""
        self._number = number
        return number % N_QUIET < 2 or self._n_guessed > 0 or self._n_to_measure > 0

    def sent(self, plan: Plan, now_s: float, guessing_s: float = 0.0) -> None:
        """A frame leaves that is watched; one with prompt rows says nothing about others.

        Args:
            guessing_s: that choosing its rows took.
        """
        self._number = plan.number
        n_rows, has_guesses = 0, False
        for _, _, n, _, _, _, _, n_guessed, is_prompt in plan.slices:
            if is_prompt:
                n_rows = 0
                break
            n_rows += n
            has_guesses |= n_guessed > 0
        if not n_rows or plan.is_replay:
            self._last, self._busy_s, self._prompt = None, 0.0, plan.number
            return
        is_first = not self._n_guessed
        self._n_guessed += has_guesses
        if has_guesses:
            guess_s = guessing_s / sum(part.n_guessed for part in plan.slices)
            known_s = self._guess_s.get(self._kind, guess_s)
            self._guess_s[self._kind] = known_s + WEIGHT * (min(guess_s, 2 * known_s) - known_s)
        is_free = self._is_full or (is_first and len(self.under_way) < max(1, self._n_nodes // 2))
        is_plain = is_first and not has_guesses
        # As many frames later as the ring may have, no prompt is ahead in it.
        is_steady = is_plain and plan.number - self._prompt >= min(self._n_texts, 2 * self._n_nodes)
        self.under_way[plan.number] = _Flight(now_s, n_rows, has_guesses, is_free, is_plain, is_steady)

    def returned(self, number: int, now_s: float, busy_s: float, n_tokens: int) -> None:
        """A frame that is watched is back, with so many tokens; this node has computed for `busy_s` in all."""
        flight = self.under_way.pop(number, None)
        if flight is None:
            return
        self._n_guessed -= flight.has_guesses
        self._n_since += n_tokens
        if self._n_since > MEASURED_EACH * max(1, self._n_texts):
            self._n_since, self._n_to_measure = 0, 1
        if number - self._priced_at >= FORGOTTEN_EACH and (self._is_full or self._n_nodes == 1):
            self._priced_at = number
            self.rounds.forget_more(self._n_together)
        time_s = now_s - flight.sent_s
        if flight.is_free:
            self.rounds.note(flight.n_rows, time_s)
        else:
            self.rounds.note_most(flight.n_rows, time_s)
        if flight.is_steady and self._n_texts:
            self._n_to_measure = max(0, self._n_to_measure - 1)
            # Gaps between frames depend on where in the ring the texts are.
            token_s = time_s / self._n_texts
            known_s = self._plain_s.get(self._n_texts, token_s)
            self._plain_s[self._n_texts] = known_s + WEIGHT * (token_s - known_s)
        if self._last is not None and self._last[1] == number - 1:
            last_s, _, last = self._last
            gap_s = now_s - last_s
            if flight.sent_s < last_s and flight.n_rows == last.n_rows:  # both were under way, and took as long
                if flight.sent_s - last.sent_s < 0.9 * gap_s:  # one waited for the other in the slowest stage
                    self.stages.note(flight.n_rows, gap_s)
                else:
                    self.stages.note_most(flight.n_rows, gap_s)
            if not flight.is_plain:
                self._trials[self._kind].note(gap_s, n_tokens, self._plain_s.get(self._n_texts, 0.0), number)
        self._last = now_s, number, flight
        if number - self._noted >= N_OWN:
            self._own_s = (busy_s - self._busy_s) / (number - self._noted) if self._busy_s else 0.0
            self._noted, self._busy_s = number, busy_s


class _Flight(NamedTuple):
    """A frame under way.

    Attributes:
        is_free: whether it waits for no other frame, or as all frames do;
        is_plain: whether no guesses are under way, here or before it; is_steady: nor prompts,
            so that each text has one token in its time.
    """

    sent_s: float
    n_rows: int
    has_guesses: bool
    is_free: bool
    is_plain: bool
    is_steady: bool


class _Trial:
    """Compares the time of a token with and without guesses of a source, whatever the prices promise: nodes may share cores.

    Attributes:
        until: number of the frame from which on it is asked again.
    """

    def __init__(self) -> None:
        self.until = 0
        self._time_s, self._n_tokens, self._n_frames = 0.0, 0, 0
        self._pause = TRIAL_PAUSE

    def note(self, time_s: float, n_tokens: int, plain_s: float, number: int) -> None:
        """The next frame was back after so long, with so many tokens; without guesses one token takes `plain_s`."""
        if not plain_s:
            return
        self._time_s += min(time_s, MOST_SLOW * plain_s * max(1, n_tokens))
        self._n_tokens, self._n_frames = self._n_tokens + n_tokens, self._n_frames + 1
        if self._n_tokens < N_CLEAR or self._n_frames < CLEAR_FRAMES:
            return
        slower = self._time_s / (self._n_tokens * plain_s)
        if (self._n_tokens < N_TRIAL or self._n_frames < TRIAL_FRAMES) and slower < CLEARLY:
            return
        self._time_s, self._n_tokens, self._n_frames = 0.0, 0, 0
        if PAYS * slower > 1:
            self.until, self._pause = number + self._pause, min(4 * self._pause, LONGEST_TRIAL_PAUSE)
        else:
            self._pause = TRIAL_PAUSE
