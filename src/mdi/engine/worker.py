"""The loop of a secondary: receive, compute, send. The stage decides whether rows are arrays or tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mdi.engine.prefix_tasks import PrefixTask
from mdi.engine.replay import COMPUTE, FILL, PASS, SentRows
from mdi.engine.rows import FrameRows, whole_rows
from mdi.errors import RingEndedError, WireError
from mdi.kernels.pages import CachePages
from mdi.kernels.slices import Slices, SliceTable
from mdi.model.rows import RowLayout
from mdi.net.ring import Ring
from mdi.net.wire import Frame

if TYPE_CHECKING:
    import numpy as np


class WeightUse(NamedTuple):
    """The cost of a stage's weights: bytes of memory, at most; bytes read from the disk; seconds that computing waited for the
    disk; of chosen experts of frames, those that were in memory and those that were not, where they are read one by one."""

    resident_bytes: int
    read_bytes: int
    wait_s: float
    expert_hits: int = 0
    expert_misses: int = 0


class Caches(Protocol):
    def free(self, seq_id: int) -> None: ...
    def rearrange(self, freed: Iterable[int], copies: Iterable[tuple[int, int]]) -> None: ...
    def clear(self) -> None: ...


class FrameStage(Protocol):
    """Blocks that compute the rows of a frame: stages.torch_stage.Stage, or stages.kernel_stage.KernelStage."""

    @property
    def row_in(self) -> RowLayout:
        """Of the rows before its first block."""

    @property
    def row_out(self) -> RowLayout:
        """Of those behind its last one."""

    @property
    def caches(self) -> Caches: ...

    def __call__(self, x: Any, slices: Slices, taps: Sequence[int] = ()) -> Any:
        """The rows (N, row_in.width) of all slices -> (N, row_out.width)

        Args:
            x: where `row_in.is_skipped`, rows that give no logits have 0 in all columns but those for caches; in the result
                these may be anything where `row_out.is_skipped`.
            taps: numbers of its blocks in the model, rising. For each of them follow, below the others, its outputs of the rows
                that need logits.
        """


class StarterRows(FrameRows, Protocol):
    """As the starter has them: engine.rows.ArrayRows, engine.rows.TensorRows."""

    def ids(self, ids: list[int]) -> Any:
        """Token ids (N,), as the stage embeds them."""

    def are_finite(self, x: Any) -> bool:
        """Whether all numbers are."""

    def array(self, x: Any) -> np.ndarray:
        """Rows as float32 in main memory."""

    def of_array(self, x: np.ndarray) -> Any:
        """Rows of float32 as the stage has them."""


class StarterFrameStage(FrameStage, Protocol):
    """The starter's part: stages.torch_stage.StarterStage, stages.kernel_stage.KernelStage, or its Ends."""

    @property
    def returned_width(self) -> int: ...

    @property
    def is_head_shared(self) -> bool:
        """Whether `head` needs all rows that came back, because the other nodes of a group compute their part of them."""

    def embed(self, ids: Any, slices: Slices) -> Any:
        """(N,) token ids -> (N, row_in.width); the slices say which positions they have."""

    def head(self, x: Any) -> Any:
        """(M, returned_width) rows that went through all blocks -> (M, vocabulary) logits"""

    def final_norm(self, x: Any) -> Any:
        """(M, returned_width) the same rows -> (M, returned_width), what `head` multiplies"""


