"""Weight formats: linear layers whose weights take fewer bytes and are multiplied by packed kernels.

Decoding reads every weight once per forward, so bytes per weight is its speed. A format replaces `nn.Linear` from outside;
stages do not know of it. A row's result never depends on the other rows of its frame: activations are scaled row by row.

fp16  weights in half precision, activations in float32 (FBGEMM): half the bytes, no measurable loss.
int8  weights in 8 bits with a scale per output, activations in 8 bits with a scale per row (FBGEMM). The few input columns
      that are far larger than the rest are multiplied in fp16 beside it, as in LLM.int8() (Dettmers et al. 2022, section 3),
      because they would take the precision of all others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from mdi.errors import UsageError

OUTLIER_RATIO = 6.0  # columns that are expected to be so many times larger than the median one go beside
FP16_MAX = 65504.0


def has_fbgemm() -> bool:
    """Whether this build of torch has FBGEMM's packed kernels and this processor runs them (x86 with AVX2)."""
    return (
        "fbgemm" in torch.backends.quantized.supported_engines and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    )


@contextmanager
def _packing() -> Iterator[None]:
    """torch announces the end of its quantized tensors each time that one is made; the packed kernels stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Fp16Linear(nn.Module):
    """y = x W^T + b with W (out, in) in half precision; x in any dtype, computed in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # A weight that half precision cannot hold would turn into infinity.
        weight = weight.detach().float().clamp(-FP16_MAX, FP16_MAX)
        self._packed: Any = None
        self._weight: torch.Tensor | None = None
        if has_fbgemm():
            with _packing():
                self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        else:
            self._weight = weight.half()
        self._bias = None if bias is None else bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).float()
        if self._packed is not None:
            y = torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)
        else:
            assert self._weight is not None
            y = F.linear(rows, self._weight.float())
        if self._bias is not None:
            y += self._bias
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


