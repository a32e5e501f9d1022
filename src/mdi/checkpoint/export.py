"""A model as a Hugging Face directory for other programs: config.json, the reverse of hfconfig.py, then the weights part by
part, one shard each.

What config.json cannot say is refused: what was written is read back and compared.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.checkpoint.folder import TOKENIZER_FILES
from mdi.checkpoint.hfconfig import Json, derive_config
from mdi.checkpoint.hffolder import FIRST_POSITION, INTERLEAVED, TRANSPOSED
from mdi.checkpoint.shapes import interleaved_rows
from mdi.checkpoint.weights import WeightSource
from mdi.errors import CheckpointError, UsageError
from mdi.files import replacing
from mdi.model.tensors import EMBEDDING, HEAD
from mdi.spec.model import ModelConfig, why_not_litgpt

if TYPE_CHECKING:
    import torch

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "bloom": "BloomForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
}
_EPS = {"layer_norm_eps": ("gpt_neox", "phi", "stablelm"), "layer_norm_epsilon": ("falcon", "bloom", "gpt2")}
_OPT_EPS = 1e-5  # which its config.json does not say
# not what is computed
_NOT_COMPARED = ("name", "hf_config", "vocab_size", "padding_multiple")


def hf_config(config: ModelConfig) -> Json:
    """config.json of a model; its `model_type` says the family.

    Raises:
        CheckpointError: transformers has no model with these settings.
    """
    model_type = transformers_type(config)
    if model_type not in _OWN and (lacking := why_not_litgpt(config)) is not None:
        raise CheckpointError(f"{lacking} cannot be written in Hugging Face's form: litgpt's converters do not know it")
    eps = next((key for key, kinds in _EPS.items() if model_type in kinds), "rms_norm_eps")
    written = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "num_hidden_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_query_groups,
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.padded_vocab_size,
        "max_position_embeddings": config.block_size,
        "rope_theta": config.rope_base,
        "hidden_act": "silu",
        eps: config.norm_eps,
        **_rope(config),
        **_own(model_type, config),
    }
    for key in _NOT_THERE if model_type in ("bloom", "falcon", "gpt2", "opt") else ():
        del written[key]
    again = vars(derive_config(written, config.name, Path("config.json")))
    for key, value in vars(config).items():
        if key not in _NOT_COMPARED and again[key] != value:
            raise CheckpointError(
                f"a Hugging Face {model_type} model has no such settings: {key} is {value!r} here, and would be "
                f"{again[key]!r} there"
            )
    return written


# What config.json of BLOOM, Falcon, GPT-2 and OPT calls otherwise, or lacks.
_NOT_THERE = ("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act")


def transformers_type(config: ModelConfig) -> str:
    """The family of transformers' model, as its config.json names it."""
    if config.glu_limit:
        return "gpt_oss"
    if config.embedding_norm:
        return "bloom"
    if config.learned_positions:  # some are both, and computed alike
        is_opt = config.mlp_class_name == "ReluMLP" and config.norm_eps == _OPT_EPS
        return "opt" if is_opt or config.norm_after_residual or not config.bias else "gpt2"
    if config.alibi or (config.n_query_groups != config.n_head and config.mlp_class_name == "GptNeoxMLP"):
        return "falcon"
    if config.mlp_class_name == "GptNeoxMLP":
        return "phi" if config.lm_head_bias else "gpt_neox" if config.bias else "falcon"
    if config.norm_class_name == "LayerNorm":
        return "stablelm" if config.norm_has_weight else "olmo"
    if config.mlp_class_name == "GemmaMLP":
        return "gemma3_text" if config.norm_qk else "gemma2" if config.post_mlp_norm else "gemma"
    if config.sigmoid_router:
        return "minimax_m2" if config.norm_qk_type == "olmo2" else "glm4_moe"
    if config.mlp_class_name == "LLaMAMoE":
        return "qwen3_moe" if config.norm_qk else "mixtral"
    if config.norm_qk:
        return "olmo2" if config.norm_qk_type == "olmo2" else "qwen3"
    if config.attn_bias:
        return "qwen2"
    if config.rotary_percentage != 1:
        return "phi3"
    return "mistral" if config.sliding_window_size else "llama"


def _rope(config: ModelConfig) -> Json:
    scaling = config.rope_adjustments
    if scaling and "rope_type" in scaling:
        return {
            "rope_scaling": scaling,
            **(
                {"max_position_embeddings": scaling["max_position_embeddings"]}
                if scaling["rope_type"] == "dynamic"
                else {}
            ),
        }
    if scaling and "low_freq_factor" in scaling:
        llama3 = {key: scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        original = {"original_max_position_embeddings": scaling["original_max_seq_len"]}
        return {"rope_scaling": {"rope_type": "llama3", **llama3, **original}}
    factor = scaling["factor"] if scaling else config.rope_condense_ratio
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}


