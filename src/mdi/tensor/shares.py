"""The division of every block among nodes: query heads and MLP columns, shared over the nodes of a group.

Keys and values go with their queries. Where the queries of a group are split, more than one node holds the group. Latent rows
are of all heads, so each node computes and keeps the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mdi.errors import UsageError
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.layout import Range, skipped
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Alibi, Attention, BlockSpec, DeltaNet, Dense, Experts, LatentAttention, Mixer, ModelSpec

COLUMNS_TOGETHER = 64  # MLP columns that stay together if there are enough: whole groups of all packed formats
ROWS_TOGETHER = 16  # of the head


@dataclass(frozen=True)
class Shares:
    """Bounds, one more than nodes: node r has [bounds[r], bounds[r + 1]).

    Attributes:
        heads: of the query heads of `n_heads`, and columns: of the MLP columns of `mlp_width`; blocks that have another number
            of them are cut in the same proportion.
        vocabulary: of the rows of the head; None leaves it to the first node.
    """

    heads: tuple[int, ...]
    columns: tuple[int, ...]
    vocabulary: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for bounds in (self.heads, self.columns, self.vocabulary or self.heads):
            if len(bounds) != len(self.heads) or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
                raise ValueError(f"bounds {bounds} of {self.n_nodes} nodes")

    @property
    def n_nodes(self) -> int:
        return len(self.heads) - 1

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError if they are not those of this model."""
        spec = spec_of(config)
        ends = (self.heads[-1], self.columns[-1], (self.vocabulary or (spec.n_rows,))[-1])
        if ends != (n_heads(spec), mlp_width(spec), spec.n_rows):
            raise ValueError(f"shares of {ends[0]} heads, {ends[1]} columns and {ends[2]} tokens")


@dataclass(frozen=True)
class Share:
    """What node `rank` has of a model.

    Args:
        config: of the whole model.
    """

    shares: Shares
    rank: int
    config: ModelConfig

    @property
    def whole(self) -> ModelSpec:
        return spec_of(self.config)

    @property
    def spec(self) -> ModelSpec:
        """A model whose blocks are just this node's share: for the kernels."""
        kinds = {one: BlockShare(self, one).spec() for one in self.whole.kinds}
        return replace(self.whole, blocks=tuple(kinds[one] for one in self.whole.blocks))

    def of(self, block: int) -> BlockShare:
        return BlockShare(self, self.whole.blocks[block])

    @property
    def n_heads(self) -> int:
        """Of the first block."""
        first, end = self.of(0).heads
        return end - first

    @property
    def vocabulary(self) -> Range | None:
        """Rows of the head; None where the first node has all."""
        bounds = self.shares.vocabulary
        return None if bounds is None else (bounds[self.rank], bounds[self.rank + 1])

    @property
    def adds_attention_bias(self) -> bool:
        """Whether this node adds the terms that are added only once, behind the sum over all nodes."""
        heads = self.shares.heads
        return self.rank == next(r for r in range(self.shares.n_nodes) if heads[r] < heads[r + 1])


