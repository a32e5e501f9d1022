"""Weight formats: linear layers whose weights take fewer bytes and are multiplied by packed kernels.

Decoding reads every weight once per forward, so bytes per weight is its speed. A format replaces `nn.Linear` from outside;
stages do not know of it. A row's result never depends on the other rows of its frame: activations are scaled row by row, or
block by block within a row, and what stays in plain numbers before a rounding is computed in tiles (mdi.model.tiles).

fp16  weights in half precision, activations in float32: half the bytes of float32, no measurable loss.
int8  weights in 8 bits with a scale per output, activations in 8 bits with a scale per row.
int4  weights in 4 bits with a scale per 256 of them, activations in 8 bits with a scale per 256.

Input columns that are far larger than the rest would take the precision of all others. In int8 and int4 those few are
multiplied in fp16 beside the kernel, as in LLM.int8() (Dettmers et al. 2022, section 3).

An encoded layer is a dict of tensors under the names that a chunk has for them, after the layer's own:

    weight          fp16: float16 (out, in); int8: int8 (out, in); int4: uint8 (out, ceil(in / 256), 128), two numbers a byte
    weight_scale    int8: float32 (out); int4: float16 (out, ceil(in / 256))
    outliers        int32 (n), input columns whose weights are zero in `weight`; only if there are any
    outlier_weight  float16 (out, n), the weights of those columns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn as nn

from mdi.errors import UsageError
from mdi.model.int4 import INT4_BLOCK, Int4Linear, pack_int4
from mdi.model.packed import Fp16Linear, Int8Linear, OutlierColumns, pack_int8, to_fp16

Encoded = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """How one format encodes a weight, and what multiplies by it.

    Attributes:
        bits: per weight, scales included; what memory and speed follow from.
        pack: float32 (out, in) -> encoded weight and its scales (fp16 has none).
        layer: encoded weight, scales, in_features, bias, outlier columns -> module.
        keeps_outliers: whether large input columns are multiplied beside.
    """

    bits: float
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    layer: Callable[
        [torch.Tensor, torch.Tensor | None, int, torch.Tensor | None, OutlierColumns | None], nn.Module
    ]  # fmt: skip
    keeps_outliers: bool = True


def _fp16_layer(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    n_in: int,
    bias: torch.Tensor | None,
    beside: OutlierColumns | None,
) -> nn.Module:
    return Fp16Linear(weight, bias)


FORMATS: dict[str, Format] = {
    "fp16": Format(16, lambda weight: (to_fp16(weight), None), _fp16_layer, keeps_outliers=False),
    "int8": Format(8, pack_int8, Int8Linear),
    "int4": Format(4 + 16 / INT4_BLOCK, pack_int4, Int4Linear),
}


def check_format(name: str | None, device: torch.device) -> None:
    """Raises UsageError if a format is unknown or not for this device."""
    if name is None:
        return
    if name not in FORMATS:
        raise UsageError(f"unknown weight format {name!r}: expected one of {', '.join(FORMATS)}")
    if device.type != "cpu":
        raise UsageError(f"the weight format {name} needs the CPU's kernels; on {device} use --dtype instead")


def encode(weight: torch.Tensor, name: str, outliers: torch.Tensor | None = None) -> Encoded:
    """A linear layer's weight (out, in) in a format.

    Args:
        outliers: numbers of the input columns that are large, (n); formats that do not need them ignore them.
    """
    form = FORMATS[name]
    weight = weight.detach().float()
    encoded: Encoded = {}
    if form.keeps_outliers and outliers is not None and outliers.numel():
        columns = outliers.long()
        encoded["outliers"] = columns.to(torch.int32)
        encoded["outlier_weight"] = to_fp16(weight[:, columns])
        weight = weight.index_fill(1, columns, 0.0)
    encoded["weight"], scale = form.pack(weight)
    if scale is not None:
        encoded["weight_scale"] = scale
    return encoded


def decode(encoded: Mapping[str, torch.Tensor], name: str, n_in: int, bias: torch.Tensor | None) -> nn.Module:
    """The module that multiplies by an encoded weight."""
    beside = OutlierColumns(encoded["outliers"], encoded["outlier_weight"]) if "outliers" in encoded else None
    return FORMATS[name].layer(encoded["weight"], encoded.get("weight_scale"), n_in, bias, beside)


def format_of(weight: torch.dtype) -> str | None:
    """The format of a stored weight by its type; None for a plain one, which fp16's is as well."""
    return {torch.int8: "int8", torch.uint8: "int4"}.get(weight)
