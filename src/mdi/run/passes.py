"""Forward and backward passes through blocks of a run's nodes, for what is trained at the starter.

The starter asks the nodes one after the other, each for its blocks, and has the rows between them: so what is lost with a
node is one question, which is asked again when the run has another ring. In torch, see stages.plain_blocks.

A node gets the tensors that its blocks compute with once, whatever number of questions name them by their hash. A node that
does not have them (any more), since it has joined or was started again, says so, and gets them once more.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from mdi.cancel import Cancel
from mdi.control.client import ControlClient
from mdi.control.messages import BlocksRequest, TensorsRequest
from mdi.errors import Code, ControlError, MdiError, UsageError
from mdi.run.form import Ring
from mdi.stages.store import blocks_of_stage
from mdi.stages.trained_tensors import (
    NONE,
    LastSets,
    Trained,
    hash_of,
    header_of,
    is_learned,
    joined_bytes,
    of_blocks,
)

T = TypeVar("T")

Borders = list[tuple[int, np.ndarray]]  # blocks, and the rows before them

RETRY_S = 0.2
PATIENCE_S = 120.0  # for another ring, after a node was lost


class Bytes(NamedTuple):
    """Numbers of bytes: sent to nodes, and received from them."""

    sent: int = 0
    received: int = 0


class Traffic:
    """Bytes of questions to nodes and of their answers so far, headers of messages not counted; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = Bytes()

    def add(self, sent: int, received: int) -> None:
        with self._lock:
            self.total = Bytes(self.total.sent + sent, self.total.received + received)