@dataclass(frozen=True)
class BlockShare:
    """The heads and columns of a node in one block."""

    share: Share
    block: BlockSpec

    @property
    def mixer(self) -> Mixer:
        return self.block.mixer

    @property
    def n_per_group(self) -> int:
        """Heads of queries that share keys and values."""
        return self.mixer.queries_per_group if isinstance(self.mixer, Attention) else self.mixer.n_head

    @property
    def heads(self) -> Range:
        """Of queries, or of the values of a delta net, all that a key serves."""
        if isinstance(self.mixer, DeltaNet):
            return _times(self._keys(self.mixer), self.mixer.n_head // self.mixer.n_groups)
        return _scaled(self.share.shares.heads, self.share.rank, self.mixer.n_head)

    def _keys(self, of: DeltaNet) -> Range:
        """Heads of keys of a delta net."""
        return _scaled(self.share.shares.heads, self.share.rank, of.n_groups)

    @property
    def groups(self) -> Range:
        """Groups of keys and values that its heads read; without heads one group, which is not read."""
        first, end = self.heads
        if first == end:
            return 0, 1
        if isinstance(self.mixer, DeltaNet):
            return self._keys(self.mixer)
        n = self.n_per_group
        return first // n, -(-end // n)

    @property
    def cached(self) -> str:
        """What its cache of the block has: which groups, of how many; "" for all of them. Latent rows are one group. A node
        without heads computes no keys and values.
        """
        n = 1 if isinstance(self.mixer, LatentAttention) else self.mixer.n_groups
        first, end = self.groups if self.heads[0] < self.heads[1] else (0, 0)
        return "" if (first, end) == (0, n) else f"{first}-{end} of {n}"

    def columns(self, width: int) -> Range:
        """Of an MLP of this width."""
        return _scaled(self.share.shares.columns, self.share.rank, width)

    def of_shared_expert(self, width: int) -> Range:
        """Of one that is as wide as several experts: it is cut like each of them."""
        return _times(self.columns(self.block.dense.width), width // self.block.dense.width)

    def adds_mlp_bias(self, width: int) -> bool:
        shares = self.share.shares
        bounds = [_scaled(shares.columns, r, width) for r in range(shares.n_nodes)]
        return self.share.rank == next(r for r, (a, b) in enumerate(bounds) if a < b)

    def counts_group(self, group: int) -> bool:
        """Whether this node is the first that holds a group: sums over all groups have it once."""
        first, end = self.heads
        return first < end and group * self.n_per_group >= first

    def spec(self) -> BlockSpec:
        """The block that computes this share."""
        mixer = self._mixer()
        if isinstance(self.block.mlp, Dense):
            return replace(self.block, mixer=mixer, mlp=_of_width(self.block.mlp, self.columns(self.block.mlp.width)))
        mlp = self.block.mlp
        shared = mlp.shared and _of_width(mlp.shared, self.of_shared_expert(mlp.shared.width))
        expert = _of_width(mlp.expert, self.columns(mlp.expert.width))
        return replace(self.block, mixer=mixer, mlp=replace(mlp, expert=expert, shared=shared))

    def _mixer(self) -> Mixer:
        whole, (first, end), n_groups = self.mixer, self.heads, self.groups[1] - self.groups[0]
        if isinstance(whole, LatentAttention):
            return replace(whole, n_head=end - first)
        if isinstance(whole, DeltaNet):
            return replace(whole, n_head=end - first, n_groups=n_groups)
        n, positions = whole.queries_per_group, whole.positions
        return replace(
            whole,
            n_head=end - first,
            n_groups=n_groups,
            positions=replace(positions, first=first) if isinstance(positions, Alibi) else positions,
            share=(n, first % n if first < end else 0),
        )


def _of_width(dense: Dense, columns: Range) -> Dense:
    return replace(dense, width=columns[1] - columns[0])


def _scaled(bounds: Sequence[int], rank: int, width: int) -> Range:
    whole = bounds[-1]
    if whole == width or whole == 0:
        return bounds[rank], bounds[rank + 1]
    return bounds[rank] * width // whole, bounds[rank + 1] * width // whole


def n_heads(spec: ModelSpec) -> int:
    """The most query heads that a block has."""
    return max(block.mixer.n_head for block in spec.kinds)


def mlp_width(spec: ModelSpec) -> int:
    """Columns of the MLP with most of the work: of an expert, if there are experts."""
    return next((b.dense.width for b in spec.kinds if isinstance(b.mlp, Experts)), spec.blocks[0].dense.width)


def why_not_shared_out(config: ModelConfig) -> str | None:
    """The part of a model that cannot be shared; None if all of it can."""
    if (reason := why_not_in_kernels(config)) is not None:
        return reason
    spec = spec_of(config)
    if spec.widest_row > spec.width:
        return "rows with columns besides hidden"
    if any(isinstance(block.mlp, Experts) and block.mlp.own_norm is not None for block in spec.kinds):
        return "experts with norms of their own"
    mixers = [block.mixer for block in spec.kinds]
    if any(isinstance(m, DeltaNet) and m.is_in_turn for m in mixers):
        return "keys of delta nets that serve every n-th head"
    if any(isinstance(m, Attention) and m.qk_norm_over_all and m.has_gate for m in mixers):
        return "norms over all heads beside gates of attention"
    if any(isinstance(m, Attention) and m.qk_norm_over_all and m.qk_norm and m.qk_norm.kind != "rms" for m in mixers):
        return "norms over all heads that subtract a mean"
    return None


def share_out(config: ModelConfig, parts: Sequence[float], is_head_shared: bool = False) -> Shares:
    """Shares in proportion to `parts`, of each node one number from 0 on: what it can compute and hold.

    Raises:
        UsageError: the model cannot be shared out, or no node is to have anything.
    """
    if (reason := why_not_shared_out(config)) is not None:
        raise UsageError(f"--parallel tensor: {reason} cannot be shared out: use --parallel ring")
    if not parts or min(parts) < 0 or sum(parts) <= 0:
        raise UsageError(f"shares {list(parts)}: expected a number for each node, and one above 0")
    spec = spec_of(config)
    width, vocabulary = mlp_width(spec), spec.n_rows
    return Shares(
        _bounds(n_heads(spec), parts, 1),
        _bounds(width, parts, COLUMNS_TOGETHER if width >= COLUMNS_TOGETHER * len(parts) else 1),
        _bounds(vocabulary, parts, ROWS_TOGETHER) if is_head_shared else None,
    )


def _bounds(n: int, parts: Sequence[float], together: int) -> tuple[int, ...]:
    """Bounds that are multiples of `together`, except the last."""
    whole, done = sum(parts), 0.0
    bounds = [0]
    for part in parts[:-1]:
        done += part
        bounds.append(min(n, max(bounds[-1], round(n * done / whole / together) * together)))
    if parts[-1] == 0:  # what rounding left over belongs to the last node that has something
        last = max(i for i, part in enumerate(parts) if part > 0)
        bounds[last + 1 :] = [n] * (len(bounds) - last - 1)
    return (*bounds, n)


Shape = tuple[int, ...]

_IN_BLOCK = re.compile(r"transformer\.h\.(\d+)\.(.*)\.(weight|bias|sinks|dt_bias|A_log)")
_MLP = re.compile(r"mlp\.(experts\.\d+\.|shared_experts\.)?(fc|fc_1|fc_2|proj)")


@dataclass(frozen=True)
class Piece:
    """Of one tensor.

    Attributes:
        rows: ranges of outputs that follow each other; None is all of them.
        columns: a range of inputs; None is all of them.
    """

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None

    @property
    def is_whole(self) -> bool:
        return self.rows is None and self.columns is None

    def shape(self, whole: Shape, form: str | None) -> Shape:
        """Of the piece of a tensor, in a weight format or (None) in plain numbers."""
        n_out = whole[0] if self.rows is None else sum(b - a for a, b in self.rows)
        if self.columns is None:
            return (n_out, *whole[1:])
        first, last = self.columns
        return n_out, last - first + (skipped(form, first, last) if form else 0)


WHOLE = Piece()


def piece_of(name: str, share: Share) -> Piece | None:
    """The piece of a tensor, by its name in the full model; None if the node has no part of it."""
    if name.startswith("lm_head."):
        return WHOLE if share.vocabulary is None else Piece(rows=(share.vocabulary,))
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return WHOLE
    share_of_block, layer, what = share.of(int(match[1])), match[2], match[3]
    if what == "sinks":
        return Piece(rows=(share_of_block.heads,))
    if layer.startswith("delta"):
        return _of_delta(layer, what, share_of_block)
    if layer.startswith("attn."):
        return _of_attention(layer, what, share_of_block)
    if mlp := _MLP.fullmatch(layer):
        return _of_mlp(share_of_block, mlp[1] or "", mlp[2], what)
    return WHOLE


def _of_latents(layer: str, own: BlockShare, mixer: LatentAttention) -> Piece:
    """What makes latent rows, and compressed ones of queries, is whole."""
    rows = {"attn.kv_b_proj": mixer.nope_size + mixer.value_size}
    rows |= dict.fromkeys(("attn.q_proj", "attn.q_b_proj"), mixer.nope_size + mixer.rope_size)
    if layer == "attn.proj":
        return Piece(columns=_times(own.heads, mixer.value_size))
    return Piece(rows=(_times(own.heads, rows[layer]),)) if layer in rows else WHOLE


def _of_delta(layer: str, what: str, own: BlockShare) -> Piece:
    mixer, heads = own.mixer, own.heads
    assert isinstance(mixer, DeltaNet)
    if what in ("dt_bias", "A_log"):
        return Piece(rows=(heads,))
    values, keys, n_keys = _times(heads, mixer.v_size), _times(own.groups, mixer.k_size), mixer.n_groups * mixer.k_size
    if layer in ("delta.qkv", "delta.conv"):
        return Piece(rows=(keys, _plus(keys, n_keys), _plus(values, 2 * n_keys)))
    if layer == "delta.gates":
        return Piece(rows=(heads, _plus(heads, mixer.n_head)))
    if layer == "delta.out_gate":
        return Piece(rows=(values,))
    return Piece(columns=values) if layer == "delta.proj" else WHOLE


def _of_attention(layer: str, what: str, own: BlockShare) -> Piece | None:
    mixer = own.mixer
    if isinstance(mixer, LatentAttention):
        return _of_latents(layer, own, mixer)
    assert isinstance(mixer, Attention)
    size = mixer.head_size
    heads, groups = _times(own.heads, size), _times(own.groups, size)
    if layer == "attn.qkv":
        n_q, n_k, n_v = (n * size for n in mixer.made)
        rows = (_plus(groups, n_q) if n_k else None, _plus(groups, n_q + n_k) if n_v else None)
        return Piece(rows=(heads, *filter(None, rows)))
    if layer == "attn.out_gate":
        return Piece(rows=(heads,))
    if layer == "attn.proj":
        return Piece(columns=heads) if what == "weight" else (WHOLE if own.share.adds_attention_bias else None)
    if mixer.qk_norm_over_all:
        return Piece(rows=(heads if layer == "attn.norm_q" else groups,))
    return WHOLE


def _of_mlp(own: BlockShare, path: str, layer: str, what: str) -> Piece | None:
    mlp, width = own.block.mlp, own.block.dense.width
    columns = own.columns(width)
    if path == "shared_experts.":
        assert isinstance(mlp, Experts) and mlp.shared is not None
        columns = own.of_shared_expert(mlp.shared.width)
    if layer != "proj":
        return Piece(rows=(columns,))
    return Piece(columns=columns) if what == "weight" else (WHOLE if own.adds_mlp_bias(width) else None)


def _times(bounds: Range, n: int) -> Range:
    return bounds[0] * n, bounds[1] * n


def _plus(bounds: Range, n: int) -> Range:
    return bounds[0] + n, bounds[1] + n
