"""The plain form of a model, which is stored, sent and hashed, and a ModelSpec of it: the one place that knows its fields.

The names are those of litgpt's Config. The plain form (`ModelConfig.plain`: a dict of numbers, texts, lists and dicts) is that
of model_config.yaml, chunks, requests to nodes and the hash. It becomes a ModelConfig where it is read, by `ModelConfig.of`; so
do a config.json by checkpoint/hfconfig.py, the head of a GGUF file by checkpoint/ggufsource.py, and litgpt's own Config by
`from_litgpt`. What litgpt's Config cannot say has fields of our own (`OWN_FIELDS`), which the plain form has only where they
say more than litgpt's fields do. Needs no litgpt. Everything that computes, counts, plans or packs reads `spec_of` of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from mdi.errors import MdiError
from mdi.model.rows import Column
from mdi.model.spec import (
    Activation,
    Alibi,
    Attention,
    BlockInputs,
    BlockSpec,
    DeltaNet,
    Dense,
    Ends,
    Experts,
    Gated,
    LatentAttention,
    Mixer,
    Mlp,
    ModelSpec,
    Norm,
    Rotary,
    Router,
    cache_column,
)
from mdi.spec.decode import decode, shown
from mdi.spec.limits import excess


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of transformer blocks.

    Attributes:
        name: of the model, for people; litgpt also sees in it how norms are computed, see norm_unit_offset.
        hf_config: organisation and name on the hub; may be empty.
        block_size: most tokens of a text.
        n_embd: width of a row.
        vocab_size, padded_vocab_size: ids that mean something; rows of the embedding.
        padding_multiple: of which the latter becomes a multiple, if it is not given.
        norm_qk, norm_qk_type: queries and keys are normed, per head ("default") or over all heads ("olmo2").
        shared_attention_norm: attention and MLP read the same norm.
        n_query_groups: heads of keys and values; `attn_bias`: biases of query, key and value even without `bias`.
        attention_scores_scalar: whose root divides the scores; None is the head's size.
        sliding_window_size, sliding_window_indices: positions that a token sees in the blocks with a 1.
        rotary_percentage: the share of a head that is rotated.
        rope_condense_ratio, rope_adjustments: scaling of positions; the latter as litgpt has it, or with a "rope_type" in the
            terms of transformers: "yarn", "longrope" (both with their factor) or "dynamic" (with max_position_embeddings).
        rope_local_base_freq, rope_indices: the base of the blocks with a 1; the others have `rope_base`.
        intermediate_size, moe_intermediate_size: width of an MLP, and of an expert where it differs.
        first_k_dense_replace: so many blocks at the beginning have no experts.
        sigmoid_router: an expert's score is a sigmoid. Those with the largest sums of score and correction are taken (in one
            group), and weighted by their scores without it, over the sum of these; else by a softmax over the largest scores.
        latent_attention: ranks and sizes of DeepSeek's attention; where its "q_lora_rank" is null, queries are not compressed.
            Its "norm_eps" is that of the norms of compressed rows, without which it is that of all.
        alibi: scores get less with the distance, and nothing is rotated: "bloom", or "falcon", which rounds to bfloat16.
        learned_positions: an embedding of positions (block_size, n_embd) is added to that of tokens, and nothing is rotated.
        embedding_norm: a norm follows the embedding.
        norm_after_residual: norms follow the sums of attention and MLP with what they read, and no norm is before the head.
        attention_sinks: each head has a score that its softmax counts beside those of the keys, and that has no value.
        router_bias: the router of experts has a bias, which `bias` says of all other linear layers.
        glu_limit: gated MLPs are those of gpt-oss, which clamp their gate and what it lets through at this.
        qkv_bias: whether query, key and value have biases; None: as `bias` and `attn_bias` say.
        delta_net: the sizes of gated delta nets, which the blocks with a 1 in its "blocks" have in place of attention.
        attention_gate: what heads of attention give is multiplied by the sigmoid of a further layer.
        shared_expert_gate: what the shared expert gives is multiplied by the sigmoid of a product with the row.
        rotary_indices: the blocks with a 1 rotate queries and keys, the others know no positions; None: all rotate.
        norm_unit_offset: one is added to the weights of RMSNorms. None, as in litgpt's Config: if the name has "Gemma" in it.
        v_norm: values are normed, per head and without weights.
        far_head_size, far_query_groups: of blocks without a window, beside others that have one; None: as in these.
        far_k_eq_v: there, keys as they are before norms and positions are also the values.
        n_shared_kv: so many blocks at the end read the keys and values of the last block before them of their own kind, with a
            window or without.
        shared_kv_mlp: how many times as wide the MLPs of these blocks are.
        block_scalars: the outputs of each block are multiplied by a number of its own.
        block_inputs: width of a column that the embedding gives to each block, which adds a gated form of it; 0: none.
        experts_beside_mlp: each block has an MLP and experts, each with norms of their own, as Gemma 4 has them.
        norm_has_weight: norms have weights. None, as in litgpt's Config: all but LayerNorms of a name with "OLMo" in it.

    Lists become tuples, and dicts such that cannot be changed.

    Raises:
        ValueError: fields that do not fit each other.
    """

    name: str = ""
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    block_size: int = 4096
    n_layer: int = 16
    n_embd: int = 4096
    vocab_size: int = 50254
    padding_multiple: int = 512
    padded_vocab_size: int = None  # type: ignore[assignment]  # it and others follow from the rest, see __post_init__
    norm_class_name: str = "LayerNorm"
    norm_eps: float = 1e-5
    norm_qk: bool = False
    norm_qk_type: str = "default"
    post_attention_norm: bool = False
    post_mlp_norm: bool = False
    parallel_residual: bool = True
    shared_attention_norm: bool = False
    n_head: int = 32
    head_size: int = None  # type: ignore[assignment]
    n_query_groups: int = None  # type: ignore[assignment]
    attn_bias: bool = False
    attention_scores_scalar: float | None = None
    sliding_window_size: int | None = None
    sliding_window_indices: tuple[int, ...] | None = None
    attention_logit_softcapping: float | None = None
    rope_base: float = 10000
    rotary_percentage: float = 0.25
    rope_condense_ratio: float = 1
    rope_adjustments: Mapping[str, Any] | None = None
    rope_interleave: bool = False
    intermediate_size: int = None  # type: ignore[assignment]
    moe_intermediate_size: int | None = None
    bias: bool = True
    mlp_class_name: str = "GptNeoxMLP"
    gelu_approximate: str = "none"
    n_expert: int = 0
    n_shared_expert: int | None = None
    n_expert_groups: int | None = None
    n_topk_groups: int | None = None
    n_topk_scores_per_group: int | None = None
    n_expert_per_token: int = 0
    first_k_dense_replace: int | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False
    scale_embeddings: bool = False
    lm_head_bias: bool = False
    final_logit_softcapping: float | None = None
    norm_1: bool = True
    norm_2: bool = True
    latent_attention: Mapping[str, Any] | None = None
    rope_local_base_freq: float | None = None
    rope_indices: tuple[int, ...] | None = None
    alibi: str | None = None
    learned_positions: bool = False
    embedding_norm: bool = False
    norm_after_residual: bool = False
    sigmoid_router: bool = False
    attention_sinks: bool = False
    router_bias: bool = False
    glu_limit: float | None = None
    qkv_bias: bool | None = None
    rotary_indices: tuple[int, ...] | None = None
    delta_net: Mapping[str, Any] | None = None
    attention_gate: bool = False
    shared_expert_gate: bool = False
    v_norm: bool = False
    far_head_size: int | None = None
    far_query_groups: int | None = None
    far_k_eq_v: bool = False
    n_shared_kv: int = 0
    shared_kv_mlp: int = 1
    block_scalars: bool = False
    block_inputs: int = 0
    experts_beside_mlp: bool = False
    norm_unit_offset: bool = None  # type: ignore[assignment]
    norm_has_weight: bool = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        def fill(key: str, value: Any) -> None:
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)

        for entry in dataclasses.fields(self):
            object.__setattr__(self, entry.name, _frozen(getattr(self, entry.name)))
        if not self.name:
            object.__setattr__(self, "name", str(self.hf_config.get("name", "")))
        if self.head_size is None and self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is no multiple of n_head {self.n_head}, and there is no head_size")
        fill("head_size", self.n_embd // self.n_head)
        multiple = self.padding_multiple
        if self.padded_vocab_size is None:
            fill("padded_vocab_size", -(-self.vocab_size // multiple) * multiple)
        else:
            object.__setattr__(self, "vocab_size", min(self.vocab_size, self.padded_vocab_size))
        fill("n_query_groups", self.n_head)
        if self.n_head % self.n_query_groups:
            raise ValueError(f"n_head {self.n_head} is no multiple of n_query_groups {self.n_query_groups}")
        for key, value in _norms_by_name(self.name, self.norm_class_name).items():
            fill(key, value)
        if self.norm_unit_offset and self.norm_class_name != "RMSNorm":
            raise ValueError(f"norm_unit_offset of norms of the class {self.norm_class_name}")
        if not self.norm_has_weight and self.norm_class_name != "LayerNorm":
            raise ValueError(f"norms of the class {self.norm_class_name} without weights")
        if self.intermediate_size is None and self.mlp_class_name == "LLaMAMLP":
            raise ValueError("intermediate_size is missing")
        fill("intermediate_size", 4 * self.n_embd)
        if self.sliding_window_size is not None:
            if self.sliding_window_size < 1:
                raise ValueError(f"sliding_window_size {self.sliding_window_size}: a token sees itself at least")
            object.__setattr__(self, "sliding_window_indices", self._per_block("sliding_window_indices"))
        if self.rope_local_base_freq is not None:
            object.__setattr__(self, "rope_indices", self._per_block("rope_indices"))
        if self.rotary_indices is not None:
            rotated = self._per_block("rotary_indices")
            object.__setattr__(self, "rotary_indices", None if all(rotated) else rotated)
        for key in ("attention_logit_softcapping", "final_logit_softcapping"):
            if (cap := getattr(self, key)) is not None and not 0 < cap < math.inf:
                raise ValueError(f"{key} {cap}: expected a number above zero")
        self._check_latent()
        self._check_delta_net()
        self._check_experts()
        self._check_far()
        self._check_positions()

    @property
    def rope_n_elem(self) -> int:
        """Numbers of a head that are rotated."""
        if self.latent_attention is not None:
            return int(self.latent_attention["qk_rope_head_dim"])
        return int(self.rotary_percentage * self.head_size)

    @classmethod
    def of(cls, plain: Any) -> ModelConfig:
        """The configuration of a plain form, which may be anything; fields that it lacks have their default.

        Raises:
            ValueError: an unknown field, one of the wrong kind or too large, or ones that do not fit each other; one line.
        """
        if not isinstance(plain, Mapping):
            raise ValueError(f"expected the settings of a model, found {shown(plain)}")
        kinds = {entry.name: (str(entry.type), entry.default is None) for entry in dataclasses.fields(cls)}
        for key, value in plain.items():
            if key not in kinds:
                raise ValueError(f"unknown field {shown(key)}")
            kind, may_lack = kinds[key]
            if not (value is None and may_lack):
                _check_kind(key, value, kind.removesuffix(" | None"))
        if too_much := excess(plain):
            raise ValueError(too_much)
        try:
            config = cls(**plain)
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, RecursionError) as e:
            raise ValueError(f"there is no such model: {' '.join(str(e).split())[:200]}") from None
        if config.n_layer < 1:
            raise ValueError(f"n_layer: expected at least one block, found {config.n_layer}")
        return config

    @classmethod
    def from_litgpt(cls, config: Any) -> ModelConfig:
        """The same as litgpt's Config says."""
        names = [entry.name for entry in dataclasses.fields(cls) if hasattr(config, entry.name)]
        return cls(**{name: getattr(config, name) for name in names})

    def plain(self) -> dict[str, Any]:
        """The fields, as JSON and YAML have them; of `OWN_FIELDS` those that say more than litgpt's fields do."""
        found = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        by_name = _norms_by_name(self.name, self.norm_class_name)
        left_out = {
            entry.name
            for entry in dataclasses.fields(self)
            if entry.name in OWN_FIELDS and found[entry.name] == entry.default
        }
        left_out |= {key for key, value in by_name.items() if found[key] == value}
        return {key: _thawed(value) for key, value in found.items() if key not in left_out}

    def litgpt_plain(self) -> dict[str, Any]:
        """The plain form for litgpt's Config, with a name in which litgpt sees the norms of this model."""
        found = self.plain()
        says_norms = [found.pop(key, None) for key in ("norm_unit_offset", "norm_has_weight")]
        if says_norms == [None, None]:
            return found
        mark = "Gemma-" if self.norm_unit_offset else "" if self.norm_has_weight else "OLMo-"
        return {**found, "name": mark + self.name.replace("Gemma", "gemma").replace("OLMo", "olmo")}

    def _per_block(self, key: str) -> tuple[int, ...]:
        given: Sequence[int] | None = getattr(self, key)
        found = (1,) * self.n_layer if given is None else tuple(given)[: self.n_layer]
        if len(found) < self.n_layer or not set(found) <= {0, 1}:
            raise ValueError(f"{key}: expected a 0 or a 1 for each of {self.n_layer} blocks, found {given}")
        return found

    def _check_latent(self) -> None:
        latent = self.latent_attention
        if latent is None:
            return
        wanted = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        if missing := [key for key in wanted if latent.get(key) is None]:
            raise ValueError(f"latent_attention lacks {', '.join(missing)}")
        sizes = [*(latent[key] for key in wanted), latent.get("q_lora_rank") or 1]
        if any(type(size) is not int or size < 1 for size in sizes) or latent["qk_rope_head_dim"] % 2:
            raise ValueError(f"latent_attention: there is none of the sizes {sizes}")
        eps = latent.get("norm_eps", self.norm_eps)
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise ValueError(f"latent_attention: norm_eps is {shown(eps)}")
        if self.n_head != self.n_query_groups:
            raise ValueError("latent_attention has as many query groups as heads")

    def _check_delta_net(self) -> None:
        net = self.delta_net
        if net is None:
            return
        if set(net) - {"is_in_turn"} != {*_DELTA_SIZES, "blocks"}:
            raise ValueError(f"delta_net: expected {', '.join(_DELTA_SIZES)} and blocks, found {', '.join(net)}")
        sizes = [net[key] for key in _DELTA_SIZES]
        if any(type(size) is not int or size < 1 for size in sizes) or net["n_head"] % net["n_groups"]:
            raise ValueError(f"delta_net: there is none of the sizes {sizes}")
        n_numbers = max(net["n_head"] * net["v_size"], net["n_groups"] * net["k_size"])
        if max(sizes) > _MOST_OF_DELTA or net["n_taps"] > _MOST_TAPS or n_numbers > _MOST_NUMBERS:
            raise ValueError(f"delta_net: the sizes {sizes} are more than is supported")
        blocks = net["blocks"]
        if not isinstance(blocks, tuple) or len(blocks) != self.n_layer or not set(blocks) <= {0, 1}:
            raise ValueError(f"delta_net: expected a 0 or a 1 for each of {self.n_layer} blocks, found {blocks}")
        if self.latent_attention is not None:
            raise ValueError("delta_net beside latent attention")

    def _check_far(self) -> None:
        has_own = self.far_head_size is not None or self.far_query_groups is not None or self.far_k_eq_v
        windows = self.sliding_window_indices if self.sliding_window_size is not None else None
        if has_own and (windows is None or self.latent_attention is not None or self.norm_qk_type != "default"):
            raise ValueError("blocks without a window have heads of their own, and no block has a window")
        if self.n_head % (self.far_query_groups or 1) or 0 in (self.far_head_size, self.far_query_groups):
            raise ValueError(f"n_head {self.n_head} is no multiple of far_query_groups {self.far_query_groups}")
        if self.n_shared_kv and (windows is None or not set(windows) <= set(windows[: -self.n_shared_kv])):
            raise ValueError(f"the last {self.n_shared_kv} blocks read keys and values of blocks that are not there")
        if self.n_shared_kv and self.n_layer < self.n_shared_kv or self.shared_kv_mlp < 1:
            raise ValueError(
                f"{self.n_shared_kv} of {self.n_layer} blocks, whose MLPs are {self.shared_kv_mlp} times as wide"
            )
        if self.v_norm and not self.norm_qk:
            raise ValueError("v_norm is for models with norm_qk")
        if (self.block_inputs or self.block_scalars) and (self.parallel_residual or self.norm_after_residual):
            raise ValueError("inputs and scalars of blocks are for attention and MLP one after the other")

    def _check_positions(self) -> None:
        heads = {self.head_size, self.far_head_size or self.head_size} if self.latent_attention is None else ()
        for size in heads:
            n = int(self.rotary_percentage * size)
            if not 0 <= n <= size:
                raise ValueError(f"rotary positions of {n} numbers in heads of {size}")
        is_rotary = not (self.alibi or self.learned_positions)
        if self.alibi not in (None, "bloom", "falcon"):
            raise ValueError(f"ALiBi of the kind {self.alibi!r}")
        if not is_rotary and (self.rope_n_elem or (self.alibi and self.learned_positions)):
            raise ValueError("more than one kind of positions")
        if self.rotary_indices is not None and (not self.rope_n_elem or self.latent_attention is not None):
            raise ValueError("rotary_indices is for models with rotary positions, without latent attention")
        if self.attention_sinks and self.latent_attention is not None:
            raise ValueError("sinks of latent attention")
        if self.norm_after_residual and (
            self.parallel_residual or not (self.post_attention_norm and self.post_mlp_norm)
        ):
            raise ValueError("norm_after_residual is for norms behind attention and MLP, one after the other")
        if "rope_type" in (self.rope_adjustments or {}):
            check_rope(self.rope_adjustments or {}, self.rope_n_elem)

    def _check_experts(self) -> None:
        has_experts = self.mlp_class_name == "LLaMAMoE" or self.experts_beside_mlp
        if has_experts and not 1 <= self.n_expert_per_token <= self.n_expert:
            raise ValueError(f"a row uses {self.n_expert_per_token} of {self.n_expert} experts")
        if self.first_k_dense_replace is not None and self.mlp_class_name != "LLaMAMoE":
            raise ValueError("first_k_dense_replace is for models with experts")
        if self.sigmoid_router and (self.mlp_class_name != "LLaMAMoE" or self.n_expert_groups is not None):
            raise ValueError("sigmoid_router is for models with experts in one group")
        if self.sigmoid_router and not self.norm_topk_prob:  # the kernels divide by the sum, whatever it says
            raise ValueError("sigmoid_router without norm_topk_prob is not supported")
        if self.shared_expert_gate and not self.n_shared_expert:
            raise ValueError("shared_expert_gate is for models with a shared expert")
        if self.attention_gate and self.latent_attention is not None:
            raise ValueError("a gate of latent attention")
        if self.router_bias and self.mlp_class_name != "LLaMAMoE":
            raise ValueError("router_bias is for models with experts")
        if self.glu_limit is not None and not (
            0 < self.glu_limit < math.inf and self.mlp_class_name in ("LLaMAMLP", "LLaMAMoE")
        ):
            raise ValueError(f"MLPs of the class {self.mlp_class_name} clamped at {self.glu_limit}")
        if self.experts_beside_mlp and (
            self.mlp_class_name != "GemmaMLP" or self.norm_class_name != "RMSNorm" or not self.moe_intermediate_size
        ):
            raise ValueError("experts beside an MLP are for gated MLPs with GELU, and RMSNorms")
        if self.n_expert_groups is None:
            return
        if self.n_expert_groups < 2 or self.n_expert % self.n_expert_groups or self.n_topk_groups is None:
            raise ValueError(
                f"{self.n_expert} experts in {self.n_expert_groups} groups, of which {self.n_topk_groups} are used"
            )
        if not (self.n_topk_scores_per_group or 0) <= self.n_expert // self.n_expert_groups:
            raise ValueError("n_topk_scores_per_group is more than a group has")
        if self.n_topk_scores_per_group is None:
            raise ValueError("n_topk_scores_per_group is missing")
        n_in_reach = self.n_topk_groups * (self.n_expert // self.n_expert_groups)
        if not 1 <= self.n_topk_groups <= self.n_expert_groups or self.n_expert_per_token > n_in_reach:
            raise ValueError(f"a row uses {self.n_expert_per_token} experts of {self.n_topk_groups} groups")


# What is said of a model that has them; litgpt's has not.
OWN_FIELDS = {
    "alibi": "ALiBi",
    "learned_positions": "learned positions",
    "embedding_norm": "a norm of the embedding",
    "norm_after_residual": "norms behind residuals",
    "sigmoid_router": "a router of sigmoids in one group",
    "attention_sinks": "sinks of attention",
    "router_bias": "a bias of the router",
    "glu_limit": "clamped MLPs",
    "qkv_bias": "biases of query, key and value of their own",
    "rotary_indices": "blocks without positions",
    "delta_net": "gated delta nets",
    "attention_gate": "gates of attention",
    "shared_expert_gate": "a gate of the shared expert",
    "v_norm": "norms of values",
    "far_head_size": "heads of two sizes",
    "far_query_groups": "two numbers of query groups",
    "far_k_eq_v": "keys that are also the values",
    "n_shared_kv": "keys and values that several blocks read",
    "shared_kv_mlp": "MLPs of two widths",
    "block_scalars": "scalars of blocks",
    "block_inputs": "inputs of blocks",
    "experts_beside_mlp": "experts beside an MLP",
}
_DELTA_SIZES = ("n_head", "n_groups", "k_size", "v_size", "n_taps")  # as DeltaNet has them
_MOST_OF_DELTA, _MOST_TAPS = 1 << 14, 64  # of each size, and of a convolution
_MOST_NUMBERS = 1 << 18  # of all heads
_LARGEST = 1e9  # of a number in `rope_adjustments`
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {  # that must be there
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor", "max_position_embeddings"),
    "proportional": ("partial_rotary_factor",),
}


def check_rope(adjustments: Mapping[str, Any], n_elem: int) -> None:
    """Raises ValueError for scaling of positions of which no table of `n_elem` numbers can be made."""
    kind, factors = adjustments["rope_type"], ("short_factor", "long_factor")
    if kind not in _ROPE_NUMBERS:
        raise ValueError(f"rope scaling of the type {str(kind)[:40]!r}")
    if n_elem < 4 or n_elem % 2:
        raise ValueError(f"rope scaling of the type {kind!r} of {n_elem} numbers")
    for key in _ROPE_NUMBERS[kind]:
        if key not in adjustments:
            raise ValueError(f"rope scaling of the type {kind!r} without {key}")
    numbers = {key: value for key, value in adjustments.items() if key not in ("rope_type", "truncate", *factors)}
    if kind == "longrope":
        for key in factors:
            found = adjustments.get(key)
            if not isinstance(found, (list, tuple)) or len(found) != n_elem // 2:
                raise ValueError(f"{key}: expected {n_elem // 2} numbers")
            numbers |= {f"{key}[{i}]": number for i, number in enumerate(found)}
    for key, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 < value <= _LARGEST:
            raise ValueError(f"rope scaling: {str(key)[:40]} is {str(value)[:40]}")
    if kind == "longrope" and adjustments["original_max_position_embeddings"] < 2:
        raise ValueError("longrope of texts of one token")


def why_not_litgpt(config: ModelConfig) -> str | None:
    """Name what litgpt's model lacks of this one, which the kernels have; None if it is a model of litgpt's."""
    plain = config.plain()
    if found := next((what for key, what in OWN_FIELDS.items() if key in plain), None):
        return found
    if (latent := config.latent_attention) is not None and ("norm_eps" in latent or not latent.get("q_lora_rank")):
        return "latent attention of this kind"
    return "MLPs with ReLU" if config.mlp_class_name == "ReluMLP" else None


def litgpt_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields from which litgpt's own model is made, as training has it.

    Raises:
        ValueError: it would compute something else.
    """
    lacking, fields, adjustments = why_not_litgpt(config), config.litgpt_plain(), config.rope_adjustments or {}
    kind = adjustments.get("rope_type")
    if kind == "dynamic":  # nothing, up to the length that the model was trained with
        fields.update(rope_adjustments=None, block_size=adjustments["max_position_embeddings"])
    elif kind is not None:
        lacking = f"positions scaled by {kind}"
    if lacking is not None:
        raise ValueError(f"litgpt's model has no {lacking}; only nodes that generate compute that")
    return fields


T = TypeVar("T")


def decode_with_config(type: type[T], data: Any, where: str, error: Callable[[str], MdiError]) -> T:
    """`mdi.spec.decode.decode` of a message or record with a `config`: a ModelConfig there, its plain form in the data."""
    given = data.get("config") if isinstance(data, dict) else None
    if not isinstance(given, dict):
        return decode(type, data, where, error)  # which says what is missing
    left_out = (*OWN_FIELDS, *_norms_by_name("", ""))
    names = (entry.name for entry in dataclasses.fields(ModelConfig))
    if missing := next((name for name in names if name not in given and name not in left_out), None):
        raise error(f"{where}.config: the field {missing!r} is missing")
    found: Any = decode(type, {**data, "config": {}}, where, error)
    try:
        config = ModelConfig.of(given)
    except ValueError as e:
        raise error(f"{where}.config: {e}") from None
    replaced: T = dataclasses.replace(found, config=config)
    return replaced


NAME_WORDS = ("Gemma", "OLMo")


def _norms_by_name(name: str, norm_class_name: str) -> dict[str, bool]:
    """Two fields of a model of which only litgpt's fields are known: litgpt looks for the family in the name."""
    return {
        "norm_unit_offset": norm_class_name == "RMSNorm" and "Gemma" in name,
        "norm_has_weight": not (norm_class_name == "LayerNorm" and "OLMo" in name),
    }


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {  # by the annotation
    "str": ((str,), "a text"),
    "bool": ((bool, int), "true or false"),
    "int": ((int,), "a number"),
    "float": ((int, float), "a number"),
    "tuple[int, ...]": ((list, tuple), "a list of whole numbers"),
    "Mapping[str, Any]": ((Mapping,), "an object"),
}


def _check_kind(key: str, value: Any, annotation: str) -> None:
    kinds, wanted = _KINDS[annotation]
    is_right = isinstance(value, kinds) and not (isinstance(value, float) and not math.isfinite(value))
    if is_right and annotation.startswith("tuple"):
        is_right = all(isinstance(entry, int) for entry in value)
    if not is_right:
        raise ValueError(f"{key}: expected {wanted}, found {shown(value)}")


class _FrozenDict(dict[str, Any]):
    """Cannot be changed, so it has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)

    def _refuse(self, *args: Any, **changes: Any) -> NoReturn:
        raise TypeError("a model's configuration cannot be changed")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _FrozenDict({key: _frozen(entry) for key, entry in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thawed(entry) for key, entry in value.items()}
    return list(map(_thawed, value)) if isinstance(value, tuple) else value


def of_predicting(config: ModelConfig, n: int) -> ModelConfig:
    """The configuration of a model of just n blocks that predict further tokens of this one: they are as its last ones are, and
    have attention where others have delta nets.
    """
    n_dense = None if config.first_k_dense_replace is None else 0
    return dataclasses.replace(config, n_layer=n, first_k_dense_replace=n_dense, delta_net=None)


@functools.lru_cache(maxsize=16)
def spec_of(config: ModelConfig) -> ModelSpec:
    """The model of a configuration.

    Raises:
        ValueError: there is no such model.
    """
    blocks: dict[BlockSpec, BlockSpec] = {}
    made = [_block(config, i) for i in range(config.n_layer)]
    norm, n_inputs = _norm(config), config.block_inputs
    return ModelSpec(
        name=config.name,
        width=config.n_embd,
        n_vocab=config.vocab_size,
        n_rows=config.padded_vocab_size,
        max_length=config.block_size,
        ends=Ends(
            embedding_factor=config.n_embd**0.5 if config.scale_embeddings else None,
            n_positions=config.block_size if config.learned_positions else 0,
            embedding_norm=norm if config.embedding_norm else None,
            final_norm=None if config.norm_after_residual else norm,
            head_bias=config.lm_head_bias,
            softcap=config.final_logit_softcapping,
            gives=tuple(Column(BlockInputs.column(i), n_inputs) for i in range(config.n_layer) if n_inputs),
            inputs=BlockInputs(n_inputs, norm) if n_inputs else None,
        ),
        blocks=tuple(blocks.setdefault(one, one) for one in made),
    )


def _block(config: ModelConfig, index: int) -> BlockSpec:
    if config.shared_attention_norm and not config.parallel_residual:
        raise ValueError("a norm that attention and MLP share, without parallel residuals")
    norm, is_shared = _norm(config), config.shared_attention_norm
    column, gated = BlockInputs.column(index), None
    mixer, cache_of = _mixer(config, index), _cache_of(config, index)
    is_read = index in {_cache_of(config, i) for i in range(config.n_layer - config.n_shared_kv, config.n_layer)}
    read = [column] if config.block_inputs else []
    if cache_of is not None:
        read.append(cache_column(cache_of, mixer).name)
    if config.block_inputs:
        gated = Gated(column, config.block_inputs, "gelu_tanh" if config.gelu_approximate == "tanh" else "gelu", norm)
    return BlockSpec(
        mixer=mixer,
        mlp=_mlp(config, index),
        residual="parallel" if config.parallel_residual else "behind" if config.norm_after_residual else "sequential",
        norm_1=norm if config.norm_1 else None,
        norm_2=norm if config.norm_2 and not is_shared else None,
        post_attention_norm=norm if config.post_attention_norm else None,
        post_mlp_norm=norm if config.post_mlp_norm else None,
        norm_is_shared=is_shared,
        gated=gated,
        has_scalar=config.block_scalars,
        cache_of=cache_of,
        gives=(cache_column(index, mixer),) if is_read else (),
        reads=tuple(read),
    )


def _is_far(config: ModelConfig, index: int) -> bool:
    """Whether a block has no window, in a model where others have one."""
    indices = config.sliding_window_indices
    return config.sliding_window_size is not None and indices is not None and not indices[index]


def _cache_of(config: ModelConfig, index: int) -> int | None:
    first, is_far = config.n_layer - config.n_shared_kv, _is_far(config, index)
    return None if index < first else next(i for i in reversed(range(first)) if _is_far(config, i) == is_far)


def _norm(config: ModelConfig) -> Norm:
    kind, has_weight = config.norm_class_name, bool(config.norm_has_weight)
    if kind == "RMSNorm":
        return Norm("rms", config.norm_eps, unit_offset=bool(config.norm_unit_offset))
    if kind != "LayerNorm":
        raise ValueError(f"norms of the class {kind!r}")
    return Norm("layer", config.norm_eps, has_weight=has_weight, has_bias=has_weight)


def _mixer(config: ModelConfig, index: int) -> Mixer:
    is_far = _is_far(config, index)
    window, size, n_groups = config.sliding_window_size, config.head_size, config.n_query_groups
    if is_far:
        window, size, n_groups = None, config.far_head_size or size, config.far_query_groups or n_groups
    softcap, norm = config.attention_logit_softcapping, _norm(config)
    if (net := config.delta_net) is not None and net["blocks"][index]:
        sizes = {key: net[key] for key in _DELTA_SIZES}
        return DeltaNet(**sizes, norm=Norm("rms", config.norm_eps), is_in_turn=bool(net.get("is_in_turn")))
    if latent := config.latent_attention:
        return LatentAttention(
            n_head=config.n_head,
            q_rank=latent.get("q_lora_rank") or None,
            kv_rank=latent["kv_lora_rank"],
            rope_size=latent["qk_rope_head_dim"],
            nope_size=latent["qk_nope_head_dim"],
            value_size=latent["v_head_dim"],
            scale=_scale(config, latent["qk_rope_head_dim"] + latent["qk_nope_head_dim"]),
            norm_eps=latent.get("norm_eps", config.norm_eps),
            positions=_rotary(config, index),
            a_bias=config.attn_bias,
            bias=config.bias,
            window=window,
            softcap=softcap,
        )
    positions: Rotary | Alibi | None = None
    if config.alibi:
        positions = Alibi(config.n_head, is_rounded=config.alibi == "falcon")
    elif config.rope_n_elem and (config.rotary_indices is None or config.rotary_indices[index]):
        positions = _rotary(config, index)
    return Attention(
        n_head=config.n_head,
        n_groups=n_groups,
        head_size=size,
        scale=_scale(config, size),
        window=window,
        positions=positions,
        softcap=softcap,
        qkv_bias=config.bias or config.attn_bias if config.qkv_bias is None else config.qkv_bias,
        bias=config.bias,
        qk_norm=norm if config.norm_qk else None,
        qk_norm_over_all=config.norm_qk and config.norm_qk_type == "olmo2",
        v_norm=replace(norm, has_weight=False, has_bias=False) if config.v_norm else None,
        makes=(
            "nothing"
            if _cache_of(config, index) is not None
            else "keys"
            if is_far and config.far_k_eq_v
            else "keys and values"
        ),
        has_sinks=config.attention_sinks,
        has_gate=config.attention_gate,
    )


def _rotary(config: ModelConfig, index: int) -> Rotary:
    """Blocks with a 1 in rope_indices have a base of their own, and no scaling but `condense`."""
    near = config.rope_local_base_freq is not None and config.rope_indices is not None and config.rope_indices[index]
    base = config.rope_local_base_freq if near else config.rope_base
    assert base is not None
    scaling = None if near else config.rope_adjustments
    n_elem = config.rope_n_elem
    if config.far_head_size and _is_far(config, index):
        n_elem = int(config.rotary_percentage * config.far_head_size)
    return Rotary(n_elem, base, config.rope_condense_ratio, config.rope_interleave, scaling or None)


def _scale(config: ModelConfig, size: int) -> float:
    """The factor of scores of heads of this size. YaRN has one more in litgpt's form, and in latent attention."""
    adjustments, factor = config.rope_adjustments or {}, 1.0
    has_more = "rope_type" not in adjustments or config.latent_attention is not None
    if has_more and adjustments.get("mscale_all_dim") and adjustments.get("factor", 0) > 1:
        factor = (0.1 * adjustments["mscale_all_dim"] * math.log(adjustments["factor"]) + 1.0) ** 2
    return factor / math.sqrt(config.attention_scores_scalar or size)


_GATED: dict[str, Activation | None] = {"LLaMAMLP": "silu", "GemmaMLP": None, "LLaMAMoE": "silu"}
_PLAIN: dict[str, Activation | None] = {"GptNeoxMLP": None, "ReluMLP": "relu"}


def _mlp(config: ModelConfig, index: int) -> Mlp:
    kind = config.mlp_class_name
    if kind not in (*_GATED, *_PLAIN):
        raise ValueError(f"MLPs of the class {kind!r}")
    if config.experts_beside_mlp:
        assert config.moe_intermediate_size is not None
        expert, norm = _dense(config, config.moe_intermediate_size), _norm(config)
        mlp, router = _dense(config, config.intermediate_size), replace(_router(config), has_expert_scales=True)
        return Experts(config.n_expert, config.n_expert_per_token, expert, router, mlp, own_norm=norm)
    if kind != "LLaMAMoE" or index < (config.first_k_dense_replace or 0):
        is_wide = _cache_of(config, index) is not None
        return _dense(config, config.intermediate_size * (config.shared_kv_mlp if is_wide else 1))
    width, shared = config.moe_intermediate_size, None
    if config.n_shared_expert:
        if width is None:
            raise ValueError("n_shared_expert without moe_intermediate_size")
        shared = _dense(config, width * config.n_shared_expert)
    return Experts(
        n=config.n_expert,
        n_used=config.n_expert_per_token,
        expert=_dense(config, width or config.intermediate_size),
        router=_router(config),
        shared=shared,
        has_shared_gate=config.shared_expert_gate,
    )


def _dense(config: ModelConfig, width: int) -> Dense:
    kind = config.mlp_class_name
    activation = (_GATED | _PLAIN)[kind] or ("gelu_tanh" if config.gelu_approximate == "tanh" else "gelu")
    if config.glu_limit:
        activation = "clamped_glu"
    return Dense(width, activation, kind in _GATED, config.bias, config.glu_limit)


def _router(config: ModelConfig) -> Router:
    is_sigmoid, groups = config.sigmoid_router or bool(config.n_expert_groups), config.n_expert_groups or 1
    return Router(
        kind="sigmoid" if is_sigmoid else "softmax",
        is_normed=config.norm_topk_prob or not is_sigmoid,
        scale=config.routed_scaling_factor,
        has_bias=config.router_bias,
        n_groups=groups,
        n_used_groups=(config.n_topk_groups or 1) if groups > 1 else 1,
        n_scores_per_group=(config.n_topk_scores_per_group or 0) if groups > 1 else 0,
    )
