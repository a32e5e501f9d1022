"""OPT."""

from __future__ import annotations

from typing import Any

from mdi.families.config_json import BEHIND_EACH_OTHER, NOT_THERE, Json, activation, plain_mlp, refuse, words
from mdi.families.family import Family
from mdi.families.names import Held, Names
from mdi.model.plain import ModelConfig


def _read(hf: Json) -> Json:
    refuse(hf, word_embed_proj_dim=(hf["hidden_size"],), layer_norm_elementwise_affine=(True,))
    refuse(hf, _remove_final_layer_norm=(False,))
    own = {"norm_eps": 1e-5, "learned_positions": True, "bias": hf.get("enable_bias", True)}
    if not hf.get("do_layer_norm_before", True):  # norms behind the sums, as in the first transformers
        behind = {"norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True}
        own |= {**behind, "norm_after_residual": True}
    return {**BEHIND_EACH_OTHER, **own, **plain_mlp(hf, "relu")}


def _write(config: ModelConfig) -> Json:
    if config.mlp_class_name != "ReluMLP" and config.bias and not config.norm_after_residual:
        raise ValueError("this is a GPT-2 as well, and is written as that")
    own = {"ffn_dim": "intermediate_size", "enable_bias": "bias", "word_embed_proj_dim": "n_embd"}
    found = words(config, own, lacks=NOT_THERE)
    return {**found, "activation_function": activation(config), "do_layer_norm_before": not config.norm_after_residual}


_NAMES = Names(
    {
        **dict.fromkeys(("norm_1", "post_attention_norm"), "self_attn_layer_norm"),
        **dict.fromkeys(("norm_2", "post_mlp_norm"), "final_layer_norm"),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.proj": "self_attn.out_proj",
        "mlp.fc": "fc1",
        "mlp.proj": "fc2",
    },
    {
        "transformer.wte": "embed_tokens",
        "transformer.wpe": Held(("embed_positions",), n_before=2),  # for padding
        "transformer.ln_f": "final_layer_norm",
    },
    prefixes=("model.decoder.", "decoder."),
)


def _published(n_layer: int, hidden_size: int, n_head: int, **other: Any) -> Json:
    return {
        "model_type": "opt", "num_hidden_layers": n_layer, "hidden_size": hidden_size, "num_attention_heads": n_head,
        "ffn_dim": 4 * hidden_size, "max_position_embeddings": 2048, "vocab_size": 50272, **other,
    }  # fmt: skip


_PUBLISHED = {
    "facebook/opt-125m": _published(12, 768, 12),
    "facebook/opt-350m": _published(24, 1024, 16, do_layer_norm_before=False, word_embed_proj_dim=512),  # refused
    "facebook/opt-1.3b": _published(24, 2048, 32),
    "facebook/opt-2.7b": _published(32, 2560, 32),
    "facebook/opt-6.7b": _published(32, 4096, 32),
    "facebook/opt-13b": _published(40, 5120, 40),
    "facebook/opt-30b": _published(48, 7168, 56),
    "facebook/opt-66b": _published(64, 9216, 72),
}

FAMILIES = (
    Family(
        "opt", "OPTForCausalLM", _read, _write, lambda _: _NAMES, {"ffn_dim": "intermediate_size"}, published=_PUBLISHED
    ),
)  # fmt: skip
