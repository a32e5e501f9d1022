"""A model as a list of blocks, each of which says everything about itself. Pure values; equal blocks are one object.

Kernels, torch, shapes, caches, groups, adapters, plans and exports read these, and ask for no family. Names of tensors are in
`mdi.model.tensors`; `mdi.model.plain` makes a ModelSpec of the plain form that is stored and sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mdi.model.rows import HIDDEN, Column, RowLayout

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_glu"]


@dataclass(frozen=True)
class Norm:
    """A norm of rows: "rms" divides by the root of the mean square, "layer" subtracts the mean before.

    Attributes:
        unit_offset: one is added to the weights.
        has_weight, has_bias: whether it has tensors of these names.
    """

    kind: Literal["rms", "layer"]
    eps: float
    unit_offset: bool = False
    has_weight: bool = True
    has_bias: bool = False


@dataclass(frozen=True)
class Rotary:
    """Rotary positions.

    Attributes:
        n_elem: numbers of a head that are rotated.
        base: of the frequencies.
        condense: positions are divided by it.
        interleaved: the two numbers of a pair lie beside each other, and not half of `n_elem` apart.
        scaling: of frequencies, as ModelConfig.rope_adjustments has it; cannot be changed. None is none.
    """

    n_elem: int
    base: float
    condense: float = 1
    interleaved: bool = False
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Alibi:
    """Scores get less with the distance, by a slope of each head (Press et al. 2022).

    Attributes:
        n_slopes, first: of the slopes of so many heads, those from number `first` on.
        is_rounded: slopes and products are rounded to bfloat16, as Falcon's are.
    """

    n_slopes: int
    first: int = 0
    is_rounded: bool = False


@dataclass(frozen=True)
class Attention:
    """Attention of `n_head` heads of queries over `n_groups` of keys and values, each of `head_size` numbers.

    Attributes:
        scale: the factor of scores.
        window: positions that a row sees, itself included; None is all.
        positions: how rows are told where they are; None: not here (learned positions, or no positions at all).
        softcap: of scores: softcap * tanh(score / softcap); None is none.
        qkv_bias, bias: biases of query, key and value, and of the layer behind the heads.
        qk_norm: of queries and keys, of each head or (`qk_norm_over_all`) of all heads together; None is none.
        v_norm: of values, of each head, without weights; None is none.
        makes: "keys and values" of its rows; "keys", of which values are made as well, before norms and positions; or "nothing"
            but queries: keys and values are those of another block (`BlockSpec.cache_of`).
        has_sinks: each head has a score that its softmax counts beside those of the keys, and that has no value.
        has_gate: what heads give is multiplied by the sigmoid of a further layer of the block's input.
        share: of a node's part in a group: heads of queries of a whole group of keys and values, and the place of the node's
            first head in its own; None: it is whole.
    """

    n_head: int
    n_groups: int
    head_size: int
    scale: float
    window: int | None = None
    positions: Rotary | Alibi | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    bias: bool = False
    qk_norm: Norm | None = None
    qk_norm_over_all: bool = False
    v_norm: Norm | None = None
    makes: Literal["keys and values", "keys", "nothing"] = "keys and values"
    has_sinks: bool = False
    has_gate: bool = False
    share: tuple[int, int] | None = None

    @property
    def queries_per_group(self) -> int:
        """Heads of queries that share keys and values, on all nodes together."""
        return self.n_head // self.n_groups if self.share is None else self.share[0]

    @property
    def made(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values that the layer in front of them makes."""
        return self.n_head, self.n_groups * (self.makes != "nothing"), self.n_groups * (self.makes == "keys and values")


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's attention (DeepSeek-V2, section 2.1): keys and values of all heads come from one row of `kv_rank` numbers.

    Attributes:
        q_rank, kv_rank: of the compressed rows of queries, and of keys and values; None: queries are not compressed.
        rope_size, nope_size: numbers of a head's query and key that are rotated, and that are not.
        value_size: of a head.
        norm_eps: of the norms of compressed rows.
        a_bias, bias: biases of the layers that compress, and of the others.
        Others are those of Attention.
    """

    n_head: int
    q_rank: int | None
    kv_rank: int
    rope_size: int
    nope_size: int
    value_size: int
    scale: float
    norm_eps: float
    positions: Rotary
    a_bias: bool = False
    bias: bool = False
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (Yang et al. 2025): a state of each head in place of keys and values of all positions.

    Of each row, queries, keys and values go through a convolution over this row and those before it, then SiLU. Queries and
    keys are divided by their lengths, queries also by the root of `k_size`. The state S (k_size, v_size) of a head becomes
    e^g S + k (b (v - k e^g S)), and the head gives q S, which is normed and multiplied by SiLU of a further layer. b is a
    sigmoid, g is -e^A softplus(a + dt), with b and a of each head from the block's input.

    Attributes:
        n_head, n_groups: heads of values, and of queries and keys, each of which serves as many of the former: those that
            follow each other, or (`is_in_turn`) every n_groups-th.
        k_size, v_size: numbers of a head.
        n_taps: rows that the convolution sees, the present one included.
        norm: of what a head gives.
    """

    n_head: int
    n_groups: int
    k_size: int
    v_size: int
    n_taps: int
    norm: Norm
    is_in_turn: bool = False

    @property
    def window(self) -> None:
        """A state has all positions."""

    @property
    def positions(self) -> None:
        """It needs none."""

    @property
    def n_channels(self) -> int:
        """Of the convolution: numbers of queries, keys and values, one behind the other."""
        return 2 * self.n_groups * self.k_size + self.n_head * self.v_size


