"""config.json as the families' real models have it, field by field, and litgpt's name for the same model.

Written by hand from what the models' files say. Left out are fields that say nothing of the computation (dropout, token
ids, dtypes, versions). Beside the first form of a model stand those that other tools and later versions write.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_LLAMA: Json = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "pretraining_tp": 1,
    "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
_LLAMA_2 = {
    **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "vocab_size": 32000,
}  # fmt: skip
_LLAMA_3 = {
    **_LLAMA, "attention_bias": False, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip
_SCALED = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
_LLAMA_3_1 = {**_LLAMA_3, "max_position_embeddings": 131072, "mlp_bias": False, "rope_scaling": _SCALED}
_LLAMA_3_2 = {
    **_LLAMA_3_1, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": {**_SCALED, "factor": 32.0}, "tie_word_embeddings": True,
}  # fmt: skip
_TINY_LLAMA = {
    **_LLAMA, "attention_bias": False, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048,
    "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "vocab_size": 32000,
}  # fmt: skip
_OPEN_LLAMA = {
    **_LLAMA, "hidden_size": 3200, "intermediate_size": 8640, "max_position_embeddings": 2048, "num_attention_heads": 32,
    "num_hidden_layers": 26, "rms_norm_eps": 1e-6, "vocab_size": 32000,
}  # fmt: skip
_SMOLLM = {
    **_LLAMA, "attention_bias": False, "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True,
    "vocab_size": 49152,
}  # fmt: skip
_SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536, "mlp_bias": False,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 4, "pad_token_id": 128004, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
_SMOLLM3_IS = {
    "n_layer": 36, "n_embd": 2048, "n_head": 16, "n_query_groups": 4, "head_size": 128, "intermediate_size": 11008,
    "rotary_indices": [1, 1, 1, 0] * 9, "rope_base": 5000000, "rotary_percentage": 1.0, "block_size": 65536,
    "padded_vocab_size": 128256,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
_MIXTRAL = {
    **_MISTRAL, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
    "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}  # fmt: skip
_QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_QWEN_3_MOE = {
    **_QWEN_3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
_PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 128,
    "intermediate_size": 512, "layer_norm_eps": 1e-5, "max_position_embeddings": 512, "num_attention_heads": 4,
    "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
_PHI = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new", "hidden_size": 2048,
    "intermediate_size": 8192, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 32,
    "num_hidden_layers": 24, "num_key_value_heads": None, "partial_rotary_factor": 0.5, "qk_layernorm": False,
    "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 51200,
}  # fmt: skip
_PHI_2 = {
    **_PHI, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
}  # fmt: skip
_PHI_3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "vocab_size": 32064,
}  # fmt: skip
_PHI_4 = {
    **_PHI_3, "hidden_size": 5120, "intermediate_size": 17920, "max_position_embeddings": 16384,
    "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384, "rope_theta": 250000, "sliding_window": None, "vocab_size": 100352,
}  # fmt: skip
_GEMMA = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "attention_bias": False, "head_dim": 256,
    "hidden_act": "gelu", "hidden_size": 3072, "intermediate_size": 24576, "max_position_embeddings": 8192,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
}  # fmt: skip
_GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
_GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
_LINEAR_8 = {"factor": 8.0, "rope_type": "linear"}
_GEMMA_3_4B = {  # the language part of a model that sees: defaults are left out
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": _LINEAR_8, "sliding_window": 1024,
}  # fmt: skip
_GEMMA_3_27B = {
    "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
    "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
    "rope_scaling": _LINEAR_8, "sliding_window": 1024,
}  # fmt: skip
_OLMO = {
    "architectures": ["OlmoForCausalLM"], "model_type": "olmo", "attention_bias": False, "clip_qkv": None,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 2048,
    "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16, "pretraining_tp": 1,
    "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True, "vocab_size": 50304,
}  # fmt: skip
_OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip
_STABLELM = {
    "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 6912, "layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_scaling": None,
    "rope_theta": 10000, "tie_word_embeddings": False, "use_qkv_bias": False, "vocab_size": 50304,
}  # fmt: skip
_FALCON_7B = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "bias": False, "hidden_size": 4544, "layer_norm_epsilon": 1e-5, "model_type": "falcon", "multi_query": True,
    "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
    "vocab_size": 65024,
}  # fmt: skip
_FALCON_40B = {
    **_FALCON_7B, "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128,
    "num_hidden_layers": 60, "num_kv_heads": 8,
}  # fmt: skip


def _rope_parameters(config: Json, **parameters: Any) -> Json:
    """As transformers 5 writes it: all that concerns RoPE in one object, also what was outside of rope_scaling."""
    outside = ("rope_theta", "rope_scaling", "rope_local_base_freq", "rotary_emb_base", "rotary_pct")
    rest = {key: value for key, value in config.items() if key not in (*outside, "partial_rotary_factor")}
    return {**rest, "rope_parameters": parameters}


def without(config: Json, *keys: str) -> Json:
    return {key: value for key, value in config.items() if key not in keys}


_FULL, _NEAR = "full_attention", "sliding_attention"

# what it is -> (litgpt's name for the same settings, config.json)
REAL: dict[str, tuple[str, Json]] = {
    "Llama 2 7B": ("Llama-2-7b-hf", _LLAMA_2),
    "Llama 2 7B, saved before there were groups": ("Llama-2-7b-hf", without(_LLAMA_2, "num_key_value_heads")),
    "Llama 2 7B, saved later": ("Llama-2-7b-hf", {**_LLAMA_2, "head_dim": 128, "mlp_bias": False, "rope_theta": 10000.0}),
    "Llama 2 7B, 32K": (
        "LLaMA-2-7B-32K",
        {**_LLAMA_2, "max_position_embeddings": 4096, "rope_scaling": {"factor": 8.0, "type": "linear"}},
    ),
    "Code Llama 7B": (
        "CodeLlama-7b-hf",
        {**_LLAMA_2, "max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016},
    ),
    "Llama 3 8B": ("Llama-3-8B", _LLAMA_3),
    "Llama 3.1 8B": ("Llama-3.1-8B", _LLAMA_3_1),
    "Llama 3.1 8B, transformers 5": (
        "Llama-3.1-8B", _rope_parameters(_LLAMA_3_1, **_SCALED, rope_theta=500000.0)
    ),
    "Llama 3.2 1B": ("Llama-3.2-1B", _LLAMA_3_2),
    "Llama 3.3 70B": (
        "Llama-3.3-70B-Instruct",
        {**_LLAMA_3_1, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    ),
    "TinyLlama 1.1B": ("tiny-llama-1.1b", _TINY_LLAMA),
    "TinyLlama 1.1B, dynamic": (
        "tiny-llama-1.1b", {**_TINY_LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    ),
    "OpenLLaMA 3B": ("open_llama_3b", _OPEN_LLAMA),
    "SmolLM2 135M": ("SmolLM2-135M", _SMOLLM),
    "Mistral 7B v0.1": ("Mistral-7B-v0.1", _MISTRAL),
    "Mistral 7B v0.3": (
        "Mistral-7B-v0.3", {**_MISTRAL, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
    ),
    "Mistral 7B v0.3, head_dim null": (
        "Mistral-7B-v0.3",
        {**_MISTRAL, "head_dim": None, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    ),
    "Mixtral 8x7B": ("Mixtral-8x7B-v0.1", _MIXTRAL),
    "Qwen 2.5 0.5B": ("Qwen2.5-0.5B", _QWEN_2_5),
    "Qwen 2.5 0.5B, with layer_types": (
        "Qwen2.5-0.5B", {**_QWEN_2_5, "layer_types": [_FULL] * 24, "sliding_window": None, "rope_scaling": None}
    ),
    "Qwen 2.5 7B Instruct": (
        "Qwen2.5-7B-Instruct",
        {
            **_QWEN_2_5, "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28,
            "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072,
            "tie_word_embeddings": False, "vocab_size": 152064,
        },
    ),
    "Qwen 3 0.6B": ("Qwen3-0.6B", _QWEN_3),
    "Qwen 3 30B A3B": ("Qwen3-30B-A3B", _QWEN_3_MOE),
    "Qwen 3 30B A3B, transformers 5": (
        "Qwen3-30B-A3B", {**without(_QWEN_3_MOE, "num_experts"), "num_local_experts": 128}
    ),
    "Pythia 14M": ("pythia-14m", _PYTHIA),
    "Pythia 14M, transformers 5": (
        "pythia-14m",
        _rope_parameters(_PYTHIA, rope_theta=10000, rope_type="default", partial_rotary_factor=0.25),
    ),
    "Phi 1.5": ("phi-1_5", _PHI),
    "Phi 2": ("phi-2", _PHI_2),
    "Phi 3 mini 4K": ("Phi-3-mini-4k-instruct", _PHI_3),
    "Phi 4": ("phi-4", _PHI_4),
    "Gemma 7B": ("Gemma-7b", _GEMMA),
    "Gemma 7B, with hidden_activation": ("Gemma-7b", {**_GEMMA, "hidden_activation": "gelu_pytorch_tanh"}),
    "Gemma 2 2B": ("Gemma-2-2b", _GEMMA_2),
    "Gemma 3 1B": ("Gemma-3-1b-it", _GEMMA_3_1B),
    "Gemma 3 1B, transformers 5": (
        "Gemma-3-1b-it",
        {
            **_rope_parameters(
                without(_GEMMA_3_1B, "sliding_window_pattern"),
                full_attention={"rope_theta": 1000000.0, "rope_type": "default"},
                sliding_attention={"rope_theta": 10000.0, "rope_type": "default"},
            ),
            "layer_types": ([_NEAR] * 5 + [_FULL]) * 4 + [_NEAR] * 2,
        },
    ),
    "Gemma 3 4B, its language part": ("Gemma-3-4b-it", _GEMMA_3_4B),
    "Gemma 3 27B, its language part": ("Gemma-3-27b-it", _GEMMA_3_27B),
    "OLMo 1B": ("OLMo-1B-hf", _OLMO),
    "OLMo 2 7B": ("OLMo-2-1124-7B", _OLMO_2),
    "StableLM 3B": ("stablelm-3b-4e1t", _STABLELM),
    "Falcon 7B": ("falcon-7b", _FALCON_7B),
    "Falcon 7B, saved later": (
        "falcon-7b", {**_FALCON_7B, "activation": "gelu", "ffn_hidden_size": 18176, "max_position_embeddings": 2048}
    ),
    "Falcon 40B": ("falcon-40b", _FALCON_40B),
}  # fmt: skip

# The same for models whose files set positions otherwise than litgpt's table.
OFFICIAL: dict[str, tuple[str, Json]] = {
    "Phi 3 mini 128K": (
        "Phi-3-mini-128k-instruct",
        {
            **_PHI_3, "max_position_embeddings": 131072, "sliding_window": 262144,
            "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [2.5] * 48},
        },
    ),
    "Phi 3.5 mini": (
        "Phi-3.5-mini-instruct",
        {
            **_PHI_3, "max_position_embeddings": 131072, "sliding_window": 262144,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
        },
    ),
    "Phi 4 mini": (
        "Phi-4-mini-instruct",
        {
            **_PHI_3, "max_position_embeddings": 131072, "num_attention_heads": 24, "num_key_value_heads": 8,
            "partial_rotary_factor": 0.75, "sliding_window": 262144, "vocab_size": 200064, "tie_word_embeddings": True,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
        },
    ),
    "Qwen 2.5 7B Instruct with YaRN, as its card says": (
        "Qwen2.5-7B-Instruct",
        {
            **REAL["Qwen 2.5 7B Instruct"][1],
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
    ),
    "TinyLlama 1.1B Chat, dynamic": (
        "tiny-llama-1.1b-chat", {**_TINY_LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    ),
    "Llama 2 7B with another base": ("Llama-2-7b-hf", {**_LLAMA_2, "rope_theta": 1000000.0}),
}  # fmt: skip

_BLOOM: Json = {  # BLOOM 560M
    "model_type": "bloom", "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True,
    "n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1,
    "seq_length": 2048, "skip_bias_add": True, "slow_but_exact": False, "use_cache": True, "vocab_size": 250880,
}  # fmt: skip
_GPT_2: Json = {
    "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50256, "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "vocab_size": 50257,
}  # fmt: skip
_OPT: Json = {  # OPT 125M
    "model_type": "opt", "_remove_final_layer_norm": False, "activation_function": "relu", "do_layer_norm_before": True,
    "ffn_dim": 3072, "hidden_size": 768, "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12,
    "vocab_size": 50272, "word_embed_proj_dim": 768,
}  # fmt: skip
_FALCON_RW: Json = {  # Falcon RW 1B
    "model_type": "falcon", "alibi": True, "bias": True, "hidden_size": 2048, "layer_norm_epsilon": 1e-05,
    "multi_query": False, "new_decoder_architecture": False, "num_attention_heads": 32, "num_hidden_layers": 24,
    "parallel_attn": False, "vocab_size": 50304,
}  # fmt: skip
_GLM_4_5: Json = {  # GLM 4.5; 4.6 and 4.7 differ in the length
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536,
    "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
_GLM_4_5_AIR: Json = {
    **_GLM_4_5, "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "num_hidden_layers": 46, "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
_MINIMAX_M2: Json = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
_SIGMOIDS: Json = {
    "mlp_class_name": "LLaMAMoE", "sigmoid_router": True, "norm_class_name": "RMSNorm", "parallel_residual": False,
    "bias": False, "norm_qk": True, "rotary_percentage": 0.5, "head_size": 128, "n_query_groups": 8, "n_expert_per_token": 8,
}  # fmt: skip
_GLM = {
    **_SIGMOIDS, "n_layer": 92, "n_embd": 5120, "n_head": 96, "n_expert": 160, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "n_shared_expert": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
    "attn_bias": True, "norm_qk_type": "default", "rope_base": 1000000, "padded_vocab_size": 151552, "block_size": 131072,
}  # fmt: skip
_MINIMAX = {
    **_SIGMOIDS, "n_layer": 62, "n_embd": 3072, "n_head": 48, "n_expert": 256, "intermediate_size": 1536,
    "moe_intermediate_size": None, "n_shared_expert": None, "first_k_dense_replace": None, "routed_scaling_factor": 1.0,
    "attn_bias": False, "norm_qk_type": "olmo2", "rope_base": 5000000, "norm_eps": 1e-6, "padded_vocab_size": 200064,
}  # fmt: skip
_GPT_OSS: Json = {  # gpt-oss 20B
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
_DEEPSEEK_V3: Json = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_KIMI_K2: Json = {
    **_DEEPSEEK_V3, "model_type": "kimi_k2", "first_k_dense_replace": 1, "max_position_embeddings": 131072, "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_scaling": {**_DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
_GLM_FLASH: Json = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "attention_bias": False,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512,
    "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.8, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
_LATENTS: Json = {
    "mlp_class_name": "LLaMAMoE", "norm_class_name": "RMSNorm", "parallel_residual": False, "bias": False,
    "rope_interleave": True, "norm_topk_prob": True, "n_shared_expert": 1,
}  # fmt: skip
_V3_SIZES = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
_V3_IS: Json = {
    **_LATENTS, "n_layer": 61, "n_head": 128, "n_query_groups": 128, "n_expert": 256, "n_expert_per_token": 8,
    "n_expert_groups": 8, "n_topk_groups": 4, "n_topk_scores_per_group": 2, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "block_size": 163840, "rope_base": 10000, "norm_eps": 1e-6, "latent_attention": _V3_SIZES,
    "rope_adjustments": {
        "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
_BEHIND: Json = {"parallel_residual": False, "bias": True, "rotary_percentage": 0.0, "norm_class_name": "LayerNorm"}

# What litgpt has not, and the settings that count.
OWN: dict[str, tuple[Json, Json]] = {
    "BLOOM 560M": (
        {
            **_BEHIND, "n_layer": 24, "n_embd": 1024, "n_head": 16, "intermediate_size": 4096, "block_size": 2048,
            "padded_vocab_size": 250880, "alibi": "bloom", "embedding_norm": True, "gelu_approximate": "tanh",
        },
        _BLOOM,
    ),
    "GPT-2": (
        {
            **_BEHIND, "n_layer": 12, "n_embd": 768, "n_head": 12, "intermediate_size": 3072, "block_size": 1024,
            "padded_vocab_size": 50257, "learned_positions": True, "gelu_approximate": "tanh", "mlp_class_name": "GptNeoxMLP",
        },
        _GPT_2,
    ),
    "OPT 125M": (
        {
            **_BEHIND, "n_layer": 12, "n_embd": 768, "intermediate_size": 3072, "block_size": 2048, "learned_positions": True,
            "mlp_class_name": "ReluMLP", "post_mlp_norm": False,
        },
        _OPT,
    ),
    "Falcon RW 1B": (
        {
            **_BEHIND, "n_layer": 24, "n_head": 32, "n_query_groups": 32, "head_size": 64, "intermediate_size": 8192,
            "alibi": "falcon", "gelu_approximate": "none", "block_size": 2048, "shared_attention_norm": False,
        },
        _FALCON_RW,
    ),
    "SmolLM3 3B": (_SMOLLM3_IS, _SMOLLM3),
    "SmolLM3 3B, without the layers": (_SMOLLM3_IS, without(_SMOLLM3, "no_rope_layers", "no_rope_layer_interval")),
    "GLM 4.5": (_GLM, _GLM_4_5),
    "GLM 4.5 Air": (
        {
            **_GLM, "n_layer": 46, "n_embd": 4096, "n_expert": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_qk": False,
        },
        _GLM_4_5_AIR,
    ),
    "GLM 4.5, transformers 5": (
        _GLM,
        {
            **{key: value for key, value in _GLM_4_5.items() if key not in ("partial_rotary_factor", "rope_theta")},
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_type": "default"},
        },
    ),
    "MiniMax M2": (_MINIMAX, _MINIMAX_M2),
    "MiniMax M2, transformers 5": (
        _MINIMAX,
        {
            **{key: value for key, value in _MINIMAX_M2.items() if key not in ("rotary_dim", "rope_theta")},
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5000000.0, "rope_type": "default"},
        },
    ),
    "DeepSeek V3": (_V3_IS, _DEEPSEEK_V3),
    "Moonlight 16B A3B": (
        {
            "sigmoid_router": True, "n_expert_groups": None,
            "latent_attention": {**_V3_SIZES, "q_lora_rank": None, "norm_eps": 1e-6},
        },
        {**_DEEPSEEK_V3, "q_lora_rank": None, "rope_scaling": None, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1},
    ),
    "Kimi K2": (
        {
            **_LATENTS, "n_head": 64, "n_expert": 384, "sigmoid_router": True, "n_expert_groups": None, "block_size": 131072,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rope_base": 50000, "latent_attention": _V3_SIZES,
            "rope_adjustments": {**_V3_IS["rope_adjustments"], "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
        },
        _KIMI_K2,
    ),
    "GLM 4.7 Flash": (
        {
            **_LATENTS, "n_layer": 47, "n_embd": 2048, "n_head": 20, "n_query_groups": 20, "head_size": 256, "n_expert": 64,
            "n_expert_per_token": 4, "sigmoid_router": True, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8,
            "norm_eps": 1e-5, "rope_base": 1000000, "rope_adjustments": None,
            "latent_attention": {
                "q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
                "norm_eps": 1e-6,
            },
        },
        _GLM_FLASH,
    ),
    "gpt-oss 20B": (
        {
            "n_layer": 24, "n_embd": 2880, "n_head": 64, "n_query_groups": 8, "head_size": 64, "intermediate_size": 2880,
            "n_expert": 32, "n_expert_per_token": 4, "bias": True, "block_size": 131072, "padded_vocab_size": 201088,
            "sliding_window_size": 128, "sliding_window_indices": [1, 0] * 12, "attention_sinks": True, "router_bias": True,
            "glu_limit": 7.0, "rotary_percentage": 1.0, "rope_base": 150000,
            "rope_adjustments": {
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": False,
            },
        },
        _GPT_OSS,
    ),
    "gpt-oss 120B": (
        {"n_layer": 36, "n_expert": 128, "sliding_window_indices": [1, 0] * 18},
        {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None},
    ),
}  # fmt: skip

# what it is -> (what is refused, config.json): set to what litgpt does not compute
REFUSED: dict[str, tuple[str, Json]] = {
    "DeepSeek V3.2": ("an indexer chooses", {**_DEEPSEEK_V3, "model_type": "deepseek_v32"}),
    "GLM 5": ("an indexer chooses", {**_GLM_FLASH, "model_type": "glm_moe_dsa"}),
    "Phi 3 mini 128K, cut short": (
        "short_factor",
        {**_PHI_3, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
    ),
    "gpt-oss, sharper": ("swiglu_alpha", {**_GPT_OSS, "swiglu_alpha": 2.0}),
    "gpt-oss without biases": ("attention_bias", {**_GPT_OSS, "attention_bias": False}),
    "gpt-oss that lets nothing through": ("clamped", {**_GPT_OSS, "swiglu_limit": -1.0}),
    "YaRN that grows without end": ("block_size", {**_QWEN_2_5, "rope_scaling": {"type": "yarn", "factor": 1e300}}),
    "positions of a later kind": (
        "proportional",
        {**_QWEN_2_5, "rope_scaling": {"type": "proportional", "factor": 4.0}},
    ),
    "a SmolLM3 with windows": ("use_sliding_window", {**_SMOLLM3, "use_sliding_window": True}),
    "Qwen 2 with windows": ("use_sliding_window", {**_QWEN_2_5, "use_sliding_window": True}),
    "a Llama with biases": ("attention_bias", {**_LLAMA_3, "attention_bias": True}),
    "OLMo 7B 0424": ("clip_qkv", {**_OLMO, "clip_qkv": 8.0}),
    "StableLM 2 1.6B": ("use_qkv_bias", {**_STABLELM, "use_qkv_bias": True}),
    "OPT 350M": (
        "word_embed_proj_dim",
        {
            **_OPT,
            "do_layer_norm_before": False,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
        },
    ),
    "a GPT-2 of a kind of its own": ("scale_attn_by_inverse", {**_GPT_2, "scale_attn_by_inverse_layer_idx": True}),
    "a BLOOM with residuals behind norms": (
        "apply_residual_connection",
        {**_BLOOM, "apply_residual_connection_post_layernorm": True},
    ),
    "a GLM with experts in groups": ("n_group", {**_GLM_4_5, "n_group": 8, "topk_group": 4}),
    "a GLM with weights that do not add up to one": ("norm_topk_prob", {**_GLM_4_5, "norm_topk_prob": False}),
    "a MiniMax with a softmax": ("scoring_func", {**_MINIMAX_M2, "scoring_func": "softmax"}),
    "a MiniMax with attention of another kind": ("attn_type_list", {**_MINIMAX_M2, "attn_type_list": [0, 1] * 31}),
    "heads that do not divide": ("head_dim", {**_LLAMA_3, "num_attention_heads": 33, "num_key_value_heads": 33}),
}
