"""The stages that a node computes with, by the protocol that its engine has: the kernels, torch on the CPU, torch on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from kernel_models import tensors_of
from litgpt.model import GPT

from families import CONTEXT
from mdi.engine.worker import Backend
from mdi.host.computing import Computing
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.pages import CachePages
from mdi.kernels.slices import Slices
from mdi.model.plain import ModelConfig, spec_of
from mdi.net.wire import Frame, FrameType
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.torch_stage import Stage, TorchStage


class Loaded:
    """All blocks of a model, with caches for texts of CONTEXT tokens; rows go in and out as frames bring and carry them."""

    def __init__(self, stage: Backend) -> None:
        self.stage = stage
        stage.prepare(CONTEXT)

    @property
    def caches(self) -> CachePages:
        """Append and truncate with each batch, by the positions of its slices; copy, free, and count bytes when asked."""
        return self.stage.caches

    def __call__(self, x: torch.Tensor, slices: Slices) -> torch.Tensor:
        """The rows (N, n_embd) of all slices, float32 on the CPU -> the same rows after the last block"""
        stage, (n_rows, n_cols) = self.stage, x.shape
        data = bytearray(x.contiguous().numpy().tobytes())
        frame = Frame(FrameType.BATCH, 0, 0, "float32", n_rows, n_cols, payload=data)
        dtype, found = stage.rows.payload(stage(stage.rows.read(frame, n_cols), slices), "auto")
        assert dtype == "float32"
        return torch.from_numpy(np.frombuffer(found, dtype=np.float32).reshape(n_rows, n_cols).copy())


def _kernels(gpt: GPT, cache_type: str) -> Backend:
    config = ModelConfig.from_litgpt(gpt.config)
    if why := why_not_in_kernels(config):
        pytest.skip(f"not in the kernels: {why}")
    n_layer = gpt.config.n_layer
    tensors = [tensors_of(gpt, i, "float32") for i in range(n_layer)]
    parts = {
        f"block.{i}": {f"transformer.h.{i}.{name}": w for name, w in found.items()} for i, found in enumerate(tensors)
    }
    return KernelStage(
        spec_of(ModelConfig.from_litgpt(gpt.config)),
        0,
        n_layer,
        Resident(parts, parts.__getitem__),
        cache_type=cache_type,
    )


def _torch(gpt: GPT, cache_type: str, device: str = "cpu") -> Backend:
    inner = Stage(spec_of(ModelConfig.from_litgpt(gpt.config)), 0, gpt.config.n_layer)
    stage = TorchStage(inner, Computing(device, "float32"), cache_type, "float32")
    wanted = {name: weight for name, weight in gpt.state_dict().items() if name in inner.state_dict()}
    stage.load(["all"], lambda _: wanted)
    return stage


def _cuda(gpt: GPT, cache_type: str) -> Backend:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return _torch(gpt, cache_type, "cuda:0")


MAKERS: dict[str, Callable[[GPT, str], Loaded]] = {
    name: lambda gpt, cache_type, make=make: Loaded(make(gpt, cache_type))  # type: ignore[misc]
    for name, make in (("kernels", _kernels), ("torch", _torch), ("cuda", _cuda))
}
ALL = [*(name for name in MAKERS if name != "cuda"), pytest.param("cuda", marks=pytest.mark.gpu)]


def embedded(gpt: GPT, ids: Sequence[int]) -> torch.Tensor:
    x = gpt.transformer.wte(torch.tensor(ids))
    return x * gpt.config.n_embd**0.5 if gpt.config.scale_embeddings else x


def logits(gpt: GPT, rows: torch.Tensor) -> torch.Tensor:
    y = gpt.lm_head(gpt.transformer.ln_f(rows))
    cap = gpt.config.final_logit_softcapping
    return y if cap is None else torch.tanh(y / cap) * cap
