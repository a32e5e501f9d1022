"""Rows of numbers: as stages have them, as frames carry them, and in half the bytes or a bit more than a quarter.

Scales belong to a row or to a part of one, so a row's bytes never depend on the rows that share its frame. What is not
finite stays not finite, so that the starter's check finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mdi.errors import WireError
from mdi.kernels.layout import bf16_from_float32, float32_from_bf16
from mdi.kernels.slices import Slices, SliceTable
from mdi.model.rows import RowLayout
from mdi.net.wire import BLOCK_INT8, FRAME_ROWS, HANDSHAKE_LIMITS, ROW_FLOAT16, Allocate, Frame, Limits, PayloadType

if TYPE_CHECKING:
    import torch


INT8_MAX = 127
MARK = -128  # marks the place of a block's largest value
SMALLEST_SCALE = np.float32(1e-30)  # a block of zeros must not be divided by zero
# Rows are scaled to below 2 ** 15, half of what float16 holds. The bounds keep the scale an ordinary float32.
HALF_EXPONENT = 15
EXPONENTS = (-100, 120)

Bytes = np.ndarray  # of uint8
Floats = np.ndarray  # of float32


class FrameRows(Protocol):
    """How a stage's rows come from frames and into them: ArrayRows, TensorRows."""

    def read(self, frame: Frame, n_cols: int) -> Any:
        """All rows, (n_rows, n_cols). Raises WireError if the frame has others."""

    def wanting_logits(self, x: Any, slices: Slices) -> Any:
        """The rows of a frame that need logits."""

    def joined(self, parts: Sequence[Any]) -> Any:
        """Rows below rows."""

    def zeros(self, n_rows: int, n_cols: int) -> Any:
        """Rows of zeros."""

    def payload(self, x: Any, wire: str) -> tuple[str, memoryview]:
        """Encoded rows: the name of the type and the bytes, which may be their memory."""


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

    Rows have columns that are tens of times larger than the rest (Dettmers et al. 2022, LLM.int8(), section 4). With one scale
    for all 64, such a column would leave little of its neighbours.
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


_PLAIN = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "float64": np.float64}


class ArrayRows:
    """Rows as a stage in the kernels has them, for both loops: float32 arrays."""

    def ids(self, ids: list[int]) -> np.ndarray:
        return np.array(ids, dtype=np.int64)

    def zeros(self, n_rows: int, n_cols: int) -> Floats:
        return np.zeros((n_rows, n_cols), dtype=np.float32)

    def are_finite(self, x: Floats) -> bool:
        return bool(np.isfinite(x).all())

    def joined(self, parts: Sequence[Floats]) -> Floats:
        return np.concatenate(parts)

    def array(self, x: Floats) -> Floats:
        return x

    def of_array(self, x: Floats) -> Floats:
        return x

    def read(self, frame: Frame, n_cols: int) -> Floats:
        return rows_of(frame, n_cols)

    def wanting_logits(self, x: Floats, slices: Slices) -> Floats:
        kept = logit_rows(slices)
        return x if kept is None else x[kept]

    def payload(self, x: Floats, wire: str) -> tuple[str, memoryview]:
        return ("float32", bytes_of(x)) if wire == "auto" or not len(x) else encoded(x, wire)


