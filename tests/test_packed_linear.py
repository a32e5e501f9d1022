"""Torch's path over packed weights: the same numbers as the weights that they stand for, with the kernels and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from families import FAMILIES, config_of, random_gpt
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.parts import part_of, stage_parts
from mdi.checkpoint.torch_tensors import as_array, tensor_spec
from mdi.errors import CheckpointError
from mdi.kernels.layout import Matrix, pack, unpack
from mdi.kernels.weight_formats import LAYOUTS
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.tensors import EMBEDDING
from mdi.stages import torch_packed as packed_linear
from mdi.stages.torch_packed import PackedLinear, Weights, kernel_context
from mdi.stages.torch_stage import StarterStage
from tolerance import assert_alike

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(3)
WEIGHT = torch.randn(96, 200, generator=GENERATOR)
BIAS = torch.randn(96, generator=GENERATOR)
# Of the result, relative: what the kernels round activations of 8 bits by, and the order of sums.
NEAR = {"float32": 1e-6, "bf16": 1e-6, "fp16": 1e-6, "int8": 0.012, "int4": 0.012, "mxfp4": 0.012}


@pytest.fixture(params=["kernels", "none"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "none":
        monkeypatch.setattr(packed_linear, "load", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("form", LAYOUTS)
def test_a_layer_multiplies_by_what_it_holds(form: str, kernels: str) -> None:
    context = kernel_context()
    assert (context is None) == (kernels == "none")
    matrix = pack(form, WEIGHT.numpy())
    layer = PackedLinear(matrix, BIAS.numpy(), context)
    x = torch.randn(2, 5, 200, generator=GENERATOR)
    exact = x.double() @ torch.from_numpy(unpack(matrix)).double().T + BIAS.double()
    found = layer(x)
    assert found.shape == (2, 5, 96) and found.dtype == torch.float32
    limit = NEAR[form] if kernels == "kernels" else 1e-6
    assert (found - exact).norm() / exact.norm() < limit
    assert layer(torch.zeros(0, 200)).shape == (0, 96)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    strided = x[0].T.contiguous().T
    torch.testing.assert_close(layer(strided), layer(strided.contiguous()), atol=0, rtol=0)
    if kernels == "kernels":
        assert torch.equal(layer(x[:1, 2:3])[0], found[0, 2:3]), "a row does not depend on those beside it"


def weights_of(gpt: torch.nn.Module, packing: Packing, part: str) -> Weights:
    weights: dict[str, Matrix | np.ndarray | torch.Tensor] = {}
    for name, tensor in gpt.state_dict().items():
        if part_of(name) == part:
            weights.update(packing.pack(name, as_array(tensor), tensor_spec(tensor)))
    return weights


def logits_of(gpt: torch.nn.Module, weights: object) -> torch.Tensor:
    config = gpt.config
    stage = StarterStage(spec_of(ModelConfig.from_litgpt(config)), config.n_layer)
    stage.load(stage_parts(0, config.n_layer, starter=True), weights, CPU, torch.float32)  # type: ignore[arg-type]
    stage.prepare(32, CPU, torch.float32)
    return stage.head(stage(stage.embed(torch.arange(2, 14)), [(0, 0, 12)]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_a_stage_computes_with_packed_weights(family: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "load", lambda: None)
    gpt = random_gpt(config_of(family), seed=3)
    packing = Packing(form, form)
    found = logits_of(gpt, lambda part: weights_of(gpt, packing, part))

    def exact(part: str) -> dict[str, torch.Tensor]:
        packed = {n: w for n, w in weights_of(gpt, packing, part).items() if not isinstance(w, torch.Tensor)}
        return {name: torch.from_numpy(array.copy()) for name, array in plain(packed).items()}

    assert_alike(found, logits_of(gpt, exact), gpt.config)


@pytest.mark.parametrize(
    "change",
    [
        {"transformer.h.0.attn.nothing.weight": pack("int8", np.ones((16, 16), np.float32))},
        {"transformer.h.0.attn.proj.weight": pack("int8", np.ones((16, 16), np.float32))},
        {"transformer.h.0.norm_1.weight": pack("int8", np.ones((16, 16), np.float32))},
        {"transformer.h.0.norm_1.weight": np.ones(3, np.float32)},
        {"transformer.h.0.norm_1.nothing": np.ones(3, np.float32)},
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Matrix | np.ndarray]) -> None:
    gpt = random_gpt(config_of("Llama-3.1-8B"), seed=4)
    packing = Packing("int8", "int8")
    with pytest.raises(CheckpointError) as e:
        logits_of(gpt, lambda part: {**weights_of(gpt, packing, part), **(change if part == "block.0" else {})})
    assert "transformer.h.0" in str(e.value)


def test_an_embedding_of_8_bits() -> None:
    gpt = random_gpt(config_of("Llama-3.1-8B"), seed=4)
    stage = StarterStage(spec_of(ModelConfig.from_litgpt(gpt.config)), 0)
    packing = Packing("int4", "int4")
    stage.load(["embedding", "head"], lambda part: weights_of(gpt, packing, part), CPU, torch.float32)
    table = gpt.state_dict()[EMBEDDING]
    rows = stage.embed(torch.tensor([3, 90, 3]))
    assert torch.equal(rows[0], rows[2])
    assert ((rows[:2] - table[[3, 90]]).abs() <= 0.501 * table[[3, 90]].abs().amax(1, True) / 127).all()