def _own(model_type: str, config: ModelConfig) -> dict[str, Any]:
    """Settings that only this family has."""
    window = config.sliding_window_size
    gelu = "gelu_pytorch_tanh" if config.gelu_approximate == "tanh" else "gelu"
    layers = ["sliding_attention" if is_near else "full_attention" for is_near in config.sliding_window_indices or ()]
    near = {"sliding_window": window, "layer_types": layers, "query_pre_attn_scalar": config.attention_scores_scalar}
    experts = {"num_experts_per_tok": config.n_expert_per_token}
    partial = {"partial_rotary_factor": config.rotary_percentage}
    if model_type == "falcon":
        groups, is_parallel = config.n_query_groups, config.parallel_residual
        is_new = is_parallel and (groups > 1 or not config.shared_attention_norm)
        new = {"new_decoder_architecture": is_new, "num_kv_heads": groups, "multi_query": groups == 1}
        norms = {"num_ln_in_parallel_attn": 1 if config.shared_attention_norm else 2}
        old = {"parallel_attn": is_parallel, "bias": config.bias, "alibi": config.alibi == "falcon"}
        return {
            **new, **(norms if is_new else {}), **old, "activation": gelu, "ffn_hidden_size": config.intermediate_size,
        }  # fmt: skip
    activation = "relu" if config.mlp_class_name == "ReluMLP" else "gelu_new" if "tanh" in gelu else "gelu"
    own: dict[str, dict[str, Any]] = {
        "bloom": {"n_layer": config.n_layer, "n_head": config.n_head, "seq_length": config.block_size},
        "gpt2": {
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "n_positions": config.block_size,
            "n_inner": config.intermediate_size,
            "activation_function": activation,
        },
        "opt": {
            "ffn_dim": config.intermediate_size,
            "activation_function": activation,
            "enable_bias": config.bias,
            "do_layer_norm_before": not config.norm_after_residual,
            "word_embed_proj_dim": config.n_embd,
        },
        "mistral": {"sliding_window": window},
        "phi3": {"sliding_window": window, **partial},
        "mixtral": {**experts, "num_local_experts": config.n_expert, "sliding_window": window},
        "qwen3_moe": {
            **experts,
            "num_experts": config.n_expert,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": True,
        },
        "gpt_oss": {
            **experts,
            "num_local_experts": config.n_expert,
            "sliding_window": window,
            "layer_types": layers,
            "swiglu_limit": config.glu_limit,
            "attention_bias": True,
        },
        "glm4_moe": {
            **experts,
            **partial,
            "attention_bias": config.attn_bias,
            "use_qk_norm": config.norm_qk,
            "first_k_dense_replace": config.first_k_dense_replace,
            "moe_intermediate_size": config.moe_intermediate_size,
            "n_routed_experts": config.n_expert,
            "n_shared_experts": config.n_shared_expert,
            "routed_scaling_factor": config.routed_scaling_factor,
            "num_nextn_predict_layers": 0,
        },
        "minimax_m2": {
            **experts,
            "num_local_experts": config.n_expert,
            "rotary_dim": config.rope_n_elem,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
        },
        "gemma": {"hidden_act": gelu},
        "gemma2": {
            "hidden_act": gelu,
            "hidden_activation": gelu,
            **near,
            "attn_logit_softcapping": config.attention_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        },
        "gemma3_text": {
            "hidden_act": gelu,
            "hidden_activation": gelu,
            **near,
            "rope_local_base_freq": config.rope_local_base_freq,
        },
        "stablelm": partial,
        "gpt_neox": {
            "hidden_act": "gelu_new" if config.gelu_approximate == "tanh" else "gelu",
            "rotary_pct": config.rotary_percentage,
            "use_parallel_residual": config.parallel_residual,
        },
        "phi": {"hidden_act": "gelu_new", **partial},
    }
    return own.get(model_type, {})


Tensors = dict[str, "torch.Tensor"]


