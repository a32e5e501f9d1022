"""Tensors of torch in frames, as a stage's loop makes and reads them."""

from __future__ import annotations

import torch

from mdi.engine.rows import TensorRows
from mdi.kernels.slices import Slice
from mdi.net.wire import Frame, FrameType


def frame_of(
    x: torch.Tensor, epoch: int, number: int, slices: tuple[Slice, ...], freed: tuple[int, ...], wire: str = "auto",
    copies: tuple[tuple[int, int], ...] = (),
) -> Frame:  # fmt: skip
    """A BATCH frame of the rows `x` (n_rows, n_cols)."""
    name, payload = TensorRows(x.device, x.dtype).payload(x, wire)
    n_rows, n_cols = x.shape
    return Frame(FrameType.BATCH, epoch, number, name, n_rows, n_cols, slices, freed, payload, copies)


def rows_of(frame: Frame, n_cols: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a frame, (n_rows, n_cols) of `dtype` on `device`."""
    return TensorRows(device, dtype).read(frame, n_cols)
