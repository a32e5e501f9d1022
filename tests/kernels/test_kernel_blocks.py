"""Blocks in the kernels against litgpt's own model, and their promise of equal bits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from forced import instruction_sets
from kernel_models import KNOWN, TEXTS, blocks_of, embedded, is_linear, logits, run, tensors_of
from litgpt.model import GPT

from families import CONTEXT, FAMILIES, model_of
from mdi.errors import EngineError, KernelError
from mdi.kernels import library
from mdi.kernels.blocks import Blocks, Context, Head, Linear, why_not_in_kernels
from mdi.kernels.layout import Matrix, pack, unpack
from mdi.kernels.weight_formats import ROUNDED
from mdi.model.plain import ModelConfig, spec_of
from tolerance import assert_alike

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")


@pytest.mark.parametrize("family", KNOWN)
def test_logits_equal_the_uncached_model(family: str) -> None:
    gpt = model_of(family)
    for text, rows in zip(TEXTS, run(blocks_of(gpt), gpt, TEXTS, seed=4), strict=True):
        assert_alike(logits(gpt, rows), gpt(torch.tensor([text]))[0], gpt.config)


def test_all_families_but_those_with_latent_attention_are_known() -> None:
    assert set(FAMILIES) - set(KNOWN) == {"deepseek-v3-shape"}


FEW = ["Llama-3.1-8B", "pythia-14m", "falcon-7b", "Gemma-2-9b", "Mixtral-8x7B-v0.1", "OLMo-2-1124-7B"]


@pytest.mark.parametrize("force", instruction_sets())
@pytest.mark.parametrize("form", ["float32", "bf16", "fp16", "int8", "int4", "mxfp4"])
def test_weight_formats_equal_their_unpacked_weights(form: str, force: str) -> None:
    """As close to litgpt with the rounded weights as the rounding of activations to bytes allows."""
    gpt = model_of("Llama-3.1-8B")
    rounded = GPT(gpt.config).eval()
    state = gpt.state_dict()
    for name, tensor in state.items():
        if is_linear(name) and ".h." in name:
            state[name] = torch.from_numpy(unpack(pack(form, tensor.numpy())))
    rounded.load_state_dict(state)
    text = TEXTS[0]
    with torch.no_grad():
        expected = rounded(torch.tensor([text]))[0]
    found = logits(gpt, run(blocks_of(gpt, form, force=force), gpt, [text], seed=1)[0])
    if form in ROUNDED:
        error = (found - expected).norm() / expected.norm()
        assert error < 0.05
    else:
        assert_alike(found, expected, gpt.config)


@pytest.mark.parametrize("cache_type, allowed", [("bf16", 0.02), ("fp16", 0.003), ("int8", 0.03)])
def test_smaller_caches_lose_little(cache_type: str, allowed: float) -> None:
    gpt = model_of("Llama-3.1-8B")
    exact = run(blocks_of(gpt), gpt, TEXTS, seed=2)
    rough = run(blocks_of(gpt, cache_type=cache_type), gpt, TEXTS, seed=2)
    for a, b in zip(exact, rough, strict=True):
        assert 0 < np.linalg.norm(a - b) < allowed * np.linalg.norm(a)


@pytest.mark.parametrize("form", ["float32", "bf16", "fp16", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("family", FEW)
def test_cuts_batches_and_threads_change_no_bit(family: str, form: str) -> None:
    gpt = model_of(family)
    cache_type = {"float32": "float32", "bf16": "bf16", "fp16": "fp16"}.get(form, "int8")
    together = run(blocks_of(gpt, form, cache_type), gpt, TEXTS, seed=None)
    for n_threads, seed in ((1, 5), (3, 6), (2, None)):
        again = run(blocks_of(gpt, form, cache_type, n_threads), gpt, TEXTS, seed=seed)
        for a, b in zip(together, again, strict=True):
            assert a.tobytes() == b.tobytes()
    alone = run(blocks_of(gpt, form, cache_type), gpt, TEXTS[2:], seed=7)
    assert alone[0].tobytes() == together[2].tobytes()


@pytest.mark.parametrize("form", ["float32", "bf16", "fp16", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("force", instruction_sets()[1:-1])
def test_instruction_sets_give_the_same_bits(force: str, form: str) -> None:
    for family in FEW:
        gpt = model_of(family)
        best = run(blocks_of(gpt, form), gpt, TEXTS, seed=None)
        other = run(blocks_of(gpt, form, force=force), gpt, TEXTS, seed=None)
        for a, b in zip(best, other, strict=True):
            assert a.tobytes() == b.tobytes(), family


def test_large_numbers_keep_the_precision_of_the_others() -> None:
    """A few input channels that are thirty times larger than the rest, as language models have them."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 512)).astype(np.float32) * 0.02
    x = rng.standard_normal((5, 512)).astype(np.float32)
    loud = [3, 200, 201, 511]
    x[:, loud] *= 30
    weight[:, loud] /= 30
    for form, allowed in (("int8", 0.02), ("int4", 0.15), ("mxfp4", 0.2)):
        packed = pack(form, weight)
        exact = x.astype(np.float64) @ unpack(packed).astype(np.float64).T
        found = multiplied(packed, x)
        assert np.linalg.norm(found - exact) < 0.013 * np.linalg.norm(exact)
        whole = x.astype(np.float64) @ weight.astype(np.float64).T
        assert np.linalg.norm(found - whole) < allowed * np.linalg.norm(whole)


