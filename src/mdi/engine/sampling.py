"""From logits to one token id per row. No state: draw number n of a sequence follows from its seed and n alone.

So a text is the same in any company, over any nodes, and after it was computed again from its token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mdi.engine.sequence import SamplingParams

LEAST_TEMPERATURE = 1e-30  # below it, all but the best token have no chance in float32
_MASK = (1 << 64) - 1


def seed_of(seed: int, index: int) -> int:
    """Seed of sample `index` of a run: samples of the same prompt must differ, runs of the same seed must not."""
    return (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) % (1 << 63)


def uniform(seed: int, n: int) -> float:
    """Number `n` of the stream `seed`, from 0 on and below 1: SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (_mixed(seed & _MASK) + (n + 1) * 0x9E3779B97F4A7C15) & _MASK
    return (_mixed(z) >> 11) / (1 << 53)


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    """One token per row.

    Args:
        logits: (M, vocabulary), on any device.
        rows: M pairs: the parameters of the row's sequence, and how many tokens it has drawn before.
    """
    tokens = [0] * len(rows)
    if any(params.temperature == 0 for params, _ in rows):
        tokens = logits.argmax(dim=-1).tolist()
    for i, (params, n_drawn) in enumerate(rows):
        if params.temperature > 0:
            tokens[i] = _draw(logits[i], params, uniform(params.seed, n_drawn))
    return tokens


def _draw(logits: torch.Tensor, params: SamplingParams, u: float) -> int:
    """Temperature, then top-k, then top-p, then the inverse of the cumulative distribution at `u`."""
    k = min(params.top_k or logits.numel(), logits.numel())
    values, ids = torch.topk(logits.float(), k)  # sorted, the most probable first
    # The largest is subtracted first: divided by a tiny temperature it would be infinite, and by one that float32 cannot
    # hold, no number.
    probs = torch.softmax((values - values[0]) / max(params.temperature, LEAST_TEMPERATURE), dim=-1).cpu()
    cumulative = probs.cumsum(dim=-1)
    if params.top_p < 1:
        n_kept = int((cumulative - probs < params.top_p).sum())  # the token that passes top_p is still in
        cumulative = cumulative[: max(1, n_kept)]
    choice = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return int(ids[min(choice, cumulative.numel() - 1)])
