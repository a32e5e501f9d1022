"""Texts of one prompt that are continued together: a chooser decides which of them go on, and with which tokens.

Beam search is one chooser; another needs only a function. Pure: numbers of each step in, texts out; caches are copied by the
scheduler, which sees the same choices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from mdi.cancel import Periodic
from mdi.engine.sampling import Row, adjusted, best_of, log_probs
from mdi.engine.sequence import UNMATCHED, Constraint, SamplingParams, TokenLogprobs
from mdi.engine.sequence import Sequence as Text
from mdi.errors import Code, EngineError, UsageError

MOST_BEAMS = 32

logger = logging.getLogger(__name__)

REPORT_S = 5.0  # from one line about a search to the next


class Choice(NamedTuple):
    """One way to go on: behind the text of row `parent`, with a token, of which this is the log probability."""

    parent: int
    token: int
    logprob: float


# (rows, logits, float32 (len(rows), vocabulary)) -> choices, the best first. A row with a log probability of -inf is no
# text (any more), and before the first token (`n_drawn` is 0) all rows are the same. Of the choices that end a text, those
# count that are among the first len(rows); of the others, the first len(rows) go on.
Chooser = Callable[[Sequence[Row], np.ndarray], list[Choice]]
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beams:
    """How beam search is done, as transformers does it.

    Attributes:
        n: texts that are followed at the same time.
        length_penalty: scores are log probabilities divided by length^penalty of the generated tokens, an EOS among them.
        early_stopping: True ends as soon as there are n texts that have ended; False if the best that goes on has a worse
            score than all of these, with its present length; "never" if it also has with the most tokens that it may get.
        n_groups: of texts that are to differ, each of n / n_groups (Vijayakumar et al. 2018). They choose in turn.
        diversity_penalty: what a token costs a group for each text of a group before it that goes on with it in this step.
    """

    n: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n_groups: int = 1
    diversity_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MOST_BEAMS:
            raise UsageError(f"the number of beams must be from 1 to {MOST_BEAMS}, got {self.n}", code=Code.VALUE)
        if not math.isfinite(self.length_penalty):
            raise UsageError(f"the length penalty must be a number, got {self.length_penalty}", code=Code.VALUE)
        if self.n_groups < 1 or self.n % self.n_groups:
            raise UsageError(f"{self.n} beams cannot be in {self.n_groups} groups of equal size", code=Code.VALUE)

    @property
    def chooser(self) -> Chooser:
        return best_texts if self.n_groups == 1 else partial(diverse_texts, self)

    def score(self, logprob: float, length: int) -> float:
        try:
            return logprob / length**self.length_penalty
        except (OverflowError, ZeroDivisionError):  # as in numbers without a limit
            return 0.0 if self.length_penalty > 0 else -math.inf


def best_texts(rows: Sequence[Row], logits: np.ndarray) -> list[Choice]:
    """The chooser of beam search: the most probable texts that are one token longer, enough of them if many end."""
    n = max(2, 1 + len(rows[0].params.eos_ids)) * len(rows)
    alive = [i for i, row in enumerate(rows) if row.logprob > -math.inf and (row.n_drawn or i == 0)]
    values, tokens = best_tokens([rows[i] for i in alive], logits[alive], n)
    totals = values.astype(np.float64) + np.array([[rows[i].logprob] for i in alive])
    order = np.argsort(-totals, axis=None, kind="stable")[:n]
    places = [divmod(int(at), values.shape[1]) for at in order]
    return [Choice(alive[i], int(tokens[i, k]), float(values[i, k])) for i, k in places if values[i, k] > -np.inf]


def diverse_texts(beams: Beams, rows: Sequence[Row], logits: np.ndarray) -> list[Choice]:
    """The chooser of `beams` in groups, each of which has places next to each other. Scores keep what tokens have cost."""
    size, n_eos = len(rows) // beams.n_groups, len(rows[0].params.eos_ids)
    used = np.zeros(logits.shape[1], dtype=np.float32)
    first, others = list[Choice](), list[Choice]()
    for begin in range(0, len(rows), size):
        places = [
            i for i in range(begin, begin + size) if rows[i].logprob > -math.inf and (rows[i].n_drawn or i == begin)
        ]
        if not places:
            continue
        # Tokens of the groups before, len(rows) at most, may fall behind as many others.
        values, tokens = best_tokens([rows[i] for i in places], logits[places], size + n_eos + len(rows))
        values = values - beams.diversity_penalty * used[tokens]
        totals = values.astype(np.float64) + np.array([[rows[i].logprob] for i in places])
        n_going = 0
        for rank, at in enumerate(np.argsort(-totals, axis=None, kind="stable")):
            i, k = divmod(int(at), values.shape[1])
            choice = Choice(places[i], int(tokens[i, k]), float(values[i, k]))
            if n_going == size or choice.logprob == -math.inf:
                break
            if choice.token in rows[0].params.eos_ids:
                first += [choice] if rank < size else []
                continue
            (first if rank < size else others).append(choice)
            n_going += 1
            used[choice.token] += 1
    return first + others


def best_tokens(rows: Sequence[Row], logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The `n` most probable next tokens of each row.

    Penalties, biases and constraints are applied to the log probabilities, as in transformers, which then need not add up to 1.

    Args:
        logits: float32, (len(rows), vocabulary).

    Returns:
        float32 log probabilities and ids, each (len(rows), n or the vocabulary), the best first.
    """
    top = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - top).sum(axis=1, keepdims=True, dtype=np.float64)
    below = top + np.log(sums).astype(np.float32)
    n = min(n, logits.shape[1])
    if all(row.is_plain for row in rows):
        values, ids = best_of(logits, n)
        return values - below, ids
    return best_of(adjusted(logits - below, rows), n)


