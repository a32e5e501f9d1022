"""From logits to one token id per sequence, each drawn with the sequence's own generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mdi.engine.sequence import SamplingParams


def seed_of(seed: int, index: int) -> int:
    """Seed of sample `index` of a run: samples of the same prompt must differ, runs of the same seed must not."""
    return (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) % (1 << 63)


class Sampler:
    """One per run: keeps the generators of the sequences that are in flight."""

    def __init__(self) -> None:
        self._generators: dict[int, torch.Generator] = {}

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, who: Sequence[tuple[int, SamplingParams]]) -> list[int]:
        """One token per row.

        Args:
            logits: (M, vocabulary), on any device.
            who: seq_id and parameters, row by row.
        """
        greedy = [i for i, (_, params) in enumerate(who) if params.temperature == 0]
        tokens = [0] * len(who)
        if greedy:
            best = logits.argmax(dim=-1).tolist()
            for i in greedy:
                tokens[i] = best[i]
        for i, (seq_id, params) in enumerate(who):
            if params.temperature > 0:
                tokens[i] = self._draw(logits[i], params, self._generator(seq_id, params.seed))
        return tokens

    def forget(self, seq_id: int) -> None:
        self._generators.pop(seq_id, None)

    def _generator(self, seq_id: int, seed: int) -> torch.Generator:
        if seq_id not in self._generators:
            self._generators[seq_id] = torch.Generator().manual_seed(seed)
        return self._generators[seq_id]

    @staticmethod
    def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
        """Temperature, then top-k, then top-p, then one draw by inversion of the cumulative distribution."""
        k = min(params.top_k or logits.numel(), logits.numel())
        values, ids = torch.topk(logits.float(), k)  # sorted, the most probable first
        # The largest is subtracted first: divided by a tiny temperature it would be infinite.
        probs = torch.softmax((values - values[0]) / params.temperature, dim=-1).cpu()
        cumulative = probs.cumsum(dim=-1)
        if params.top_p < 1:
            n_kept = int((cumulative - probs < params.top_p).sum())  # the token that passes top_p is still in
            cumulative = cumulative[:n_kept]
        u = torch.rand((), generator=generator) * cumulative[-1]
        choice = min(int(torch.searchsorted(cumulative, u, right=True)), cumulative.numel() - 1)
        return int(ids[choice])
