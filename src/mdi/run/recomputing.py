"""Blocks of a ring's node that are computed a second time: in this process, or by another node that has them.

Another node is in a ring of two with this one, of a run of its own, beside the ring whose rows are verified. So its caches are
a lease as those of any run, and it gets the parts that it lacks as for any.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial

from mdi.cancel import Cancel
from mdi.control.client import FanOut
from mdi.engine.rows import whole_rows
from mdi.engine.worker import TappedStage
from mdi.errors import EngineError, RingEndedError, RingError
from mdi.kernels.slices import Slice, SliceTable
from mdi.model.rows import RowLayout
from mdi.net.ring import TcpRing
from mdi.net.wire import Frame
from mdi.run.form import VerifyRing
from mdi.run.nodes import dismiss
from mdi.spec.arithmetic import Arithmetic
from mdi.stages.store import HeldStage, StageStore

ANSWER_S = 60.0  # for the rows of one frame: the node computes for other runs as well
END_S = 2.0  # for the node to notice the end


class Recomputed(ABC):
    """Blocks that are computed a second time, with caches of their own.

    Attributes:
        name: of the node that computes them; "" for this one.
        cached: rows of each text, from the first on, that are in the caches.
    """

    def __init__(self, name: str, arithmetic: Arithmetic) -> None:
        self.name, self.arithmetic = name, arithmetic
        self.cached: dict[int, int] = {}

    def compute(self, seq_id: int, start: int, rows: Frame) -> tuple[str, bytes]:
        """Rows of a text from position `start` on, behind those that are cached: what a node would send. Raises RingError.

        Args:
            rows: what the node got, with this one slice.
        """
        told = self._compute(Slice(seq_id, start, rows.n_rows), rows)
        self.cached[seq_id] = start + rows.n_rows
        return told

    def free(self, seq_id: int) -> None:
        """A text is over."""
        if self.cached.pop(seq_id, None) is not None:
            self._free(seq_id)

    @property
    def is_leaving(self) -> bool:
        """Whether its node is to end, or to hold other blocks, and waits until it is not needed here."""
        return False

    @abstractmethod
    def _compute(self, part: Slice, rows: Frame) -> tuple[str, bytes]: ...

    @abstractmethod
    def _free(self, seq_id: int) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; harmless if repeated. From any thread."""


class OwnBlocks(Recomputed):
    """In this process.

    Args:
        wire: number format of rows on the links.
    """

    def __init__(self, held: HeldStage, store: StageStore, wire: str) -> None:
        super().__init__("", held.spec.arithmetic)
        self._held, self._store, self._wire = held, store, wire

    def _compute(self, part: Slice, rows: Frame) -> tuple[str, bytes]:
        stage = self._held.stage
        assert stage is not None
        x = whole_rows(stage.rows, rows, stage.row_in)
        found = TappedStage(stage, stage.rows, (), 0, 0)(rows, x, False, self._wire)
        return found.dtype, bytes(found.payload)

    def _free(self, seq_id: int) -> None:
        assert self._held.stage is not None
        self._held.stage.caches.free(seq_id)

    def close(self) -> None:
        self._store.release(self._held, self._held.owner)


class OthersBlocks(Recomputed):
    """On another node.

    Args:
        row_out: of the rows behind its blocks.
    """

    def __init__(self, ring: VerifyRing, row_out: RowLayout, cancel: Cancel) -> None:
        super().__init__(ring.client.node.name, ring.arithmetic)
        self._ring, self._cancel = ring, cancel
        self._n_cols = row_out.width - row_out.cached.width
        self._freed: list[int] = []
        self._n_frames = 0

    @property
    def is_leaving(self) -> bool:
        return bool(self._ring.link.leaving)

    def _compute(self, part: Slice, rows: Frame) -> tuple[str, bytes]:
        link = self._ring.link
        self._make_room(part.seq_id, part.start + part.n_rows)
        self._n_frames += 1
        asked = SliceTable([part._replace(n_logits=part.n_rows)])  # all of them come back
        freed, self._freed = tuple(self._freed), []
        link.send(replace(rows, epoch=link.epoch, number=self._n_frames, slices=asked, freed=freed))
        end = time.monotonic() + ANSWER_S
        with self._cancel.waking(link.wake):
            while (frame := self._received(link)) is None:
                if self._cancel.is_cancelled:
                    raise EngineError(f"{self.name} is left alone")
                if time.monotonic() > end:
                    raise RingError(f"{self.name} has not computed {part.n_rows} rows within {ANSWER_S:.0f} s")
        told = frame.dtype, bytes(frame.payload)
        n_rows, shape = frame.n_rows, (frame.n_rows, frame.n_cols, frame.number)
        link.release(frame)
        if shape != (part.n_rows, self._n_cols, self._n_frames):
            raise RingError(f"{self.name} answered {part.n_rows} rows with {n_rows} others")
        return told

    @staticmethod
    def _received(link: TcpRing) -> Frame | None:
        try:
            return link.recv(1.0)
        except RingEndedError as e:
            raise RingError(str(e)) from None

    def _make_room(self, seq_id: int, n: int) -> None:
        """Free the caches of other texts where those of this one would not fit with them."""
        report = self._ring.caches

        def n_bytes(positions: int) -> int:
            return sum(one.n_bytes(positions) for one in report.classes)

        others = sum(n_bytes(own) for one, own in self.cached.items() if one != seq_id)
        if others + n_bytes(n) <= report.limit_bytes:
            return
        for one in [one for one in self.cached if one != seq_id]:
            self.free(one)
        if n_bytes(n) > report.limit_bytes:
            raise EngineError(f"{self.name} has no memory for the caches of {n} rows")

    def _free(self, seq_id: int) -> None:
        self._freed.append(seq_id)

    def close(self) -> None:
        """Until the node has noticed it, for a time: it may be needed for another ring."""
        self._ring.link.stop("nothing more is to be computed again")
        self._ring.link.close()
        ended = FanOut({self.name: partial(dismiss, [self._ring.client], self._ring.run_id, False, True)})
        ended.join(END_S)