class Ended(NamedTuple):
    """A text of a cohort that has ended: its generated tokens, without an EOS or a stop sequence."""

    score: float
    tokens: tuple[int, ...]
    reason: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class _State:
    """Of one text that goes on, besides its tokens."""

    logprob: float
    constraint: Constraint | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Cohort:
    """Texts of one prompt, one for each of `texts`, and those of them that have ended.

    Args:
        texts: sequences of the same prompt, without any token yet.
        chooser: see `Chooser`; None is that of `beams`.
        constraint: what the tokens of each may be.
        is_stopped: whether generated tokens have a stop string in them, other than `stop_sequences`.

    Attributes:
        ended: at most as many as there are texts, the one with the best score first.
    """

    def __init__(
        self, texts: Sequence[Text], beams: Beams, chooser: Chooser | None = None, constraint: Constraint | None = None,
        is_stopped: Callable[[list[int]], bool] | None = None,
    ) -> None:  # fmt: skip
        self.texts = tuple(texts)
        self.beams = beams
        self.ended: list[Ended] = []
        self._chooser = chooser or beams.chooser
        self._is_stopped = is_stopped
        self._states = [_State(0.0, constraint and constraint.copy()) for _ in self.texts]
        self._logits: dict[int, tuple[int, np.ndarray]] = {}  # with the evictions of the text
        self._reports = Periodic(REPORT_S)

    @property
    def _params(self) -> SamplingParams:
        return self.texts[0].params

    @property
    def most_tokens(self) -> int:
        """Tokens that each may have."""
        return min(self._params.n_tokens, self.texts[0].max_length - self.texts[0].n_prompt)

    def forget(self) -> None:
        """The rows of this step are computed again."""
        self._logits.clear()

    def take(self, seq_id: int, logits: np.ndarray) -> bool:
        """The next logits of one text, float32 (vocabulary). Returns whether all have theirs, so that `choose` can follow."""
        evictions = {text.seq_id: text.n_evictions for text in self.texts}
        self._logits[seq_id] = evictions[seq_id], logits
        return all(one in self._logits and self._logits[one][0] == n for one, n in evictions.items())

    def choose(self) -> list[Choice]:
        """The texts that go on: for each place, the text that is continued there; none: all has ended.

        A place whose text goes on stays its own; no cache is copied for it.
        """
        rows, logits = self._rows()
        has_texts = any(row.logprob > -math.inf for row in rows)
        choices = self._chooser(rows, logits) if has_texts else []
        going: list[tuple[Choice, _State]] = []
        for rank, choice in enumerate(choices):
            if len(going) == len(self.texts) and rank >= len(self.texts):
                break
            state, reason = self._followed(choice, logits[choice.parent])
            if reason is not None and reason != UNMATCHED and rank < len(self.texts):
                self._end(choice, state, reason)
            elif reason is None and len(going) < len(self.texts):
                going.append((choice, state))
        if not going or self._is_over(going):
            self._logits.clear()
            return []
        dead = (going[0][0], replace(going[0][1], logprob=-math.inf))
        size = len(self.texts) // self.beams.n_groups
        placed = _in_own_places([*going, *[dead] * (len(self.texts) - len(going))], size)
        self._states = [state for _, state in placed]
        self._logits.clear()
        if self._reports.is_due():  # nobody sees a word before the end
            n_tokens = len(self.texts[0].generated) + 1
            logger.info("the best texts are searched: %d of at most %d tokens", n_tokens, self.most_tokens)
        return [choice for choice, _ in placed]

    def _rows(self) -> tuple[list[Row], np.ndarray]:
        """Of all texts; those that can have no further token are none any more."""
        rows = []
        for text, state in zip(self.texts, self._states, strict=True):
            allowed, logprob = None, state.logprob
            if state.constraint is not None and logprob > -math.inf:
                try:
                    allowed = state.constraint.allowed()
                except Exception as e:  # of a grammar: its own text ends, and no other
                    _note_failure(e)
                    logprob = -math.inf
            n_drawn = len(text.ids) - text.n_prompt
            rows.append(Row(self._params, n_drawn, text.ids, text.n_prompt, allowed, logprob))
        return rows, np.stack([self._logits[text.seq_id][1] for text in self.texts])

    def _followed(self, choice: Choice, logits: np.ndarray) -> tuple[_State, str | None]:
        """The state behind a choice, and the reason if it ends the text; UNMATCHED: it cannot be."""
        before, text = self._states[choice.parent], self.texts[choice.parent]
        params, token = self._params, choice.token
        state = replace(before, logprob=before.logprob + choice.logprob)
        if token in params.eos_ids:
            return state, "eos"
        if params.n_logprobs is not None:
            state = replace(state, logprobs=(*before.logprobs, log_probs(logits, token, params.n_logprobs)))
        tokens = [*text.generated, token]
        if any(len(stop) <= len(tokens) and tuple(tokens[-len(stop) :]) == stop for stop in params.stop_sequences):
            return state, "stop"
        if before.constraint is not None:
            constraint = before.constraint.copy()
            try:
                if constraint.take(token):
                    return state, "stop"
            except Exception as e:  # of a grammar
                _note_failure(e)
                return state, UNMATCHED
            state = replace(state, constraint=constraint)
        if self._is_stopped is not None and self._is_stopped(tokens):
            return state, "stop"
        return state, "length" if len(tokens) >= self.most_tokens else None

    def _end(self, choice: Choice, state: _State, reason: str) -> None:
        """Keep a text that has ended, if it is one of the best."""
        text, params = self.texts[choice.parent], self._params
        tokens = [*text.generated, choice.token]
        score = self.beams.score(state.logprob, len(tokens))
        n = len(tokens) - (reason == "eos")
        if reason == "stop":
            ends = (len(stop) for stop in params.stop_sequences if stop and tuple(tokens[-len(stop) :]) == stop)
            n -= max(ends, default=0)
        self.ended.append(Ended(score, tuple(tokens[:n]), reason, state.logprobs[:n]))
        self.ended.sort(key=lambda one: -one.score)
        del self.ended[len(self.texts) :]

    def _is_over(self, going: Sequence[tuple[Choice, _State]]) -> bool:
        """Whether the texts that have ended are taken as the best: there are enough, and none that goes on is better."""
        if len(self.ended) < len(self.texts):
            return False
        beams = self.beams
        if beams.early_stopping is True:
            return True
        length = len(self.texts[0].generated) + 1
        if beams.early_stopping == "never" and beams.length_penalty > 0:
            length = self.most_tokens
        best = max(state.logprob for _, state in going)
        return not beams.score(best, length) > self.ended[-1].score


def _note_failure(error: Exception) -> None:
    """A grammar that lets no token follow has done its work; anything else is a fault."""
    level = logging.DEBUG if isinstance(error, EngineError) else logging.ERROR
    logger.log(level, "a text of a cohort is given up, because its grammar failed", exc_info=error)


def _in_own_places(going: Sequence[tuple[Choice, _State]], size: int) -> list[tuple[Choice, _State]]:
    """The same in another order: of the choices behind a text, the first has its place; the others stay in its group of `size`
    places, if one is free there.
    """
    placed: list[tuple[Choice, _State] | None] = [None] * len(going)
    others = []
    for one in going:
        if placed[one[0].parent] is None:
            placed[one[0].parent] = one
        else:
            others.append(one)
    for one in others:
        free = [i for i, there in enumerate(placed) if there is None]
        placed[min(free, key=lambda i: (i // size != one[0].parent // size, i))] = one
    return [one for one in placed if one is not None]
