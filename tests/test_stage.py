"""Stages against litgpt's own model, for every family: logits, and that each peculiarity of a family is really there."""

from __future__ import annotations

import random

import pytest
import torch

from families import CONTEXT, FAMILIES, VOCAB, config_of, model_of, prompt, random_gpt
from loopback import CPU, load_from, stages_of
from mdi.errors import CheckpointError, EngineError
from mdi.model.plain import ModelConfig, spec_of
from mdi.stages.torch_stage import Stage, StarterStage
from tolerance import assert_alike


def run_staggered(stages: list[Stage], texts: list[list[int]], seed: int) -> list[torch.Tensor]:
    """All logits of several texts that travel together in pieces of random length."""
    rng = random.Random(seed)
    done = [0] * len(texts)
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        slices, ids = [], []
        for i, text in enumerate(texts):
            n = min(rng.choice([0, 1, 1, 2, 13, 40]), len(text) - done[i])
            if n:
                slices.append((i, done[i], n))
                ids += text[done[i] : done[i] + n]
                done[i] += n
        if not slices:
            continue
        x = stages[0].embed(torch.tensor(ids))
        for stage in stages:
            x = stage(x, slices)
        row = 0
        for i, _, n in slices:
            logits[i].append(stages[0].head(x[row : row + n]))
            row += n
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_uncached_model(family: str) -> None:
    gpt = model_of(family)
    texts = [prompt(CONTEXT, 1), prompt(1, 2), prompt(70, 3)]
    logits = run_staggered(stages_of(gpt, (1, 3)), texts, seed=4)
    for text, found in zip(texts, logits, strict=True):
        assert_alike(found, gpt(torch.tensor([text]))[0], gpt.config)


# What would be lost if a stage ignored it: the logits must then differ.
PECULIARITIES = [
    ("Llama-3.1-8B", {"rope_adjustments": None}),
    ("deepseek-v3-shape", {"rope_adjustments": None}),
    ("deepseek-v3-shape", {"routed_scaling_factor": 1.0}),
    ("Gemma-2-9b", {"attention_logit_softcapping": None}),
    ("Gemma-2-9b", {"final_logit_softcapping": None}),
    ("Gemma-2-9b", {"sliding_window_size": None}),
    ("Gemma-2-9b", {"attention_scores_scalar": None}),
    ("Gemma-2-9b", {"scale_embeddings": False}),
    ("Gemma-3-1b-it", {"rope_local_base_freq": None, "rope_indices": None}),
    ("Gemma-3-1b-it", {"rope_adjustments": None}),
    ("Gemma-3-1b-it", {"sliding_window_size": None}),
    ("pythia-14m", {"parallel_residual": False}),
    ("pythia-14m", {"rotary_percentage": 1.0}),
]


@pytest.mark.parametrize(("family", "change"), PECULIARITIES)
def test_a_peculiarity_left_out_is_noticed(family: str, change: dict) -> None:
    gpt = model_of(family)
    text = prompt(80, 5)
    without = run_staggered(stages_of(gpt, (2,), config_of(family, **change)), [text], seed=6)[0]
    assert (without - gpt(torch.tensor([text]))[0]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["OLMo-2-1124-7B", "Gemma-2-9b", "Qwen3-0.6B", "deepseek-v3-shape"])
def test_every_norm_weight_matters(family: str) -> None:
    gpt = random_gpt(config_of(family), seed=7)
    text = prompt(30, 8)
    expected = gpt(torch.tensor([text]))[0]
    norms = [name for name, t in gpt.state_dict().items() if t.dim() == 1 and name.endswith("weight")]
    assert norms
    stages = stages_of(gpt, (2,))
    assert_alike(run_staggered(stages, [text], seed=9)[0], expected, gpt.config)
    for name in norms:
        weight = gpt.state_dict()[name]
        kept = weight.clone()
        weight.fill_(1.0)
        load_from(gpt, stages)
        found = run_staggered(stages, [text], seed=9)[0]
        weight.copy_(kept)
        assert (found - expected).abs().max() > 1e-3, name


def test_a_slice_that_starts_earlier_truncates() -> None:
    gpt = model_of("Llama-3.1-8B")
    stage = stages_of(gpt, ())[0]
    assert isinstance(stage, StarterStage)
    first, second = prompt(50, 10), prompt(20, 11)
    stage(stage.embed(torch.tensor(first)), [(0, 0, 50)])
    again = stage.head(stage(stage.embed(torch.tensor(second)), [(0, 30, 20)]))
    whole = gpt(torch.tensor([first[:30] + second]))[0, 30:]
    assert_alike(again, whole, gpt.config)


