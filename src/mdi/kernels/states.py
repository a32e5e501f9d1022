"""States of recurrent blocks (`model.caches.State`), of all sequences of a stage: memory, and what is kept in it.

For each block of a sequence there are two states, the rows that came between them, and before these the rows that the first of
their convolution still sees. A block that computes brings all that up to date by itself: `places` says where its states stand.
What computes is in `csrc/delta.h`, or in torch (`mdi.stages.torch_delta`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from mdi.errors import Code, EngineError
from mdi.kernels.stage_caches import Piece
from mdi.model.caches import CHUNK_ROWS, PAGE, SLACK, State

New = Callable[[tuple[int, int]], Any]  # float32 zeros of this shape: an array, or a tensor


def host_zeros(shape: tuple[int, int]) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def _block_size(kind: State, n_rows: int) -> int:
    """Numbers of one block's states, and of so many rows with those before them."""
    return 2 * kind.n_heads * kind.k_size * kind.v_size + (kind.n_taps - 1 + n_rows) * kind.row_size


class StateMemory:
    """Of one sequence, or of several that are the same so far.

    Attributes:
        numbers: float32 (blocks, size): state before the kept rows, state behind some of them, and n_taps - 1 + n_rows rows.
        places: int64 (blocks, 2): position of the first kept row, and of the row that the second state takes in next.
        n_rows: for which there is room.
        n_owners: sequences that have it.
    """

    def __init__(self, kind: State, n_blocks: int, n_rows: int, new: New) -> None:
        self.kind, self.n_rows, self.n_owners = kind, n_rows, 1
        self.n_state = kind.n_heads * kind.k_size * kind.v_size
        self.numbers = new((n_blocks, _block_size(kind, n_rows)))
        self.places = np.zeros((n_blocks, 2), dtype=np.int64)

    @property
    def n_bytes(self) -> int:
        return 4 * self.numbers.shape[0] * self.numbers.shape[1]

    def block(self, number: int) -> tuple[Any, Any, Any]:
        """Both states (n_heads, k_size, v_size), and the rows (n_taps - 1 + n_rows, row_size)."""
        numbers, n = self.numbers[number], self.n_state
        states = numbers[: 2 * n].reshape(2, *self.kind.shape)
        return states[0], states[1], numbers[2 * n :].reshape(-1, self.kind.row_size)


class StateEntry:
    """Of one sequence: its memory, and the first position that it can be cut to, behind the rows that are final."""

    def __init__(self, memory: StateMemory, first: int) -> None:
        self.memory, self.first = memory, first

    @property
    def record(self) -> tuple[int, int, int, int]:
        """What the kernels read of it (csrc/model.h, MdiStates), where the memory is the host's; until it gets other memory."""
        numbers = self.memory.numbers
        return numbers.ctypes.data, self.memory.places.ctypes.data, numbers.shape[1], self.first


class StateStore:
    """States of the blocks of one class, see stage_caches.Store.

    Args:
        limit_bytes: what they take at most; None is the machine's memory.
        new: makes their memory.
    """

    def __init__(self, kind: State, n_blocks: int, limit_bytes: int | None = None, new: New = host_zeros) -> None:
        self.kind, self.cache_class = kind, kind.of_blocks(n_blocks, "float32")
        self._n_blocks, self._new = n_blocks, new
        self.n_bytes = 0
        self.most_bytes = psutil.virtual_memory().total if limit_bytes is None else limit_bytes

    def begin(self, first: int = 0) -> StateEntry:
        entry = StateEntry(StateMemory(self.kind, self._n_blocks, 0, self._new), first)
        entry.memory.places[:] = first
        self.n_bytes += entry.memory.n_bytes
        return entry

    def check(self, entry: StateEntry, start: int) -> None:
        if start < entry.first:
            raise EngineError(
                f"a slice goes back to position {start}, but states have taken in what precedes {entry.first}"
            )

    def cut(self, entry: StateEntry, end: int) -> None:
        """Blocks see it by themselves: the next row that they compute is not the one that their state takes in next."""

    def grow(self, entry: StateEntry, start: int, n_rows: int) -> None:
        is_long = start + n_rows - entry.first > SLACK + CHUNK_ROWS
        first = max(entry.first, start - SLACK) if is_long else entry.first
        self._make_room(entry, start + n_rows - first)
        entry.first = first  # only now: without room the entry is what it was

    def _make_room(self, entry: StateEntry, n_rows: int) -> None:
        """Have memory of its own for so many rows. Raises EngineError."""
        old = entry.memory
        wanted = max(old.n_rows, -(-n_rows // PAGE) * PAGE)
        if wanted == old.n_rows and old.n_owners == 1:
            return
        freed = old.n_bytes if old.n_owners == 1 else 0
        if self.n_bytes - freed + 4 * self._n_blocks * _block_size(self.kind, wanted) > self.most_bytes:
            raise EngineError("no memory is left for states of further texts", Code.MEMORY)
        memory = StateMemory(self.kind, self._n_blocks, wanted, self._new)
        memory.numbers[:, : old.numbers.shape[1]] = old.numbers
        memory.places[:] = old.places
        self.n_bytes += memory.n_bytes
        self.free(entry)
        entry.memory = memory

    def copied(self, entry: StateEntry) -> StateEntry:
        entry.memory.n_owners += 1
        return StateEntry(entry.memory, entry.first)

    def free(self, entry: StateEntry) -> None:
        entry.memory.n_owners -= 1
        if not entry.memory.n_owners:
            self.n_bytes -= entry.memory.n_bytes

    def read(self, entry: StateEntry, number: int, start: int, stop: int) -> Piece:
        """The first state, and the rows that lead from there to `stop`, with those before them that a convolution sees."""
        before, _, rows = entry.memory.block(number)
        first = int(entry.memory.places[number, 0])
        return Piece(first, (_array(before), _array(rows[: self.kind.n_taps - 1 + stop - first])))

    def write(self, entry: StateEntry, number: int, piece: Piece, stop: int) -> None:
        n_rows, kind = stop - piece.first, self.kind
        wanted = [kind.shape, (kind.n_taps - 1 + n_rows, kind.row_size)]
        if [one.shape for one in piece.arrays] != wanted or any(one.dtype != np.float32 for one in piece.arrays):
            raise EngineError(
                f"a state of the shapes {[one.shape for one in piece.arrays]}, expected {wanted} of float32"
            )
        self._make_room(entry, n_rows)
        entry.first = max(entry.first, piece.first) if number else piece.first
        before, _, rows = entry.memory.block(number)
        rows = rows[: len(piece.arrays[1])]
        before[:], rows[:] = (_like(own, one) for own, one in zip((before, rows), piece.arrays, strict=True))
        entry.memory.places[number] = piece.first, piece.first - 1  # the second state is made of the first


def _array(numbers: Any) -> np.ndarray:
    """A copy of an array or a tensor."""
    return np.array(numbers if isinstance(numbers, np.ndarray) else numbers.cpu().numpy())


def _like(own: Any, array: np.ndarray) -> Any:
    return array if isinstance(own, np.ndarray) else own.new_tensor(array)
