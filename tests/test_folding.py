"""Gains of norms that go into the weights behind them: nothing changes but rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from families import DEEPSEEK_V3, FAMILIES, config_of, model_of
from mdi.checkpoint.packing import Packing, folded, norm_before
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.shapes import shapes_of
from mdi.kernels import library
from mdi.kernels.blocks import Blocks, Context, why_not_in_kernels
from mdi.kernels.layout import pack, unpack
from mdi.model.plain import ModelConfig, spec_of


def plain_tensors(family: str) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in model_of(family).state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_folded_weights_are_the_same_model(family: str) -> None:
    if library.load() is None or why_not_in_kernels(ModelConfig.from_litgpt(model_of(family).config)) is not None:
        pytest.skip("computed in torch")
    tensors = plain_tensors(family)
    specs = {name: TensorSpec("F32", tensor.shape) for name, tensor in tensors.items()}
    config = ModelConfig.from_litgpt(model_of(family).config)
    packing = Packing("int8", "int8")
    changed = {name: folded(name, packing, spec_of(config), tensors.__getitem__, specs)[0][:] for name in tensors}
    norms = [
        n
        for n in tensors
        if n.endswith(("norm_1.weight", "ln_f.weight")) and n.replace("weight", "bias") not in tensors
    ]
    assert bool(norms) == any(not np.array_equal(changed[name], tensors[name]) for name in tensors)

    rows = np.random.default_rng(0).standard_normal((9, config.n_embd)).astype(np.float32)
    results = []
    for state in (tensors, changed):

        def of_block(i: int, state: dict[str, np.ndarray] = state) -> dict:  # type: ignore[type-arg]
            prefix = f"transformer.h.{i}."
            own = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
            return {n: pack("float32", t) if t.ndim == 2 else t for n, t in own.items()}

        blocks = Blocks(spec_of(config), 0, 2, of_block, "float32", Context())
        blocks.prepare(16, [4] * len(blocks.classes))
        x = rows.copy()
        blocks.forward(x, [(0, 0, len(x))])
        results.append(x)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_a_channel_with_a_large_gain_keeps_its_precision() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((32, 192)).astype(np.float32)
    gain = np.ones(192, dtype=np.float32)
    gain[[5, 100]] = 30
    weight[:, [5, 100]] /= 30
    tensors = {"transformer.h.0.attn.qkv.weight": weight, "transformer.h.0.norm_1.weight": gain}
    specs = {name: TensorSpec("F32", tensor.shape) for name, tensor in tensors.items()}
    config = ModelConfig(norm_class_name="RMSNorm")
    name = "transformer.h.0.attn.qkv.weight"
    better, _ = folded(name, Packing("int4", "int4"), spec_of(config), tensors.__getitem__, specs)
    x = rng.standard_normal((4, 192)).astype(np.float32)
    exact = (x * gain) @ weight.T
    rounded = (x * gain) @ unpack(pack("int4", weight)).T
    kept = x @ unpack(pack("int4", better)).T
    assert np.linalg.norm(kept - exact) < 0.7 * np.linalg.norm(rounded - exact)
    untouched, _ = folded(name, Packing("bf16", "bf16"), spec_of(config), tensors.__getitem__, specs)
    assert untouched is weight


def test_which_norm_a_layer_reads() -> None:
    shared, own = ModelConfig(shared_attention_norm=True), ModelConfig()
    assert norm_before("transformer.h.3.mlp.fc_1.weight", spec_of(own)) == "transformer.h.3.norm_2.weight"
    assert norm_before("transformer.h.3.mlp.experts.11.fc_2.weight", spec_of(own)) == "transformer.h.3.norm_2.weight"
    assert norm_before("transformer.h.3.mlp.fc.weight", spec_of(shared)) == "transformer.h.3.norm_1.weight"
    assert norm_before("lm_head.weight", spec_of(own)) == "transformer.ln_f.weight"
    for name in ("transformer.h.3.attn.proj.weight", "transformer.h.3.mlp.proj.weight", "transformer.wte.weight"):
        assert norm_before(name, spec_of(own)) is None


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_the_gain_goes_into_each_matrix_that_reads_the_rows_of_latent_attention(q_lora_rank: int | None) -> None:
    ranks = {**DEEPSEEK_V3["latent_attention"], "q_lora_rank": q_lora_rank}
    config = replace(ModelConfig.from_litgpt(config_of("deepseek-v3-shape")), latent_attention=ranks)
    rng, block = np.random.default_rng(0), "transformer.h.1."
    specs = {n: one for n, one in shapes_of(config).items() if n.startswith(block) and len(one) < 3}
    tensors = {n: rng.uniform(0.5, 1.5, shape).astype(np.float32) for n, shape in specs.items()}
    types = {n: TensorSpec("F32", shape) for n, shape in specs.items()}
    packing, gain = Packing("int4", "int8"), tensors[f"{block}norm_1.weight"]
    attention = [n for n in tensors if ".attn." in n and n.endswith(".weight")]
    changed = [
        n for n in attention if tensors[n].ndim == 2 and tensors[n].shape[1] == config.n_embd and ".proj" not in n
    ]
    assert len(changed) == 2
    for n in attention:
        found = folded(n, packing, spec_of(config), tensors.__getitem__, types)[0][:]
        np.testing.assert_allclose(found, tensors[n] * gain if n in changed else tensors[n], rtol=1e-6)
    assert (folded(f"{block}norm_1.weight", packing, spec_of(config), tensors.__getitem__, types)[0][:] == 1).all()
