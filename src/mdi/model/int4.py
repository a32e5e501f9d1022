"""Linear layers with weights of 4 bits, on onnxruntime's MatMulNBits (MLAS: x86 and ARM), or in plain torch without it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mdi.model.nbits import MatMulNBits, has_onnxruntime
from mdi.model.packed import TINY, ByteLinear, OutlierColumns

# Weights that share a scale. Larger blocks are much faster: on an AVX-512 machine 32 weights cost 1.8 times as much time per
# weight as 256. Scales that are searched for (`pack_int4`) bring
# back most of the precision: an error of 0.102 against 0.095 for blocks of 32 with plain scales, on normal weights.
INT4_BLOCK = 256
# Scales that are tried, relative to the one which just holds the largest weight: a few weights cut off are worth finer steps.
SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6)
ROWS_AT_ONCE = 64  # of a weight that is packed: so that the search stays within the processor's caches


def pack_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (out, in) -> uint8 (out, ceil(in / 256), 128) and float16 scales (out, ceil(in / 256)).

    Low half of a byte first; a half h stands for (h - 8) * scale. Of each block, the scale with the least squared error is
    taken among a few, each improved by least squares for the numbers that it led to.
    """
    halves, scales = zip(*(_pack_rows(rows) for rows in weight.split(ROWS_AT_ONCE)), strict=True)
    return torch.cat(halves), torch.cat(scales)


def _pack_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = F.pad(weight, (0, -weight.size(1) % INT4_BLOCK)).unflatten(1, (-1, INT4_BLOCK))  # (out, n, 256)
    largest = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))
    best = torch.full_like(largest, torch.inf)
    best_q, best_scale = torch.zeros_like(blocks), torch.ones_like(largest)
    for shrink in SHRINKS:
        scale = _usable(largest / -8 * shrink)  # so that the largest weight is -8, which has no counterpart
        q = (blocks / scale).round_().clamp_(-8, 7)
        scale = _usable((q * blocks).sum(2, keepdim=True) / (q * q).sum(2, keepdim=True).clamp_min_(TINY))
        q = (blocks / scale).round_().clamp_(-8, 7)
        error = (q * scale - blocks).square_().sum(2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        best_q, best_scale = torch.where(better, q, best_q), torch.where(better, scale, best_scale)
    low, high = (best_q + 8).to(torch.uint8).unflatten(2, (-1, 2)).unbind(3)
    return low | (high << 4), best_scale.squeeze(2).half()


def _usable(scale: torch.Tensor) -> torch.Tensor:
    """As half precision will store it, and never zero."""
    scale = scale.half().float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def unpack_int4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 weights that packed ones stand for: (out, n, 128) and (out, n) -> (out, n * 256)"""
    q = torch.stack((weight & 15, weight >> 4), dim=3).flatten(2).float() - 8
    return (q * scale.float()[..., None]).flatten(1)


class Int4Linear(ByteLinear):
    """y = x W^T + b with W in 4 bits, see `pack_int4`; activations have 8 bits and a scale per block of a row."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor | None, n_in: int, bias: torch.Tensor | None,
        beside: OutlierColumns | None,
    ) -> None:  # fmt: skip
        super().__init__(n_in, weight.size(0), bias, beside)
        assert scale is not None
        self._kernel: MatMulNBits | None = None
        self._weight: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        if has_onnxruntime():
            self._kernel = MatMulNBits(weight, scale, n_in, 4, INT4_BLOCK)
        else:
            self._weight, self._scale = weight, scale

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return self._multiply_plain(rows) if self._kernel is None else self._kernel(rows)

    def _multiply_plain(self, rows: torch.Tensor) -> torch.Tensor:
        """The kernel's numbers in plain torch, added in float32; the weights are unpacked for it. (M, in) -> (M, out)"""
        assert self._weight is not None and self._scale is not None
        blocks = F.pad(rows, (0, -rows.size(1) % INT4_BLOCK)).unflatten(1, (-1, INT4_BLOCK))
        step = blocks.abs().amax(dim=2, keepdim=True).clamp_min_(TINY) / 127
        return F.linear(((blocks / step).round_() * step).flatten(1), unpack_int4(self._weight, self._scale))
