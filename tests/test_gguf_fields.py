"""What families read from the fields of GGUF files: words of config.json, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from litgpt.config import Config

from gguf_files import rope_factors as expected_factors
from mdi.families.gguf import Fields, fields_of, rope_factors
from mdi.families.registry import family_in_gguf
from mdi.model.plain import ModelConfig

Shapes = dict[str, tuple[int, ...]]
USUAL: dict[str, Any] = {
    "block_count": 2, "embedding_length": 12, "attention.head_count": 3, "feed_forward_length": 20, "context_length": 64,
    "attention.layer_norm_rms_epsilon": 2.0**-20, "attention.layer_norm_epsilon": 2.0**-16,
}  # fmt: skip
NUMBERS = {
    "rope_factors_short.weight": np.array([1, 1.5], dtype=np.float32),
    "rope_factors_long.weight": np.array([[4, 8]], dtype=np.float32),
    "rope_freqs.weight": np.ones(3, dtype=np.float32),
}
FACTORS: Shapes = {name: NUMBERS[name].shape for name in NUMBERS if "factors" in name}
EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 7}


def read(arch: str, values: dict[str, Any], shapes: Shapes | None = None) -> dict[str, Any]:
    """Words of config.json. A field that is None, or a tensor without dimensions, is not there."""
    given = {f"{arch}.{key}": value for key, value in {**USUAL, **values}.items() if value is not None}
    n_rows = values.get("attention.key_length", 4) * 3
    own: Shapes = {f"blk.{i}.attn_q.weight": (n_rows, 12) for i in range(values.get("block_count", 2))}
    own |= {f"blk.{i}.ffn_gate_exps.weight": (4, 7, 12) for i in (0, 1) if "expert_count" in values}
    own |= {"token_embd.weight": (10, 12), **(shapes or {})}
    own = {name: shape for name, shape in own.items() if shape}
    fields = Fields({"general.architecture": arch, **given}, own, NUMBERS.__getitem__)
    found = family_in_gguf(fields)
    assert found is not None
    return {"model_type": found[0].model_type, **found[1].config_json(fields)}


SIZES = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3,
    "head_dim": 4, "intermediate_size": 20, "vocab_size": 10, "max_position_embeddings": 64, "rope_theta": 10000.0,
    "rms_norm_eps": 2.0**-20, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ({}, {}),
        ({"attention.head_count_kv": 1}, {"num_key_value_heads": 1}),
        ({"attention.key_length": 6, "attention.value_length": 6}, {"head_dim": 6}),
        ({"feed_forward_length": np.array([9, 9], dtype=np.int32)}, {"intermediate_size": 9}),  # one for each block
        ({"block_count": 3, "nextn_predict_layers": 1}, {}),
        ({"rope.freq_base": 5e5}, {"rope_theta": 5e5}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_scaling": ("linear", 2.0)}),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 3.0}, {"rope_scaling": ("linear", 3.0)}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, {}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {}),
        ({**EXPERTS}, {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_words_of_all_files(values: dict[str, Any], changed: dict[str, Any]) -> None:
    if "rope_scaling" in changed:
        kind, factor = changed["rope_scaling"]
        changed = {"rope_scaling": {"rope_type": kind, "factor": factor}}
    assert read("llama", values) == {**SIZES, **changed}


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": np.e, "rope.scaling.original_context_length": 32}


def test_scaled_positions() -> None:
    of_yarn = {"rope_type": "yarn", "factor": np.e, "original_max_position_embeddings": 32}
    found = read("qwen2", {**YARN, "rope.scaling.attn_factor": 2.0, "rope.scaling.yarn_beta_slow": 3.0})
    assert found["rope_scaling"] == {**of_yarn, "attention_factor": pytest.approx(2.2), "beta_slow": 3.0}
    of_longrope = {"rope_type": "longrope", "short_factor": [1, 1.5], "long_factor": [4, 8]}
    values = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25}
    for kind in (None, "longrope"):
        found = read("phi3", {**values, "rope.scaling.type": kind}, FACTORS)
        assert found["rope_scaling"] == {
            **of_longrope, "original_max_position_embeddings": 16, "attention_factor": 1.25
        }  # fmt: skip


BIASES: Shapes = {"blk.0.attn_q.bias": (12,), "blk.0.attn_q_norm.weight": (4,)}
LARGE = {"attention.key_length": 6, "attention.value_length": 6}


@pytest.mark.parametrize(
    ("arch", "values", "shapes", "expected"),
    [
        ("qwen2", {}, {}, {"model_type": "qwen2"}),
        ("qwen3", {}, {}, {"model_type": "qwen3"}),
        ("qwen3moe", EXPERTS, {}, {"num_experts": 4, "moe_intermediate_size": 7, "norm_topk_prob": True}),
        ("gpt-oss", {**EXPERTS, "attention.sliding_window": 5}, {}, {"num_local_experts": 4, "sliding_window": 5}),
        ("glm4moe", {**EXPERTS, "expert_group_count": 0}, {}, {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "n_shared_experts": 0, "n_group": 1,
            "first_k_dense_replace": 0, "attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False,
            "routed_scaling_factor": 1.0, "partial_rotary_factor": 1.0,
        }),
        ("glm4moe", {
            **EXPERTS, "expert_group_count": 2, "expert_shared_count": 3, "expert_weights_norm": True,
            "expert_weights_scale": 2.5, "leading_dense_block_count": 1, "rope.dimension_count": 2,
            "rope.dimension_sections": np.zeros(4, dtype=np.int32),
        }, BIASES, {
            "n_shared_experts": 3, "n_group": 2, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
        }),
        ("minimax-m2", {**EXPERTS, "rope.dimension_count": 2}, {}, {
            "num_local_experts": 4, "intermediate_size": 7, "partial_rotary_factor": 0.5,
        }),
        ("minimax-m2", {**EXPERTS, "expert_feed_forward_length": None}, {}, {"intermediate_size": 20}),
        ("gemma", LARGE, {}, {"model_type": "gemma", "head_dim": 6}),
        ("gemma2", LARGE, {}, {
            "model_type": "gemma2", "query_pre_attn_scalar": 6, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window": 4096,
        }),
        ("gemma2", {
            **LARGE, "block_count": 46, "attn_logit_softcapping": 7.0, "final_logit_softcapping": 8.0,
            "attention.sliding_window": 9,
        }, {}, {
            "query_pre_attn_scalar": 4, "attn_logit_softcapping": 7.0, "final_logit_softcapping": 8.0, "sliding_window": 9,
        }),
        ("gemma3", {**LARGE, "attention.sliding_window": 9}, {}, {
            "model_type": "gemma3_text", "query_pre_attn_scalar": 6, "sliding_window": 9, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        }),
        ("gemma3", {
            **LARGE, "block_count": 62, "attention.sliding_window": 9, "rope.freq_base": 2e6, "rope.freq_base_swa": 3e4,
        }, {}, {"query_pre_attn_scalar": 4, "rope_theta": 2e6, "rope_local_base_freq": 3e4}),
        ("phi2", {"rope.dimension_count": 2}, {}, {
            "model_type": "phi", "layer_norm_eps": 2.0**-16, "partial_rotary_factor": 0.5,
        }),
        ("phi3", {"rope.dimension_count": 2}, {}, {"sliding_window": None, "partial_rotary_factor": 0.5}),
        ("phi3", {"attention.sliding_window": 0}, {}, {"sliding_window": None}),
        ("phi3", {"attention.sliding_window": 9}, {}, {"sliding_window": 9}),
        ("ernie4_5", {}, {}, {"model_type": "ernie4_5", "use_bias": False}),
        ("ernie4_5", {}, BIASES, {"use_bias": True}),
        ("bloom", {}, {}, {"model_type": "bloom", "layer_norm_epsilon": 2.0**-16}),
        ("gpt2", {}, {}, {"model_type": "gpt2", "layer_norm_epsilon": 2.0**-16}),
    ],
)  # fmt: skip
def test_words_of_a_family(arch: str, values: dict[str, Any], shapes: Shapes, expected: dict[str, Any]) -> None:
    found = read(arch, values, shapes)
    assert {word: found[word] for word in expected} == expected
    if "layer" not in " ".join(expected):
        assert found["rms_norm_eps"] == 2.0**-20


def test_the_rotated_share_gives_its_number_again() -> None:
    for n_rotated in range(1, 50):  # 1 / 49 * 49 is below 1
        found = read(
            "phi2", {"attention.key_length": 49, "attention.value_length": 49, "rope.dimension_count": n_rotated}
        )
        assert int(found["partial_rotary_factor"] * 49) == n_rotated


def test_positions_of_gpt_oss_are_not_truncated() -> None:
    assert read("gpt-oss", {**EXPERTS, **YARN, "attention.sliding_window": 5})["rope_scaling"]["truncate"] is False


@pytest.mark.parametrize(
    ("arch", "values", "shapes", "words"),
    [
        ("qwen2", {"attention.layer_norm_rms_epsilon": None}, {}, "lacks the field qwen2.attention.layer_norm_rms_epsilon"),
        ("qwen2", {"feed_forward_length": None}, {}, "lacks the field qwen2.feed_forward_length"),
        ("qwen2", {"context_length": 0}, {}, "context_length is 0"),
        ("qwen2", {"context_length": (1 << 27) + 1}, {}, "context_length is 134217729"),
        ("qwen2", {"feed_forward_length": np.array([9, 8])}, {}, "feed_forward_length is a list"),
        ("qwen2", {"nextn_predict_layers": -1}, {}, "nextn_predict_layers is -1"),
        ("qwen2", {}, {"blk.3.attn_q.weight": (12, 12)}, "names 2 blocks, but its tensors are not"),
        ("qwen2", {}, {"blk.1.attn_q.weight": (), "blk.2.attn_q.weight": (12, 12)}, "names 2 blocks, but its tensors are not"),
        ("qwen2", {}, {"token_embd.weight": (10, 11)}, "its tensor has 11"),
        ("qwen2", {"attention.head_count": 4}, {"blk.0.attn_q.weight": (15, 12)}, "do not fit its tensors of 15 rows"),
        ("qwen2", {"attention.value_length": 5}, {}, "do not fit"),
        ("qwen2", {"attention.head_count_kv": 1}, {"blk.0.attn_qkv.weight": (12, 12)}, "do not fit its tensors of 12 rows"),
        ("qwen2", {"rope.scaling.type": "su"}, {}, "of the type 'su'"),
        ("phi3", YARN, FACTORS, "of the type 'yarn'"),
        ("llama", {}, {"rope_freqs.weight": (3,)}, "has 3 numbers for heads of 4"),
        ("llama", {**EXPERTS, "expert_count": 5}, {}, "says that it has 5 experts"),
        ("llama", {**EXPERTS, "expert_used_count": 5}, {}, "says that it has 4 experts"),
        ("glm4moe", {**EXPERTS, "leading_dense_block_count": 2}, {}, "lacks the tensor blk.2.ffn_gate_exps.weight"),
        ("glm4moe", {**EXPERTS, "expert_gating_func": 1}, {}, "a router of the kind 1"),
        ("minimax-m2", {**EXPERTS, "expert_gating_func": 1}, {}, "a router of the kind 1"),
        ("glm4moe", {**EXPERTS, "rope.dimension_sections": np.array([1, 1])}, {}, "positions of images"),
        ("gpt-oss", EXPERTS, {}, "lacks the field gpt-oss.attention.sliding_window"),
        ("gemma3", {}, {}, "lacks the field gemma3.attention.sliding_window"),
    ],
)  # fmt: skip
def test_refusals(arch: str, values: dict[str, Any], shapes: Shapes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(arch, values, shapes)


LATENT: dict[str, Any] = {
    **EXPERTS, "attention.key_length": 6, "attention.value_length": 4, "rope.dimension_count": 2, "attention.kv_lora_rank": 4,
    "expert_shared_count": 1, "expert_weights_norm": True,
}  # fmt: skip


def of_v3(n_experts: int, **values: Any) -> dict[str, Any]:
    """What a file of the size of one of DeepSeek's models says, with so many experts in its first block."""
    own: Shapes = {"blk.0.ffn_gate_exps.weight": (n_experts, 7, 12)}
    return read("deepseek2", {**LATENT, "expert_count": n_experts, **values}, own)


