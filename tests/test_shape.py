"""A model's numbers against the model itself."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from families import DEEPSEEK_V3, config_of
from mdi.block_ranges import head_cost_blocks
from mdi.checkpoint.manifest import config_hash
from mdi.errors import CheckpointError
from mdi.kernels.weight_formats import FORMATS, LAYOUTS, PACKED
from mdi.model.caches import CACHE_TYPES, cache_classes
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import LatentAttention
from mdi.placement.cost import CostModel
from mdi.placement.model import Workload, model_shape
from mdi.placement.profile import boards
from mdi.stages.torch_stage import StarterStage
from tiny_checkpoint import tiny_config

FAMILIES = ["Llama-3.1-8B", "Gemma-2-9b", "Mixtral-8x7B-v0.1", "pythia-14m", "Qwen3-30B-A3B"]


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_tensors(family: str) -> None:
    config = config_of(family)
    stage = StarterStage(spec_of(ModelConfig.from_litgpt(config)), config.n_layer)
    shape = model_shape(ModelConfig.from_litgpt(config), "float32")
    assert shape.weight_bytes == sum(t.numel() * 4 for t in stage.state_dict().values())
    assert model_shape(ModelConfig.from_litgpt(config), "bfloat16").weight_bytes * 2 == shape.weight_bytes
    assert shape.n_layer == config.n_layer and shape.config_hash == config_hash(ModelConfig.from_litgpt(config))
    assert shape.row_bytes == config.n_embd * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_those_of_the_stage(family: str) -> None:
    config = config_of(family)
    shape = model_shape(ModelConfig.from_litgpt(config), "float32")
    stage = StarterStage(spec_of(ModelConfig.from_litgpt(config)), config.n_layer)
    for length in (5, 100, 160):
        ours = sum(block.cache_bytes(length) for block in shape.blocks) + shape.table_bytes * length
        rounded = sum(
            c.n_pages(length) * mmap.PAGESIZE
            for c in cache_classes(spec_of(ModelConfig.from_litgpt(config)), 0, config.n_layer, "float32")[0]
        )
        assert ours <= stage.run_bytes(length, torch.float32) < ours + rounded


def test_latent_attention_and_dense_layers_make_blocks_differ() -> None:
    from litgpt.config import Config

    config = Config(**DEEPSEEK_V3)
    shape = model_shape(ModelConfig.from_litgpt(config), "float32")
    assert shape.blocks[0].cache.n_bytes(32) == 32 * 4 * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert shape.is_uniform == (not config.first_k_dense_replace)


@pytest.mark.parametrize("form, n_bytes", [("float32", 4), ("int8", 4), ("bfloat16", 0)])
def test_what_the_kernels_absorb_is_held_but_not_read_beside_the_weights(form: str, n_bytes: int) -> None:
    """Torch, which alone computes in bfloat16, absorbs nothing."""
    config = config_of("deepseek-v3-shape")
    latent = spec_of(ModelConfig.from_litgpt(config)).blocks[0].mixer
    assert isinstance(latent, LatentAttention)
    shape = model_shape(ModelConfig.from_litgpt(config), form)
    absorbed = n_bytes * latent.n_head * (latent.nope_size + latent.value_size) * latent.kv_rank
    cost = CostModel(boards(), shape, Workload(1, 64))
    assert shape.n_layer * absorbed == cost.weights[-1] - sum(block.weight_bytes for block in shape.blocks)
    assert shape.blocks[0].weights_read(1000) == pytest.approx(shape.blocks[0].weight_bytes)


def test_a_head_is_worth_as_many_blocks_as_the_even_split_says() -> None:
    config = ModelConfig.from_litgpt(config_of("Llama-3.1-8B"))
    shape = model_shape(config, "int8")
    assert shape.head_macs / shape.reference.macs == pytest.approx(head_cost_blocks(spec_of(config)))


def test_experts_are_read_but_not_all_are_used() -> None:
    config = config_of("Mixtral-8x7B-v0.1")
    found = model_shape(ModelConfig.from_litgpt(config), "float32").reference
    assert found.macs < found.weight_bytes / 4


def test_quantized_bytes_are_those_of_the_packed_layers() -> None:
    """fp16 and int8 keep what they say: 2 and 1 bytes for each weight of a linear layer."""
    config = config_of("Llama-2-7b-hf")
    stage = StarterStage(spec_of(ModelConfig.from_litgpt(config)), config.n_layer)
    linear = sum(m.weight.numel() for m in stage.blocks[0].modules() if isinstance(m, torch.nn.Linear))
    plain = model_shape(ModelConfig.from_litgpt(config), "float32").blocks[0]
    for name, each in (("fp16", 2), ("int8", 1)):
        block = model_shape(ModelConfig.from_litgpt(config), name).blocks[0]
        assert block.weight_bytes >= plain.weight_bytes - linear * (4 - each)
        widest = max(m.weight.shape[1] for m in stage.blocks[0].modules() if isinstance(m, torch.nn.Linear))
        assert block.load_bytes == 64 * 48 * widest and plain.load_bytes == 0
        assert block.cache == plain.cache
    assert set(FORMATS) >= {"float32", "bfloat16", "float16", *PACKED}
    assert tuple(LAYOUTS) == PACKED
    assert all(FORMATS[name].bits == layout.bits for name, layout in LAYOUTS.items())


@pytest.mark.parametrize("kv_dtype", CACHE_TYPES)
def test_caches_of_a_plan_are_those_of_a_run(kv_dtype: str) -> None:
    """What admission reckons with, for every type of cache; Gemma 2 has blocks with and without a window."""
    config = ModelConfig.from_litgpt(config_of("Gemma-2-9b"))
    shape, n_rows = model_shape(config, "int8", kv_dtype), 2000
    classes, _ = cache_classes(spec_of(config), 0, shape.n_layer, kv_dtype)
    planned = sum(block.cache_bytes(n_rows) for block in shape.blocks)
    whole_pages = sum(
        c.n_pages(n_rows) * mmap.PAGESIZE for c in classes
    )  # a page of a class is whole pages of the system
    assert planned <= sum(c.n_bytes(n_rows) for c in classes) < planned + whole_pages
    assert shape.kv_dtype == kv_dtype


def test_caches_hold_what_is_computed_in_unless_told() -> None:
    config = ModelConfig.from_litgpt(tiny_config())
    for form, expected in (("int4", "float32"), ("float32", "float32"), ("bfloat16", "bf16")):
        assert model_shape(config, form) == model_shape(config, form, expected)


def test_what_litgpt_cannot_build_is_refused() -> None:
    config = ModelConfig.from_litgpt(config_of("Llama-3.1-8B"))
    with pytest.raises(CheckpointError) as e:
        model_shape(replace(config, norm_class_name="NoNorm"), "float32")
    assert e.value.code == "weights"