class _Known:
    """Sets of tensors that a node has, as far as the starter knows; each with an object that is new whenever it is sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # so that questions at the same time do not send them twice
        self.sets = LastSets[object]()


class Passes:
    """Args:
    ring: gives the present one; while none is closed, the last one.
    failure: raises what has ended the run.
    cancel: of the run.
    """

    def __init__(self, run: str, ring: Callable[[], Ring], failure: Callable[[], None], cancel: Cancel) -> None:
        self._run, self._ring, self._failure, self._cancel = run, ring, failure, cancel
        self.traffic = Traffic()
        self._known = defaultdict[str, _Known](_Known)  # by the nodes' names
        self._lock = threading.Lock()

    def forward(self, x: np.ndarray, start: int, stop: int, trained: Trained = NONE) -> Borders:
        """float32 (texts, tokens, n_embd) before block `start` -> the same before each node's blocks, and before block `stop`

        Args:
            trained: of these blocks, see `stages.trained_tensors`; each node gets those of its own.

        Raises:
            MdiError: the blocks have no gradients, or a lost node was not replaced in time.
        """
        borders = [(start, x)]
        while borders[-1][0] < stop:
            borders.append(self._tried(lambda: self._from(borders[-1][1], borders[-1][0], stop, trained)))
        return borders

    def backward(self, borders: Borders, dy: np.ndarray, trained: Trained = NONE) -> tuple[np.ndarray, Trained]:
        """The gradients with respect to the first rows of `forward` and to what is learned in `trained`, if `dy` is that of the
        last rows; raises as `forward`.
        """
        end, learned = borders[-1][0], dict[str, np.ndarray]()
        for start, rows in reversed(borders[:-1]):
            dy, found = self._back(rows, dy, start, end, trained)
            learned |= found
            end = start
        return dy, learned

    def _back(
        self, x: np.ndarray, dy: np.ndarray, start: int, stop: int, trained: Trained
    ) -> tuple[np.ndarray, Trained]:
        """As `backward`, through blocks that one node has had; another ring may have cut them."""
        return self._tried(lambda: self._back_now(x, dy, start, stop, trained))

    def _back_now(
        self, x: np.ndarray, dy: np.ndarray, start: int, stop: int, trained: Trained
    ) -> tuple[np.ndarray, Trained]:
        held = self._stage_of(stop - 1)[0]
        if held > start:
            middle = self.forward(x, start, held, trained)[-1][1]
            dy, behind = self._back(middle, dy, held, stop, trained)
            dx, before = self._back(x, dy, start, held, trained)
            return dx, {**before, **behind}
        return self._asked(x, dy, start, stop, trained)

    def _from(self, x: np.ndarray, start: int, stop: int, trained: Trained) -> tuple[int, np.ndarray]:
        """Through the blocks of the node that has block `start`: the block behind them, and the rows before that."""
        end = min(self._stage_of(start)[1], stop)
        return end, self._asked(x, None, start, end, trained)[0]

    def _stage_of(self, block: int) -> tuple[int, int]:
        """The blocks of the node that has `block`, half-open."""
        return next((one.start, one.stop) for one in self._ring().stages if one.start <= block < one.stop)

    def _asked(
        self, x: np.ndarray, dy: np.ndarray | None, start: int, stop: int, trained: Trained
    ) -> tuple[np.ndarray, Trained]:
        """Rows behind the blocks, or gradients before them and those of what is learned, from the node that has all of them."""
        ring = self._ring()
        index = next((i for i, one in enumerate(ring.stages) if one.start <= start and stop <= one.stop), None)
        if index is None:
            raise MdiError(f"no node has the blocks {start} to {stop - 1} any more")
        own = of_blocks(trained, start, stop)
        if index == 0:
            blocks = blocks_of_stage(ring.stage)
            if dy is None:
                return blocks.forward(x, start, stop, own), NONE
            return blocks.backward(x, dy, start, stop, own)
        stage = ring.stages[index]
        node = next(client for client in ring.clients if client.node.name == stage.name)
        of_node = of_blocks(trained, stage.start, stage.stop) if own else NONE
        sha256 = hash_of(of_node) if own else None
        sent = None if sha256 is None else self._give(node, of_node, (stage.start, stage.stop), sha256)
        n_texts, n_tokens, _ = x.shape
        request = BlocksRequest(self._run, (start, stop), n_texts, n_tokens, dy is not None, sha256)
        rows = joined_bytes([x] if dy is None else [x, dy])
        learned = {} if dy is None else {name: array for name, array in own.items() if is_learned(name)}
        try:
            data = node.blocks(request, [rows], x.size * 4 + sum(array.size * 4 for array in learned.values()))
        except ControlError as e:
            if (
                e.code is Code.TENSORS and sha256 is not None
            ):  # the question is asked again, and they are sent before it
                self._known_of(node).sets.forget(sha256, sent)
            raise
        self.traffic.add(len(rows), len(data))
        found, *others = _split(data, [x, *learned.values()])
        return found, dict(zip(learned, others, strict=True))

    def _give(self, node: ControlClient, trained: Trained, blocks: tuple[int, int], sha256: str) -> object:
        """Have a node know these tensors; what stands for the time that they were sent."""
        known = self._known_of(node)
        with known.lock:
            if (sent := known.sets.use(sha256)) is None:
                header = header_of(trained)
                pieces = [memoryview(header), joined_bytes(list(trained.values()))]
                node.tensors(TensorsRequest(self._run, blocks, sha256, len(header)), pieces)
                self.traffic.add(sum(map(len, pieces)), 0)
                known.sets.put(sha256, sent := object())
            return sent

    def _known_of(self, node: ControlClient) -> _Known:
        with self._lock:
            return self._known[node.node.name]

    def _tried(self, ask: Callable[[], T]) -> T:
        """Ask until there is an answer: a node may be lost meanwhile, and its blocks be elsewhere then."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ask()
            except UsageError:
                raise
            except MdiError as e:
                if getattr(e, "status", None) in (400, 404, 413) or time.monotonic() > end:
                    raise
                self._failure()
                self._cancel.wait(RETRY_S)


def _split(data: bytearray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays of these shapes, one after the other."""
    flat, found, at = np.frombuffer(data, dtype="<f4"), [], 0
    for one in like:
        found.append(flat[at : at + one.size].reshape(one.shape))
        at += one.size
    return found
