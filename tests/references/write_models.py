"""Writes a tiny random model of each family as transformers does, and what transformers computes with it.

`make references` makes an environment with transformers and runs this in it:

    .venv-references/bin/python tests/references/write_models.py FOLDER

For each family, FOLDER gets a directory with config.json and safetensors as `save_pretrained` writes them, and in
`reference.json` greedy ids of a prompt and the log probability of each. `version.txt` is the hash of this file.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

N_PROMPT, N_TOKENS = 30, 16
SIZES = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 320,
    "max_position_embeddings": 160,
}  # fmt: skip
NO_IDS = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}  # of texts: here they have their whole length
GROUPS: dict[str, Any] = {"num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPS, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
WINDOW = {"sliding_window": 12, "query_pre_attn_scalar": 20, **HEADS}

# directory -> class of transformers, without "Config" and "ForCausalLM", and its settings
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPS),
    "llama-scaled": ("Llama", {**GROUPS, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**GROUPS, "sliding_window": 12}),
    "mixtral": ("Mixtral", {**GROUPS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", GROUPS),
    "qwen3": ("Qwen3", HEADS),
    "qwen3_moe": ("Qwen3Moe", {**HEADS, **EXPERTS}),
    "gemma": ("Gemma", HEADS),
    "gemma2": ("Gemma2", {**WINDOW, "num_hidden_layers": 4, "final_logit_softcapping": 9.0, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**WINDOW, "num_hidden_layers": 7}),
    "gemma3-sees": ("Gemma3", {**WINDOW, "num_hidden_layers": 7}),  # the language part of a model that also sees
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {**GROUPS, "sliding_window": 20}),
    "gpt_neox": ("GPTNeoX", {}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", GROUPS),
    "stablelm": ("StableLm", {"num_key_value_heads": 6}),
    "falcon": ("Falcon", {"bias": False, "alibi": False, "ffn_hidden_size": 64}),
    "falcon-groups": (
        "Falcon",
        {
            "bias": False, "alibi": False, "ffn_hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def version() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def make(name: str) -> Any:
    """The model, with every parameter random: norms around one, all others around zero."""
    import transformers

    kind, own = FAMILIES[name]
    settings, ending = {**SIZES, **NO_IDS, **own}, "ForCausalLM"
    if name == "gemma3-sees":
        settings = {"text_config": settings, "vision_config": VISION, "mm_tokens_per_image": 4}
        ending = "ForConditionalGeneration"
    config_class = kind + ("TextConfig" if name == "gemma3" else "Config")
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(list(FAMILIES).index(name))
    model = getattr(transformers, kind + ending)(config).float().eval()
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            parameter.normal_(0, 0.3)
            if parameter.dim() == 1 and "norm" in key and key.endswith("weight"):
                parameter += 1
    return model


@torch.no_grad()
def reference(model: Any, prompt: list[int]) -> dict[str, Any]:
    """Greedy ids without a cache, the log probability of each, and by how much it is before the second best."""
    ids, logprobs, leads = list(prompt), [], []
    for _ in range(N_TOKENS):
        row = torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0, -1].double(), -1)
        best = row.topk(2)
        ids.append(int(best.indices[0]))
        logprobs.append(float(best.values[0]))
        leads.append(float(best.values[0] - best.values[1]))
    return {"prompt": prompt, "ids": ids[len(prompt) :], "logprobs": logprobs, "leads": leads}


def main() -> None:
    folder = Path(sys.argv[1])
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, SIZES["vocab_size"], (N_PROMPT,), generator=generator).tolist()
    for name in FAMILIES:
        model = make(name)
        model.save_pretrained(folder / name)
        answer = reference(model, prompt)
        (folder / name / "reference.json").write_text(json.dumps(answer), encoding="utf-8")
        print(
            f"{name}: {len(set(answer['ids']))} different ids, the best leads by {min(answer['leads']):.4f}", flush=True
        )
    (folder / "version.txt").write_text(version(), encoding="utf-8")


if __name__ == "__main__":
    main()
