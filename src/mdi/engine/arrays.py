"""Converts between frames and numpy arrays: gives payload bytes a shape. For torch see `mdi.engine.tensors`."""

from __future__ import annotations

import numpy as np

from mdi.engine.encoding import ENCODED, ENCODERS
from mdi.errors import WireError
from mdi.kernels.layout import float32_from_bf16
from mdi.net.wire import Frame
from mdi.slices import Slices

Floats = np.ndarray  # of float32

_PLAIN = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "float64": np.float64}


class ArrayRows:
    """Rows as a stage in the kernels has them, for both loops: float32 arrays."""

    def ids(self, ids: list[int]) -> np.ndarray:
        return np.array(ids, dtype=np.int64)

    def none(self, n_cols: int) -> Floats:
        return np.empty((0, n_cols), dtype=np.float32)

    def are_finite(self, x: Floats) -> bool:
        return bool(np.isfinite(x).all())

    def read(self, frame: Frame, n_cols: int) -> Floats:
        return rows_of(frame, n_cols)

    def wanting_logits(self, x: Floats, slices: Slices) -> Floats:
        kept = logit_rows(slices)
        return x if kept is None else x[kept]

    def payload(self, x: Floats, wire: str) -> tuple[str, memoryview]:
        return ("float32", bytes_of(x)) if wire == "auto" or not len(x) else encoded(x, wire)


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


def check_width(frame: Frame, n_cols: int) -> None:
    """Raises WireError: rows of another width, or no numbers at all."""
    is_known = frame.dtype in _PLAIN or frame.dtype in ENCODED
    if frame.n_rows and (frame.n_cols != n_cols or not is_known):
        raise WireError(f"rows of {frame.n_cols} x {frame.dtype}; this model's have {n_cols} numbers")


def encoded(x: Floats, wire: str) -> tuple[str, memoryview]:
    """What rows travel as: the name of the type (net.wire.DTYPES), and the payload."""
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
    if all(s.n_logits == s.n_rows for s in slices):
        return None
    kept: list[int] = []
    row = 0
    for s in slices:
        row += s.n_rows
        kept.extend(range(row - s.n_logits, row))
    return kept
