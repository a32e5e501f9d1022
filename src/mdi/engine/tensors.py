"""Converts between frames and torch's tensors, by the same rules as `mdi.engine.arrays`."""

from __future__ import annotations

from typing import Any

import torch

from mdi.engine import arrays
from mdi.engine.encoding import ENCODED
from mdi.net.wire import Frame, FrameType
from mdi.slices import Slice, Slices

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorRows:
    """Rows as a stage of torch has them, for both loops.

    Args:
        device, dtype: that the stage computes with.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def ids(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor(ids, device=self._device)

    def none(self, n_cols: int) -> torch.Tensor:
        return torch.empty(0, n_cols, dtype=self._dtype)

    def are_finite(self, x: torch.Tensor) -> bool:
        return bool(torch.isfinite(x).all())

    def read(self, frame: Frame, n_cols: int) -> torch.Tensor:
        return rows_of(frame, n_cols, self._device, self._dtype)

    def wanting_logits(self, x: torch.Tensor, slices: Slices) -> torch.Tensor:
        return logit_rows(x, slices)

    def payload(self, x: torch.Tensor, wire: str) -> tuple[str, memoryview]:
        return payload_of(x, wire)


def rows_of(frame: Frame, n_cols: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The payload as (n_rows, n_cols) of `dtype` on `device`; on the CPU, in the frame's dtype, without a copy.

    Raises:
        WireError: the frame has another width or no numbers at all.
    """
    arrays.check_width(frame, n_cols)
    if frame.n_rows == 0:
        return torch.empty(0, n_cols, device=device, dtype=dtype)
    if frame.dtype in ENCODED:
        return torch.from_numpy(arrays.decoded(frame, n_cols)).to(device=device, dtype=dtype)
    x = torch.frombuffer(frame.payload, dtype=DTYPES[frame.dtype]).view(frame.n_rows, n_cols)
    return x.to(device=device, dtype=dtype)


def frame_of(
    x: torch.Tensor, epoch: int, number: int, slices: tuple[Slice, ...], freed: tuple[int, ...], wire: str = "auto",
    copies: tuple[tuple[int, int], ...] = (),
) -> Frame:  # fmt: skip
    """A BATCH frame of the rows `x` (n_rows, n_cols); see `payload_of`."""
    name, payload = payload_of(x, wire)
    n_rows, n_cols = x.shape
    return Frame(FrameType.BATCH, epoch, number, name, n_rows, n_cols, slices, freed, payload, copies)


def payload_of(x: torch.Tensor, wire: str) -> tuple[str, memoryview]:
    """What rows (n_rows, n_cols) travel as: the name of the type, see net.wire.DTYPES, and the bytes.

    Args:
        wire: one of net.wire.WIRE_DTYPES. With "auto" the bytes are the memory of `x`, which must not change until they are
            sent.
    """
    if not len(x):
        return _NAMES[x.dtype], memoryview(b"")
    if wire == "auto":
        return _NAMES[x.dtype], arrays.bytes_of(_on_host(x).view(torch.uint8).numpy())
    return arrays.encoded(x.float().cpu().numpy(), wire)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """`x`, contiguous in memory that a socket can read; from a GPU by way of page-locked memory, which torch keeps."""
    if x.device.type != "cuda":
        return x.cpu().contiguous()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x)


def pinned_buffer(n_bytes: int) -> Any:
    """Page-locked memory to receive into, from which a GPU copies without a stop on the way (see net.link.BufferPool)."""
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()


def logit_rows(x: torch.Tensor, slices: Slices) -> torch.Tensor:
    """The rows of a frame that need logits."""
    kept = arrays.logit_rows(slices)
    return x if kept is None else x[kept]
