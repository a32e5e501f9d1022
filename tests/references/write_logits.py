"""Writes tiny random models as transformers does, and the logits that it computes at every position of a text.

`make references` runs this in its environment, as it does write_models.py:

    .venv-references/bin/python tests/references/write_logits.py FOLDER

For each case, FOLDER gets a directory with config.json and safetensors as `save_pretrained` writes them, the ids of a text in
`ids.json`, and the logits behind each of them, float32 (ids, vocabulary), in `logits.npy`. `version.txt` is this file's hash.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 320,
    "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GROUPS: dict[str, Any] = {"num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPS, "head_dim": 16}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


def _long(original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 3.0, 6.0, 9.0]}
    return {"original_max_position_embeddings": original, **_rope("longrope", **factors)}


_FACTOR = {"attention_factor": 0.7}
_MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.6, "beta_fast": 8.0, "beta_slow": 2.0}

# Every other layer has a window; two of them are without.
OSS: dict[str, Any] = {
    **HEADS, "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20,
    **_rope("yarn", factor=4.0, original_max_position_embeddings=40, beta_fast=32.0, beta_slow=1.0, truncate=False),
}  # fmt: skip

FALCON: dict[str, Any] = {"ffn_hidden_size": 64, "max_position_embeddings": 320}

GLM: dict[str, Any] = {
    "moe_intermediate_size": 24, "n_routed_experts": 7, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}  # fmt: skip

LARGER: dict[str, Any] = {  # of several blocks of 128, the last of which are short
    **GROUPS, "head_dim": 32, "hidden_size": 192, "intermediate_size": 160,
}  # fmt: skip
_NEAR, _FAR = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {  # heads of two sizes
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 12,
    "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0, "pad_token_id": 0,
}  # fmt: skip
_K_EQ_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 48}

# directory -> class of transformers without "Config" and "ForCausalLM", its settings, and the length of the text
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "yarn": ("Llama", {**GROUPS, **_rope("yarn", factor=4.0, original_max_position_embeddings=40)}, 90),
    "yarn-not-truncated": (
        "Qwen3", {**HEADS, **_rope("yarn", factor=8.0, original_max_position_embeddings=20, truncate=False)}, 90
    ),
    "yarn-mscale": ("Qwen2", {**GROUPS, **_rope("yarn", factor=5.0, original_max_position_embeddings=32, **_MSCALE)}, 90),
    "yarn-attention-factor": (
        "Mistral",
        {**GROUPS, "sliding_window": 30, **_rope("yarn", factor=4.0, original_max_position_embeddings=40, **_FACTOR)},
        90,
    ),
    "longrope-short": ("Phi3", {**GROUPS, "sliding_window": None, **_long(90)}, 90),
    "longrope-long": ("Phi3", {**GROUPS, "sliding_window": None, **_long(89)}, 90),
    "dynamic": ("Llama", {**GROUPS, "max_position_embeddings": 40, **_rope("dynamic", factor=3.0)}, 90),
    "dynamic-within": ("Llama", {**GROUPS, **_rope("dynamic", factor=3.0)}, 90),
    "bloom": ("Bloom", {}, 150),
    "bloom-eight-heads": ("Bloom", {"hidden_size": 64, "n_head": 8}, 90),
    # Positions from 257 on are rounded in bfloat16.
    "falcon-rw": ("Falcon", {**FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}, 300),
    "falcon-alibi-one-group": ("Falcon", {**FALCON, "num_attention_heads": 12, "alibi": True}, 300),
    "falcon-biases": ("Falcon", {**FALCON, "alibi": False, "bias": True, "parallel_attn": False}, 90),
    "gpt2": ("GPT2", {"n_inner": 80}, 90),
    "gpt2-relu": ("GPT2", {"activation_function": "relu"}, 60),
    "opt": ("OPT", {"ffn_dim": 96}, 90),
    "opt-norms-behind": ("OPT", {"ffn_dim": 96, "do_layer_norm_before": False}, 90),
    "glm4-moe": ("Glm4Moe", {**HEADS, **GLM, "use_qk_norm": True, "attention_bias": True}, 90),  # as 4.5, 4.6 and 4.7
    "glm4-moe-air": ("Glm4Moe", {**HEADS, **GLM, "first_k_dense_replace": 2, "routed_scaling_factor": 1.0}, 60),
    "minimax-m2": ("MiniMaxM2", {**HEADS, "rotary_dim": 8, "num_local_experts": 7, "num_experts_per_tok": 3}, 90),
    # In the form of the official checkpoints: `publish` rewrites what transformers wrote.
    "glm4-moe-fp8": ("Glm4Moe", {**LARGER, **GLM, "use_qk_norm": True, "attention_bias": True}, 60),
    "glm4v-moe": ("Glm4vMoe", {**HEADS, **GLM, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, 60),
    "minimax-m2-fp8": ("MiniMaxM2", {**LARGER, "rotary_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}, 60),
    "opt-gelu": ("OPT", {"ffn_dim": 96, "activation_function": "gelu", "enable_bias": False}, 60),
    "gpt-oss": ("GptOss", {**OSS, "swiglu_limit": 2.0}, 90),
    "gpt-oss-mxfp4": ("GptOss", {**OSS, "hidden_size": 64, "intermediate_size": 96}, 90),
    "ernie4_5": ("Ernie4_5", HEADS, 90),
    "ernie4_5-biases": ("Ernie4_5", {**HEADS, "use_bias": True, "tie_word_embeddings": False}, 60),
    "smollm3": ("SmolLM3", {**GROUPS, "num_hidden_layers": 5, "no_rope_layer_interval": 2}, 90),
    "smollm3-apart": (
        "SmolLM3", {**HEADS, "num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False}, 60
    ),
    # As 31B, 26B-A4B, E2B and E4B, with the parts for images beside.
    "gemma4-dense": (
        "Gemma4", {**GEMMA4, **_K_EQ_V, "num_hidden_layers": 6, "layer_types": [_NEAR, _NEAR, _FAR] * 2}, 90
    ),
    "gemma4-experts": (
        "Gemma4",
        {
            **GEMMA4, **_K_EQ_V, "num_hidden_layers": 4, "layer_types": [_NEAR, _FAR] * 2, "enable_moe_block": True,
            "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
        },
        90,
    ),
    "gemma4-shared": (
        "Gemma4",
        {
            **GEMMA4, "num_key_value_heads": 1, "hidden_size_per_layer_input": 16, "num_hidden_layers": 8,
            "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
            "layer_types": [_NEAR, _NEAR, _NEAR, _FAR, _NEAR, _FAR, _NEAR, _FAR],
        },
        90,
    ),
    "gemma4-shared-one-width": (
        "Gemma4",
        {
            **GEMMA4, "hidden_size_per_layer_input": 8, "num_hidden_layers": 7, "num_kv_shared_layers": 2,
            "layer_types": [_NEAR, _FAR, _NEAR, _FAR, _NEAR, _NEAR, _FAR],
        },
        36,  # row 37 of this text is no measure: transformers' own float32 is 2e-4 from float64 there
    ),
}  # fmt: skip


PUBLISHED = ("glm4-moe-fp8", "glm4v-moe", "minimax-m2-fp8")
_CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "Glm4vMoe": "Glm4vMoeForConditionalGeneration",
    "Gemma4": "Gemma4ForConditionalGeneration",
}
Tensors = dict[str, torch.Tensor]


def _fp8(weight: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In blocks of so many rows and columns: FP8, scales, and the numbers that both stand for."""
    n_out, n_in = weight.shape
    scales = torch.empty(-(-n_out // height), -(-n_in // width))
    codes, numbers = torch.empty(n_out, n_in, dtype=torch.float8_e4m3fn), torch.empty(n_out, n_in)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = (weight[place].abs().max() / 448).bfloat16()
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[place] = codes[place].float() * scales[i, j]
    return codes, scales, numbers


def _predicting(tensors: Tensors, last: int, number: int) -> Tensors:
    """A block that predicts a further token, such as follows the last one in a checkpoint."""
    block, behind = (f"model.layers.{i}." for i in (last, number))
    width = tensors["model.norm.weight"].shape[0]
    more = {"enorm": (width,), "hnorm": (width,), "shared_head.norm": (width,), "eh_proj": (width, 2 * width)}
    of_block = {key.replace(block, behind): tensor.clone() for key, tensor in tensors.items() if key.startswith(block)}
    return of_block | {f"{behind}{key}.weight": torch.randn(shape) for key, shape in more.items()}


def _released_glm(config: dict[str, Any]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {**weights, "strategy": "token", "dynamic": True}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    rope = config.pop("rope_parameters")
    return {**config, **rope, "rope_scaling": None, "quantization_config": {**method, "config_groups": groups}}


def _released_minimax(config: dict[str, Any]) -> dict[str, Any]:
    theta = config.pop("rope_parameters")["rope_theta"]
    own = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
    modules = {"num_mtp_modules": 2, "mtp_transformer_layers": 1, "use_mtp": True, "attn_type_list": [1, 1, 1]}
    method = {
        "quant_method": "fp8",
        "fmt": "float8_e4m3fn",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return {**config, **own, **modules, "rope_theta": theta, "quantization_config": method}


def publish(name: str, folder: Path, model: Any) -> Any:
    """Rewrite a folder in the form of the official checkpoint, in three shards. Returns the model with the numbers there."""
    from safetensors.torch import load_file, save_file

    tensors, stored = load_file(folder / "model.safetensors"), Tensors()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if name.endswith("-fp8"):
        is_glm = name.startswith("glm")
        ending = "_scale" if is_glm else "_scale_inv"
        for key, tensor in tensors.items():
            stored[key] = tensor
            if tensor.dim() == 2 and key.startswith("model.layers.") and not key.endswith("gate.weight"):
                block = (1, tensor.shape[1]) if is_glm else (128, 128)
                stored[key], stored[key + ending], tensors[key] = _fp8(tensor, *block)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for i in range(1 if is_glm else 2):
            stored |= _predicting(stored, 2, 3 + i)
        config = (_released_glm if is_glm else _released_minimax)(config)
    else:
        stored = tensors
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "model.safetensors").unlink()
    of_shards = [sorted(stored)[i::3] for i in range(3)]
    files = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    for file, keys in zip(files, of_shards, strict=True):
        save_file({key: stored[key].contiguous() for key in keys}, folder / file, {"format": "pt"})
    index = {key: file for file, keys in zip(files, of_shards, strict=True) for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return model


def version() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def make(name: str) -> Any:
    """The model, with every number of its state random: weights of norms around one, all others around zero."""
    import transformers

    kind, own, _ = CASES[name]
    sizes = {
        key: value for key, value in SIZES.items() if kind not in ("Bloom", "GPT2", "OPT") or key != "intermediate_size"
    }
    if kind == "Bloom":
        del sizes["max_position_embeddings"]
    if "n_head" in own:
        del sizes["num_attention_heads"]
    attention = "sdpa" if kind == "Falcon" else "eager"  # there, Falcon's eager form adds what ALiBi gives twice
    settings: dict[str, Any] = {**sizes, **own}
    if kind == "Glm4vMoe":
        settings = {"text_config": settings, "vision_config": _VISION}
    if kind == "Gemma4":
        settings = {"text_config": settings, "vision_config": _GEMMA4_VISION, "audio_config": None}
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation=attention)
    torch.manual_seed(list(CASES).index(name))
    model = getattr(transformers, _CLASSES.get(kind, f"{kind}ForCausalLM"))(config).float().eval()
    with torch.no_grad():
        for key, tensor in sorted(model.state_dict().items()):
            tensor.normal_(0, 0.3)
            is_norm = ("norm" in key or "ln_" in key) and key.endswith("weight")
            if tensor.dim() == 1 and (is_norm or key.endswith(("scalar", "scale"))):
                tensor += 1
    return model


MXFP4_CASES = ("gpt-oss-mxfp4",)  # written as the official files are, not as transformers writes
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _mxfp4(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks (..., n_in / 32, 16), their scales, and the numbers that they stand for, which have this shape."""
    groups = (*shape[:-1], shape[-1] // 32)
    blocks, scales = random.integers(0, 256, (*groups, 16), np.uint8), random.integers(122, 126, groups, np.uint8)
    numbers = np.empty((*groups, 32), np.float32)
    numbers[..., 0::2], numbers[..., 1::2] = _E2M1[blocks & 15], _E2M1[blocks >> 4]
    return blocks, scales, (numbers * 2.0 ** (scales[..., None].astype(float) - 127)).reshape(shape).astype(np.float32)


def write_mxfp4(model: Any, folder: Path, random: np.random.Generator) -> None:
    """Experts in MXFP4, all else in bfloat16, in two files; the model's weights become what these stand for."""
    from safetensors.torch import save_file

    stored, config = {}, {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    del config["swiglu_alpha"]
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # inputs are in rows
            n_expert, n_in, n_out = parameter.shape
            blocks, scales, numbers = _mxfp4(random, (n_expert, n_out, n_in))
            stored |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
            parameter.data = torch.from_numpy(numbers).transpose(1, 2).contiguous()
        else:
            stored[name] = parameter.data.bfloat16()
            parameter.data = stored[name].float()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    files, names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)], list(stored)
    found = {name: files[i * 2 // len(names)] for i, name in enumerate(names)}
    for file in files:
        save_file({name: stored[name] for name in names if found[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}), encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1])
    for name, (_, _, n_ids) in CASES.items():
        model = make(name)
        if name in MXFP4_CASES:
            write_mxfp4(model, folder / name, np.random.default_rng(list(CASES).index(name)))
        else:
            model.save_pretrained(folder / name)
        if name in PUBLISHED:
            model = publish(name, folder / name, model)
        ids = torch.randint(1, SIZES["vocab_size"], (n_ids,), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0]
        (folder / name / "ids.json").write_text(json.dumps(ids.tolist()), encoding="utf-8")
        np.save(folder / name / "logits.npy", logits.numpy())
        print(f"{name}: logits to {float(logits.abs().max()):.1f}", flush=True)
    (folder / "version.txt").write_text(version(), encoding="utf-8")


if __name__ == "__main__":
    main()
