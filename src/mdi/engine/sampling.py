"""From logits to one token id per row. No state: draw number n of a sequence follows from its seed and n alone.

Rows that are drawn in the same way are drawn together. What comes of a row does not depend on which others those are: nothing
is summed over more than the row's own numbers, in their own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mdi.engine.seeds import uniform
from mdi.engine.sequence import SamplingParams

LEAST_TEMPERATURE = 1e-30  # below it, all but the best token have no chance in float32
FIRST_BEST = 1024  # of a vocabulary in order; more are only looked at if they do not have the top_p together


class Row(NamedTuple):
    """How one row is drawn.

    Attributes:
        n_drawn: how many tokens its sequence has drawn before.
        ids: of the sequence so far, prompt included, for penalties.
        n_prompt: how many of them are the prompt.
        allowed: bool (vocabulary); None are all tokens.
    """

    params: SamplingParams
    n_drawn: int
    ids: Sequence[int] = ()
    n_prompt: int = 0
    allowed: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the model's logits are taken as they are."""
        return self.allowed is None and not self.params.changes_logits


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[Row | tuple[SamplingParams, int]]) -> list[int]:
    """One token per row.

    Args:
        logits: (M, vocabulary), on any device.
        rows: M of them.
    """
    asked = [Row(*row) for row in rows]
    logits = adjusted(logits, asked)
    tokens = [0] * len(asked)
    groups: dict[tuple[int | None, bool], list[int]] = {}
    for i, row in enumerate(asked):
        if row.params.temperature > 0:
            top_k = row.params.top_k
            is_all = top_k is None or top_k >= logits.size(1)
            groups.setdefault((None if is_all else top_k, row.params.top_p < 1), []).append(i)
    if sum(map(len, groups.values())) < len(asked):
        tokens = logits.argmax(dim=-1).tolist()
    for (top_k, is_cut), members in groups.items():
        own = logits if len(members) == len(asked) else logits[members]
        drawn = _draw(own.float(), [asked[i] for i in members], top_k, is_cut)
        for i, token in zip(members, drawn, strict=True):
            tokens[i] = token
    return tokens


def adjusted(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Logits after what the rows ask for beside the model's opinion; the same object if none asks for anything."""
    if all(row.is_plain for row in rows):
        return logits
    changed = logits.float().clone()
    for i, row in enumerate(rows):
        if not row.is_plain:
            _adjust(changed[i], row)
    return changed


def _adjust(logits: torch.Tensor, row: Row) -> None:
    """Penalties, biases and what is allowed, in place, of one row."""
    params, device = row.params, logits.device
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.ids)), dtype=torch.long, device=device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        written = torch.tensor(row.ids[row.n_prompt :], dtype=torch.long, device=device)
        counts = torch.bincount(written, minlength=logits.numel())[: logits.numel()].to(logits.dtype)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    for token, bias in params.logit_bias:
        if token < logits.numel():
            logits[token] += bias
    if row.allowed is not None:
        logits.masked_fill_(~row.allowed.to(device), float("-inf"))


def _draw(logits: torch.Tensor, rows: Sequence[Row], top_k: int | None, is_cut: bool) -> list[int]:
    """Temperature, then top-k, then min-p, then top-p, then the inverse of the cumulative distribution.

    Args:
        logits: (M, vocabulary), float32.
        is_cut: whether top_p leaves tokens out.
    """
    n = logits.size(1)
    if top_k is None and not is_cut:  # any order does
        return _choose(_weights(logits, logits.amax(dim=-1, keepdim=True), rows), None, rows)
    k = min(top_k or n, n)
    if top_k is None and n > FIRST_BEST:
        return _draw_of_best(logits, rows)
    values, ids = torch.topk(logits, k)  # sorted, the most probable first
    return _choose(_weights(values, values[:, :1], rows), ids, rows)


def _draw_of_best(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """As `_draw` among all tokens with a top_p, but most rows have it together in their first best tokens."""
    best = logits.amax(dim=-1, keepdim=True)
    totals = _weights(logits, best, rows).cumsum(dim=-1)[:, -1]
    values, ids = torch.topk(logits, FIRST_BEST)
    weights = _weights(values, best, rows)
    limits = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64)
    reached = (weights.cumsum(dim=-1)[:, -1] >= limits * totals).tolist()
    tokens = []
    for i, row in enumerate(rows):
        if reached[i]:
            tokens += _choose(weights[i : i + 1], ids[i : i + 1], [row], totals[i : i + 1])
        else:
            every, order = torch.sort(logits[i : i + 1], dim=-1, descending=True, stable=True)
            tokens += _choose(_weights(every, best[i : i + 1], [row]), order, [row])
    return tokens


def _weights(values: torch.Tensor, best: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Probabilities up to a factor, float64 (M, n) in the machine's memory, those below min_p 0; that of the best token is 1.

    The largest is subtracted first: divided by a tiny temperature it would be infinite, and by one that float32 cannot hold, no
    number.
    """
    temperatures = [max(row.params.temperature, LEAST_TEMPERATURE) for row in rows]
    scale = torch.tensor(temperatures, dtype=torch.float32, device=values.device)[:, None]
    weights = torch.exp((values - best) / scale).cpu().double()
    if any(row.params.min_p for row in rows):
        least = torch.tensor([row.params.min_p for row in rows], dtype=torch.float64)[:, None]
        weights = weights.masked_fill(weights < least, 0.0)
    return weights


def _choose(
    weights: torch.Tensor, ids: torch.Tensor | None, rows: Sequence[Row], totals: torch.Tensor | None = None
) -> list[int]:
    """Where the random number of each row falls.

    Args:
        weights: (M, n); where a row has a top_p, the largest first.
        ids: tokens that they belong to; None 0, 1, 2, ...
        totals: (M) of all tokens, if `weights` lacks some; None the sums.
    """
    cumulative = weights.cumsum(dim=-1)
    ends = cumulative[:, -1]
    if any(row.params.top_p < 1 for row in rows):
        limits = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64) * (
            ends if totals is None else totals
        )
        n_kept = (
            (cumulative - weights < limits[:, None]).sum(dim=-1).clamp(min=1)
        )  # the one that passes top_p is still in
        ends = cumulative.gather(1, n_kept[:, None] - 1)[:, 0]
    draws = torch.tensor([uniform(row.params.seed, row.n_drawn) for row in rows], dtype=torch.float64)
    targets = torch.minimum(draws * ends, torch.nextafter(ends, torch.zeros_like(ends)))
    places = torch.searchsorted(cumulative, targets[:, None], right=True)
    tokens: list[int] = (places if ids is None else ids.cpu().gather(1, places))[:, 0].tolist()
    return tokens


@torch.inference_mode()
def log_probs(logits: torch.Tensor, token: int, n_best: int) -> tuple[float, list[tuple[int, float]]]:
    """Logarithms of the model's own probabilities: that of a token, and the `n_best` best ones.

    Args:
        logits: (vocabulary), as the model gives them.
    """
    values = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(values, min(n_best, values.numel()))
    return float(values[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
