"""A starter at the level of requests and frames, of a ring with one secondary that holds all blocks: it can do anything."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loopback import DEADLINE_S, listener
from mdi.checkpoint.source import open_source
from mdi.control.client import ControlClient
from mdi.control.messages import InitRequest, PartSpec
from mdi.net.handshake import close_starter_ring
from mdi.net.ring import Seat, TcpRing
from mdi.net.wire import Frame, FrameType, Limits, Slice
from mdi.node.secondary import SecondaryNode
from mdi.spec.cluster import NodeConfig
from mdi.spec.extent import Extent
from secondaries import entry_of

NAMES = ("starter", "secondary0")


class FrameStarter:
    """One run on a secondary.

    Args:
        node: the secondary, in this process or another.
        checkpoint: the model.
    """

    def __init__(self, node: SecondaryNode | NodeConfig, checkpoint: Path, capacity: int = 2) -> None:
        self.run = secrets.token_hex(8)
        entry = node if isinstance(node, NodeConfig) else entry_of(node)
        self.client = ControlClient(entry)
        self._listener, self._capacity = listener(), capacity
        self._ring_port = entry.port_in
        self._source = source = open_source(checkpoint)
        self._n_layer, self.n_embd = source.config.n_layer, source.config.n_embd
        parts = [(name, source.info(name)) for name in (f"block.{i}" for i in range(self._n_layer))]
        self._fields: dict[str, Any] = {
            "model": source.model_id, "parts": tuple(PartSpec(name, one.sha256, one.n_bytes) for name, one in parts),
        }  # fmt: skip
        self.ring: TcpRing | None = None
        self._n_rings = 0

    def init(self, epoch: str | None = None, **changes: Any) -> str:
        """Ask for a ring; its epoch."""
        self._n_rings += 1
        epoch = epoch or f"{int(self.run, 16) + self._n_rings:016x}"
        fields = {"blocks": (0, self._n_layer), "extent": Extent(200), **self._fields, **changes}
        self.client.init(
            InitRequest(
                run=self.run, epoch=epoch, index=1, names=NAMES, placement="p", next_addr="127.0.0.1",
                next_port=self._listener.port, **fields,
            )
        )  # fmt: skip
        return epoch

    def wait(self, *states: str) -> dict[str, Any]:
        """Until the run is in one of these states there."""
        for _ in range(3000):
            status = self.client.status(self.run)
            if status["state"] in states:
                return status
            threading.Event().wait(0.02)
        raise AssertionError(status)

    def send(self) -> None:
        """The weights that the secondary lacks."""
        for _ in range(3000):
            missing = self.client.status(self.run)["missing"]
            if missing is not None:
                break
            threading.Event().wait(0.02)
        parts = {part.sha256: part for part in self._fields["parts"]}
        for entry in missing:
            part = parts[entry["sha256"]]
            self.client.send_part(part, self.run, 0, self._source.pieces(part.name))

    def form(self, **changes: Any) -> dict[str, Any]:
        """Ask for a ring and close it; the secondary's status when it was ready."""
        epoch = self.init(**changes)
        self.send()
        status = self.wait("READY")
        self.close_ring(epoch)
        return status

    def close_ring(self, epoch: str) -> None:
        """Close a ring that the secondary is ready for; the one before ends."""
        seat = Seat(int(epoch, 16), 0, NAMES, "p", "127.0.0.1", self._ring_port)
        self.drop()
        self.ring = close_starter_ring(self._listener, seat, self._capacity, Limits(), DEADLINE_S)
        self.wait("RUNNING")

    def frame(self, number: int, rows: np.ndarray, start: int, seq_id: int = 1) -> Frame:
        """All rows of which want logits."""
        assert self.ring is not None
        x = np.ascontiguousarray(rows, dtype=np.float32)
        part = Slice(seq_id, start, len(x), len(x))
        return Frame(
            FrameType.BATCH, self.ring.epoch, number, "float32", len(x), self.n_embd, (part,), (), memoryview(x).cast("B")
        )  # fmt: skip

    def compute(self, number: int, rows: np.ndarray, start: int) -> bytes:
        """What comes back of a frame."""
        assert self.ring is not None
        self.ring.send(self.frame(number, rows, start))
        back = self.ring.recv(DEADLINE_S)
        assert back is not None
        return bytes(back.payload)

    def drop(self) -> None:
        """Give the links back, without a word to the secondary if they were ended already."""
        if self.ring is not None:
            self.ring.close()
        self.ring = None

    def close(self) -> None:
        if self.ring is not None:
            self.ring.stop("the test is over")
        self.drop()
        self._listener.close()
        self._source.close()


@contextlib.contextmanager
def frame_starter(node: SecondaryNode | NodeConfig, checkpoint: Path, **options: Any) -> Iterator[FrameStarter]:
    starter = FrameStarter(node, checkpoint, **options)
    try:
        yield starter
    finally:
        starter.close()
