"""Writes tiny random models with latent attention as they are published, and the logits that transformers computes.

`make references` runs this in its environment, as it does write_logits.py:

    .venv-references/bin/python tests/references/write_latent.py FOLDER

For each case, FOLDER gets a directory as that of write_logits.py. Kimi K2 is no model_type of transformers: its models are
those of DeepSeek V3 with its settings, and K2.5 has its composite form, with tensors of images beside the others. Published
forms have a block that predicts a further token, or weights in FP8.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

N_IDS = 90
SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 320,
    "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "num_hidden_layers": 4,
    "kv_lora_rank": 32, "q_lora_rank": 28, "qk_rope_head_dim": 16, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 40, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
OF_V3: dict[str, Any] = {"n_group": 4, "topk_group": 2, "rope_parameters": YARN, "rms_norm_eps": 1e-6}
OF_KIMI: dict[str, Any] = {
    "rope_parameters": {
        **YARN, "beta_fast": 1, "mscale_all_dim": 1.0, "rope_theta": 50000.0, "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-2,
}  # fmt: skip
LARGER = {
    "hidden_size": 192, "intermediate_size": 160, "moe_intermediate_size": 144, "kv_lora_rank": 144, "q_lora_rank": 136,
}  # fmt: skip

# directory -> class of transformers, and settings
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # rms_norm_eps is large, such that it matters that latent rows have another one.
    "glm4-moe-lite": (
        "Glm4MoeLite", {"v_head_dim": 16, "rope_parameters": PLAIN, "rms_norm_eps": 1e-2, "routed_scaling_factor": 1.8}
    ),
    "deepseek-v3": ("DeepseekV3", OF_V3),
    "deepseek-v3-fp8": ("DeepseekV3", {**OF_V3, **LARGER, "num_hidden_layers": 3}),
    "moonlight": (
        "DeepseekV3", {"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": PLAIN, "rms_norm_eps": 1e-2}
    ),
    "kimi-k2": ("DeepseekV3", {**OF_KIMI, "num_hidden_layers": 3}),
    "kimi-k25": ("DeepseekV3", OF_KIMI),
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def version() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def make(name: str) -> Any:
    """The model, with every number random: weights of norms around one, all others around zero."""
    import transformers

    kind, own = CASES[name]
    settings = {**SIZES, **own}
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager")
    torch.manual_seed(list(CASES).index(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in sorted(model.state_dict().items()):
            tensor.normal_(0, 0.3 if settings["hidden_size"] < 100 or tensor.dim() == 1 else 0.15)
            if key.endswith("norm.weight"):
                tensor += 1
    return model


def fp8(weight: torch.Tensor, size: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In blocks of so many rows and columns: FP8, scales, and the numbers that both stand for."""
    shape = tuple(-(-n // size) for n in weight.shape)
    scales, of_numbers = torch.empty(shape), torch.empty_like(weight)
    for i in range(shape[0]):
        for j in range(shape[1]):
            place = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scales[i, j] = weight[place].abs().max() / 448
            of_numbers[place] = scales[i, j]
    codes = (weight / of_numbers).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * of_numbers


def in_fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Of a checkpoint, and the numbers that these stand for."""
    stored, numbers = Tensors(), Tensors()
    for key, tensor in tensors.items():
        stored[key] = numbers[key] = tensor
        if tensor.dim() == 2 and key.startswith("model.layers.") and not key.endswith("gate.weight"):
            stored[key], stored[f"{key}_scale_inv"], numbers[key] = fp8(tensor)
    return stored, numbers


def predicting(tensors: Tensors, last: int) -> Tensors:
    """A block that predicts a further token, such as follows the last one in a checkpoint."""
    block, behind = (f"model.layers.{i}." for i in (last, last + 1))
    width = tensors["model.norm.weight"].shape[0]
    more = {"enorm": (width,), "hnorm": (width,), "shared_head.norm": (width,), "eh_proj": (width, 2 * width)}
    of_block = {key.replace(block, behind): tensor.clone() for key, tensor in tensors.items() if key.startswith(block)}
    return of_block | {f"{behind}{key}.weight": torch.randn(shape) for key, shape in more.items()}


def publish(name: str, folder: Path, model: Any) -> Any:
    """Rewrite a folder in the form of the official checkpoint. Returns the model with the numbers there."""
    from safetensors.torch import load_file, save_file

    path, where = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(path), json.loads(where.read_text(encoding="utf-8"))
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        scaling["type"] = scaling.pop("rope_type")
        config["rope_scaling"] = scaling
    if name == "deepseek-v3-fp8":
        tensors, numbers = in_fp8(tensors)
        save_file(numbers, path, {"format": "pt"})
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        }  # fmt: skip
    if name.startswith("kimi"):
        config |= {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        config |= {"num_nextn_predict_layers": 0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
        for key in ("rope_interleave", "head_dim"):  # which these files do not say
            config.pop(key, None)
    else:
        tensors |= predicting(tensors, config["num_hidden_layers"] - 1)
        config["num_nextn_predict_layers"] = 1
    if name == "kimi-k25":
        tensors = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
        tensors |= {
            "vision_tower.patch_embed.proj.weight": torch.randn(8, 3),
            "mm_projector.proj.0.weight": torch.randn(8, 8),
        }
        own = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {}}
        config = {**own, "text_config": config}
    where.write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"format": "pt"})
    return model


def main() -> None:
    folder = Path(sys.argv[1])
    for name in CASES:
        model = make(name)
        model.save_pretrained(folder / name)
        model = publish(name, folder / name, model)
        ids = torch.randint(1, SIZES["vocab_size"], (N_IDS,), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0]
        (folder / name / "ids.json").write_text(json.dumps(ids.tolist()), encoding="utf-8")
        np.save(folder / name / "logits.npy", logits.numpy())
        print(f"{name}: logits to {float(logits.abs().max()):.1f}", flush=True)
    (folder / "version.txt").write_text(version(), encoding="utf-8")


if __name__ == "__main__":
    main()