Mixer = Attention | LatentAttention | DeltaNet


@dataclass(frozen=True)
class Dense:
    """An MLP of `width` columns: two layers, or (`is_gated`) three, of which one lets through what another computes.

    Attributes:
        limit: of "clamped_glu": gate and what it lets through are clamped at it.
    """

    width: int
    activation: Activation
    is_gated: bool
    bias: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Router:
    """Chooses the experts of a row.

    Attributes:
        kind: "softmax": those with the largest scores, weighted by a softmax over these scores. "sigmoid": those with the
            largest sums of a score's sigmoid and a correction, weighted by the sigmoids.
        is_normed: the weights of "sigmoid" are divided by their sum.
        scale: the factor of the weights.
        has_bias: of the layer that scores.
        has_expert_scales: each expert has a factor of its weights.
        n_groups, n_used_groups, n_scores_per_group: experts are in groups, of which those with the largest sums of so many of
            their scores are used; one group is none.
    """

    kind: Literal["softmax", "sigmoid"]
    is_normed: bool
    scale: float = 1.0
    has_bias: bool = False
    has_expert_scales: bool = False
    n_groups: int = 1
    n_used_groups: int = 1
    n_scores_per_group: int = 0

    @property
    def has_correction(self) -> bool:
        return self.kind == "sigmoid"


@dataclass(frozen=True)
class Experts:
    """`n` MLPs, of which each row uses `n_used`, and one that all rows use (`shared`; None is none).

    Attributes:
        has_shared_gate: what the shared one gives is multiplied by the sigmoid of a product with the row.
        own_norm: experts and router read the rows in front of `norm_2`, each through a norm of this kind of their own (the
            router's weights are divided by the root of the width), and one each follows experts and `shared`, before their
            sum. None: all read what `norm_2` gives.
    """

    n: int
    n_used: int
    expert: Dense
    router: Router
    shared: Dense | None = None
    has_shared_gate: bool = False
    own_norm: Norm | None = None


Mlp = Dense | Experts


@dataclass(frozen=True)
class Gated:
    """What a block adds behind its MLP, of the rows x there and of a column: norm(proj(activation(fc x) * column)).

    Attributes:
        column: that it reads, of `width` numbers.
    """

    column: str
    width: int
    activation: Activation
    norm: Norm