class TensorRows:
    """Rows as a stage of torch has them, for both loops, by the same rules.

    Args:
        device, dtype: that the stage computes with.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        import torch  # only where stages are torch's

        self._torch = torch
        self._device, self._dtype = device, dtype

    def ids(self, ids: list[int]) -> torch.Tensor:
        return self._torch.tensor(ids, device=self._device)

    def zeros(self, n_rows: int, n_cols: int) -> torch.Tensor:
        return self._torch.zeros(n_rows, n_cols, device=self._device, dtype=self._dtype)

    def are_finite(self, x: torch.Tensor) -> bool:
        return bool(self._torch.isfinite(x).all())

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._torch.cat(list(parts))

    def array(self, x: torch.Tensor) -> Floats:
        found: Floats = x.float().cpu().numpy()
        return found

    def of_array(self, x: Floats) -> torch.Tensor:
        return self._torch.from_numpy(x).to(device=self._device, dtype=self._dtype)

    def read(self, frame: Frame, n_cols: int) -> torch.Tensor:
        """On the CPU, in the frame's dtype, without a copy."""
        check_width(frame, n_cols)
        if frame.n_rows == 0:
            return self._torch.empty(0, n_cols, device=self._device, dtype=self._dtype)
        if frame.dtype in ENCODED:
            x = self._torch.from_numpy(decoded(frame, n_cols))
        else:
            plain = self._torch.frombuffer(frame.payload, dtype=getattr(self._torch, frame.dtype))
            x = plain.view(frame.n_rows, n_cols)
        return x.to(device=self._device, dtype=self._dtype)

    def wanting_logits(self, x: torch.Tensor, slices: Slices) -> torch.Tensor:
        kept = logit_rows(slices)
        return x if kept is None else x[kept]

    def payload(self, x: torch.Tensor, wire: str) -> tuple[str, memoryview]:
        """With "auto" the bytes are the memory of `x`, which must not change until they are sent."""
        name = str(x.dtype).removeprefix("torch.")
        if not len(x):
            return name, memoryview(b"")
        if wire == "auto":
            return name, bytes_of(self._on_host(x).view(self._torch.uint8).numpy())
        return encoded(x.float().cpu().numpy(), wire)

    def _on_host(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, contiguous in memory that a socket can read; from a GPU by way of page-locked memory, which torch keeps."""
        if x.device.type != "cuda":
            return x.cpu().contiguous()
        host = self._torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        return host.copy_(x)


def pinned_buffer(n_bytes: int) -> Any:
    """Page-locked memory to receive into, from which a GPU copies without a stop on the way (see net.wire.BufferPool)."""
    import torch

    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()


def rows_of(frame: Frame, n_cols: int) -> Floats:
    """The payload as float32 (n_rows, n_cols); where it is that already, without a copy.

    Raises:
        WireError: the frame has another width or no numbers at all.
    """
    check_width(frame, n_cols)
    if frame.n_rows == 0:
        return np.empty((0, n_cols), dtype=np.float32)
    if frame.dtype in ENCODED:
        return decoded(frame, n_cols)
    x = np.frombuffer(frame.payload, dtype=_PLAIN[frame.dtype]).reshape(frame.n_rows, n_cols)
    return float32_from_bf16(x) if frame.dtype == "bfloat16" else np.asarray(x, dtype=np.float32)


def whole_rows(rows: FrameRows, frame: Frame, layout: RowLayout) -> Any:
    """All rows of a frame's slices, (n_rows, layout.width); with 0 in the columns that a row does not carry.

    Args:
        rows: as the stage has them.

    Raises:
        WireError: the frame has other columns.
    """
    n_cached = layout.cached.width
    if frame.n_cached != (n_cached if frame.slices else 0):
        raise WireError(f"rows with {frame.n_cached} numbers for caches; this model's have {n_cached} at this cut")
    if not (n_cached or layout.is_skipped):
        return rows.read(frame, layout.width)
    n_own = layout.width - n_cached
    kept = logit_rows(frame.slices) if layout.is_skipped else None
    whole = rows.zeros(frame.slices.n_rows, layout.width)
    own, *cached = frame.sections
    whole[slice(None) if kept is None else kept, :n_own] = rows.read(own, n_own)
    for section in cached:
        whole[:, n_own:] = rows.read(section, n_cached)
    return whole


def check_width(frame: Frame, n_cols: int) -> None:
    """Raises WireError: rows of another width, or no numbers at all."""
    is_known = frame.dtype in _PLAIN or frame.dtype in ENCODED
    if frame.n_rows and (frame.n_cols != n_cols or not is_known):
        raise WireError(f"rows of {frame.n_cols} x {frame.dtype}; this model's have {n_cols} numbers")


def encoded(x: Floats, wire: str) -> tuple[str, memoryview]:
    """Encode rows for the wire: the name of the type (net.wire.DTYPES), and the payload."""
    encoder = ENCODERS[wire]
    return encoder.payload_type.name, bytes_of(encoder.encode(x))


def decoded(frame: Frame, n_cols: int) -> Floats:
    """The rows, float32 (n_rows, n_cols), of a frame whose payload `encoded` made."""
    data = np.frombuffer(frame.payload, dtype=np.uint8)
    return ENCODED[frame.dtype].decode(data, frame.n_rows, n_cols)


def bytes_of(x: np.ndarray) -> memoryview:
    """The memory of an array, or of a copy if it is not contiguous."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def logit_rows(slices: Slices) -> list[int] | None:
    """The rows of a frame that need logits; the last stage sends no others. None if all do."""
    table = SliceTable.of(slices)
    if table.n_logits == table.n_rows:
        return None
    kept: list[int] = []
    row = 0
    for s in slices:
        row += s.n_rows
        kept.extend(range(row - s.n_logits, row))
    return kept


def ring_limits(widest_row: int, n_taps: int = 0) -> Limits:
    """Limits of a run's frames. The text of a STOP or ERROR has a byte per column: a narrow model must not refuse it.

    Args:
        n_taps: blocks whose outputs come back.
    """
    max_cols = max(widest_row, HANDSHAKE_LIMITS.max_cols)
    return Limits(max_rows=(1 + n_taps) * FRAME_ROWS, max_cols=max_cols, n_taps=n_taps)


def receive_buffers(device: str) -> Allocate | None:
    """Memory that frames are received into, on a node that computes on `device`; None is ordinary memory."""
    if not device.startswith("cuda"):
        return None

    return pinned_buffer
