"""Which rows and columns of each tensor belong to a node's share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mdi.kernels.layout import Range, skipped
from mdi.tensor.shares import Share

Shape = tuple[int, ...]

_IN_BLOCK = re.compile(r"transformer\.h\.\d+\.(.*)\.(weight|bias)")
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
    if layer.startswith("attn."):
        return _of_attention(layer, what, share)
    if mlp := _MLP.fullmatch(layer):
        return _of_mlp(share, mlp[1] or "", mlp[2], what)
    return WHOLE


def _of_attention(layer: str, what: str, share: Share) -> Piece | None:
    size, n_heads, n_groups = (int(share.config[key]) for key in ("head_size", "n_head", "n_query_groups"))
    heads, groups = _times(share.heads, size), _times(share.groups, size)
    if layer == "attn.qkv":
        keys, values = n_heads * size, (n_heads + n_groups) * size
        return Piece(rows=(heads, _plus(groups, keys), _plus(groups, values)))
    if layer == "attn.proj":
        return Piece(columns=heads) if what == "weight" else (WHOLE if share.adds_attention_bias else None)
    if share.config["norm_qk_type"] == "olmo2":
        return Piece(rows=(heads if layer == "attn.norm_q" else groups,))
    return WHOLE


def _of_mlp(share: Share, path: str, layer: str, what: str) -> Piece | None:
    """A shared expert is as wide as several experts, and cut like each of them."""
    config = share.config
    expert = int(config["moe_intermediate_size"] or config["intermediate_size"])
    width = expert if path else int(config["intermediate_size"])
    columns = share.columns(width)
    if path == "shared_experts.":
        columns = _times(columns, int(config["n_shared_expert"]))
    if layer != "proj":
        return Piece(rows=(columns,))
    return Piece(columns=columns) if what == "weight" else (WHOLE if share.adds_mlp_bias(width) else None)


def _times(bounds: Range, n: int) -> Range:
    return bounds[0] * n, bounds[1] * n


def _plus(bounds: Range, n: int) -> Range:
    return bounds[0] + n, bounds[1] + n