@dataclass(frozen=True)
class BlockSpec:
    """One block.

    Attributes:
        residual: "sequential": x + attention(norm_1 x), then + mlp(norm_2 of that). "parallel": both read x, or (with
            `norm_is_shared`) the same norm of it. "behind": sequential, and each sum goes through the norm behind it.
        norm_1, norm_2: before attention and MLP. post_attention_norm, post_mlp_norm: behind them, before the sum or, with
            "behind", after it. None: not there.
        gated: what it adds behind the MLP; None is nothing.
        has_scalar: its outputs are multiplied by a number of its own.
        cache_of: the block, by its number, whose keys and values this one reads; None: its own. On another node it reads a
            copy, which is made of a column for caches (`cache_column`) that the other block gives.
        gives, reads: columns besides hidden that it makes for blocks behind it, and names of those that it reads. A block that
            reads a column for caches makes its keys and values of that, and not of hidden.
    """

    mixer: Mixer
    mlp: Mlp
    residual: Literal["sequential", "parallel", "behind"]
    norm_1: Norm | None
    norm_2: Norm | None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    norm_is_shared: bool = False
    gated: Gated | None = None
    has_scalar: bool = False
    cache_of: int | None = None
    gives: tuple[Column, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def norms(self) -> dict[str, Norm]:
        """Those that are there, by their names, in their order."""
        found = {
            "norm_1": self.norm_1,
            "post_attention_norm": self.post_attention_norm,
            "norm_2": self.norm_2,
            "post_mlp_norm": self.post_mlp_norm,
        }
        return {name: norm for name, norm in found.items() if norm is not None}

    @property
    def dense(self) -> Dense:
        """The MLP, or one expert."""
        return self.mlp if isinstance(self.mlp, Dense) else self.mlp.expert


def cache_column(block: int, mixer: Mixer) -> Column:
    """Keys and then values that a block has put into its cache, as float32 numbers, for blocks that read these elsewhere."""
    assert isinstance(mixer, Attention)
    return Column(f"cache.{block}", 2 * mixer.n_groups * mixer.head_size, is_cached=True)


@dataclass(frozen=True)
class BlockInputs:
    """A column for each block, which the embedding gives: of a token's row of a table, times the root of `width`, and of a
    projection of the embedding's hidden row over the root of its width, through a norm; their sum over the root of two.

    Attributes:
        width: numbers of one block's column.
        norm: of these.
    """

    width: int
    norm: Norm

    @staticmethod
    def column(block: int) -> str:
        return f"input.{block}"


@dataclass(frozen=True)
class Ends:
    """What is before the first block and behind the last one.

    Attributes:
        embedding_factor: of the tokens' rows; None is none.
        n_positions: learned positions that are added to them; 0 is none.
        embedding_norm: follows both; final_norm: before the head. None is none.
        head_bias: of the head.
        softcap: of logits: softcap * tanh(logit / softcap); None is none.
        gives: columns besides hidden that the embedding makes for blocks.
        inputs: how it makes them; None: it makes none.
    """

    embedding_factor: float | None = None
    n_positions: int = 0
    embedding_norm: Norm | None = None
    final_norm: Norm | None = None
    head_bias: bool = False
    softcap: float | None = None
    gives: tuple[Column, ...] = ()
    inputs: BlockInputs | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder.

    Attributes:
        name: for people.
        width: numbers of a row's hidden column.
        n_vocab, n_rows: ids that mean something, and rows of the embedding.
        max_length: most tokens of a text.
    """

    name: str
    width: int
    n_vocab: int
    n_rows: int
    max_length: int
    ends: Ends
    blocks: tuple[BlockSpec, ...]

    @property
    def n_layer(self) -> int:
        return len(self.blocks)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(one.mlp, Experts) for one in self.kinds)

    @property
    def has_states(self) -> bool:
        """Whether a block keeps a state in place of keys and values."""
        return any(isinstance(one.mixer, DeltaNet) for one in self.kinds)

    @property
    def has_window(self) -> bool:
        """Whether a block sees a limited number of positions."""
        return any(one.mixer.window is not None for one in self.kinds)

    @property
    def kinds(self) -> list[BlockSpec]:
        """The different blocks, in the order in which they come first."""
        return distinct(self.blocks)

    def allowed_cuts(self) -> list[int]:
        """Where the model may be cut: c is between the blocks c - 1 and c. A block stays with the one whose cache it reads, if
        that does not give what it holds (`cache_column`).
        """
        reads = [(one.cache_of, i) for i, one in enumerate(self.blocks) if one.cache_of is not None]
        kept = [(of, i) for of, i in reads if not self._gives_cache(of)]
        return [c for c in range(len(self.blocks) + 1) if not any(of < c <= i for of, i in kept)]

    def _gives_cache(self, block: int) -> bool:
        mixer, gives = self.blocks[block].mixer, self.blocks[block].gives
        return bool(gives) and isinstance(mixer, Attention) and cache_column(block, mixer) in gives

    def caches_before(self, cut: int) -> list[int]:
        """Blocks in front of a cut whose caches blocks behind it read."""
        return sorted({of for one in self.blocks[cut:] if (of := one.cache_of) is not None and of < cut})

    @property
    def skipped_from(self) -> int:
        """The block from which on only rows that give logits are computed: no block from there on makes anything of hidden that
        another row reads. n_layer: all compute all rows.
        """
        cached = {one.name for gives in self._given for one in gives if one.is_cached}
        first = self.n_layer
        for block in reversed(self.blocks):
            if block.gives or (block.cache_of is None and cached.isdisjoint(block.reads)):
                break
            first -= 1
        return first

    def row_at(self, cut: int) -> RowLayout:
        """Rows between the blocks cut - 1 and cut: hidden, and what is given in front of the cut and read behind it."""
        read = {name for block in self.blocks[cut:] for name in block.reads}
        given = {one.name: one for gives in self._given[: cut + 1] for one in gives if one.name in read}
        columns = Column(HIDDEN, self.width), *sorted(given.values(), key=lambda one: one.is_cached)
        return RowLayout(columns, is_skipped=self.skipped_from <= cut < self.n_layer)

    @property
    def widest_row(self) -> int:
        """Numbers of a row, at the cut where there are most."""
        return max(self.row_at(cut).width for cut in self.allowed_cuts())

    @property
    def _given(self) -> list[tuple[Column, ...]]:
        """Columns that the embedding gives, and each block."""
        return [self.ends.gives, *(block.gives for block in self.blocks)]


def distinct(blocks: Iterable[BlockSpec]) -> list[BlockSpec]:
    """The different ones, in the order in which they come first."""
    return list({id(one): one for one in dict.fromkeys(blocks)}.values())
