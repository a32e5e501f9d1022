"""Whose turn it is: one sample per frame, and the whole of its text each time."""

from __future__ import annotations

from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import PlannedSlice


class WholeTextScheduler(Scheduler):
    """Samples take turns, first come, first served; with more samples than nodes the others wait in the starter's queue.

    Args:
        n_frames: frames in flight at most; the number of nodes.
        context: tokens that the model sees; of a longer text the last ones are sent.
    """

    def __init__(self, n_frames: int, context: int) -> None:
        super().__init__(n_frames, chunk_rows=context)
        self._context = context

    def _decode_slices(self) -> list[PlannedSlice]:
        queue = self._prefilling or self._ready
        if not queue:
            return []
        sequence = queue.popleft()
        ids = tuple(sequence.ids[-self._context :])
        sequence.n_sent = len(sequence.ids)
        return [PlannedSlice(sequence.seq_id, 0, len(ids), 1, ids, sequence.n_evictions)]

    def _prefill_slices(self) -> list[PlannedSlice]:
        return []