class Backend(FrameStage, Protocol):
    """A stage that is loaded, whatever computes it: stages.kernel_stage.KernelStage, or stages.torch_stage.TorchStage.

    Attributes:
        rows: how its rows come from frames; a starter's has those of StarterRows.
    """

    start: int
    stop: int
    rows: Any

    @property
    def at_starter(self) -> StarterFrameStage:
        """The part that the starter's engine calls: without blocks where a group computes them."""

    @property
    def caches(self) -> CachePages:
        """The caches of the run that it is prepared for."""

    @property
    def max_length(self) -> int:
        """Tokens that a sequence of that run may reach."""

    @property
    def n_finished(self) -> int:
        """Blocks that it has computed so far; from any thread."""

    @property
    def weight_use(self) -> WeightUse: ...

    @property
    def mapped_bytes(self) -> int:
        """Weights that are pages of a file, which count as free memory, but must stay."""

    @property
    def cache_limit(self) -> int | None:
        """The most that its caches may take whatever is free, because the whole process has a limit; None without one."""

    @property
    def gathered_share(self) -> float:
        """Temporary memory of attention besides the caches, as a share of them."""

    def run_bytes(self, max_length: int) -> int:
        """Position tables, and the caches of one sequence of full length."""

    def prepare(self, max_length: int, cache_limit: int | None = None) -> None:
        """Build what depends on the longest sequence of a run: position tables and, empty, the caches.

        Args:
            cache_limit: bytes that all caches together will take at most; None is not known.
        """

    def close(self) -> None:
        """Nothing is computed any more; harmless if repeated."""


class TappedStage:
    """A stage in a run to whose starter the outputs of some blocks come back, of the rows that need logits.

    They travel below the rows of a frame, block after block; each node adds its own. Rows with more columns have none.

    Args:
        rows: as the stage has them.
        taps: all blocks of the run whose outputs are wanted; `start` and `stop` are the stage's.
    """

    def __init__(self, stage: FrameStage, rows: FrameRows, taps: Sequence[int], start: int, stop: int) -> None:
        self._stage, self._rows = stage, rows
        self._row_in, self._row_out = stage.row_in, stage.row_out
        self._n_before = sum(tap < start for tap in taps)
        self._own = tuple(tap for tap in taps if start <= tap < stop)

    def n_rows(self, slices: SliceTable) -> int:
        """Rows of a frame that comes to the stage, with all columns."""
        n_whole = slices.n_logits if self._row_in.is_skipped else slices.n_rows
        return n_whole + self._n_before * slices.n_logits

    def __call__(self, frame: Frame, x: Any, is_last: bool, wire: str) -> Frame:
        """The frame with its rows after the stage.

        Args:
            x: all rows of the frame (any, row_in.width).
            is_last: whether only the rows that need logits are wanted, and those below.
            wire: number format of the rows.
        """
        slices = frame.slices
        n_cached = self._row_out.cached.width if slices else 0
        n, before = slices.n_rows, x
        if n:
            x = self._stage(x[:n], slices, self._own) if self._own else self._stage(x[:n], slices)
        done = self._rows.wanting_logits(x[:n], slices) if is_last or self._row_out.is_skipped else x[:n]
        parts = [part for part in (before[n:], x[n:]) if len(part)] if n else []
        done = self._rows.joined([done, *parts]) if parts else done
        own = done[:, :-n_cached] if n_cached else done
        dtype, payload = self._rows.payload(own, wire)
        if n_cached:
            dtype, cached = self._rows.payload(x[:n, -n_cached:], wire)
            payload = memoryview(b"".join((payload, cached)))
        n_rows, n_cols = own.shape
        return replace(frame, dtype=dtype, n_rows=n_rows, n_cols=n_cols, n_cached=n_cached, payload=payload)


