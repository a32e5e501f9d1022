"""Tiny models in the kernels: their blocks, and what comes out of them for texts in pieces."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from forced import forced
from litgpt.model import GPT

from families import CONTEXT, FAMILIES, model_of, prompt
from mdi.kernels.blocks import Blocks, Context, why_not_in_kernels
from mdi.kernels.layout import Matrix, pack
from mdi.model.plain import ModelConfig, spec_of

KNOWN = [f for f in FAMILIES if why_not_in_kernels(ModelConfig.from_litgpt(model_of(f).config)) is None]
Tensors = dict[str, Matrix | np.ndarray]
TEXTS = [prompt(CONTEXT, 1), prompt(1, 2), prompt(70, 3)]


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name


def tensors_of(gpt: GPT, block: int, form: str) -> Tensors:
    found: Tensors = {}
    for name, tensor in gpt.transformer.h[block].state_dict().items():
        weight = tensor.float().numpy()
        router = name == "mlp.gate.weight"
        found[name] = pack("float32" if router else form, weight) if is_linear(name) else weight
    return found


def blocks_of(
    gpt: GPT, form: str = "float32", cache_type: str = "float32", n_threads: int = 1, force: str = "",
    changed: Callable[[int, Tensors], None] = lambda block, tensors: None,
) -> Blocks:  # fmt: skip
    """
    Args:
        force: the instruction set; none is the best one.
        changed: changes the tensors of a block in place.
    """

    def tensors(block: int) -> Tensors:
        found = tensors_of(gpt, block, form)
        changed(block, found)
        return found

    with forced(force):
        context = Context(n_threads)
    config = ModelConfig.from_litgpt(gpt.config)
    blocks = Blocks(spec_of(config), 0, config.n_layer, tensors, cache_type, context)
    blocks.prepare(CONTEXT, [64] * len(blocks.classes))
    return blocks


def embedded(gpt: GPT, ids: Sequence[int]) -> np.ndarray:
    x = gpt.transformer.wte(torch.tensor(ids))
    return (x * gpt.config.n_embd**0.5 if gpt.config.scale_embeddings else x).numpy()


def run(blocks: Blocks, gpt: GPT, texts: Sequence[Sequence[int]], seed: int | None) -> list[np.ndarray]:
    """What comes out of the blocks for all rows of several texts, in pieces of random length; with seed None all at once."""
    rng = random.Random(seed)
    done = [0] * len(texts)
    rows: list[list[np.ndarray]] = [[] for _ in texts]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        slices, x = [], []
        for i, text in enumerate(texts):
            n = len(text) - done[i]
            n = n if seed is None else min(n, rng.choice([0, 1, 1, 2, 5, 13, 40]))
            if n:
                slices.append((i, done[i], n))
                x.append(embedded(gpt, text[done[i] : done[i] + n]))
                done[i] += n
        if not slices:
            continue
        frame = np.ascontiguousarray(np.concatenate(x))
        blocks.forward(frame, slices)
        first = 0
        for i, _, n in slices:
            rows[i].append(frame[first : first + n])
            first += n
    return [np.concatenate(r) for r in rows]


def logits(gpt: GPT, rows: np.ndarray) -> torch.Tensor:
    y = gpt.lm_head(gpt.transformer.ln_f(torch.from_numpy(rows)))
    cap = gpt.config.final_logit_softcapping
    return y if cap is None else torch.tanh(y / cap) * cap
