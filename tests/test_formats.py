"""Weight formats: their error, their independence of company, and the plain fallback."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, config_of, prompt, random_gpt
from mdi.errors import CheckpointError, UsageError
from mdi.model import int4, packed
from mdi.model.attention import CachedLatentAttention, cached
from mdi.model.formats import FORMATS, check_format, decode, encode, format_of
from mdi.model.int4 import INT4_BLOCK, pack_int4, unpack_int4
from mdi.model.quantize import GatedMLP, Quantizer, expected_outliers, linears, plain_weight, quantize_block
from mdi.model.stage import StarterStage
from mdi.model.tiles import keep_rows_apart
from test_stage import run_staggered, stages_of

WEIGHT = torch.randn(96, 200, generator=torch.Generator().manual_seed(0)) * 0.05
BIAS = torch.randn(96, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(8, 200, generator=torch.Generator().manual_seed(2))
OUTLIERS = torch.tensor([3, 77])


def planted() -> torch.Tensor:
    rows = ROWS.clone()
    rows[:, OUTLIERS] *= 30
    return rows


def error(layer: torch.nn.Module, rows: torch.Tensor) -> float:
    exact = rows.double() @ WEIGHT.double().T + BIAS.double()
    return float((layer(rows).double() - exact).norm() / exact.norm())


def layer(name: str, outliers: torch.Tensor | None = None, bias: torch.Tensor | None = BIAS) -> torch.nn.Module:
    return decode(encode(WEIGHT, name, outliers), name, WEIGHT.size(1), bias)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "has_fbgemm", lambda: False)
    monkeypatch.setattr(packed, "has_onnxruntime", lambda: False)
    monkeypatch.setattr(int4, "has_onnxruntime", lambda: False)


@pytest.mark.parametrize(("name", "bound"), [("fp16", 5e-4), ("int8", 0.015), ("int4", 0.13)])
def test_errors_are_those_of_the_format(name: str, bound: float) -> None:
    assert error(layer(name), ROWS) < bound
    assert error(layer(name, OUTLIERS), planted()) < bound
    # Columns that are 30 times larger cost 8 bits their precision, unless they go beside.
    if name == "int8":
        assert error(layer(name), planted()) > 0.02


@pytest.mark.parametrize("outliers", [None, OUTLIERS])
@pytest.mark.parametrize("name", FORMATS)
def test_the_fallback_gives_the_same_numbers(
    name: str, outliers: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = layer(name, outliers)(planted())
    without_kernels(monkeypatch)
    torch.testing.assert_close(layer(name, outliers)(planted()), kernel, atol=2e-3, rtol=2e-3)


def test_int8_without_fbgemm_gives_nearly_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What machines without FBGEMM use (ARM); exact to the rounding of activations, in which the two differ."""
    ours = layer("int8", OUTLIERS)(planted())
    monkeypatch.setattr(packed, "has_fbgemm", lambda: False)
    other = layer("int8", OUTLIERS)
    assert error(other, planted()) < 0.015
    assert (other(planted()) - ours).norm() / ours.norm() < 0.015


