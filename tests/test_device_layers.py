"""What a GPU computes with where weights stay in int8 or int4: the layers, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from families import config_of, random_gpt
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.parts import stage_parts
from mdi.host import resources
from mdi.host.computing import choose_computing
from mdi.kernels.layout import codes_of, pack, unpack
from mdi.kernels.weight_formats import LAYOUTS
from mdi.model.plain import ModelConfig, spec_of
from mdi.spec.options import Requested
from mdi.stages import torch_stage as stage_module
from mdi.stages.torch_packed import DeviceLayers, DeviceLinear, unpacked
from mdi.stages.torch_stage import StarterStage
from test_packed_linear import weights_of
from tolerance import assert_alike

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(5)
SHAPES = [(96, 200), (33, 300), (16, 64)]
FORMS = ("int8", "int4", "mxfp4")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_numbers_and_scales_are_those_of_the_packed_weight(form: str, shape: tuple[int, int]) -> None:
    matrix = pack(form, torch.randn(shape, generator=GENERATOR).numpy())
    codes = codes_of(matrix)
    numbers, scales = torch.from_numpy(codes.numbers), torch.from_numpy(codes.scales)
    whole = unpacked(numbers, scales, form, torch.float32, shape[1])
    assert torch.equal(whole, torch.from_numpy(unpack(matrix)))
    exact = whole.half()
    assert torch.equal(unpacked(numbers, scales, form, torch.float16, shape[1]), exact), "rounded once"
    padded_bytes = matrix.data.nbytes * shape[0] / (-(-shape[0] // 16) * 16)
    assert codes.numbers.nbytes + codes.scales.nbytes == padded_bytes, "no more memory than packed"
    assert codes.width % LAYOUTS[form].record_inputs == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_computes_in_the_type_that_is_asked_for(form: str, dtype: torch.dtype) -> None:
    matrix = pack(form, torch.randn(40, 200, generator=GENERATOR).numpy())
    bias = np.linspace(-1, 1, 40, dtype=np.float32)
    layer = DeviceLinear(matrix, bias, CPU, dtype)
    x = torch.randn(2, 3, 200, generator=GENERATOR).to(dtype)
    found = layer(x)
    assert found.dtype == dtype and found.shape == (2, 3, 40)
    expected = F.linear(x, torch.from_numpy(unpack(matrix)).to(dtype), torch.from_numpy(bias).to(dtype))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    scales = torch.uint8 if form == "mxfp4" else torch.float16
    assert {t.dtype for t in layer.state_dict().values()} == {layer.numbers.dtype, scales, dtype}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-2-9b", "Qwen3-30B-A3B"])
def test_a_stage_with_the_layers_of_a_gpu(family: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt, packing = random_gpt(config_of(family), seed=3), Packing(form, form)
    n_layer = gpt.config.n_layer

    def logits_of(weights: Callable[[str], dict]) -> torch.Tensor:
        stage = StarterStage(spec_of(ModelConfig.from_litgpt(gpt.config)), n_layer)
        stage.load(stage_parts(0, n_layer, starter=True), weights, CPU, torch.float32)
        stage.prepare(32, CPU, torch.float32)
        return stage.head(stage(stage.embed(torch.arange(2, 14)), [(0, 0, 12)]))

    def exact(part: str) -> dict[str, torch.Tensor]:
        packed = {n: w for n, w in weights_of(gpt, packing, part).items() if not isinstance(w, torch.Tensor)}
        return {name: torch.from_numpy(array.copy()) for name, array in plain(packed).items()}

    expected = logits_of(exact)
    monkeypatch.setattr(stage_module, "layers_for", DeviceLayers)
    assert_alike(logits_of(lambda part: dict(weights_of(gpt, packing, part))), expected, gpt.config)


def test_formats_and_types_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    config = ModelConfig.from_litgpt(config_of("Llama-3.1-8B"))
    asked = choose_computing(config, Requested(device="cuda:0", quantize="int4", quantize_head="int4"), "bfloat16")
    assert (asked.format, asked.head_format, asked.dtype, asked.cache_type("auto")) == (
        "int4",
        "int4",
        "bfloat16",
        "bf16",
    )
    assert asked.packing is None, "torch computes"
    stored = choose_computing(config, Requested(device="cuda:0", quantize="int8"), "bfloat16", "int8")
    assert stored.format == "int8", "what is stored packed stays so"
    exact = choose_computing(
        config, Requested(device="cuda:0", quantize="fp16", quantize_head="fp16"), "bfloat16", "fp16"
    )
    assert (exact.format, exact.head_format) == ("bfloat16", "bfloat16"), "what loses nothing is plain on a GPU"


def test_memory_that_torch_keeps_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    assert resources.device_free_bytes("cuda:0") == 1200
