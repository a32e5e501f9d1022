"""GGUF files of tiny models, written as llama.cpp's own converter would: names by the gguf package's table."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from litgpt.config import Config

from tiny_models import HF_KINDS, State, hf_state

# model_type -> architecture
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "phi3": "phi3",
}
_ARCH_OF_NAME = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def gguf_families() -> list[str]:
    return [family for family, (kind, _) in HF_KINDS.items() if kind in ARCHITECTURES]


def write_gguf(
    path: Path, family: str, config: Config, state: State, matrices: str | Callable[[str], str] = "F32",
    tokens: dict[str, Any] | None = None, changes: dict[str, Any] | None = None, more: dict[str, np.ndarray] | None = None,
    types: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    """One file with all weights; norms, biases and routers in F32 as llama.cpp wants them.

    Args:
        matrices: ggml's name of the type of all others, or what gives that by a tensor's name; rows that do not divide stay
            in F16.
        tokens: the tokenizer's fields; None is a file without one.
        changes: fields that are to be wrong, or others.
        more: tensors that no checkpoint has.
        types: ggml's names of the types of some tensors, by theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[HF_KINDS[family][0]])
    _metadata(writer, family, config)
    for key, value in (tokens or {"tokenizer.ggml.model": "none"}).items():
        _add(writer, key, value)
    for key, value in (changes or {}).items():
        writer.kv_data[0].pop(key, None)
        _add(writer, key, value)
    _write(writer, {**gguf_arrays(family, config, state), **(more or {})}, matrices, types)
    return path


def write_shard(path: Path, family: str, config: Config, state: State, index: int, n_files: int) -> None:
    """One of several files of a model; the first has the metadata."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[HF_KINDS[family][0]])
    if index == 0:
        _metadata(writer, family, config)
    writer.add_uint16("split.no", index)
    writer.add_uint16("split.count", n_files)
    arrays = gguf_arrays(family, config, state)
    _write(writer, {name: arrays[name] for name in sorted(arrays)[index::n_files]}, "F32")


def _write(
    writer: gguf.GGUFWriter, arrays: dict[str, np.ndarray], matrices: str | Callable[[str], str],
    types: dict[str, str] | None = None,
) -> None:  # fmt: skip
    for name, data in arrays.items():
        is_matrix = data.ndim > 1 and "ffn_gate_inp" not in name
        wanted = Kind[matrices if isinstance(matrices, str) else matrices(name)] if is_matrix else Kind.F32
        if types and name in types:
            wanted = Kind[types[name]]
        if data.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
            wanted = Kind.F16
        writer.add_tensor(name, gguf.quants.quantize(data, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_arrays(family: str, config: Config, state: State) -> dict[str, np.ndarray]:
    """The weights as they stand in the file, in float32."""
    kind = HF_KINDS[family][0]
    arch = ARCHITECTURES[kind]
    names = gguf.get_tensor_name_map(_ARCH_OF_NAME[arch], config.n_layer)
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in hf_state(config, state).items():
        if name == "lm_head.weight" and arch.startswith("gemma"):
            continue  # always tied
        data = tensor.float().numpy()
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = data
            continue
        if arch == "llama" and re.search(r"\.[qk]_proj\.weight$", name):
            data = _paired(data, config.n_head if ".q_proj." in name else config.n_query_groups)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        found[str(names.get_name(name, (".weight", ".bias")))] = data
    for name, of_expert in experts.items():
        target = names.get_name(name.removesuffix(".weight")) or names.get_name(name, (".weight",))
        stacked = np.stack([of_expert[i] for i in range(len(of_expert))])
        found[str(target) if str(target).endswith(".weight") else f"{target}.weight"] = stacked
    if config.rope_adjustments and "low_freq_factor" in config.rope_adjustments:
        found["rope_freqs.weight"] = rope_factors(config)
    return found


def _paired(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """The rows of each head in pairs: llama.cpp's Llama rotates neighbours."""
    halves = weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def rope_factors(config: Config) -> np.ndarray:
    """What each frequency is divided by in Llama 3.1's scaling."""
    scaling = config.rope_adjustments
    factors = []
    for i in range(config.head_size // 2):
        wavelength = 2 * np.pi * config.rope_base ** (2 * i / config.head_size)
        ratio = scaling["original_max_seq_len"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(max((ratio - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _metadata(writer: gguf.GGUFWriter, family: str, config: Config) -> None:
    kind, hf = HF_KINDS[family]
    writer.add_name("my model")
    writer.add_vocab_size(config.padded_vocab_size)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_query_groups)
    if kind.startswith(("gemma", "qwen3")):
        writer.add_key_length(config.head_size)
        writer.add_value_length(config.head_size)
    writer.add_rope_freq_base(float(config.rope_base))
    writer.add_rope_dimension_count(config.rope_n_elem)
    add_eps = writer.add_layer_norm_eps if kind == "phi" else writer.add_layer_norm_rms_eps
    add_eps(config.norm_eps)
    if kind in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window_size)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attention_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "gemma3_text":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_adjustments["factor"])
    if config.n_expert:
        writer.add_expert_count(config.n_expert)
        writer.add_expert_used_count(config.n_expert_per_token)
    if config.moe_intermediate_size:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def as_stored(state: State, matrices: str) -> State:
    """The weights as they are after they were stored in plain type `matrices` ("F32", "F16")."""
    dtype = {"F32": torch.float32, "F16": torch.float16}[matrices]
    return {name: tensor.to(dtype).float() if tensor.dim() > 1 else tensor for name, tensor in state.items()}


def byte_level_tokens(tokenizer_json: dict[str, Any], cut: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """The fields for a tokenizer of GPT-2's kind, from its tokenizer.json."""
    model = tokenizer_json["model"]
    special = {entry["content"] for entry in tokenizer_json["added_tokens"]}
    vocab = {**model["vocab"], **{entry["content"]: entry["id"] for entry in tokenizer_json["added_tokens"]}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        **more,
    }


def sentencepiece_tokens(model: Any, **more: Any) -> dict[str, Any]:
    """The fields for a tokenizer of Llama 2's kind, from a SentencePieceProcessor."""
    ids = range(model.vocab_size())
    types = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        **more,
    }
