"""Encodings of rows on links: half the bytes, or a bit more than a quarter.

Scales belong to a row or to a part of one, so a row's bytes never depend on the rows that share its frame. What is not
finite stays not finite, so that the starter's check finds it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mdi.kernels.layout import bf16_from_float32, float32_from_bf16
from mdi.net.wire import BLOCK_INT8, ROW_FLOAT16, PayloadType

INT8_MAX = 127
MARK = -128  # marks the place of a block's largest value
SMALLEST_SCALE = np.float32(1e-30)  # a block of zeros must not be divided by zero
# Rows are scaled to below 2 ** 15, half of what float16 holds. The bounds keep the scale an ordinary float32.
HALF_EXPONENT = 15
EXPONENTS = (-100, 120)

Bytes = np.ndarray  # of uint8
Floats = np.ndarray  # of float32


class Encoder(Protocol):
    """Brings rows into a payload and back."""

    payload_type: PayloadType

    def encode(self, x: Floats) -> Bytes:
        """float32 (n_rows, n_cols) -> the payload, (n_bytes,) uint8"""

    def decode(self, data: Bytes, n_rows: int, n_cols: int) -> Floats:
        """The payload, (n_bytes,) uint8 -> (n_rows, n_cols) float32"""


class RowFloat16:
    """float16, each row times the power of two that brings its largest value near the middle of float16's range."""

    payload_type = ROW_FLOAT16

    def encode(self, x: Floats) -> Bytes:
        exponent = np.frexp(np.abs(x).max(axis=1, keepdims=True))[1]
        scale = np.ldexp(np.float32(1), np.clip(exponent - HALF_EXPONENT, *EXPONENTS))
        data, scales, values = _empty(self.payload_type, x.shape[0], x.shape[1], np.float32, np.float16)
        scales[:] = scale
        with np.errstate(over="ignore", invalid="ignore"):  # the starter finds values that are not finite
            values[:] = x / scale
        return data

    def decode(self, data: Bytes, n_rows: int, n_cols: int) -> Floats:
        scales, values = _parts(self.payload_type, data, n_rows, n_cols, np.float32, np.float16)
        return values.astype(np.float32) * scales


class BlockInt8:
    """8 bits, in blocks of 64 values of a row: a bfloat16 scale for 63 of them, and the largest one apart, as bfloat16.

    Hidden states have channels that are tens of times larger than the rest (Dettmers et al. 2022, LLM.int8(), section 4). With
    one scale for all 64, such a channel would leave little of its neighbours.
    """

    payload_type = BLOCK_INT8

    def encode(self, x: Floats) -> Bytes:
        n_rows, n_cols = x.shape
        blocks = _padded(x).reshape(n_rows, -1, BLOCK_INT8.block)
        low, high = blocks.min(axis=2, keepdims=True), blocks.max(axis=2, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.where(high + low >= 0, high, low) + np.float32(0)  # of zeros, the one without a sign
            is_largest = blocks == largest  # more than one where values are equal: they are marked alike
            rest = np.where(is_largest, np.float32(0), blocks)
            scale = np.maximum(np.abs(rest).max(axis=2, keepdims=True) / np.float32(INT8_MAX), SMALLEST_SCALE)
            data, scales, values = _empty(self.payload_type, n_rows, n_cols, np.uint16, np.int8)
            pairs = scales.reshape(n_rows, -1, 2)
            pairs[..., :1] = bf16_from_float32(scale)
            pairs[..., 1:] = bf16_from_float32(largest)
            # Divided by the scale as it is sent, which is less by 1/256 at most: none of the others gets to 127.5 steps.
            rest /= float32_from_bf16(pairs[..., :1])
            np.rint(rest, out=rest)
            rest[is_largest] = MARK
            values[:] = rest.reshape(n_rows, -1)[:, :n_cols]
        return data

    def decode(self, data: Bytes, n_rows: int, n_cols: int) -> Floats:
        scales, values = _parts(self.payload_type, data, n_rows, n_cols, np.uint16, np.int8)
        pairs = float32_from_bf16(scales.reshape(n_rows, -1, 2))
        steps = _padded(values).reshape(n_rows, -1, BLOCK_INT8.block)
        with np.errstate(invalid="ignore"):
            blocks = np.where(steps == MARK, pairs[..., 1:], steps * pairs[..., :1])
        return blocks.reshape(n_rows, -1)[:, :n_cols]


def _padded(x: np.ndarray) -> np.ndarray:
    """Columns of zeros up to the next whole block."""
    missing = -x.shape[1] % BLOCK_INT8.block
    return np.pad(x, ((0, 0), (0, missing))) if missing else x


def _empty(
    payload_type: PayloadType, n_rows: int, n_cols: int, scale: Any, value: Any
) -> tuple[Bytes, np.ndarray, np.ndarray]:
    """Memory for a payload, and its two parts."""
    data = np.empty(payload_type.n_bytes(n_rows, n_cols), dtype=np.uint8)
    return data, *_parts(payload_type, data, n_rows, n_cols, scale, value)


def _parts(
    payload_type: PayloadType, data: Bytes, n_rows: int, n_cols: int, scale: Any, value: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The payload's scales (n_rows, numbers of type `scale`) and values (n_rows, n_cols), in place."""
    split = n_rows * payload_type.n_scales(n_cols) * payload_type.scale_bytes
    return data[:split].view(scale).reshape(n_rows, -1), data[split:].view(value).reshape(n_rows, n_cols)


ENCODERS: dict[str, Encoder] = {"fp16": RowFloat16(), "int8": BlockInt8()}  # by WIRE_DTYPES
ENCODED: dict[str, Encoder] = {encoder.payload_type.name: encoder for encoder in ENCODERS.values()}  # by Frame.dtype