def export_hf(
    source: WeightSource, directory: Path, out: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write config.json, shards with an index, and the tokenizer's files into `out`.

    Args:
        source: of the whole model.
        directory: where its tokenizer is.
        out: a new directory, or an empty one.

    Raises:
        UsageError: `out` holds something already.
        CheckpointError: transformers has no such model, or the disk refuses.
    """
    import torch

    config = source.config
    written = hf_config(config)
    model_type = written["model_type"]
    is_tied = torch.equal(source.tensor(EMBEDDING), source.tensor(HEAD))
    if model_type.startswith("gemma") and not is_tied:
        raise CheckpointError(
            f"head and embedding of {source} differ, which a Hugging Face {model_type} model cannot have"
        )
    _make(out)
    convert = _converter(model_type, config)
    parts = source.part_names()
    weight_map: dict[str, str] = {}
    n_bytes = 0
    for i, part in enumerate(parts):
        tensors = convert({name: t for name, t in source.tensors(part).items() if not (is_tied and name == HEAD)})
        shard = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        _write_shard(out / shard, tensors)
        weight_map |= dict.fromkeys(tensors, shard)
        n_bytes += sum(t.nbytes for t in tensors.values())
        source.release()
        if progress is not None:
            progress(n_bytes, sum(spec.n_bytes for spec in source.specs.values()))
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": n_bytes}, "weight_map": weight_map})
    for name in TOKENIZER_FILES:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, out / name)
    _write_json(out / "config.json", {**written, "tie_word_embeddings": is_tied, "torch_dtype": source.dtype})


# Names by which litgpt's converters recognise a family.
_FAMILIES = {
    "olmo2": "OLMo-2-", "gemma2": "Gemma-2", "gemma3_text": "Gemma-3", "phi": "phi", "phi3": "Phi-3",
    "qwen2": "Qwen2.5", "qwen3": "Qwen3", "qwen3_moe": "Qwen3", "gpt_neox": "pythia",
}  # fmt: skip


def _converter(model_type: str, config: ModelConfig) -> Callable[[Tensors], Tensors]:
    """litgpt's way back for a family, over the tensors of a part; or our own."""
    if model_type in _OWN:
        return functools.partial(_OWN[model_type], config)
    from litgpt.config import Config
    from litgpt.scripts import convert_lit_checkpoint as litgpt

    functions: dict[str, Callable[..., None]] = {
        "gemma2": litgpt.copy_weights_gemma_2,
        "gemma3_text": litgpt.copy_weights_gemma_3,
        "phi": litgpt.copy_weights_phi,
        "phi3": litgpt.copy_weights_phi,
        "qwen2": litgpt.copy_weights_qwen_2_5,
        "qwen3": litgpt.copy_weights_qwen_3,
        "qwen3_moe": litgpt.copy_weights_qwen_3,
        "olmo2": litgpt.copy_weights_olmo2,
        "gpt_neox": litgpt.copy_weights_gpt_neox,
    }
    copy = functions.get(model_type, litgpt.copy_weights_llama)
    lit_config = Config(**{**config.litgpt_plain(), "name": _FAMILIES.get(model_type, "Llama")})

    def convert(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        rest = dict(tensors)
        for name in tensors if model_type == "olmo2" else ():  # which litgpt's way back forgets
            if name.endswith("post_attention_norm.weight"):
                number = name.split(".")[2]
                found[f"model.layers.{number}.post_attention_layernorm.weight"] = rest.pop(name)
        copy(lit_config, found, rest)
        return found

    return convert


_GPT_OSS = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn": "self_attn",
    "attn.proj": "self_attn.o_proj",
    "mlp.gate": "mlp.router",
}


def _gpt_oss(config: ModelConfig, tensors: Tensors) -> Tensors:
    """As transformers has it: experts in one tensor, with inputs in rows, and the columns of gate and up in turn."""
    import torch

    found: Tensors = {}
    experts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    n_keys = config.n_query_groups * config.head_size
    sizes = [config.n_head * config.head_size, n_keys, n_keys]
    for name, tensor in tensors.items():
        stem, ending = name.rsplit(".", 1)
        if stem in _GPT_OSS:
            found[f"{_GPT_OSS[stem]}.{ending}"] = tensor
            continue
        block, layer = stem.removeprefix("transformer.h.").split(".", 1)
        path = f"model.layers.{block}"
        if layer == "attn.qkv":
            for which, rows in zip("qkv", tensor.split(sizes), strict=True):
                found[f"{path}.self_attn.{which}_proj.{ending}"] = rows
        elif layer.startswith("mlp.experts."):
            number, which = layer.removeprefix("mlp.experts.").split(".")
            experts.setdefault(f"{path}.mlp.experts", {}).setdefault(f"{which}.{ending}", {})[int(number)] = tensor
        else:
            found[f"{path}.{_GPT_OSS[layer]}.{ending}"] = tensor
    for path, of_layer in experts.items():
        for ending, theirs in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                torch.stack([tensor for _, tensor in sorted(of_layer[f"{layer}.{ending}"].items())])
                for layer in ("fc_1", "fc_2", "proj")
            )
            both = {"gate_up_proj": torch.stack((gate, up), dim=2).flatten(1, 2), "down_proj": down}
            for layer, stacked in both.items():
                found[f"{path}.{layer}{theirs}"] = stacked.transpose(1, 2) if ending == "weight" else stacked
    return found


