"""The log probabilities that a run's model gives to a text.

A text is cut into tokens as a whole, and its tokens into windows that do not overlap. If the tokenizer says that texts begin
with a token of their own, each window begins with it, and all tokens of the text are scored; else the first token of each
window, which has nothing before it, is not. Nothing is added: no prompt style, no end.
"""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mdi.engine.sequence import Events, wait_for_event
from mdi.errors import Code, EngineError, UsageError
from mdi.run.run import Run

WINDOW = 2048  # tokens, without another wish; a model with less context has less
N_AT_ONCE = 16  # windows in the ring, or that wait for it; the next one comes when one has ended


class Token(NamedTuple):
    """A token of a text.

    Attributes:
        text: its part of the text; joined, these are the text.
        log_probability: natural logarithm; None: it has nothing before it.
    """

    id: int
    text: str
    log_probability: float | None


@dataclass(frozen=True)
class Score:
    """What a model says of a text.

    Attributes:
        windows: the ids of each; with `has_bos` each begins with one that is not in the text.
        log_probs: of each window, those of all its ids but the first, float32.
        pieces: of each token of the text, its part of that.
    """

    windows: list[list[int]]
    log_probs: list[np.ndarray]
    pieces: list[str]
    has_bos: bool

    @property
    def tokens(self) -> list[Token]:
        """Of the text, all of them in order."""
        return list(self._tokens())

    def _tokens(self) -> Iterator[Token]:
        pieces = iter(self.pieces)
        for ids, found in zip(self.windows, self.log_probs, strict=True):
            if not self.has_bos:
                yield Token(ids[0], next(pieces), None)
            for token, log_prob in zip(ids[1:], found.tolist(), strict=True):
                yield Token(token, next(pieces), log_prob)

    @property
    def log_probability(self) -> float:
        """Of all scored tokens together."""
        return float(sum(found.sum(dtype=np.float64) for found in self.log_probs))

    @property
    def n_tokens(self) -> int:
        """That are scored."""
        return sum(map(len, self.log_probs))

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the scored tokens."""
        return sum(len(token.text.encode()) for token in self._tokens() if token.log_probability is not None)

    @property
    def perplexity(self) -> float:
        return 2.0**self.bits_per_token if self.bits_per_token < 1000 else math.inf

    @property
    def bits_per_token(self) -> float:
        return -self.log_probability / math.log(2) / self.n_tokens

    @property
    def bits_per_byte(self) -> float:
        return -self.log_probability / math.log(2) / max(1, self.n_bytes)


def cut(ids: Sequence[int], length: int, first_id: int | None) -> list[list[int]]:
    """Tokens of a text in windows of at most `length`, the id included that each begins with, if there is one.

    Raises:
        UsageError: a window is too short, or there is nothing to score.
    """
    before = [] if first_id is None else [first_id]
    if length < 2:
        raise UsageError(
            f"a window has {length} token, but it takes two: one that is scored, and one before it (--sequence-length)",
            code=Code.VALUE,
        )
    if len(before) + len(ids) < 2:
        found = "no token" if not ids else "one token, which has nothing before it"
        raise UsageError(f"the text has {found}: give a longer one", code=Code.EMPTY)
    n_own = length - len(before)
    return [[*before, *ids[i : i + n_own]] for i in range(0, len(ids), n_own)]


def score_text(run: Run, text: str, length: int | None = None, tell: Callable[[int], None] = lambda n: None) -> Score:
    """Score a text over an open run; see the module.

    Args:
        length: tokens of a window; None: as many as the run allows, at most WINDOW.
        tell: called with the number of tokens that are scored so far.

    Raises:
        UsageError: the text has no two tokens, or a window does not fit the context; MdiError: what has ended the run.
    """
    if length is None:
        length = min(run.max_length, WINDOW)
    pieces, first_id = run.model.codec.pieces(text), run.model.codec.first_id
    windows = cut([i for i, _ in pieces], length, first_id)
    return Score(windows, score_ids(run, windows, tell), [piece for _, piece in pieces], first_id is not None)


def score_ids(
    run: Run, texts: Sequence[Sequence[int]], tell: Callable[[int], None] = lambda n: None
) -> list[np.ndarray]:
    """The log probabilities of all ids but the first of each text, float32; a text of one id has none.

    Several texts go round the ring together. Raises as `score_text`.
    """
    came: Events = queue.SimpleQueue()
    found = [np.empty(max(0, len(ids) - 1), dtype=np.float32) for ids in texts]
    waiting, running, n_done = deque(i for i, ids in enumerate(texts) if len(ids) > 1), dict[int, int](), 0
    known = [0] * len(texts)  # tokens whose log probabilities have come

    while waiting or running:
        while waiting and len(running) < N_AT_ONCE:
            index = waiting.popleft()
            running[run.submit_scores(texts[index], came).seq_id] = index
        event = wait_for_event(came)
        index, n_new = running[event.seq_id], len(event.logprobs)
        found[index][known[index] : known[index] + n_new] = [own for own, _ in event.logprobs]
        known[index] += n_new
        tell(n_done := n_done + n_new)
        if event.finish_reason is not None:
            del running[event.seq_id]
            if event.finish_reason != "length":
                run.raise_failure()
                raise EngineError(f"window {index} was not scored: {event.finish_reason}")
    return found
