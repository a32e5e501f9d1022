"""The loop of a secondary: receive, compute, send."""

from __future__ import annotations

import time

import torch

from mdi.engine.tensors import frame_of, logit_rows, rows_of
from mdi.errors import WireError
from mdi.model.stage import Stage
from mdi.net.ring import Ring


class SecondaryLoop:
    """Runs a stage over the frames of a ring until the run ends.

    Args:
        epoch: run id, for the frames that it sends.
        is_last: whether the next node is the starter, which wants only the rows for logits.
        dtype: what the stage computes in.
        wire: what the rows travel as (net.wire.WIRE_DTYPES).
    """

    def __init__(
        self,
        stage: Stage,
        ring: Ring,
        epoch: int,
        is_last: bool,
        device: torch.device,
        dtype: torch.dtype,
        wire: str = "auto",
    ) -> None:
        self._stage = stage
        self._ring = ring
        self._epoch = epoch
        self._is_last = is_last
        self._device = device
        self._dtype = dtype
        self._wire = wire
        self.compute_s = 0.0

    def run(self) -> None:
        """Return when the run was stopped.

        Raises:
            RingError: the ring broke.
            MdiError: this node cannot go on; the caller must tell the ring.
        """
        n_embd = self._stage.config.n_embd
        while True:
            ended = self._ring.ended  # asked before recv(), which raises if it was a failure that ended the run
            frame = self._ring.recv()
            if frame is None:
                if ended:
                    return
                continue
            begin = time.perf_counter()
            for seq_id in frame.freed:
                self._stage.caches.free(seq_id)
            if frame.n_rows != sum(s.n_rows for s in frame.slices):
                raise WireError(f"a frame of {frame.n_rows} rows that lacks some of those which its slices name")
            x = rows_of(frame, n_embd, self._device, self._dtype)
            if frame.n_rows:
                x = self._stage(x, [(s.seq_id, s.start, s.n_rows) for s in frame.slices])
            if self._is_last:
                x = logit_rows(x, frame.slices)
            out = frame_of(x, self._epoch, frame.number, frame.slices, frame.freed, self._wire)
            self.compute_s += time.perf_counter() - begin
            self._ring.send(out)
            if x.data_ptr() != _address(frame.payload):
                self._ring.release(frame)


def _address(payload: bytes | bytearray | memoryview) -> int:
    """Where a payload begins in memory: a stage without blocks would send on what it received."""
    return torch.frombuffer(payload, dtype=torch.uint8).data_ptr() if len(payload) else 0
