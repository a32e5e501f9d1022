"""Between frames and tensors: the only place where payload bytes get a shape."""

from __future__ import annotations

import torch

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
    if frame.n_cols != n_cols or frame.dtype not in DTYPES:
        raise WireError(f"rows of {frame.n_cols} x {frame.dtype}; this model's have {n_cols} numbers")
    x = torch.frombuffer(frame.payload, dtype=DTYPES[frame.dtype]).view(frame.n_rows, n_cols)
    return x.to(device=device, dtype=dtype)


def frame_of(x: torch.Tensor, epoch: int, number: int, slices: tuple[Slice, ...], freed: tuple[int, ...]) -> Frame:
    """A BATCH frame whose payload is the memory of `x` (n_rows, n_cols); `x` must not change until it is sent."""
    n_rows, n_cols = x.shape
    payload = x.cpu().contiguous().view(torch.uint8).numpy().data.cast("B") if n_rows else memoryview(b"")
    return Frame(Kind.BATCH, epoch, number, _NAMES[x.dtype], n_rows, n_cols, slices, freed, payload)


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
