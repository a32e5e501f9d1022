"""Tiny random models of every family that litgpt's Config describes, and litgpt's own uncached answer for them.

Each keeps what is special about its family (scaled or dual RoPE, soft caps, windows, experts, latent attention ...); norms
and biases get random values, so that one which is left out is noticed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT

VOCAB = 97
CONTEXT = 160

_SMALL: dict[str, Any] = {
    "n_layer": 5, "n_embd": 48, "n_head": 6, "padded_vocab_size": VOCAB, "vocab_size": VOCAB, "block_size": CONTEXT,
}  # fmt: skip
_MLP = {"intermediate_size": 64}

# name in litgpt's table -> what makes it tiny
NAMED: dict[str, dict[str, Any]] = {
    "Llama-2-7b-hf": {**_MLP, "head_size": 8},
    "Llama-3.1-8B": {
        **_MLP, "n_query_groups": 2, "head_size": 8,
        "rope_adjustments": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 40},
    },
    "tiny-llama-1.1b": {**_MLP, "n_query_groups": 3, "head_size": 8},
    "pythia-14m": {**_MLP, "head_size": 8},
    "falcon-7b": {**_MLP, "head_size": 8},
    "falcon-40b": {**_MLP, "n_query_groups": 2, "head_size": 8},
    "stablelm-3b-4e1t": {**_MLP, "head_size": 8},
    "Gemma-2b": {**_MLP, "n_query_groups": 1, "head_size": 16},
    "Gemma-2-9b": {**_MLP, "n_query_groups": 2, "head_size": 16, "sliding_window_size": 12, "attention_scores_scalar": 20},
    "Gemma-3-1b-it": {
        **_MLP, "n_query_groups": 1, "head_size": 16, "sliding_window_size": 12, "n_layer": 7,
        "sliding_window_indices": [1, 1, 1, 0, 1, 1, 0], "rope_indices": [1, 1, 1, 0, 1, 1, 0],
        "rope_adjustments": {"factor": 8.0},
    },
    "phi-2": {**_MLP, "head_size": 8},
    "Phi-3-mini-4k-instruct": {**_MLP, "head_size": 8, "sliding_window_size": 20},
    "Qwen2.5-0.5B": {**_MLP, "n_query_groups": 2, "head_size": 8},
    "Qwen3-0.6B": {**_MLP, "n_query_groups": 2, "head_size": 16},
    "Mistral-7B-v0.1": {**_MLP, "n_query_groups": 2, "head_size": 8, "sliding_window_size": 16},
    "Mixtral-8x7B-v0.1": {**_MLP, "n_query_groups": 2, "head_size": 8, "n_expert": 4},
    "Qwen3-30B-A3B": {
        **_MLP, "n_query_groups": 2, "head_size": 16, "n_expert": 6, "n_expert_per_token": 2, "moe_intermediate_size": 24,
    },
    "OLMo-2-1124-7B": {**_MLP, "n_query_groups": 3, "head_size": 8},
    "OLMo-1B-hf": {**_MLP, "head_size": 8},
}  # fmt: skip

# litgpt's table has no DeepSeek V3; this has its shape.
DEEPSEEK_V3: dict[str, Any] = {
    **_SMALL, **_MLP, "name": "deepseek-v3-shape", "n_head": 4, "rotary_percentage": 1.0,
    "parallel_residual": False, "bias": False,
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMoE", "moe_intermediate_size": 24, "n_expert": 8,
    "n_shared_expert": 1, "n_expert_groups": 4, "n_topk_groups": 2, "n_topk_scores_per_group": 2, "n_expert_per_token": 3,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "latent_attention": {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    },
    "rope_adjustments": {
        "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_seq_len": 40,
    },
}  # fmt: skip

FAMILIES = [*NAMED, "deepseek-v3-shape"]


def config_of(family: str, **changes: Any) -> Config:
    if family == "deepseek-v3-shape":
        return Config(**{**DEEPSEEK_V3, **changes})
    return Config.from_name(family, **{**_SMALL, **NAMED[family], **changes})


def random_gpt(config: Config, seed: int = 0) -> GPT:
    """litgpt's model with weights that keep logits apart, and no norm, bias or buffer at its default."""
    generator = torch.Generator().manual_seed(seed)
    gpt = GPT(config).eval().requires_grad_(False)
    for name, tensor in gpt.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.uniform_(-0.2, 0.2, generator=generator)
        elif tensor.dim() == 1 and name.endswith("weight"):  # norms
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.dim() == 1:
            tensor.normal_(0, 0.3, generator=generator)
        else:
            tensor.normal_(0, 1.2 / tensor.size(-1) ** 0.5, generator=generator)
    return gpt


@functools.cache
def model_of(family: str) -> GPT:
    """The same object for all tests: none of them may change it."""
    gpt = random_gpt(config_of(family))
    _known[gpt] = {}
    return gpt


# Of the models of `model_of`: prompt -> its reference, as far as a test wanted it. Many tests ask for the same ones.
_known: dict[GPT, dict[tuple[int, ...], list[int]]] = {}


def prompt(n_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, VOCAB, (n_tokens,), generator=generator).tolist()


@torch.no_grad()
def greedy(gpt: GPT, prompt_ids: list[int], n_tokens: int) -> list[int]:
    """The reference: the whole text again for every token, no cache."""
    ids = _known.get(gpt, {}).setdefault(tuple(prompt_ids), [])
    while len(ids) < n_tokens:
        ids.append(int(gpt(torch.tensor([[*prompt_ids, *ids]]))[0, -1].argmax()))
    return ids[:n_tokens]