def test_a_latent_model_without_a_field_for_groups_has_none_and_v3_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert of_v3(64, expert_gating_func=2)["n_group"] == 1
    assert of_v3(256, expert_gating_func=2, expert_group_count=8, expert_group_used_count=4)["topk_group"] == 4
    assert not caplog.records
    assert of_v3(256, expert_gating_func=2)["n_group"] == 1
    assert [record.getMessage().split(":")[1] for record in caplog.records] == [
        " the GGUF file lacks the field deepseek2.expert_group_count"
    ]


def test_a_latent_model_without_a_field_for_its_router_is_as_llama_cpp_takes_it() -> None:
    """Those of DeepSeek V2 have another router, but for GLM 4.7 Flash, which llama.cpp knows by its size."""
    with pytest.raises(ValueError, match=r"lacks the field deepseek2.expert_gating_func: its router is DeepSeek V2's"):
        of_v3(160)
    n, size = 47, {"token_embd.weight": (154880, 12), "blk.0.ffn_gate_exps.weight": (4, 7, 12)}
    assert read("deepseek2", {**LATENT, "block_count": n}, size)["n_routed_experts"] == 4
    with pytest.raises(ValueError, match="expert_gating_func"):
        read("deepseek2", {**LATENT, "block_count": n - 1}, size)


