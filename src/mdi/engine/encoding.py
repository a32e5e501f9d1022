"""What rows travel as, if not as they were computed: half the bytes, or a bit more than a quarter.

Scales belong to a row or to a part of one, so a row's bytes never depend on the rows that share its frame. What is not
finite stays not finite, so that the starter's check finds it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from mdi.net.wire import BLOCK_INT8, ROW_FLOAT16, PayloadType

INT8_MAX = 127
MARK = -128  # stands where a block's largest value was
SMALLEST_SCALE = 1e-30  # a block of zeros must not be divided by zero
# Rows are scaled to below 2 ** 15, half of what float16 holds. The bounds keep the scale an ordinary float32.
HALF_EXPONENT = 15
EXPONENTS = (-100, 120)


class Encoder(Protocol):
    """Brings rows into a payload and back."""

    payload_type: PayloadType

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """(n_rows, n_cols) of any float type -> the payload, (n_bytes,) uint8"""

    def decode(self, data: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
        """The payload, (n_bytes,) uint8 -> (n_rows, n_cols) float32"""


class RowFloat16:
    """float16, each row times the power of two that brings its largest value near the middle of float16's range."""

    payload_type = ROW_FLOAT16

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        exponent = torch.frexp(x.abs().amax(dim=1, keepdim=True)).exponent
        scale = torch.exp2((exponent - HALF_EXPONENT).clamp_(*EXPONENTS).float())
        n_rows, n_cols = x.shape
        data, scales, values = _empty(self.payload_type, n_rows, n_cols, x.device, torch.float32, torch.float16)
        scales.copy_(scale)
        values.copy_(x / scale)
        return data

    def decode(self, data: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
        scales, values = _parts(self.payload_type, data, n_rows, n_cols, torch.float32, torch.float16)
        return values.float() * scales


class BlockInt8:
    """8 bits, in blocks of 64 values of a row: a bfloat16 scale for 63 of them, and the largest one apart, as bfloat16.

    Hidden states have channels that are tens of times larger than the rest (Dettmers et al. 2022, LLM.int8(), section 4). With
    one scale for all 64, such a channel would leave little of its neighbours.
    """

    payload_type = BLOCK_INT8

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        n_rows, n_cols = x.shape
        blocks = _padded(x.float()).view(n_rows, -1, BLOCK_INT8.block)
        low, high = blocks.amin(dim=2, keepdim=True), blocks.amax(dim=2, keepdim=True)
        largest = torch.where(high + low >= 0, high, low)
        is_largest = blocks == largest  # more than one where values are equal: they are marked alike
        rest = blocks.masked_fill(is_largest, 0.0)
        data, scales, values = _empty(self.payload_type, n_rows, n_cols, x.device, torch.bfloat16, torch.int8)
        pairs = scales.view(n_rows, -1, 2)
        pairs[..., :1] = (rest.abs().amax(dim=2, keepdim=True) / INT8_MAX).clamp_min_(SMALLEST_SCALE)
        pairs[..., 1:] = largest
        # Divided by the scale as it is sent. It may have been rounded down by 1/512: hence the clamp, of a quarter step.
        steps = (rest / pairs[..., :1].float()).round_().clamp_(-INT8_MAX, INT8_MAX).masked_fill_(is_largest, MARK)
        values.copy_(steps.view(n_rows, -1)[:, :n_cols])
        return data

    def decode(self, data: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
        scales, values = _parts(self.payload_type, data, n_rows, n_cols, torch.bfloat16, torch.int8)
        pairs = scales.view(n_rows, -1, 2).float()
        steps = _padded(values.float()).view(n_rows, -1, BLOCK_INT8.block)
        blocks = torch.where(steps == MARK, pairs[..., 1:], steps * pairs[..., :1])
        return blocks.view(n_rows, -1)[:, :n_cols]


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Columns of zeros up to the next whole block."""
    missing = -x.size(1) % BLOCK_INT8.block
    return F.pad(x, (0, missing)) if missing else x


def _empty(
    kind: PayloadType, n_rows: int, n_cols: int, device: torch.device, scale: torch.dtype, value: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for a payload, and its two parts."""
    data = torch.empty(kind.n_bytes(n_rows, n_cols), dtype=torch.uint8, device=device)
    return data, *_parts(kind, data, n_rows, n_cols, scale, value)


def _parts(
    kind: PayloadType, data: torch.Tensor, n_rows: int, n_cols: int, scale: torch.dtype, value: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload's scales (n_rows, numbers of type `scale`) and values (n_rows, n_cols), in place."""
    split = n_rows * kind.n_scales(n_cols) * kind.scale_bytes
    return data[:split].view(scale).view(n_rows, -1), data[split:].view(value).view(n_rows, n_cols)


ENCODERS: dict[str, Encoder] = {"fp16": RowFloat16(), "int8": BlockInt8()}  # by WIRE_DTYPES
ENCODED: dict[str, Encoder] = {encoder.payload_type.name: encoder for encoder in ENCODERS.values()}  # by Frame.dtype