class Int8Linear(nn.Module):
    """y = x W^T + b with W (out, in) in 8 bits, one scale per output.

    FBGEMM's dynamic kernel chooses one activation scale for all rows, from their smallest and largest number. So each row is
    divided by its own largest number first, and two more input columns hold +1 and -1, with weights of zero: the range is then
    always [-1, 1], and a row's result is the same whatever rows are beside it.

    Args:
        outliers: numbers of the input columns that are kept in fp16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, outliers: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().float()
        self._outliers: torch.Tensor | None = None
        self._beside: Fp16Linear | None = None
        if outliers is not None and outliers.numel():
            self._outliers = outliers
            self._beside = Fp16Linear(weight[:, outliers], None)
            weight = weight.index_fill(1, outliers, 0.0)
        scale = weight.abs().amax(dim=1).clamp_min(1e-12) / 127
        self._packed: Any = None
        self._weight: torch.Tensor | None = None
        self._scale = scale
        if has_fbgemm():
            with _packing():
                wide = F.pad(weight, (0, 2))
                zeros = torch.zeros(self.out_features, dtype=torch.long)
                quantized = torch.quantize_per_channel(wide, scale.double(), zeros, 0, torch.qint8)
                self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        else:
            self._weight = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        # Without VNNI the kernel adds products of 8 bits in 16: a bit less of range keeps them from overflowing.
        self._reduce_range = not torch.cpu._is_vnni_supported()
        self._bias = None if bias is None else bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).float()
        wide = rows.new_empty(rows.size(0), self.in_features + 2)
        body = wide[:, : self.in_features]
        if self._outliers is None:
            largest = rows.abs().amax(dim=1, keepdim=True).clamp_min_(1e-30)
            torch.div(rows, largest, out=body)
        else:
            body.copy_(rows).index_fill_(1, self._outliers, 0.0)
            largest = body.abs().amax(dim=1, keepdim=True).clamp_min_(1e-30)
            body /= largest
        wide[:, -2] = 1.0
        wide[:, -1] = -1.0
        y = self._multiply(wide).mul_(largest)
        if self._beside is not None:
            y += self._beside(rows[:, self._outliers])
        if self._bias is not None:
            y += self._bias
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _multiply(self, wide: torch.Tensor) -> torch.Tensor:
        """(M, in + 2) within [-1, 1] -> (M, out)"""
        if self._packed is not None:
            return torch.ops.quantized.linear_dynamic(wide, self._packed, reduce_range=self._reduce_range)
        assert self._weight is not None
        # The same numbers in plain torch: 8 bits over [-1, 1], products added in float32. Like the kernel's, the inverse of
        # the step is rounded down, so that -1 becomes -127 and not -128.
        q = (wide[:, :-2] * 127.49999).round().clamp_(-128, 127)
        return F.linear(q, self._weight.float()) * (self._scale * (2 / 255))


Format = Callable[[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], nn.Module]

FORMATS: dict[str, Format] = {
    "fp16": lambda weight, bias, outliers: Fp16Linear(weight, bias),
    "int8": Int8Linear,
}


def check_format(name: str | None, device: torch.device) -> None:
    """Raises UsageError if a format is unknown or not for this device."""
    if name is None:
        return
    if name not in FORMATS:
        raise UsageError(f"unknown weight format {name!r}: expected {' or '.join(FORMATS)}")
    if device.type != "cpu":
        raise UsageError(f"the weight format {name} needs the CPU's kernels; on {device} use --dtype instead")


def quantize_linear(linear: nn.Linear, name: str, outliers: torch.Tensor | None = None) -> nn.Module:
    """The module that stands in for `linear` in a format."""
    return FORMATS[name](linear.weight, linear.bias, outliers)


def quantize_block(block: nn.Module, name: str) -> None:
    """Replace the linear layers of a block, one after the other, so that only one exists twice.

    Routers of experts stay as they are: they are small, and a wrong choice of expert costs more than rounding. So does the
    up-projection of latent attention, whose weights are read in pieces.
    """
    large = _expected_outliers(block) if name == "int8" else {}
    for path, module in list(block.named_modules()):
        if isinstance(module, nn.Linear) and not path.endswith(("gate", "kv_b_proj")):
            parent_path, _, child = path.rpartition(".")
            parent = block.get_submodule(parent_path)
            setattr(parent, child, quantize_linear(module, name, large.get(path)))


def quantizer(blocks: str | None, head: str | None) -> Callable[[str, Any], None] | None:
    """For `Stage.load`: brings each part into its format as soon as it is loaded; None if nothing is to be done."""
    if blocks is None and head is None:
        return None

    def finish(part: str, stage: Any) -> None:
        if part.startswith("block.") and blocks is not None:
            quantize_block(stage.transformer["h"][part.removeprefix("block.")], blocks)
        elif part == "head" and head is not None:
            stage.lm_head = quantize_linear(stage.lm_head, head)

    return finish


def _expected_outliers(block: nn.Module) -> dict[str, torch.Tensor]:
    """Input columns that weights alone say to be large: those that a norm's gain, or the layer before, makes large."""
    found: dict[str, torch.Tensor] = {}
    shared = block.norm_2 is None
    offset = 1.0 if getattr(block.norm_1, "add_unit_offset", False) else 0.0
    for path, module in block.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        parent, _, child = path.rpartition(".")
        size: torch.Tensor | None = None
        if path in ("attn.qkv", "attn.q_a_proj", "attn.kv_a_proj_with_mqa"):
            size = _gain(block.norm_1, offset)
        elif child in ("fc", "fc_1", "fc_2"):
            size = _gain(block.norm_1 if shared else block.norm_2, offset)
        elif child == "proj" and parent != "attn":
            before = [getattr(block.get_submodule(parent), name, None) for name in ("fc", "fc_2")]
            weights = [layer.weight for layer in before if isinstance(layer, nn.Linear)]
            size = weights[0].float().norm(dim=1) if weights else None
        if size is not None:
            large = torch.nonzero(size.abs() > OUTLIER_RATIO * size.abs().median()).flatten()
            if large.numel():
                found[path] = large
    return found


def _gain(norm: Any, offset: float) -> torch.Tensor | None:
    weight = getattr(norm, "weight", None)
    return None if weight is None else weight.detach().float() + offset