def multiplied(matrix: Matrix, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    return Linear(Context(), matrix, bias)(x)


@pytest.mark.parametrize("cache_type", ["float32", "bf16", "fp16", "int8"])
def test_prompts_in_chunks_of_any_size_have_the_same_bits(cache_type: str) -> None:
    gpt = model_of("Llama-3.1-8B")
    ids = [i % gpt.config.vocab_size for i in range(300)]
    found = set()
    for n in (1, 7, 64, 256):
        blocks, rows = blocks_of(gpt, cache_type=cache_type), []
        blocks.prepare(len(ids), [64] * len(blocks.classes))
        for start in range(0, len(ids), n):
            rows.append(np.ascontiguousarray(embedded(gpt, ids[start : start + n])))
            blocks.forward(rows[-1], [(0, start, len(rows[-1]))])
        found.add(np.concatenate(rows).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("shape", [(1, 1), (5, 130), (16, 64), (33, 257), (100, 1000)])
@pytest.mark.parametrize("form", ["float32", "bf16", "fp16", "int8", "int4", "mxfp4"])
def test_ragged_shapes_of_one_layer(form: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    packed = pack(form, rng.standard_normal(shape).astype(np.float32))
    bias = rng.standard_normal(shape[0]).astype(np.float32)
    for n_rows in (1, 2, 3, 7, 8, 9, 20):
        x = rng.standard_normal((n_rows, shape[1])).astype(np.float32)
        exact = x.astype(np.float64) @ unpack(packed).astype(np.float64).T + bias
        error = np.linalg.norm(multiplied(packed, x, bias) - exact) / np.linalg.norm(exact)
        assert error < (0.02 if form in ROUNDED else 1e-6)


def test_functions_are_as_exact_as_float32_allows() -> None:
    loaded = library.load()
    assert loaded is not None
    x = np.concatenate([np.linspace(-30, 30, 20001), [0, 1e-9, -1e-4, 0.1, -0.3, 87, -100]]).astype(np.float32)
    t = torch.from_numpy(x).double()
    exact = [
        t.exp(), t.tanh(), t.erf(), torch.nn.functional.silu(t), torch.nn.functional.gelu(t),
        torch.nn.functional.gelu(t, approximate="tanh"),
    ]  # fmt: skip
    for which, wanted in enumerate(exact):
        y = np.empty_like(x)
        loaded.mdi_function(
            which, ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(x.size), ctypes.c_void_p(y.ctypes.data)
        )
        relative = 3e-7 if which == 0 else 1e-6
        assert np.all(
            np.abs(y - wanted.numpy()) <= relative * np.maximum(np.abs(wanted.numpy()), 0.5 if which else 1e-30)
        )


def test_wrong_slices_and_tensors_are_refused() -> None:
    gpt = model_of("Llama-3.1-8B")
    blocks = blocks_of(gpt)
    x = embedded(gpt, TEXTS[1])
    with pytest.raises(EngineError):
        blocks.forward(x.copy(), [(0, 3, 1)])  # its cache is empty
    with pytest.raises(EngineError):
        blocks.forward(x.copy(), [(0, CONTEXT, 1)])
    with pytest.raises(EngineError):
        blocks.forward(x.astype(np.float64), [(0, 0, 1)])
    with pytest.raises(EngineError):
        blocks.forward(x.copy(), [(0, 0, 2)])
    with pytest.raises(EngineError):
        blocks.forward(x.copy(), [(0, -1, 1)])
    config = ModelConfig.from_litgpt(gpt.config)
    for change in ({"attn.qkv.weight": pack("int8", np.zeros((8, 8), np.float32))}, {"norm_1.weight": np.zeros(3)}):
        with pytest.raises(KernelError):
            Blocks(spec_of(config), 0, 1, lambda i, c=change: {**tensors_of(gpt, i, "int8"), **c}, "float32", Context())
    cut = pack("int8", np.zeros((8, 8), np.float32))
    with pytest.raises(KernelError):
        multiplied(Matrix("int8", 8, 8, cut.data[:-64]), np.zeros((1, 8), np.float32))
    n_embd = config.n_embd
    head = {"lm_head.weight": pack("int8", np.zeros((16, n_embd), np.float32))}
    for name in ("transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.bias"):
        with pytest.raises(KernelError):
            Head(spec_of(config), {**head, name: np.zeros(3, np.float32)}, 16, Context())


def test_a_half_is_what_forward_adds() -> None:
    gpt = model_of("tiny-llama-1.1b")
    whole, halves = blocks_of(gpt), blocks_of(gpt)
    rows = embedded(gpt, TEXTS[2])
    x = rows.copy()
    whole.forward(x, [(0, 0, len(x))])
    for block in range(gpt.config.n_layer):
        for half in (0, 1):
            rows = rows + halves.half(block, half, rows, [(block, 0, len(rows))])
    assert rows.tobytes() == x.tobytes()


@pytest.mark.parametrize(
    "changes",
    [{"n_head": 7}, {"n_query_groups": 0}, {"rotary_percentage": 2.0}, {"sliding_window_size": -5},
     {"mlp_class_name": "LLaMAMoE", "n_expert": 2, "n_expert_per_token": 3}, {"n_head": None}, {"mlp_class_name": [2, 1]},
     {"norm_class_name": ["RMSNorm"]}, {"rotary_percentage": "all"}, {"rope_indices": 1e308}, {"sliding_window_size": 0},
     {"rope_local_base_freq": 1e4, "rope_indices": [0]}, {"sliding_window_size": 8, "sliding_window_indices": [1]}],
)  # fmt: skip
def test_numbers_that_do_not_fit_each_other_never_reach_the_kernels(changes: dict[str, Any]) -> None:
    """A config may come from another node, and the kernels would read beyond their memory."""
    config = ModelConfig.from_litgpt(model_of("Llama-3.1-8B").config)
    assert why_not_in_kernels(config) is None
    try:
        changed = ModelConfig.of({**config.plain(), **changes})
    except ValueError:
        return  # it was refused where it was read
    assert why_not_in_kernels(changed) is not None


def test_a_window_of_nothing_never_reaches_the_kernels() -> None:
    """They take 0 for no window, and would read pages that a window has dropped."""
    config = ModelConfig.from_litgpt(model_of("Llama-3.1-8B").config)
    object.__setattr__(config, "sliding_window_size", 0)
    assert why_not_in_kernels(config) == "windows of 0 positions"


def test_a_router_in_plain_numbers_as_files_hold_it() -> None:
    family = next(f for f in KNOWN if model_of(f).config.mlp_class_name == "LLaMAMoE")
    gpt = model_of(family)
    config, context = ModelConfig.from_litgpt(gpt.config), Context(1)
    plain = {"mlp.gate.weight": gpt.transformer.h[0].mlp.gate.weight.detach().numpy()}
    packed, found = (
        Blocks(spec_of(config), 0, 1, lambda i, own=own: {**tensors_of(gpt, i, "float32"), **own}, "float32", context)
        for own in ({}, plain)
    )
    rows = np.random.default_rng(1).standard_normal((3, config.n_embd), dtype=np.float32)
    results = []
    for blocks in (packed, found):
        blocks.prepare(CONTEXT, [8] * len(blocks.classes))
        x = rows.copy()
        blocks.forward(x, [(1, 0, 3)])
        results.append(x)
    assert np.array_equal(*results) and not np.array_equal(results[0], rows)


def test_nodes_say_which_of_them_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("amx", "fused"), ("neon", "fused"), ("plain", "plain"), ("off", "torch")):
        monkeypatch.setattr(library, "instruction_set", lambda name=name: name)
        assert library.arithmetic() == expected