def test_finished_blocks_are_counted() -> None:
    first, second = stages_of(model_of("Llama-3.1-8B"), (2,))
    for n_frames in (1, 2):
        assert isinstance(first, StarterStage)
        second(first(first.embed(torch.tensor([1, 2])), [(n_frames, 0, 2)]), [(n_frames, 0, 2)])
        assert (first.n_finished, second.n_finished) == (2 * n_frames, (first.spec.n_layer - 2) * n_frames)


def test_a_copied_cache_goes_its_own_way() -> None:
    gpt = model_of("Gemma-2-9b")
    stage = stages_of(gpt, ())[0]
    assert isinstance(stage, StarterStage)
    shared, one, other = prompt(40, 12), prompt(9, 13), prompt(9, 14)
    stage(stage.embed(torch.tensor(shared)), [(0, 0, 40)])
    stage.caches.rearrange((), [(0, 1)])
    x = stage(stage.embed(torch.tensor(one + other)), [(0, 40, 9), (1, 40, 9)])
    for rows, text in ((x[:9], one), (x[9:], other)):
        assert_alike(stage.head(rows), gpt(torch.tensor([shared + text]))[0, 40:], gpt.config)


def test_caches_grow_with_the_tokens_and_are_freed() -> None:
    stage = stages_of(model_of("Gemma-2-9b"), ())[0]
    assert isinstance(stage, StarterStage)
    text = prompt(CONTEXT, 15)
    for start in range(0, CONTEXT, 8):
        stage(stage.embed(torch.tensor(text[start : start + 8])), [(3, start, 8)])
    full, windowed = sorted(stage.caches.classes, key=lambda c: c.window or 0)
    assert full.window is None and windowed.window == stage.spec.blocks[0].mixer.window
    assert stage.caches.n_bytes <= full.n_bytes(CONTEXT) + windowed.n_bytes(CONTEXT, 8)
    stage.caches.free(3)
    stage.caches.free(99)
    assert len(stage.caches) == 0 and stage.caches.n_bytes == 0


def test_a_gap_and_a_cut_beyond_the_window_are_refused() -> None:
    stage = stages_of(model_of("Gemma-2-9b"), ())[0]
    assert isinstance(stage, StarterStage)
    with pytest.raises(EngineError) as e:
        stage(stage.embed(torch.tensor(prompt(2, 0))), [(0, 5, 2)])
    assert "position 5" in str(e.value) and e.value.code == "engine"
    for start in range(0, CONTEXT, 32):
        stage(stage.embed(torch.tensor(prompt(32, start))), [(1, start, 32)])
    with pytest.raises(EngineError) as e:
        stage(stage.embed(torch.tensor(prompt(1, 0))), [(1, 20, 1)])
    assert "window" in str(e.value) and e.value.code == "engine"
    with pytest.raises(EngineError) as e:
        stage(stage.embed(torch.tensor(prompt(1, 0))), [(1, CONTEXT, 1)])
    assert str(CONTEXT) in str(e.value) and e.value.code == "engine"


def test_missing_unknown_and_misshapen_tensors_are_named() -> None:
    gpt = model_of("Llama-3.1-8B")
    weights = dict(gpt.state_dict())
    config = ModelConfig.from_litgpt(gpt.config)
    of_block = {k: v for k, v in weights.items() if k.startswith("transformer.h.2.")}
    with pytest.raises(CheckpointError) as e:
        lacking = {k: v for k, v in of_block.items() if not k.endswith("mlp.proj.weight")}
        Stage(spec_of(config), 2, 3).load(["block.2"], lambda _: lacking, CPU, torch.float32)
    assert "mlp.proj.weight" in str(e.value)
    with pytest.raises(CheckpointError) as e:
        Stage(spec_of(config), 2, 3).load(["block.2"], lambda _: weights, CPU, torch.float32)
    assert "lm_head.weight" in str(e.value)
    with pytest.raises(CheckpointError) as e:
        wrong = {**of_block, "transformer.h.2.attn.proj.weight": torch.zeros(3, VOCAB)}
        Stage(spec_of(config), 2, 3).load(["block.2"], lambda _: wrong, CPU, torch.float32)
    assert "attn.proj.weight" in str(e.value)
