"""One way to run the blocks of a model wherever they can be computed: the kernels, torch on the CPU, torch on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

import pytest
import torch
from kernel_models import blocks_of
from litgpt.model import GPT

from families import CONTEXT
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.pages import CachePages
from mdi.kernels.slices import Slices
from mdi.stages.torch_cache import TORCH_TYPES
from mdi.stages.torch_stage import Stage


class Backend(Protocol):
    """All blocks of a model, with caches for texts of CONTEXT tokens.

    Attributes:
        caches: append and truncate with each batch, by the positions of its slices; copy, free, and count bytes when asked.
    """

    caches: CachePages

    def __call__(self, x: torch.Tensor, slices: Slices) -> torch.Tensor:
        """The rows (N, n_embd) of all slices, float32 on the CPU -> the same rows after the last block"""


class Kernels:
    def __init__(self, gpt: GPT, cache_type: str) -> None:
        if why := why_not_in_kernels(asdict(gpt.config)):
            pytest.skip(f"not in the kernels: {why}")
        self._blocks = blocks_of(gpt, cache_type=cache_type)
        self.caches = self._blocks.caches

    def __call__(self, x: torch.Tensor, slices: Slices) -> torch.Tensor:
        rows = x.numpy().copy()
        self._blocks.forward(rows, slices)
        return torch.from_numpy(rows)


class Torch:
    def __init__(self, gpt: GPT, cache_type: str, device: str) -> None:
        self._device, n_layer = torch.device(device), gpt.config.n_layer
        self._stage = Stage(gpt.config, 0, n_layer)
        wanted = {name: weight for name, weight in gpt.state_dict().items() if name in self._stage.state_dict()}
        self._stage.load(["all"], lambda _: wanted, self._device, torch.float32)
        self._stage.prepare(CONTEXT, self._device, TORCH_TYPES[cache_type])
        self.caches = self._stage.caches

    def __call__(self, x: torch.Tensor, slices: Slices) -> torch.Tensor:
        rows: torch.Tensor = self._stage(x.to(self._device), slices)
        return rows.cpu()


def _cuda(gpt: GPT, cache_type: str) -> Backend:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Torch(gpt, cache_type, "cuda:0")


MAKERS: dict[str, Callable[[GPT, str], Backend]] = {
    "kernels": Kernels,
    "torch": lambda gpt, cache_type: Torch(gpt, cache_type, "cpu"),
    "cuda": _cuda,
}
ALL = [*(name for name in MAKERS if name != "cuda"), pytest.param("cuda", marks=pytest.mark.gpu)]


def embedded(gpt: GPT, ids: Sequence[int]) -> torch.Tensor:
    x = gpt.transformer.wte(torch.tensor(ids))
    return x * gpt.config.n_embd**0.5 if gpt.config.scale_embeddings else x


def logits(gpt: GPT, rows: torch.Tensor) -> torch.Tensor:
    y = gpt.lm_head(gpt.transformer.ln_f(rows))
    cap = gpt.config.final_logit_softcapping
    return y if cap is None else torch.tanh(y / cap) * cap
