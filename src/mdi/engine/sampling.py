"""Draws one token id per row from logits. No state: draw number n of a sequence follows from its seed and n alone.

So a text is the same in any batch, over any nodes, and after it was computed again from its token ids.

Each token has a random number of its own, E, exponentially distributed; the token with the least E / weight is drawn. So it is
drawn with the probability that it should have, and a model with other weights draws the same one nearly as often as their
probabilities overlap. (With one number for a draw, and the sum of the weights up to it, the best tokens would stand at other
places of the sum for each model.)

Logits are an array, or a tensor of torch on any device, of which only the best leave it where those are enough. What comes of a
row does not depend on the others: nothing is summed over more than the row's own numbers, in their own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mdi.engine.sequence import STREAM_STEP, SamplingParams, TokenLogprobs

LEAST_TEMPERATURE = 1e-30  # below it, all but the best token have no chance in float32
MOST_PENALTY, MOST_LOGIT = 1e30, 1e37  # beyond them is what float32 has no number for
FIRST_BEST = 1024  # of a vocabulary in order; more are only looked at if they do not have the top_p together
BUCKET = 64  # neighbouring tokens of a whole vocabulary: first one of these is drawn, then one of its tokens
BUCKETS_FROM = 1 << 32  # number of the first bucket's random number; tokens have those below

_MASK = (1 << 64) - 1  # of 64 bits
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64
_ONE, _STEP_64, _LAST_SHIFT, _SPARE_BITS = np.uint64(1), np.uint64(STREAM_STEP), np.uint64(31), np.uint64(12)
_ROUNDS = ((np.uint64(30), np.uint64(_FACTORS[0])), (np.uint64(27), np.uint64(_FACTORS[1])))


class Row(NamedTuple):
    """How one row is drawn.

    Attributes:
        n_drawn: how many tokens its sequence has drawn before.
        ids: of the sequence so far, prompt included, for penalties.
        n_prompt: how many of them are the prompt.
        allowed: bool (vocabulary); None are all tokens.
        logprob: of the tokens drawn before, where a chooser compares texts (engine.cohort).
    """

    params: SamplingParams
    n_drawn: int
    ids: Sequence[int] = ()
    n_prompt: int = 0
    allowed: np.ndarray | None = None
    logprob: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the model's logits are taken as they are."""
        return self.allowed is None and not self.params.changes_logits


def sample(logits: Any, rows: Sequence[Row | tuple[SamplingParams, int]]) -> list[int]:
    """One token per row.

    Args:
        logits: (M, vocabulary).
        rows: M of them.
    """
    asked = [row if type(row) is Row else Row(*row) for row in rows]
    logits = adjusted(logits, asked)
    tokens = [0] * len(asked)
    groups: dict[int | None, list[int]] = {}
    for i, row in enumerate(asked):
        if row.params.temperature > 0:
            top_k = row.params.top_k
            groups.setdefault(None if top_k is None or top_k >= logits.shape[1] else top_k, []).append(i)
    if sum(map(len, groups.values())) < len(asked):
        tokens = logits.argmax(-1).tolist()
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        _draw(logits, asked, groups, tokens)
    return tokens


def _draw(logits: Any, asked: Sequence[Row], groups: dict[int | None, list[int]], tokens: list[int]) -> None:
    """Set the tokens of the rows that are drawn, by their top_k."""
    for k, members in groups.items():
        own = logits if len(members) == len(asked) else logits[members]
        has_order = any(asked[i].params.top_p < 1 for i in members)
        every, ids = (on_host(own), None) if k is None else best_of(own, k, has_order)
        for place, i in enumerate(members):
            if ids is None:
                tokens[i] = _draw_of_all(every[place], asked[i])
            else:
                tokens[i] = _choose(_weights(every[place], every[place].max(), asked[i].params), ids[place], asked[i])


def on_host(logits: Any) -> np.ndarray:
    """float32, in the machine's memory."""
    if not isinstance(logits, np.ndarray):
        logits = logits.float().cpu().numpy()
    return np.asarray(logits, dtype=np.float32)


