"""The units that are read, used and freed at once: packed weights of half a block, or some rows of the head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mdi.kernels.layout import Matrix, matrix_bytes
from mdi.weight_formats import PANEL
from mdi.window.files import PAGE_BYTES, WeightBytes

HEAD = "head"
HEAD_PIECE_BYTES = 32 << 20  # where no block says how large a unit is


@dataclass(frozen=True)
class StoredMatrix:
    """A packed weight in a file; `start` is its first byte there, and `skip` that of kernels.layout.Matrix."""

    name: str
    format: str
    n_out: int
    n_in: int
    file: WeightBytes
    start: int
    skip: int = 0

    @property
    def n_bytes(self) -> int:
        return matrix_bytes(self.format, self.n_out, self.n_in)

    def rows(self, first: int, n: int) -> StoredMatrix:
        """Outputs [first, first + n); `first` begins a panel."""
        return replace(self, n_out=n, start=self.start + matrix_bytes(self.format, first, self.n_in))


@dataclass(frozen=True)
class ByteRun:
    """Whole pages of a file, the bytes [start, stop), and their place in a unit's memory."""

    file: WeightBytes
    start: int
    stop: int
    at: int


class Unit:
    """See the module.

    Args:
        part: "block.<i>" or "head".
        piece: 0 is attention, 1 the MLP; of the head, which rows.

    Attributes:
        n_bytes: of memory that it takes, a whole number of pages.
    """

    def __init__(self, part: str, piece: int, matrices: Iterable[StoredMatrix]) -> None:
        self.part, self.piece = part, piece
        self.matrices = tuple(matrices)
        self.runs = _runs(self.matrices)
        self.n_bytes = sum(run.stop - run.start for run in self.runs)

    def placed(self, memory: np.ndarray) -> dict[str, Matrix]:
        """The weights by their names, in memory that will hold this unit: uint8, (n_bytes) or more."""
        return {
            one.name: Matrix(one.format, one.n_out, one.n_in, self._data(one, memory), one.skip)
            for one in self.matrices
        }

    def _data(self, stored: StoredMatrix, memory: np.ndarray) -> np.ndarray:
        if not stored.n_bytes:  # of a share without heads, or without columns
            return memory[:0]
        run = next(r for r in self.runs if r.file is stored.file and r.start <= stored.start < r.stop)
        first = run.at + stored.start - run.start
        return memory[first : first + stored.n_bytes]


def _runs(matrices: Sequence[StoredMatrix]) -> tuple[ByteRun, ...]:
    """The pages of some weights, each once; adjacent pages are read at once."""
    matrices = [stored for stored in matrices if stored.n_bytes]
    files = list(dict.fromkeys(stored.file for stored in matrices))
    runs: list[ByteRun] = []
    at = 0
    for file in files:
        spans: list[list[int]] = []
        for stored in sorted((s for s in matrices if s.file is file), key=lambda s: s.start):
            start = stored.start // PAGE_BYTES * PAGE_BYTES
            stop = -(-(stored.start + stored.n_bytes) // PAGE_BYTES) * PAGE_BYTES
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], stop)
            else:
                spans.append([start, stop])
        for start, stop in spans:
            runs.append(ByteRun(file, start, stop, at))
            at += stop - start
    return tuple(runs)


def block_units(parts: Mapping[str, Mapping[str, StoredMatrix]]) -> list[Unit]:
    """Attention and MLP of each block, in the order of `parts`, by name of the part."""
    units = []
    for part, matrices in parts.items():
        halves: tuple[list[StoredMatrix], list[StoredMatrix]] = ([], [])
        for name, stored in matrices.items():
            halves[".attn." not in name].append(stored)
        units += [Unit(part, piece, half) for piece, half in enumerate(halves)]
    return units


def head_units(head: StoredMatrix, piece_bytes: int, multiple_of: int = 1, beside: int = 0) -> list[Unit]:
    """The head in pieces of rows.

    Args:
        piece_bytes: what one takes at most, if a single panel does not take more.
        multiple_of: together with `beside` other units they are a multiple of this, if there are panels enough.
    """
    n_panels = -(-head.n_out // PANEL)
    panel_bytes = matrix_bytes(head.format, PANEL, head.n_in)
    most = max(1, (piece_bytes - 2 * PAGE_BYTES) // panel_bytes)  # a piece may begin and end in the middle of a page
    n_pieces = -(-n_panels // most)
    n_pieces = min(n_panels, n_pieces + -(n_pieces + beside) % multiple_of)
    each, more = divmod(n_panels, n_pieces)
    units, first = [], 0
    for piece in range(n_pieces):
        n = PANEL * (each + (piece < more))
        units.append(Unit(HEAD, piece, [head.rows(first, min(n, head.n_out - first))]))
        first += n
    return units
