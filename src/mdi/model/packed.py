"""Linear layers on FBGEMM's packed kernels, in half precision and in 8 bits, and the same in plain torch for other machines."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from mdi.model.nbits import MatMulNBits, has_onnxruntime

FP16_MAX = 65504.0
NBITS_BLOCK = 256  # inputs that share an activation scale where onnxruntime's kernel stands in
TINY = 1e-30  # what a row of zeros is divided by


def has_fbgemm() -> bool:
    """Whether this build of torch has FBGEMM's packed kernels and this processor runs them (x86 with AVX2)."""
    # builds for ARM list the engine as well, and processors with SVE have a capability
    return (
        platform.machine().lower() in ("x86_64", "amd64")
        and "fbgemm" in torch.backends.quantized.supported_engines
        and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    )


def to_fp16(weight: torch.Tensor) -> torch.Tensor:
    """Half precision; a weight that it cannot hold becomes its largest number, not infinity."""
    return weight.detach().clamp(-FP16_MAX, FP16_MAX).half()


def pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (out, in) -> int8 (out, in) within +-127, and a scale per output (out)"""
    scale = weight.abs().amax(dim=1).clamp_min(1e-12) / 127
    return (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


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
        self._packed: Any = None
        self._weight: torch.Tensor | None = None
        if has_fbgemm():
            with _packing():
                self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        else:
            self._weight = weight
        self._bias = None if bias is None else bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)"""
        if x.dim() == 2 and x.dtype == torch.float32 and self._bias is None:  # as in ByteLinear
            return self.multiply(x)
        y = self.multiply(x.reshape(-1, self.in_features).float())
        if self._bias is not None:
            y += self._bias
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 (M, in) -> (M, out), without the bias"""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(rows, self._weight.float())
        y: torch.Tensor = _linear_fp16(rows, self._packed)
        return y


_linear_fp16 = torch.ops.quantized.linear_dynamic_fp16.default


class OutlierColumns:
    """The input columns of a layer that are multiplied in fp16, because they are too large for 8 bits.

    Args:
        columns: (n) whole numbers.
        weight: float16 (out, n).
    """

    def __init__(self, columns: torch.Tensor, weight: torch.Tensor) -> None:
        self.columns = columns.long()
        self._linear = Fp16Linear(weight, None)

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(M, in) -> the rows with zeros in these columns; what these columns add to the result, (M, out)"""
        return rows.index_fill(1, self.columns, 0.0), self._linear.multiply(rows.index_select(1, self.columns))


class ByteLinear(nn.Module):
    """What int8 and int4 share: columns beside the kernel, the bias, any leading dimensions."""

    def __init__(self, n_in: int, n_out: int, bias: torch.Tensor | None, beside: OutlierColumns | None) -> None:
        super().__init__()
        self.in_features, self.out_features = n_in, n_out
        self._beside = beside
        self._bias = None if bias is None else bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out); computed in float32

        Beside a kernel that leaves nothing in the processor's caches every call of torch counts several microseconds.
        """
        if x.dim() == 2 and x.dtype == torch.float32 and self._beside is None and self._bias is None and x.size(0):
            return self._multiply(x)
        rows = x.reshape(-1, self.in_features).float()
        if not rows.size(0):  # an expert that no row chose
            y = rows.new_empty(0, self.out_features)
        elif self._beside is None:
            y = self._multiply(rows)
        else:
            rows, large = self._beside.split(rows)
            y = self._multiply(rows).add_(large)
        if self._bias is not None:
            y += self._bias
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 (M, in), M > 0 -> (M, out)"""
        raise NotImplementedError


class Int8Linear(ByteLinear):
    """y = x W^T + b with W (out, in) in 8 bits, one scale per output.

    Each row is divided by its own largest number, and FBGEMM's kernel then rounds all of them by the same step: a row's
    result is the same whatever rows are beside it. (FBGEMM's dynamic kernel would choose one step for all rows.)

    Where there is no FBGEMM (ARM), onnxruntime's kernel for blocks of 8 bits takes the same weights. It gives activations a
    scale per 256 of a row, so that both kinds of machines agree within the rounding of activations, not to the bit.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor | None, n_in: int, bias: torch.Tensor | None,
        beside: OutlierColumns | None,
    ) -> None:  # fmt: skip
        super().__init__(n_in, weight.size(0), bias, beside)
        assert scale is not None
        self._packed: Any = None
        self._kernel: MatMulNBits | None = None
        self._weight: torch.Tensor | None = None
        self._scale = scale.to(torch.float32, copy=True)  # not a view of a file, which would keep it all in memory
        if has_fbgemm():
            with _packing():
                self._packed = torch.ops.quantized.linear_prepack(self._as_quantized(weight), None)
        elif has_onnxruntime():
            self._kernel = _in_blocks(weight, self._scale)
        else:
            self._weight = weight
        # Without VNNI the kernel adds products of 8 bits in 16: a bit less of range keeps them from overflowing.
        self._levels = 127 if torch.cpu._is_vnni_supported() else 63

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None:
            return self._kernel(rows)
        largest = rows.abs().amax(1, True).clamp_min_(TINY)
        if self._packed is None:
            return self._multiply_plain(rows / largest).mul_(largest)
        y: torch.Tensor = _linear_int8(rows.div(largest), 1 / self._levels, self._levels + 1, self._packed)
        return y.mul_(largest)

    def _as_quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """torch's quantized tensor of the weight (out, in), in the memory of the weight."""
        zeros = torch.zeros(self.out_features, dtype=torch.long)
        quantized = torch._empty_per_channel_affine_quantized(
            (self.out_features, 0), scales=self._scale.double(), zero_points=zeros, axis=0, dtype=torch.qint8
        )
        weight = weight.contiguous()
        return quantized.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())

    def _multiply_plain(self, rows: torch.Tensor) -> torch.Tensor:
        """The kernel's numbers in plain torch: 8 bits over [-1, 1], products added in float32. (M, in) -> (M, out)"""
        assert self._weight is not None
        return F.linear((rows * self._levels).round_(), self._weight.float()) * (self._scale / self._levels)


# Quantizes its input by a given step, multiplies, and returns float32.
_linear_int8 = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


def _in_blocks(weight: torch.Tensor, scale: torch.Tensor) -> MatMulNBits:
    """onnxruntime's kernel for int8 weights (out, in) with a scale per output: the same scale for each block."""
    blocks = F.pad(weight, (0, -weight.size(1) % NBITS_BLOCK)).unflatten(1, (-1, NBITS_BLOCK))
    shifted = (blocks.to(torch.int16) + 128).to(torch.uint8)
    return MatMulNBits(shifted, scale[:, None].expand(-1, blocks.size(1)).contiguous(), weight.size(1), 8, NBITS_BLOCK)