def best_of(logits: Any, k: int, has_order: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The k best of each row: float32 values and token ids, (M, k) in the machine's memory, the best first if that matters."""
    if not isinstance(logits, np.ndarray):
        values, ids = logits.float().topk(k, sorted=has_order)
        return values.cpu().numpy(), ids.cpu().numpy()
    n = logits.shape[1]
    ids = np.argpartition(logits, n - k, axis=1)[:, n - k :]
    if not has_order:
        return np.take_along_axis(logits, ids, axis=1), ids
    ids = np.sort(ids, axis=1)  # by id, as which equal ones stay
    values = np.take_along_axis(logits, ids, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(values, order, axis=1), np.take_along_axis(ids, order, axis=1)


def adjusted(logits: Any, rows: Sequence[Row]) -> Any:
    """Logits after the penalties, biases and constraints of the rows; the same object if there are none."""
    if all(row.is_plain for row in rows):
        return logits
    changed = np.array(on_host(logits))
    for own, row in zip(changed, rows, strict=True):
        if not row.is_plain:
            _adjust(own, row)
    return changed


def _adjust(logits: np.ndarray, row: Row) -> None:
    """Applies penalties, biases and the constraint to one row, in place. Logits stay numbers, however extreme a penalty is."""
    params = row.params
    if params.repetition_penalty != 1:
        seen = np.unique(np.array(row.ids, dtype=np.int64))
        values, penalty = logits[seen], np.float32(min(max(params.repetition_penalty, 1 / MOST_PENALTY), MOST_PENALTY))
        with np.errstate(over="ignore"):
            scaled = np.where(values > 0, values / penalty, values * penalty)
        logits[seen] = np.clip(scaled, -MOST_LOGIT, MOST_LOGIT)
    if params.presence_penalty or params.frequency_penalty:
        written = np.array(row.ids[row.n_prompt :], dtype=np.int64)
        counts = np.bincount(written, minlength=logits.size)[: logits.size].astype(np.float32)
        logits -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty) * (counts > 0)
    if params.logit_bias:
        tokens, biases = params.biases
        known = tokens < logits.size
        np.add.at(logits, tokens[known], biases[known])
    if params.suppressed:  # not infinite: where nothing else is allowed, they are drawn all the same
        logits[[token for token in params.suppressed if token < logits.size]] = -MOST_LOGIT
    if row.allowed is not None:
        logits[~row.allowed] = -np.inf


def _draw_of_all(values: np.ndarray, row: Row) -> int:
    """Without a top-k. With a top_p most rows have it together in their first best tokens: only else all are put in order.

    Args:
        values: (vocabulary), float32.
    """
    best = values.max()
    weights = _weights(values, best, row.params)
    if row.params.top_p >= 1:  # any order does
        return _choose(weights, None, row)
    total = float(weights.cumsum()[-1])
    first, (ids,) = best_of(values[None], min(FIRST_BEST, values.size))
    of_first = _weights(first[0], best, row.params)
    if of_first.cumsum()[-1] < row.params.top_p * total:
        ids = np.argsort(-values, kind="stable")
        of_first = weights[ids]
    return _choose(of_first, ids, row, total)


def _weights(values: np.ndarray, best: np.floating[Any], params: SamplingParams) -> np.ndarray:
    """Probabilities up to a factor, float64, those below min_p 0; that of the best token is 1.

    The largest is subtracted first: divided by a tiny temperature it would be infinite, and by one that float32 cannot hold, no
    number.
    """
    scale = np.float32(max(params.temperature, LEAST_TEMPERATURE))
    weights = np.exp((values - best) / scale).astype(np.float64)
    if params.min_p:
        weights[weights < params.min_p] = 0.0
    return weights


def _choose(weights: np.ndarray, ids: np.ndarray | None, row: Row, total: float | None = None) -> int:
    """The token that is drawn.

    Args:
        weights: (n); where the row has a top_p, the largest first.
        ids: tokens that they belong to; None 0, 1, 2, ...
        total: of all tokens, if `weights` lacks some; None their sum.
    """
    if ids is None:
        begins = np.arange(0, len(weights), BUCKET)
        bucket = _first(np.add.reduceat(weights, begins), BUCKETS_FROM + np.arange(len(begins)), row)
        begin = bucket * BUCKET
        some = weights[begin : begin + BUCKET]
        return begin + _first(some, np.arange(begin, begin + len(some)), row)
    if row.params.top_p < 1:
        cumulative = weights.cumsum()
        limit = row.params.top_p * (cumulative[-1] if total is None else total)
        n_kept = max(int(np.count_nonzero(cumulative - weights < limit)), 1)  # the one that passes top_p is still in
        weights, ids = weights[:n_kept], ids[:n_kept]
    return int(ids[_first(weights, ids, row)])


def _first(weights: np.ndarray, numbers: np.ndarray, row: Row) -> int:
    """The place of the weight whose random number comes first: each with a probability in proportion to it."""
    times = np.log(uniforms(row.params.seed, row.n_drawn, numbers))
    times /= weights
    return int(times.argmax())


def uniforms(seed: int, n: int, numbers: np.ndarray) -> np.ndarray:
    """Of the stream whose seed is number `n` of the stream `seed`, these numbers: above 0 and below 1.

    A stream is SplitMix64 (Steele, Lea and Flood 2014).
    """
    z = numbers.astype(np.uint64)
    z += _ONE
    z *= _STEP_64
    z += np.uint64(_mixed(_mixed(_mixed(seed) + (n + 1) * STREAM_STEP)))
    for shift, factor in _ROUNDS:
        z ^= z >> shift
        z *= factor
    z ^= z >> _LAST_SHIFT
    z >>= _SPARE_BITS
    return (z + 0.5) * 2.0**-52  # of 52 bits: with one more, the last number would be rounded to 1


def _mixed(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _FACTORS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _FACTORS[1]) & _MASK
    return z ^ (z >> 31)


def log_probs(logits: Any, token: int, n_best: int) -> tuple[float, list[tuple[int, float]]]:
    """Logarithms of the model's own probabilities: that of a token, and the `n_best` best ones.

    Args:
        logits: (vocabulary), as the model gives them.
    """
    values = on_host(logits)
    top = values.max()
    below = np.float32(np.log(np.exp(values - top).sum(dtype=np.float64)))
    best, ids = best_of(values[None], max(1, min(n_best, values.size)))
    found = list(zip(ids[0].tolist(), (best[0] - top - below).tolist(), strict=True))
    return float(values[token] - top - below), found[:n_best]


def scores_of(logits: Any, tokens: Sequence[int], n_best: int) -> list[TokenLogprobs]:
    """What `log_probs` gives, of each of several rows; arguments as for `log_probs_of`."""
    if n_best:
        return [log_probs(row, token, n_best) for row, token in zip(on_host(logits), tokens, strict=True)]
    return [(own, []) for own in log_probs_of(logits, tokens).tolist()]


def log_probs_of(logits: Any, tokens: Sequence[int]) -> np.ndarray:
    """Logarithms of the model's own probabilities of one token for each row, float32 (M).

    Args:
        logits: (M, vocabulary), as the model gives them.
        tokens: M of them.
    """
    values = on_host(logits)
    below = values - values.max(axis=1, keepdims=True)
    found = below[np.arange(len(values)), np.asarray(tokens, dtype=np.int64)]
    return found - np.log(np.exp(below).sum(axis=1, dtype=np.float64)).astype(np.float32)
