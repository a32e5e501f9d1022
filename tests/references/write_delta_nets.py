"""Writes tiny random models with gated delta nets as they are published, and the logits that transformers computes.

`make references` runs this in its environment, as it does write_logits.py:

    .venv-references/bin/python tests/references/write_delta_nets.py FOLDER

For each case, FOLDER gets a directory as that of write_logits.py, and in `steps.npy` the same logits when one token comes at a
time. Qwen 3.5 has its composite form, with tensors of images and of a block that predicts a further token beside the others.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

N_IDS = 150
SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320,
    "max_position_embeddings": 200, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rms_norm_eps": 1e-5,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 48, "patch_size": 14,
    "num_position_embeddings": 16,
}  # fmt: skip
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]

# directory -> class of transformers without "Config", the ending of the model's class, and settings
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5", "ForConditionalGeneration",
        {"intermediate_size": 64, "num_hidden_layers": 5, "layer_types": KINDS, "rope_parameters": {**ROPE, **SECTIONS}},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe", "ForConditionalGeneration",
        {**EXPERTS, "num_hidden_layers": 5, "rope_parameters": {**ROPE, **SECTIONS}},
    ),
    "qwen3_next": (
        "Qwen3Next", "ForCausalLM",
        {**EXPERTS, "intermediate_size": 64, "num_hidden_layers": 4, "rope_parameters": ROPE, "norm_topk_prob": True},
    ),
}  # fmt: skip


def version() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def make(name: str) -> Any:
    """The model, with every number random: weights of norms without an offset around one, all others around zero."""
    import transformers

    kind, ending, own = CASES[name]
    settings = {**SIZES, **own}
    if ending == "ForConditionalGeneration":
        settings = {"text_config": settings, "vision_config": VISION, "tie_word_embeddings": False}
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager")
    torch.manual_seed(list(CASES).index(name))
    model = getattr(transformers, kind + ending)(config).float().eval()
    with torch.no_grad():
        for key, tensor in sorted(model.state_dict().items()):
            if key.endswith("inv_freq"):
                continue
            tensor.normal_(0, 0.3 if tensor.dim() == 1 or "conv1d" in key else 0.12)
            if key.endswith("linear_attn.norm.weight"):
                tensor += 1
            if key.endswith("A_log"):
                tensor *= 3
    return model


def publish(name: str, folder: Path) -> None:
    """Add a block that predicts a further token, as published files have. Qwen 3.5 has experts in one tensor."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for block in range(5 if name == "qwen3_5_moe" else 0):
        path_in = f"model.language_model.layers.{block}.mlp.experts."
        gates, ups, downs = (
            [tensors.pop(f"{path_in}{i}.{one}_proj.weight") for i in range(6)] for one in ("gate", "up", "down")
        )
        of_both = zip(gates, ups, strict=True)
        tensors[f"{path_in}gate_up_proj"] = torch.stack([torch.cat(both) for both in of_both])
        tensors[f"{path_in}down_proj"] = torch.stack(downs)
    more = {"mtp.fc.weight": (48, 96), "mtp.norm.weight": (48,), "mtp.layers.0.self_attn.q_norm.weight": (32,)}
    save_file({**tensors, **{key: torch.randn(shape) for key, shape in more.items()}}, path, {"format": "pt"})


@torch.no_grad()
def in_steps(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache, found = None, []
    for i in range(len(ids)):
        out = model(ids[None, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits[0, -1])
    return torch.stack(found)


def main() -> None:
    folder = Path(sys.argv[1])
    for name in CASES:
        model = make(name)
        model.save_pretrained(folder / name)
        publish(name, folder / name)
        ids = torch.randint(1, SIZES["vocab_size"], (N_IDS,), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0]
        steps = in_steps(model, ids)
        (folder / name / "ids.json").write_text(json.dumps(ids.tolist()), encoding="utf-8")
        np.save(folder / name / "logits.npy", logits.numpy())
        np.save(folder / name / "steps.npy", steps.numpy())
        print(
            f"{name}: logits to {float(logits.abs().max()):.1f}, steps differ by {float((steps - logits).abs().max()):.1e}"
        )
    (folder / "version.txt").write_text(version(), encoding="utf-8")


if __name__ == "__main__":
    main()