class SecondaryLoop:
    """Runs a stage over the frames of a ring: of one ring until it ends (`run`), or frame by frame, beside others (`step`).

    Args:
        rows: as the stage has them.
        is_last: whether the next node is the starter, which needs only the rows for logits.
        wire: number format of rows on the links (net.wire.WIRE_DTYPES).
        sent: where the rows are kept that go to the next node, if that is not the starter.
        received: the same for those that come; None keeps none.
        replay: this node's part in replays: COMPUTE those that have rows, and PASS them on with their rows, or FILL those that
            have none for the next node.
        tapped: the stage, if outputs of blocks are wanted; None: they are not.
        is_hot: whether the next node has the same blocks, and gets the frames as they come: this one computes them as well, so
            that it can take the other's place.
        answer: what this node does for a task about prefixes; None: it keeps none.
    """

    def __init__(
        self, stage: FrameStage, rows: FrameRows, ring: Ring, is_last: bool, wire: str = "auto", sent: SentRows | None = None,
        replay: str = COMPUTE, tapped: TappedStage | None = None, received: SentRows | None = None, is_hot: bool = False,
        answer: Callable[[PrefixTask], PrefixTask] | None = None,
    ) -> None:  # fmt: skip
        self._stage, self._answer = stage, answer
        self._tapped = TappedStage(stage, rows, (), 0, 0) if tapped is None else tapped
        self._rows = rows
        self._ring = ring
        self._is_last = is_last
        self._wire = wire
        self._sent = SentRows(0) if sent is None or is_last else sent
        self._replay = replay
        self._received = SentRows(0) if received is None else received
        self._is_hot = is_hot
        if replay == FILL:
            self._sent.hold()
        self.compute_s = 0.0

    def run(self) -> None:
        """Return when the ring was ended in good order.

        Raises:
            RingError: the ring broke.
            MdiError: this node cannot continue; the caller must tell the ring.
        """
        while True:
            try:
                frame = self._ring.recv()
            except RingEndedError:
                return
            if frame is not None:
                self._pass_on(frame)

    def step(self) -> None:
        """Compute and send on the next frame, if there is one; never waits.

        Raises:
            RingEndedError: the ring was ended in good order. Else as `run`.
        """
        frame = self._ring.poll()
        if frame is not None:
            self._pass_on(frame)

    def _pass_on(self, frame: Frame) -> None:
        if frame.is_task:
            self._answer_to(frame)
        elif self._is_hot:
            # The next node computes at the same time. This one keeps the rows that it would send in its place.
            self._ring.send(self._as_it_came(frame))
            self._compute(frame)
        else:
            self._ring.send(self._compute(frame))
        self._ring.release(frame)

    def _answer_to(self, frame: Frame) -> None:
        task = PrefixTask.of(frame)
        if task.goes_ahead:
            self._ring.send(task.frame(frame.epoch, frame.number))
        done = replace(task, ends="0", is_done=False) if self._answer is None else self._answer(task)
        if not task.goes_ahead:
            self._ring.send(done.frame(frame.epoch, frame.number))

    def _as_it_came(self, frame: Frame) -> Frame:
        """The frame for the next node, which has the same blocks; rows of a replay only if that has lost its caches, too."""
        if frame.is_replay and self._replay != PASS:
            return _without_payload(frame)
        return replace(frame, payload=bytes(frame.payload))  # the buffer is used again before the last byte has left

    def _compute(self, frame: Frame) -> Frame:
        """The frame with its rows after this stage."""
        begin = time.perf_counter()
        self._stage.caches.rearrange(frame.freed, frame.copies)
        self._received.add(frame)
        if frame.is_replay and not frame.has_rows:
            return self._without_rows(frame)
        if frame.n_rows != self._tapped.n_rows(frame.slices):
            raise WireError(f"a frame of {frame.n_rows} rows lacks rows of its slices")
        out = self._tapped(frame, whole_rows(self._rows, frame, self._stage.row_in), self._is_last, self._wire)
        self._sent.add(out, self._stage.row_out.is_skipped)
        if frame.is_replay and self._replay != PASS:
            out = _without_payload(out)
        self.compute_s += time.perf_counter() - begin
        return out

    def _without_rows(self, frame: Frame) -> Frame:
        """A replay for another node, with its rows if that is the next one."""
        self._sent.add(frame)
        if self._replay != FILL:
            return frame
        return self._sent.fill(frame)


def _without_payload(frame: Frame) -> Frame:
    return replace(frame, dtype="bytes", n_rows=0, n_cols=0, n_cached=0, payload=b"")