@pytest.mark.parametrize("arch", ["mamba", None, ["llama"], np.zeros(2)])
def test_an_architecture_that_is_not_here(arch: Any) -> None:
    assert family_in_gguf(Fields({"general.architecture": arch}, {}, NUMBERS.__getitem__)) is None


def a_config(**more: Any) -> Config:
    sizes = {"n_layer": 2, "n_embd": 48, "n_head": 6, "n_query_groups": 3, "head_size": 8, "intermediate_size": 20}
    return Config(**{**sizes, "block_size": 64, "rotary_percentage": 1.0, **more})


@pytest.mark.parametrize("base, original", [(500000, 8192), (10000, 64), (16, 25)])
def test_what_the_frequencies_of_a_scaled_rope_are_divided_by(base: int, original: int) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_seq_len": original}
    config = a_config(rope_base=base, rope_adjustments=scaling)
    found = rope_factors(ModelConfig.from_litgpt(config))
    assert found is not None and found.dtype == np.float32
    np.testing.assert_allclose(found, expected_factors(config), rtol=1e-6)
    assert rope_factors(ModelConfig.from_litgpt(a_config())) is None


def test_fields_that_say_nothing_are_left_out() -> None:
    plain = {
        "block_count": 2, "embedding_length": 48, "feed_forward_length": 20, "context_length": 64, "attention.head_count": 6,
        "attention.head_count_kv": 3, "attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8,
        "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10000.0,
    }  # fmt: skip
    assert fields_of(ModelConfig.from_litgpt(a_config())) == plain
    part = a_config(rotary_percentage=0.5)
    assert fields_of(ModelConfig.from_litgpt(part)) == plain | {"rope.dimension_count": 4}
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert fields_of(ModelConfig.from_litgpt(a_config(rope_condense_ratio=2))) == plain | linear
    assert fields_of(ModelConfig.from_litgpt(a_config(rope_adjustments={"factor": 2.0}))) == plain | linear
    assert fields_of(ModelConfig.from_litgpt(a_config(rope_adjustments={"factor": 1.0}))) == plain
    own = {"rope.freq_base": None, "expert_shared_count": 0}
    expected = {name: value for name, value in plain.items() if name != "rope.freq_base"} | {"expert_shared_count": 0}
    assert fields_of(ModelConfig.from_litgpt(a_config()), own) == expected
    experts = a_config(mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2, moe_intermediate_size=7)
    more = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 7}
    assert fields_of(ModelConfig.from_litgpt(experts)) == plain | more