@pytest.mark.parametrize("kernels", ["all", "no FBGEMM", "none"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_its_company(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "none":
        without_kernels(monkeypatch)
    elif kernels == "no FBGEMM":
        monkeypatch.setattr(packed, "has_fbgemm", lambda: False)
    module = layer(name, OUTLIERS)
    rows = planted()
    rows[3] *= 1000  # a neighbour that would coarsen a scale shared by all
    alone = torch.cat([module(row[None]) for row in rows])
    torch.testing.assert_close(module(rows), alone, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_zero_rows_and_dtypes_are_kept(name: str) -> None:
    for module in (layer(name, bias=None), layer(name, OUTLIERS)):
        assert module(torch.zeros(2, 3, 200)).shape == (2, 3, 96)
        assert module(torch.zeros(0, 200)).shape == (0, 96)
        assert module(torch.zeros(1, 5, 200, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert torch.isfinite(module(torch.zeros(4, 200))).all()
        strided = torch.randn(200, 5).T
        torch.testing.assert_close(module(strided), module(strided.contiguous()))


@pytest.mark.parametrize("name", FORMATS)
def test_an_encoded_weight_is_as_small_as_its_format_says(name: str) -> None:
    weight = torch.randn(512, 1024)
    n_bytes = sum(t.numel() * t.element_size() for t in encode(weight, name).values())
    assert n_bytes <= weight.numel() * FORMATS[name].bits / 8 + 4 * weight.size(0)


@pytest.mark.parametrize("n_in", [1, 7, INT4_BLOCK, INT4_BLOCK + 1, 3 * INT4_BLOCK])
def test_4_bits_come_back_within_half_a_step(n_in: int) -> None:
    weight = torch.randn(5, n_in)
    weight[2] = 0
    halves, scale = pack_int4(weight)
    back = unpack_int4(halves, scale)[:, :n_in]
    assert (back[2] == 0).all()
    # Within the range that a scale holds, no number is further off than half a step; the few beyond are cut off.
    step = scale.float().abs().repeat_interleave(INT4_BLOCK, dim=1)[:, :n_in]
    inside = (weight / step).abs() <= 7
    assert ((back - weight).abs() <= step * 0.501)[inside].all()


def test_the_search_for_scales_beats_the_one_that_holds_the_largest_weight() -> None:
    weight = torch.randn(64, 2 * INT4_BLOCK, generator=torch.Generator().manual_seed(5))
    blocks = weight.unflatten(1, (-1, INT4_BLOCK))
    plain_scale = blocks.abs().amax(2, keepdim=True) / 7
    plain = ((blocks / plain_scale).round().clamp(-8, 7) * plain_scale - blocks).norm()
    searched = (unpack_int4(*pack_int4(weight)) - weight).norm()
    assert searched < 0.95 * plain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_family_keeps_its_answer(name: str, family: str) -> None:
    """What the kernels add to the rounding of weights, which is no matter of the family, is the rounding of activations."""
    gpt = random_gpt(config_of(family), seed=3)
    texts = [prompt(40, 1), prompt(25, 2)]
    stages = stages_of(gpt, (2,))
    for stage in stages:
        for block in stage.blocks:
            quantize_block(block, name)
    found = run_staggered(stages, texts, seed=1)
    for block in gpt.transformer.h:
        for path, linear in linears(block):
            encoded = encode(linear.weight, name, expected_outliers(block).get(path))
            linear.weight.data = (
                encoded["weight"].float() if name == "fp16" else plain_weight(name, encoded, linear.in_features)
            )
    exact = run_staggered(stages_of(gpt, (2,)), texts, seed=1)
    # A token that is sent to another expert changes everything: of such models only most rows stay near.
    error = torch.cat([(f - e).norm(dim=-1) / e.norm(dim=-1) for f, e in zip(found, exact, strict=True)])
    assert error.median() < {"fp16": 0.001, "int8": 0.12, "int4": 0.12}[name]


def test_planted_outliers_are_found_in_the_weights() -> None:
    gpt = random_gpt(config_of("Llama-3.1-8B"), seed=4)
    block = gpt.transformer.h[1]
    large = torch.tensor([7])
    block.norm_1.weight[large] *= 30
    block.attn.qkv.weight[:, large] /= 30
    block.mlp.fc_2.weight[large] *= 30
    block.mlp.proj.weight[:, large] /= 30
    found = expected_outliers(block)
    assert found["attn.qkv"].tolist() == [7] and found["mlp.proj"].tolist() == [7]
    assert "mlp.fc_1" not in found


def test_unknown_formats_and_devices_are_refused() -> None:
    check_format(None, torch.device("cuda"))
    with pytest.raises(UsageError, match="expected one of fp16, int8, int4"):
        check_format("int3", torch.device("cpu"))
    with pytest.raises(UsageError, match="CPU"):
        check_format("int8", torch.device("cuda"))


def encoded_model(gpt: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """All tensors of a model as a chunk in a format holds them."""
    found = {}
    for key, tensor in gpt.state_dict().items():
        path, _, kind = key.rpartition(".")
        if kind == "weight" and tensor.dim() == 2 and not path.endswith(("gate", "kv_b_proj", "wte")):
            found.update({f"{path}.{k}": t for k, t in encode(tensor, name).items()})
        else:
            found[key] = tensor
    return found


def run_starter(gpt: torch.nn.Module, tensors: dict[str, torch.Tensor], quantizer: Quantizer) -> torch.Tensor:
    stage = StarterStage(gpt.config, gpt.config.n_layer)
    parts = ["embedding", *(f"block.{i}" for i in range(gpt.config.n_layer)), "head"]
    prefix = {"embedding": ("transformer.wte.",), "head": ("transformer.ln_f.", "lm_head.")}

    def of(part: str) -> dict[str, torch.Tensor]:
        starts = prefix.get(part) or (f"transformer.h.{part.partition('.')[2]}.",)
        return {k: t for k, t in tensors.items() if k.startswith(starts)}

    stage.load(parts, of, torch.device("cpu"), torch.float32, quantizer)
    stage.prepare(32, torch.device("cpu"), torch.float32)
    return stage.head(stage(stage.embed(torch.arange(2, 14)), [(0, 0, 12)]))


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "Mixtral-8x7B", "pythia", "DeepSeek-V3"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_weights_stored_in_a_format_are_those_that_loading_would_make(name: str, family: str) -> None:
    family = next(f for f in FAMILIES if f.lower().startswith(family.lower()[:7]))
    gpt = random_gpt(config_of(family), seed=3)
    plain = run_starter(gpt, gpt.state_dict(), Quantizer(name, name))
    tensors = encoded_model(gpt, name)
    tensors["transformer.wte.weight"], scale = packed.pack_int8(gpt.transformer.wte.weight.detach())
    tensors["transformer.wte.weight_scale"] = scale
    assert format_of(tensors["lm_head.weight"].dtype) == name
    torch.testing.assert_close(run_starter(gpt, tensors, Quantizer()), plain, atol=1e-5, rtol=1e-5)


def test_both_halves_of_a_gate_become_one_layer() -> None:
    block = random_gpt(config_of("Llama-3.1-8B"), seed=4).transformer.h[1]
    x = torch.randn(1, 3, block.norm_1.weight.numel())
    exact = block.mlp(x)
    quantize_block(block, "fp16")
    assert isinstance(block.mlp, GatedMLP)
    torch.testing.assert_close(block.mlp(x), exact, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_an_encoded_weight_can_become_a_plain_one_again(name: str) -> None:
    back = plain_weight(name, encode(WEIGHT, name, OUTLIERS), WEIGHT.size(1))
    assert (back - WEIGHT).norm() / WEIGHT.norm() < {"int8": 0.01, "int4": 0.13}[name]
    torch.testing.assert_close(back[:, OUTLIERS], WEIGHT[:, OUTLIERS], atol=1e-4, rtol=1e-3)


def test_a_format_where_there_is_no_linear_layer_is_refused() -> None:
    gpt = random_gpt(config_of("Llama-3.1-8B"), seed=4)
    tensors = dict(gpt.state_dict())
    tensors["transformer.h.0.attn.nothing.weight"] = torch.zeros(4, 4, dtype=torch.int8)
    with pytest.raises(CheckpointError, match="attn.nothing.weight"):
        run_starter(gpt, tensors, Quantizer())


@torch.inference_mode()
def decoded(stage: StarterStage, prompts: list[list[int]], chunk: int, n_new: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and logits of the first prompt, where all decode in the same frames; prompts in chunks."""
    last = []
    for seq_id, ids in enumerate(prompts):
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            x = stage(stage.embed(torch.tensor(piece)), [(seq_id, start, len(piece))])
        last.append(x[-1:])
    tokens, seen, rows = [], [], torch.cat(last)
    for i in range(n_new):
        logits = stage.head(rows)
        ids = logits.argmax(dim=-1)
        tokens.append(int(ids[0]))
        seen.append(logits[0])
        rows = stage(stage.embed(ids), [(s, len(p) + i, 1) for s, p in enumerate(prompts)])
    for seq_id in range(len(prompts)):
        stage.caches.free(seq_id)
    return tokens, torch.stack(seen)


EXPERTS_AND_LATENTS = ["Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "deepseek-v3-shape"]


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "pythia-14m", "Qwen3-0.6B", *EXPERTS_AND_LATENTS])
@pytest.mark.parametrize("name", FORMATS)
def test_a_sequence_in_company_gives_what_it_gives_alone(name: str, family: str) -> None:
    gpt = random_gpt(config_of(family), seed=0)
    stage = StarterStage(gpt.config, gpt.config.n_layer)
    stage.load_state_dict(gpt.state_dict(), assign=True)
    for block in stage.blocks:
        quantize_block(block, name)
    head = stage.lm_head
    stage.lm_head = decode(encode(head.weight, name), name, head.in_features, head.bias)
    stage.prepare(100, torch.device("cpu"), torch.float32)
    texts = [prompt(20 + 3 * i, i) for i in range(8)]
    alone, alone_logits = decoded(stage, texts[:1], 64, 12)
    together, logits = decoded(stage, texts, 64, 12)
    assert together == alone
    torch.testing.assert_close(logits, alone_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", EXPERTS_AND_LATENTS)
def test_routers_and_latent_products_do_not_see_how_many_rows_there_are(family: str) -> None:
    block = random_gpt(config_of(family), seed=1).transformer.h[1]
    attn = cached(block.attn, 0)
    block.attn = attn
    quantize_block(block, "int8")
    keep_rows_apart(block)  # a second time changes nothing
    x = torch.randn(70, block.norm_1.weight.numel())
    whole = block.mlp.gate(x)
    for n in (1, 2, 3, 7, 8, 9, 64):
        for part, of_all in zip(_several(block.mlp.gate(x[:n])), _several(whole), strict=True):
            assert torch.equal(part, of_all[:n])
    if isinstance(attn, CachedLatentAttention):
        a, b = torch.randn(70, 4, 12).transpose(0, 1), torch.randn(4, 12, 16)
        product = attn.multiply(a, b)
        torch.testing.assert_close(product, a @ b)
        assert all(torch.equal(attn.multiply(a[:, :n], b), product[:, :n]) for n in (1, 2, 3, 7, 8, 9, 64))


def _several(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result
