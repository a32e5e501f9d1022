"""Between frames and tensors: the only place where payload bytes get a shape."""

from __future__ import annotations

from typing import Any

import torch

from mdi.engine.encoding import ENCODED, ENCODERS
from mdi.errors import WireError
from mdi.net.wire import Frame, Kind, Slice

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def rows_of(frame: Frame, n_cols: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The payload as (n_rows, n_cols) of `dtype` on `device`; on the CPU, in the frame's dtype, without a copy.

    Raises:
        WireError: the frame has another width or no numbers at all.
    """
    if frame.n_rows == 0:
        return torch.empty(0, n_cols, device=device, dtype=dtype)
    if frame.n_cols != n_cols or not (frame.dtype in DTYPES or frame.dtype in ENCODED):
        raise WireError(f"rows of {frame.n_cols} x {frame.dtype}; this model's have {n_cols} numbers")
    if frame.dtype in DTYPES:
        x = torch.frombuffer(frame.payload, dtype=DTYPES[frame.dtype]).view(frame.n_rows, n_cols)
        return x.to(device=device, dtype=dtype)
    data = torch.frombuffer(frame.payload, dtype=torch.uint8).to(device)  # decoded there: fewer bytes to copy
    return ENCODED[frame.dtype].decode(data, frame.n_rows, n_cols).to(dtype)


def frame_of(
    x: torch.Tensor, epoch: int, number: int, slices: tuple[Slice, ...], freed: tuple[int, ...], wire: str = "auto",
    copies: tuple[tuple[int, int], ...] = (),
) -> Frame:  # fmt: skip
    """A BATCH frame of the rows `x` (n_rows, n_cols).

    Args:
        wire: what they travel as (net.wire.WIRE_DTYPES). With "auto" the payload is the memory of `x`, which must not change
            until it is sent.
    """
    n_rows, n_cols = x.shape
    name, data = _NAMES[x.dtype], x
    if wire != "auto" and n_rows:
        encoder = ENCODERS[wire]
        name, data = encoder.payload_type.name, encoder.encode(x)
    payload = _on_host(data).view(torch.uint8).numpy().data.cast("B") if n_rows else memoryview(b"")
    return Frame(Kind.BATCH, epoch, number, name, n_rows, n_cols, slices, freed, payload, copies)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous in memory that a socket can read; from a GPU by way of page-locked memory, which torch keeps."""
    if x.device.type != "cuda":
        return x.cpu().contiguous()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x)


def pinned_buffer(n_bytes: int) -> Any:
    """Page-locked memory to receive into, from which a GPU copies without a stop on the way (see net.link.BufferPool)."""
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()


def logit_rows(x: torch.Tensor, slices: tuple[Slice, ...]) -> torch.Tensor:
    """Of all rows of a frame, those that want logits: the last stage sends no others."""
    if all(s.n_logits == s.n_rows for s in slices):
        return x
    kept: list[int] = []
    row = 0
    for s in slices:
        row += s.n_rows
        kept.extend(range(row - s.n_logits, row))
    return x[kept]