# litgpt's names in a block, or in an expert -> the family's own
_DECODER = {
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attn.proj": "self_attn.o_proj",
    "attn.norm_q": "self_attn.q_norm", "attn.norm_k": "self_attn.k_norm",
}  # fmt: skip
_FUSED = {
    "blocks": "transformer.h.", "transformer.ln_f": "transformer.ln_f", "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm", "attn.qkv": "self_attention.query_key_value", "attn.proj": "self_attention.dense",
    "mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h",
}  # fmt: skip
_GATED = {"fc_1": "gate_proj", "fc_2": "up_proj", "proj": "down_proj"}
_OWN_NAMES = {
    "glm4_moe": {
        **_DECODER, "mlp.gate": "mlp.gate", "experts": "mlp.experts.{}.", **_GATED,
        **{f"{mlp}.{ours}": f"{mlp}.{theirs}" for ours, theirs in _GATED.items() for mlp in ("mlp", "mlp.shared_experts")},
    },
    "minimax_m2": {
        **_DECODER, "mlp.gate": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts.{}.",
        "fc_1": "w1", "fc_2": "w3", "proj": "w2", "correction": "block_sparse_moe",
    },
    "bloom": {
        **_FUSED, "transformer.wte": "transformer.word_embeddings",
        "transformer.wte_norm": "transformer.word_embeddings_layernorm",
    },
    "falcon": {**_FUSED, "transformer.wte": "transformer.word_embeddings"},
    "gpt2": {
        "blocks": "transformer.h.", "transformer.wte": "transformer.wte", "transformer.wpe": "transformer.wpe",
        "transformer.ln_f": "transformer.ln_f", "norm_1": "ln_1", "norm_2": "ln_2", "attn.qkv": "attn.c_attn",
        "attn.proj": "attn.c_proj", "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj",
    },
    "opt": {
        "blocks": "model.decoder.layers.", "transformer.wte": "model.decoder.embed_tokens",
        "transformer.wpe": "model.decoder.embed_positions", "transformer.ln_f": "model.decoder.final_layer_norm",
        **dict.fromkeys(("norm_1", "post_attention_norm"), "self_attn_layer_norm"),
        **dict.fromkeys(("norm_2", "post_mlp_norm"), "final_layer_norm"),
        "attn.proj": "self_attn.out_proj", "mlp.fc": "fc1", "mlp.proj": "fc2",
    },
}  # fmt: skip
_TOP_NAMES = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}
_IN_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.*)")


def _own_names(names: Mapping[str, str], config: ModelConfig, tensors: Tensors) -> Tensors:
    names, found = {**_TOP_NAMES, **names}, Tensors()
    if config.parallel_residual and not config.shared_attention_norm:  # a new Falcon
        names |= {"norm_1": "ln_attn", "norm_2": "ln_mlp"}
    n_queries, n_keys = config.n_head * config.head_size, config.n_query_groups * config.head_size
    for name, tensor in tensors.items():
        stem, ending = name.rsplit(".", 1)
        match = _IN_BLOCK.fullmatch(stem)
        if match is None:
            found[f"{names[stem]}.{ending}"] = _as_stored(names[stem], config, tensor)
            continue
        block = f"{names.get('blocks', 'model.layers.')}{match[1]}."
        if match[3] == "attn.qkv" and match[3] not in names:
            for x, part in zip("qkv", tensor.split([n_queries, n_keys, n_keys]), strict=True):
                found[f"{block}self_attn.{x}_proj.{ending}"] = part
        elif match[2] is not None:
            found[f"{block}{names['experts'].format(match[2])}{names[match[3]]}.{ending}"] = tensor
        else:
            module = names[match[3]] if ending in ("weight", "bias") else names.get("correction", names[match[3]])
            found[f"{block}{module}.{ending}"] = _as_stored(module, config, tensor)
    return found


def _as_stored(module: str, config: ModelConfig, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if module in INTERLEAVED:
        stored = torch.empty_like(tensor)
        stored[torch.from_numpy(interleaved_rows(config))] = tensor
        return stored
    if first := FIRST_POSITION.get(module.rpartition(".")[2]):
        return torch.cat([tensor.new_zeros(first, tensor.shape[1]), tensor])
    return tensor.T if module in TRANSPOSED and tensor.dim() == 2 else tensor


_OWN: dict[str, Callable[[ModelConfig, Tensors], Tensors]] = {  # what litgpt's converters lack
    "gpt_oss": _gpt_oss,
    **{kind: functools.partial(_own_names, names) for kind, names in _OWN_NAMES.items()},
}


def _write_shard(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save

    with replacing(path) as file:
        file.write(save({name: t.contiguous().clone() for name, t in tensors.items()}, metadata={"format": "pt"}))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(data, indent=2).encode())


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out} is not empty: name a new directory")
    except OSError as e:
        raise CheckpointError(f"cannot write to {out}: {e.strerror or e}") from None
