"""GGUF files of a family: metadata as words of config.json, and names of tensors by ours, where most families agree."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mdi.families.config_json import Json
from mdi.families.names import Held, Names
from mdi.model.plain import ModelConfig
from mdi.spec.decode import shown

LARGEST_SIZE = 1 << 27
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1's scaling
_SIGMOID = 2  # of llama.cpp's functions of routers


class Fields:
    """What a file says of its model.

    Args:
        values: its metadata: numbers, texts, lists of texts, and numpy arrays of numbers.
        shapes: of its tensors, rows first.
        numbers: reads a tensor.

    Attributes:
        arch: general.architecture. Names of fields are given without it.
        values, shapes: as given.

    All methods raise ValueError for a field, or a tensor, that is missing or not what is expected.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        numbers: Callable[[str], np.ndarray],
    ) -> None:
        self.values, self.shapes, self._numbers = values, shapes, numbers
        self.arch = values.get("general.architecture")

    def replaced(self, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None) -> Fields:
        """Of the same file, with other values of some fields, and other shapes of some tensors."""
        own = {f"{self.arch}.{name}": value for name, value in values.items()}
        return Fields({**self.values, **own}, {**self.shapes, **(shapes or {})}, self._numbers)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(f"{self.arch}.{name}", default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"it lacks the field {self.arch}.{name}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A number above 0, the same for all blocks."""
        value = self.need(name) if default is None else self.get(name, default)
        if isinstance(value, np.ndarray) and value.size and bool((value == value[0]).all()):
            value = int(value[0])
        if type(value) is not int or not 0 < value <= LARGEST_SIZE:
            raise ValueError(f"{self.arch}.{name} is {shown(value)}: expected one whole number for all blocks")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """A number that may be 0."""
        value = self.get(name, default)
        if type(value) is not int or not 0 <= value <= LARGEST_SIZE:
            raise ValueError(f"{self.arch}.{name} is {shown(value)}: expected a whole number")
        return value

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.shapes:
            raise ValueError(f"it lacks the tensor {tensor}")
        return self.shapes[tensor]

    def numbers(self, tensor: str) -> np.ndarray:
        """All of a tensor, one behind the other, float32."""
        self.shape(tensor)
        return self._numbers(tensor).reshape(-1).astype(np.float32)


# The names of most families: those of the GPT-NeoX form (query, key and value in one matrix) as well as Llama's.
BLOCK: dict[str, Any] = {
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.qkv": Held(("attn_q", "attn_k", "attn_v"), otherwise=Held(("attn_qkv",))),
    "attn.proj": "attn_output",
    "attn.norm_q": "attn_q_norm",
    "attn.norm_k": "attn_k_norm",
    "attn.sinks": "attn_sinks.weight",
    "post_attention_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "mlp.fc": "ffn_up",
    "mlp.fc_1": "ffn_gate",
    "mlp.fc_2": "ffn_up",
    "mlp.proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.{i}.fc_1": Held(("ffn_gate_exps",), is_stacked=True),
    "mlp.experts.{i}.fc_2": Held(("ffn_up_exps",), is_stacked=True),
    "mlp.experts.{i}.proj": Held(("ffn_down_exps",), is_stacked=True),
    "mlp.shared_experts.fc_1": "ffn_gate_shexp",
    "mlp.shared_experts.fc_2": "ffn_up_shexp",
    "mlp.shared_experts.proj": "ffn_down_shexp",
}
# Of architectures for which llama.cpp has one tensor of all three.
FUSED = {"attn.qkv": Held(("attn_qkv",), otherwise=Held(("attn_q", "attn_k", "attn_v")))}
ENDS: dict[str, Any] = {
    "transformer.wte": "token_embd",
    "transformer.wte_norm": "token_embd_norm",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


# Of blocks that predict further tokens: llama.cpp numbers them behind the last one, in every architecture.
PREDICTING_IN_GGUF: dict[str, Any] = {
    "mtp.proj": "nextn.eh_proj", "mtp.norm_token": "nextn.enorm", "mtp.norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm", "mtp.wte": "nextn.embed_tokens", "mtp.head": "nextn.shared_head_head",
}  # fmt: skip


def names(
    own: Mapping[str, Any] | None = None, ends: Mapping[str, Any] | None = None,
    predicting: Mapping[str, Any] = PREDICTING_IN_GGUF,
) -> Names:  # fmt: skip
    """The usual names, but for a family's `own` within a block, and its `ends`."""
    block, around = {**BLOCK, **(own or {})}, {**ENDS, **(ends or {})}
    return Names(block, around, head="output", prefixes=("",), blocks="blk", predicting=predicting)


@dataclass(frozen=True)
class Gguf:
    """Files of one family.

    Attributes:
        architecture: theirs, as general.architecture has it.
        read: of a file, and of the words of config.json that `sizes` and `rope` find in it: its other words, which may take the
            place of these. What the file does not say is as llama.cpp has it. Raises ValueError, TypeError, OverflowError.
        names: of their tensors.
        is_one: whether a file of the architecture is one of the family, where several have the same.
        sized: the fields in which `sizes` finds those of the first block, where blocks differ.
        own: what a file says of a model besides what `fields_of` does, or otherwise. Raises ValueError for another one.
    """

    architecture: str
    read: Callable[[Fields, Json], Json]
    names: Names = names()
    is_one: Callable[[Fields], bool] = lambda _: True
    sized: Callable[[Fields], Fields] = lambda fields: fields
    own: Callable[[ModelConfig], Json] = lambda _: {}

    def config_json(self, fields: Fields) -> Json:
        """What config.json would say, but for model_type. Raises as `read`."""
        found = {**sizes(self.sized(fields)), **rope(fields)}
        return {**found, **self.read(fields, found)}


def sizes(fields: Fields) -> Json:
    """What all files say. It is compared with the tensors, so that a file cannot ask for more than it holds."""
    n_layer, n_embd, n_head = (fields.size(n) for n in ("block_count", "embedding_length", "attention.head_count"))
    n_groups = fields.size("attention.head_count_kv", n_head)
    head_size = fields.size("attention.key_length", max(n_embd // n_head, 1))
    numbers = {int(m[1]) for name in fields.shapes if (m := re.match(r"blk\.(\d{1,9})\.", name))}
    if len(numbers) != n_layer or numbers != set(range(n_layer)):
        raise ValueError(f"it names {n_layer} blocks, but its tensors are not those of blocks 0 to {n_layer - 1}")
    n_layer -= fields.count("nextn_predict_layers")  # the last ones predict further tokens, and are left out
    n_vocab, width = fields.shape("token_embd.weight")
    if width != n_embd:
        raise ValueError(f"it names an embedding of width {n_embd}, but its tensor has {width}")
    first = next((i for i in range(n_layer) if f"blk.{i}.attn_output.weight" in fields.shapes), 0)  # with attention
    is_fused = f"blk.{first}.attn_qkv.weight" in fields.shapes
    rows = fields.shape(f"blk.{first}.attn_{'qkv' if is_fused else 'q'}.weight")[0]
    expected = head_size * (n_head + 2 * n_groups if is_fused else n_head)
    if first and rows == 2 * expected:  # behind blocks without attention, its heads have gates
        rows = expected
    if rows != expected or fields.size("attention.value_length", head_size) != head_size:
        raise ValueError(f"its heads ({n_head} and {n_groups}, of {head_size}) do not fit its tensors of {rows} rows")
    return {
        "num_hidden_layers": n_layer, "hidden_size": n_embd, "num_attention_heads": n_head, "num_key_value_heads": n_groups,
        "head_dim": head_size, "vocab_size": n_vocab,
        "intermediate_size": fields.size("feed_forward_length", fields.get("expert_feed_forward_length")),
        "max_position_embeddings": fields.size("context_length"),
    }  # fmt: skip


def rope(fields: Fields) -> Json:
    hf: Json = {"rope_theta": float(fields.get("rope.freq_base", 10000.0))}
    kind, factors = fields.get("rope.scaling.type", "none"), "rope_factors_long.weight" in fields.shapes
    if kind not in ("none", "linear", "yarn", "longrope") or (factors and kind not in ("none", "longrope")):
        raise ValueError(f"rope scaling of the type {shown(kind)} is not supported")
    factor, attention = fields.get("rope.scaling.factor"), float(fields.get("rope.scaling.attn_factor", 1.0))
    if kind == "linear":
        factor = fields.get("rope.scale_linear", 1.0) if factor is None else factor
        return hf if factor in (0.0, 1.0) else {**hf, "rope_scaling": {"rope_type": kind, "factor": float(factor)}}
    if not factors and kind != "yarn":
        return hf
    own: Json = {"original_max_position_embeddings": fields.size("rope.scaling.original_context_length")}
    if factors:
        by_length = {f"{n}_factor": fields.numbers(f"rope_factors_{n}.weight").tolist() for n in ("short", "long")}
        own |= {"rope_type": "longrope", "attention_factor": attention, **by_length}
    else:
        factor = float(fields.need("rope.scaling.factor"))
        # llama.cpp multiplies what it computes itself with a factor of its own
        own |= {"rope_type": kind, "factor": factor, "attention_factor": (0.1 * math.log(factor) + 1.0) * attention}
        betas = {beta: fields.get(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
        own |= {beta: float(value) for beta, value in betas.items() if value is not None}
    return {**hf, "rope_scaling": own}


def rms_eps(fields: Fields, hf: Json) -> Json:
    """All that many families `read`."""
    return {"rms_norm_eps": float(fields.need("attention.layer_norm_rms_epsilon"))}


def layer_eps(fields: Fields, hf: Json, word: str = "layer_norm_epsilon") -> Json:
    return {word: float(fields.need("attention.layer_norm_epsilon"))}


def experts(fields: Fields, word: str, first: int = 0) -> Json:
    """How many there are, in the blocks from `first` on, in this word, and how many a row is sent to."""
    n, n_used = fields.size("expert_count"), fields.size("expert_used_count")
    if fields.shape(f"blk.{first}.ffn_gate_exps.weight")[0] != n or n_used > n:
        raise ValueError(f"it says that it has {n} experts, which its tensors do not")
    return {word: n, "num_experts_per_tok": n_used}


def check_sigmoid(fields: Fields) -> None:
    """Of the router of experts."""
    if fields.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ValueError(f"a router of the kind {shown(fields.get('expert_gating_func'))} is not supported")


def partial_rotary(fields: Fields, hf: Json) -> Json:
    """The share of a head that is rotated, such that litgpt's rounding gives the number again."""
    n_rotated, head_size = fields.size("rope.dimension_count", hf["head_dim"]), hf["head_dim"]
    share = n_rotated / head_size
    return {"partial_rotary_factor": share if int(share * head_size) == n_rotated else math.nextafter(share, 1.0)}


def fields_of(config: ModelConfig, own: Json | None = None) -> Json:
    """What a file says of a model, without the architecture before each name. Not every family reads it as the same model.

    Args:
        own: see Gguf.own; None leaves a field out. 0 is written, unlike in the fields of all files.
    """
    eps = "layer_norm_rms_epsilon" if config.norm_class_name == "RMSNorm" else "layer_norm_epsilon"
    found: Json = {
        "block_count": config.n_layer, "embedding_length": config.n_embd, "feed_forward_length": config.intermediate_size,
        "context_length": config.block_size, "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_query_groups, "attention.key_length": config.head_size,
        "attention.value_length": config.head_size, f"attention.{eps}": float(config.norm_eps),
        "rope.dimension_count": config.rope_n_elem, "rope.freq_base": float(config.rope_base),
        "expert_count": config.n_expert, "expert_used_count": config.n_expert_per_token if config.n_expert else 0,
        "expert_feed_forward_length": config.moe_intermediate_size, "attention.sliding_window": config.sliding_window_size,
    }  # fmt: skip
    numbers = {  # which may be whole in the config
        "attn_logit_softcapping": config.attention_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping, "rope.freq_base_swa": config.rope_local_base_freq,
    }  # fmt: skip
    found |= {name: float(value) for name, value in numbers.items() if value}
    scaling = config.rope_adjustments or {}
    factor = scaling["factor"] if set(scaling) == {"factor"} else config.rope_condense_ratio
    if factor != 1:
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
    found = {name: value for name, value in found.items() if value}
    return {name: value for name, value in (found | (own or {})).items() if value is not None}


def rope_factors(config: ModelConfig) -> np.ndarray | None:
    """What each frequency is divided by in Llama 3.1's scaling, float32 (head_size / 2), which files have as a tensor."""
    scaling = config.rope_adjustments or {}
    if "low_freq_factor" not in scaling:
        return None
    frequencies = config.rope_base ** (-np.arange(config.rope_n_elem // 2, dtype=np.float64) * 2 / config.rope_n_elem)
    turns = scaling["original_max_seq_len"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)
