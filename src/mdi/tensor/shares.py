"""The division of every block among nodes: query heads and MLP columns, shared over the nodes of a group.

Keys and values go with their queries. Where the queries of a group are split, more than one node holds the group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mdi.errors import UsageError
from mdi.kernels.blocks import why_not_in_kernels
from mdi.kernels.layout import Range, skipped
from mdi.spec.model import ModelConfig

COLUMNS_TOGETHER = 64  # MLP columns that stay together if there are enough: whole groups of all packed formats
ROWS_TOGETHER = 16  # of the head


@dataclass(frozen=True)
class Shares:
    """Bounds, one more than nodes: node r has [bounds[r], bounds[r + 1]).

    Attributes:
        heads: of the query heads.
        columns: of the MLP columns of `mlp_width(config)`; MLPs of another width are cut in the same proportion.
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
        ends = (self.heads[-1], self.columns[-1], (self.vocabulary or (config.padded_vocab_size,))[-1])
        if ends != (config.n_head, mlp_width(config), config.padded_vocab_size):
            raise ValueError(f"shares of {ends[0]} heads, {ends[1]} columns and {ends[2]} tokens")


@dataclass(frozen=True)
class Share:
    """The heads and columns of node `rank`.

    Args:
        config: of the whole model.
    """

    shares: Shares
    rank: int
    config: ModelConfig

    @property
    def heads(self) -> Range:
        return self.shares.heads[self.rank], self.shares.heads[self.rank + 1]

    @property
    def heads_per_group(self) -> int:
        return self.config.n_head // self.config.n_query_groups

    @property
    def groups(self) -> Range:
        """Groups of keys and values that its heads read; without heads one group, which is not read."""
        first, end = self.heads
        n = self.heads_per_group
        if first == end:
            return 0, 1
        return first // n, -(-end // n)

    @property
    def first_head(self) -> int:
        """Place of its first head in that head's group."""
        return self.heads[0] % self.heads_per_group if self.n_heads else 0

    @property
    def n_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    def columns(self, width: int) -> Range:
        """Of an MLP of this width."""
        return _scaled(self.shares.columns, self.rank, width)

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

    def adds_mlp_bias(self, width: int) -> bool:
        bounds = [_scaled(self.shares.columns, r, width) for r in range(self.shares.n_nodes)]
        return self.rank == next(r for r, (a, b) in enumerate(bounds) if a < b)

    def counts_group(self, group: int) -> bool:
        """Whether this node is the first that holds a group: sums over all groups have it once."""
        return self.n_heads > 0 and group * self.heads_per_group >= self.heads[0]

    def shard_config(self) -> ModelConfig:
        """A model whose blocks are just this node's share; it is for the kernels, and none of litgpt's."""
        (first, end), (a, b) = self.groups, self.columns(self.config.intermediate_size)
        sizes = {"n_head": self.n_heads, "n_query_groups": end - first, "intermediate_size": b - a}
        if self.config.moe_intermediate_size:
            c, d = self.columns(self.config.moe_intermediate_size)
            sizes["moe_intermediate_size"] = d - c
        return self.config.with_sizes(**sizes)


def _scaled(bounds: Sequence[int], rank: int, width: int) -> Range:
    whole = bounds[-1]
    if whole == width or whole == 0:
        return bounds[rank], bounds[rank + 1]
    return bounds[rank] * width // whole, bounds[rank + 1] * width // whole


def mlp_width(config: ModelConfig) -> int:
    """Columns of the MLP with most of the work: of an expert, if there are experts."""
    if config.mlp_class_name == "LLaMAMoE" and config.moe_intermediate_size:
        return config.moe_intermediate_size
    return config.intermediate_size


def why_not_shared_out(config: ModelConfig) -> str | None:
    """The part of a model that cannot be shared; None if all of it can."""
    if (reason := why_not_in_kernels(config)) is not None:
        return reason
    if config.norm_qk and config.norm_qk_type == "olmo2" and config.norm_class_name != "RMSNorm":
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
    width, vocabulary = mlp_width(config), config.padded_vocab_size
    return Shares(
        _bounds(config.n_head, parts, 1),
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

_IN_BLOCK = re.compile(r"transformer\.h\.\d+\.(.*)\.(weight|bias|sinks)")
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
        if len(whole) == 1:
            return (n_out,)
        if self.columns is None:
            return (n_out, whole[1])
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
    layer, what = match.groups()
    if what == "sinks":
        return Piece(rows=(share.heads,))
    if layer.startswith("attn."):
        return _of_attention(layer, what, share)
    if mlp := _MLP.fullmatch(layer):
        return _of_mlp(share, mlp[1] or "", mlp[2], what)
    return WHOLE


def _of_attention(layer: str, what: str, share: Share) -> Piece | None:
    size, n_heads, n_groups = share.config.head_size, share.config.n_head, share.config.n_query_groups
    heads, groups = _times(share.heads, size), _times(share.groups, size)
    if layer == "attn.qkv":
        keys, values = n_heads * size, (n_heads + n_groups) * size
        return Piece(rows=(heads, _plus(groups, keys), _plus(groups, values)))
    if layer == "attn.proj":
        return Piece(columns=heads) if what == "weight" else (WHOLE if share.adds_attention_bias else None)
    if share.config.norm_qk_type == "olmo2":
        return Piece(rows=(heads if layer == "attn.norm_q" else groups,))
    return WHOLE


def _of_mlp(share: Share, path: str, layer: str, what: str) -> Piece | None:
    """A shared expert is as wide as several experts, and cut like each of them."""
    config = share.config
    expert = config.moe_intermediate_size or config.intermediate_size
    width = expert if path else config.intermediate_size
    columns = share.columns(width)
    if path == "shared_experts.":
        columns = _times(columns, config.n_shared_expert or 0)
    if layer != "proj":
        return Piece(rows=(columns,))
    return Piece(columns=columns) if what == "weight" else (WHOLE if share.adds_mlp_bias(width) else None)


def _times(bounds: Range, n: int) -> Range:
    return bounds[0] * n, bounds[1] * n


def _plus(bounds: Range, n: int) -> Range:
    return bounds[0] + n, bounds[1] + n
