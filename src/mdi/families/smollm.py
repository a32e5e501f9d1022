"""SmolLM 3: Llama of which some blocks, every fourth by default, rotate nothing."""

from __future__ import annotations

from mdi.families.config_json import LLAMA_LIKE, SILU, Json, refuse, words
from mdi.families.family import Family
from mdi.families.names import LLAMA
from mdi.model.plain import ModelConfig


def _read(hf: Json) -> Json:
    refuse(hf, attention_bias=(False,), mlp_bias=(False,), hidden_act=SILU, use_sliding_window=(False,))
    rotated = hf.get("no_rope_layers") or [
        int((i + 1) % hf["no_rope_layer_interval"] != 0) for i in range(hf["num_hidden_layers"])
    ]
    return {**LLAMA_LIKE, "norm_eps": hf["rms_norm_eps"], "rotary_indices": rotated}


def _write(config: ModelConfig) -> Json:
    rotated = config.rotary_indices or (1,) * config.n_layer  # 1 for those that rotate, there as well
    # Unless it is null, the padding's id is SmolLM3-3B's, which a smaller vocabulary lacks.
    return {**words(config), "no_rope_layers": list(rotated), "pad_token_id": None}


_DEFAULTS: Json = {"rope_theta": 2_000_000, "no_rope_layer_interval": 4, "rms_norm_eps": 1e-6}

FAMILIES = (Family("smollm3", "SmolLM3ForCausalLM", _read, _write, lambda _: LLAMA, defaults=_DEFAULTS),)
