"""What only some families have, in the kernels against litgpt's own model: leaving it out must change the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forced import forced, instruction_sets
from kernel_models import KNOWN, TEXTS, Tensors, blocks_of, logits, run
from litgpt.model import GPT

from families import config_of, model_of, random_gpt
from mdi.kernels import library
from mdi.kernels.blocks import Context, Head
from mdi.kernels.layout import bf16_from_float32, float32_from_bf16, pack
from mdi.model.plain import ModelConfig, spec_of
from tolerance import assert_alike

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")


@pytest.mark.parametrize(
    "family, changes",
    [
        ("Llama-3.1-8B", {"rope_interleave": True}),
        ("pythia-14m", {"rope_interleave": True}),  # a part of each head
        ("Mixtral-8x7B-v0.1", {"routed_scaling_factor": 2.5}),
        ("Mixtral-8x7B-v0.1", {"routed_scaling_factor": 0.5, "n_shared_expert": 1, "moe_intermediate_size": 24}),
        ("Mixtral-8x7B-v0.1", {"n_expert_per_token": 1}),
        ("Qwen3-30B-A3B", {"first_k_dense_replace": 2}),
        ("Gemma-2-9b", {"attention_logit_softcapping": 2.0}),
    ],
)
def test_settings_that_no_familys_table_has(family: str, changes: dict[str, Any]) -> None:
    gpt = random_gpt(config_of(family, **changes))
    for text, rows in zip(TEXTS, run(blocks_of(gpt), gpt, TEXTS, seed=4), strict=True):
        assert_alike(logits(gpt, rows), gpt(torch.tensor([text]))[0], gpt.config)


@pytest.mark.parametrize("force", instruction_sets())
@pytest.mark.parametrize("family", KNOWN)
def test_the_head_gives_the_models_logits(family: str, force: str) -> None:
    """Also Gemma 2's soft cap of logits, which leaves the best token the best one."""
    gpt = model_of(family)
    parts = {"lm_head": gpt.lm_head, "transformer.ln_f": gpt.transformer.ln_f}
    state = {f"{path}.{n}": t.numpy() for path, part in parts.items() for n, t in part.state_dict().items()}
    state["lm_head.weight"] = pack("float32", state["lm_head.weight"])
    with forced(force):
        head = Head(spec_of(ModelConfig.from_litgpt(gpt.config)), state, gpt.config.padded_vocab_size, Context())
    rows = 3 * torch.randn((9, gpt.config.n_embd), generator=torch.Generator().manual_seed(1))
    assert_alike(torch.from_numpy(head(rows.numpy())), logits(gpt, rows.numpy()), gpt.config)


@pytest.mark.parametrize("force", instruction_sets())
def test_of_equal_scores_the_experts_with_lower_numbers_are_chosen(force: str) -> None:
    config = config_of("Mixtral-8x7B-v0.1", n_expert=4)
    gpt = random_gpt(config)
    for block in gpt.transformer.h:
        block.mlp.gate.weight.zero_()
    few = GPT(config_of("Mixtral-8x7B-v0.1", n_expert=2)).eval().requires_grad_(False)
    state = gpt.state_dict()
    few.load_state_dict({n: state[n][:2] if n.endswith("gate.weight") else state[n] for n in few.state_dict()})
    found = logits(gpt, run(blocks_of(gpt, force=force), gpt, [TEXTS[2]], seed=1)[0])
    assert_alike(found, few(torch.tensor([TEXTS[2]]))[0], config)


def attended(
    gpt: GPT, qkv: np.ndarray, cache_type: str, rows: np.ndarray, force: str, bias: np.ndarray | None = None
) -> np.ndarray:
    """What the heads of the first block make of rows, (N, n_embd), without a projection behind them."""

    def plain(block: int, tensors: Tensors) -> None:
        tensors["attn.qkv.weight"] = pack("float32", qkv)
        if bias is not None:
            tensors["attn.qkv.bias"] = bias
        tensors["attn.proj.weight"] = pack("float32", np.eye(gpt.config.n_embd, dtype=np.float32))

    blocks = blocks_of(gpt, cache_type=cache_type, force=force, changed=plain)
    return blocks.half(0, 0, rows, [(0, 0, len(rows))])


def random_rows(n: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


@pytest.mark.parametrize("force", instruction_sets())
def test_caches_hold_the_nearest_number_of_their_type(force: str) -> None:
    """A first row sees its own value alone."""
    gpt = model_of("Llama-3.1-8B")
    qkv = random_rows(80, 48, 1)
    for seed in range(20):
        row = random_rows(1, 48, seed)
        exact = attended(gpt, qkv, "float32", row, force)
        assert np.array_equal(attended(gpt, qkv, "bf16", row, force), float32_from_bf16(bf16_from_float32(exact)))
        assert np.array_equal(attended(gpt, qkv, "fp16", row, force), exact.astype(np.float16).astype(np.float32))
        heads = exact.reshape(6, 8)
        error = np.abs(attended(gpt, qkv, "int8", row, force).reshape(6, 8) - heads).max(axis=1)
        assert np.all(error <= 0.501 * np.abs(heads).max(axis=1) / 127)


@pytest.mark.parametrize("force", instruction_sets())
def test_caches_in_bfloat16_round_ties_to_even(force: str) -> None:
    values = np.array(
        [1 + n * 2.0**-8 for n in range(1, 17, 2)], dtype=np.float32
    )  # each between two numbers of bfloat16
    bias = np.concatenate([np.zeros(64, dtype=np.float32), values, -values])
    nothing = np.zeros((80, 48), dtype=np.float32)
    found = attended(model_of("Llama-3.1-8B"), nothing, "bf16", random_rows(1, 48, 1), force, bias)
    even = np.array([1 + n * 2.0**-8 for n in (0, 4, 4, 8, 8, 12, 12, 16)], dtype=np.float32)
    assert np.array_equal(found.reshape(6, 8), np.concatenate([np.tile(even, (3, 1)), np.tile(-even, (3, 1))]))


@pytest.mark.parametrize("force", instruction_sets())
def test_int8_caches_lose_nothing_of_numbers_of_one_size(force: str) -> None:
    """All numbers of a key have the size of its largest one, which int8 holds: then only the scales decide."""
    gpt = random_gpt(config_of("tiny-llama-1.1b", rope_condense_ratio=10**9))  # positions turn nothing
    sign = np.sign(random_rows(48, 1, 1))
    qkv = random_rows(96, 48, 2)
    for group in range(6):  # three of keys, three of values
        at = 48 + 8 * group
        qkv[at : at + 8] = sign[at - 48 : at - 40] * qkv[at]
    rows = random_rows(50, 48, 3)
    exact = attended(gpt, qkv, "float32", rows, force)
    found = attended(gpt, qkv, "int8", rows, force)
    assert np.linalg.norm(found - exact) < 1e-4 * np.linalg.norm(exact)
    assert np.abs(exact - exact.mean(axis=0)).max() > 0.1  # rows see different mixtures
