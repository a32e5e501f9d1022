"""The loop of a secondary: receive, compute, send."""

from __future__ import annotations

import time

import torch

from mdi.engine.tensors import frame_of, logit_rows, rows_of
from mdi.errors import RingEndedError, WireError
from mdi.model.kernel_stage import TensorStage
from mdi.model.stage import Stage
from mdi.net.ring import Ring
from mdi.net.wire import Frame


class SecondaryLoop:
    """Runs a stage over the frames of a ring until the ring ends.

    Args:
        is_last: whether the next node is the starter, which wants only the rows for logits.
        dtype: what the stage computes in.
        wire: what the rows travel as (net.wire.WIRE_DTYPES).
    """

    def __init__(
        self,
        stage: Stage | TensorStage,
        ring: Ring,
        is_last: bool,
        device: torch.device,
        dtype: torch.dtype,
        wire: str = "auto",
    ) -> None:
        self._stage = stage
        self._ring = ring
        self._is_last = is_last
        self._device = device
        self._dtype = dtype
        self._wire = wire
        self.compute_s = 0.0

    def run(self) -> None:
        """Return when the ring was ended in good order.

        Raises:
            RingError: the ring broke.
            MdiError: this node cannot go on; the caller must tell the ring.
        """
        while True:
            try:
                frame = self._ring.recv()
            except RingEndedError:
                return
            if frame is not None:
                self._ring.send(self._compute(frame))
                self._ring.release(frame)

    def _compute(self, frame: Frame) -> Frame:
        """The frame with its rows after this stage."""
        begin = time.perf_counter()
        for seq_id in frame.freed:
            self._stage.caches.free(seq_id)
        for seq_id, new_id in frame.copies:
            self._stage.caches.copy(seq_id, new_id)
        if frame.n_rows != sum(s.n_rows for s in frame.slices):
            raise WireError(f"a frame of {frame.n_rows} rows that lacks some of those which its slices name")
        x = rows_of(frame, self._stage.n_embd, self._device, self._dtype)
        if frame.n_rows:
            x = self._stage(x, [(s.seq_id, s.start, s.n_rows) for s in frame.slices])
        if self._is_last:
            x = logit_rows(x, frame.slices)
        out = frame_of(x, self._ring.epoch, frame.number, frame.slices, frame.freed, self._wire, frame.copies)
        self.compute_s += time.perf_counter() - begin
        return out
