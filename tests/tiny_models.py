"""Tiny checkpoints made on the fly, in LitGPT's and in Hugging Face's form, with a small tokenizer."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from litgpt.config import Config
from litgpt.scripts import convert_lit_checkpoint as to_hf
from safetensors.torch import save_file

from families import config_of, random_gpt
from tiny_checkpoint import tokenizer

State = dict[str, torch.Tensor]

# What config.json would say of a model with the derived settings of `families`; sizes are added by `hf_config`.
HF_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            }
        },
    ),
    "Mistral-7B-v0.1": ("mistral", {"sliding_window": 16}),
    "Mixtral-8x7B-v0.1": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2.5-0.5B": ("qwen2", {"use_sliding_window": False}),
    "Qwen3-0.6B": ("qwen3", {}),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "Gemma-2b": ("gemma", {"hidden_act": "gelu"}),
    "Gemma-2-9b": (
        "gemma2",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "OLMo-2-1124-7B": ("olmo2", {}),
    "pythia-14m": ("gpt_neox", {"hidden_act": "gelu", "rotary_pct": 0.25, "use_parallel_residual": True}),
    "phi-2": ("phi", {"hidden_act": "gelu_new", "partial_rotary_factor": 0.4}),
    "Phi-3-mini-4k-instruct": ("phi3", {"sliding_window": 20}),
    "Gemma-3-1b-it": (
        "gemma3_text",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": 12,
            "sliding_window_pattern": 6,
            "layer_types": [("full_attention", "sliding_attention")[i] for i in (1, 1, 1, 0, 1, 1, 0)],
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "OLMo-1B-hf": ("olmo", {"clip_qkv": None}),
    "stablelm-3b-4e1t": ("stablelm", {"partial_rotary_factor": 0.25, "use_qkv_bias": False}),
    "falcon-7b": ("falcon", {"multi_query": True, "parallel_attn": True, "ffn_hidden_size": 64}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 64}),
}
# The families whose real files say head_dim; the others' leave it to hidden_size and num_attention_heads.
WITH_HEAD_DIM = ("gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe")
_EPS = {"layer_norm_eps": ("gpt_neox", "phi", "stablelm"), "layer_norm_epsilon": ("falcon",)}


def tiny_state(family: str = "Llama-3.1-8B", seed: int = 0, **changes: Any) -> tuple[Config, State]:
    """A config and random weights, each tensor with memory of its own."""
    config = config_of(family, **changes)
    return config, {name: tensor.clone() for name, tensor in random_gpt(config, seed).state_dict().items()}


def write_lit(directory: Path, config: Config, state: State, *, safetensors: bool = False) -> Path:
    """A LitGPT checkpoint, with a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model_config.yaml").write_text(yaml.safe_dump(asdict(config)), encoding="utf-8")
    if safetensors:
        save_file(state, directory / "lit_model.safetensors")
    else:
        torch.save(state, directory / "lit_model.pth")
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def tiny_lit(directory: Path, family: str = "Llama-3.1-8B", **changes: Any) -> tuple[Path, State]:
    config, state = tiny_state(family, **changes)
    return write_lit(directory, config, state), state


def hf_state(config: Config, state: State) -> State:
    """The weights under the names of transformers, by litgpt's own converter."""
    name = config.name.lower()
    if name.startswith("gemma-2-"):
        convert: Any = to_hf.copy_weights_gemma_2
    elif name.startswith("gemma-3-"):
        convert = to_hf.copy_weights_gemma_3
    elif name.startswith("falcon"):
        convert = to_hf.copy_weights_falcon
    elif name.startswith("phi"):
        convert = to_hf.copy_weights_phi
    elif name.startswith("qwen2.5"):
        convert = to_hf.copy_weights_qwen_2_5
    elif name.startswith("qwen3"):
        convert = to_hf.copy_weights_qwen_3
    elif name.startswith("olmo-2"):
        convert = to_hf.copy_weights_olmo2
    elif config.mlp_class_name == "GptNeoxMLP":
        convert = to_hf.copy_weights_gpt_neox
    else:
        convert = partial(to_hf.copy_weights_llama, untie_weights=False)
    result: State = {}
    given = {name: tensor.clone() for name, tensor in state.items()}
    for i in range(config.n_layer if name.startswith("olmo-2") else 0):  # litgpt's way back forgets these
        after = given.pop(f"transformer.h.{i}.post_attention_norm.weight")
        result[f"model.layers.{i}.post_attention_layernorm.weight"] = after
    convert(config, result, given)
    return {name: tensor.contiguous().clone() for name, tensor in result.items()}


def hf_config(family: str, config: Config) -> dict[str, Any]:
    """config.json of such a model."""
    kind, own = HF_KINDS[family]
    eps = next((key for key, kinds in _EPS.items() if kind in kinds), "rms_norm_eps")
    return {
        "model_type": kind,
        "num_hidden_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_query_groups,
        **({"head_dim": config.head_size} if kind in WITH_HEAD_DIM else {}),
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.padded_vocab_size,
        "max_position_embeddings": config.block_size,
        "rope_theta": float(config.rope_base),
        eps: config.norm_eps,
        **({} if kind == "falcon" else {"hidden_act": "silu"}),
        **own,
    }


def write_hf(
    directory: Path, config_json: dict[str, Any], weights: State, *, n_shards: int = 1, suffix: str = "safetensors"
) -> Path:
    """A Hugging Face directory. With several shards, neighbouring names go to different ones, as badly as can be."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json), encoding="utf-8")
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = [f"{stem}.{suffix}"]
    if n_shards > 1:
        names = [f"{stem}-{i + 1:05}-of-{n_shards:05}.{suffix}" for i in range(n_shards)]
        places = {name: names[i % n_shards] for i, name in enumerate(sorted(weights))}
        index = {"metadata": {}, "weight_map": places}
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    for i, file in enumerate(names):
        shard = {name: weights[name] for name in sorted(weights)[i::n_shards]}
        if suffix == "safetensors":
            save_file(shard, directory / file, metadata={"format": "pt"})
        else:
            torch.save(shard, directory / file)
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def tiny_hf(directory: Path, family: str = "Llama-3.1-8B", **options: Any) -> tuple[Path, State]:
    """A Hugging Face directory, and what it must be as LitGPT's state."""
    config, state = tiny_state(family)
    if family.startswith(("Gemma-2-", "Gemma-3-")):
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()  # always tied
    return write_hf(directory, hf_config(family, config), hf_state(config, state), **options), state
