"""The configuration of a model: one frozen class for what kernels, plans, files and messages read. Needs no litgpt.

Its names and its plain form are those of the Config of litgpt, as in model_config.yaml, chunks and requests to nodes. So a
litgpt Config becomes one by its fields, a Hugging Face config.json by checkpoint/hfconfig.py, and the head of a GGUF file
by checkpoint/ggufconfig.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of transformer blocks.

    Attributes:
        name: "Gemma" in it adds one to the weights of its RMSNorms, "OLMo" with LayerNorm has norms without weights.
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
        rope_condense_ratio, rope_adjustments: scaling of positions.
        rope_local_base_freq, rope_indices: the base of the blocks with a 1; the others have `rope_base`.
        intermediate_size, moe_intermediate_size: width of an MLP, and of an expert where it differs.
        first_k_dense_replace: so many blocks at the beginning have no experts.
        latent_attention: ranks and sizes of DeepSeek's attention.

    Raises:
        ValueError: fields that do not fit each other.
    """

    name: str = ""
    hf_config: dict[str, Any] = field(default_factory=dict)
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
    attention_scores_scalar: int | None = None
    sliding_window_size: int | None = None
    sliding_window_indices: list[int] | None = None
    attention_logit_softcapping: float | None = None
    rope_base: int = 10000
    rotary_percentage: float = 0.25
    rope_condense_ratio: float = 1
    rope_adjustments: dict[str, Any] | None = None
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
    latent_attention: dict[str, Any] | None = None
    rope_local_base_freq: float | None = None
    rope_indices: list[int] | None = None

    def __post_init__(self) -> None:
        def fill(key: str, value: Any) -> None:
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)

        if not self.name:
            object.__setattr__(self, "name", self.hf_config.get("name", ""))
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
        if self.intermediate_size is None and self.mlp_class_name == "LLaMAMLP":
            raise ValueError("intermediate_size is missing")
        fill("intermediate_size", 4 * self.n_embd)
        if self.sliding_window_size is not None:
            object.__setattr__(self, "sliding_window_indices", self._per_block("sliding_window_indices"))
        if self.rope_local_base_freq is not None:
            object.__setattr__(self, "rope_indices", self._per_block("rope_indices"))
        self._check_latent()
        self._check_experts()

    @property
    def rope_n_elem(self) -> int:
        """Numbers of a head that are rotated."""
        if self.latent_attention is not None:
            return int(self.latent_attention["qk_rope_head_dim"])
        return int(self.rotary_percentage * self.head_size)

    def plain(self) -> dict[str, Any]:
        """All fields, as JSON and YAML have them."""
        return dataclasses.asdict(self)

    def _per_block(self, key: str) -> list[int]:
        given: Sequence[int] | None = getattr(self, key)
        found = [1] * self.n_layer if given is None else list(given)[: self.n_layer]
        if len(found) < self.n_layer or not set(found) <= {0, 1}:
            raise ValueError(f"{key}: expected a 0 or a 1 for each of {self.n_layer} blocks, found {given}")
        return found

    def _check_latent(self) -> None:
        latent = self.latent_attention
        if latent is None:
            return
        wanted = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        if missing := [key for key in wanted if latent.get(key) is None]:
            raise ValueError(f"latent_attention lacks {', '.join(missing)}")
        if self.n_head != self.n_query_groups:
            raise ValueError("latent_attention has as many query groups as heads")

    def _check_experts(self) -> None:
        if self.first_k_dense_replace is not None and self.mlp_class_name != "LLaMAMoE":
            raise ValueError("first_k_dense_replace is for models with experts")
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
