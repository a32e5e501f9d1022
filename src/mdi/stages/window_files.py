"""Weights on the disk for a window: files that are read again and again, and units of weights."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mdi.errors import CheckpointError
from mdi.kernels.format_maps import matrix_pieces, rows_form
from mdi.kernels.layout import Matrix, PackedRows, matrix_bytes
from mdi.kernels.weight_formats import PANEL

logger = logging.getLogger("mdi")

PAGE_BYTES = 4096  # what direct reads are aligned to: offset, length and memory
PIECE_BYTES = 8 << 20  # bytes read at a time, so that reading can be stopped
LOG_WAIT_S = 10.0  # a wait for the disk that is longer is logged
JOIN_S = 10.0  # for a thread that reads
GIVEN_UP_S = 60.0  # ... after which a disk that gives nothing counts as failed
LONGEST_STEP_S = 2.0  # of this wait: a longer one is that of a process that was stopped (Ctrl-Z), with its reader
_DIRECT = getattr(os, "O_DIRECT", 0)


class WeightBytes:
    """A file of weights, open for reading. Safe for threads.

    Args:
        path: of the file; with `fd`, its name in messages.
        fd: an open file without a name; it is closed with this object.

    Attributes:
        is_direct: how `stream` reads: direct, or through the system's memory of files, from which it is dropped again.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self.path = path
        self._direct: int | None = None
        try:
            self._plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        except OSError as e:
            raise CheckpointError(f"cannot open {path}: {e.strerror or e}") from None
        self._looks = self._look()
        self.n_bytes = self._looks[0]
        if _DIRECT:
            with contextlib.suppress(OSError):  # a file system in memory, or one without it
                again = path if fd is None else Path(f"/proc/self/fd/{fd}")
                self._direct = os.open(again, os.O_RDONLY | os.O_CLOEXEC | _DIRECT)
        self.is_direct = self._direct is not None

    @property
    def can_be_direct(self) -> bool:
        return self._direct is not None

    def read(self, start: int, n_bytes: int) -> np.ndarray:
        """A few bytes, as uint8 (n_bytes). Raises CheckpointError."""
        found = np.empty(n_bytes, dtype=np.uint8)
        self._fill(self._plain, start, found.data)
        return found

    def stream(self, start: int, into: memoryview) -> int:
        """Fill memory with the file's bytes from `start` on, or up to its end; both aligned to pages.

        Returns:
            bytes that were read.

        Raises:
            CheckpointError: the file ends before it should, or the disk cannot read it.
        """
        if self.is_direct and self._direct is not None:
            return self._fill(self._direct, start, into)
        n_bytes = self._fill(self._plain, start, into)
        self.drop(start, n_bytes)
        return n_bytes

    def drop(self, start: int, n_bytes: int) -> None:
        """Let the system forget these bytes of the file."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._plain, start, n_bytes, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Raises CheckpointError if the file is not the one that was opened any more: cut, or written to."""
        if self._look() != self._looks:
            raise CheckpointError(f"{self.path} has changed while it was in use: start again with the whole file")

    def settle(self) -> None:
        """The file has been written: from now on it is to stay as it is."""
        self._looks = self._look()
        self.n_bytes = self._looks[0]

    def close(self) -> None:
        for fd in (self._plain, self._direct):
            if fd is not None:
                os.close(fd)
        self._plain, self._direct = -1, None

    def _look(self) -> tuple[int, ...]:
        status = os.fstat(self._plain)
        return status.st_size, status.st_mtime_ns

    def _fill(self, fd: int, start: int, into: memoryview) -> int:
        wanted, done = min(len(into), self.n_bytes - start), 0
        while done < wanted:
            try:
                n = os.preadv(fd, [into[done:]], start + done)
            except OSError as e:
                if e.errno == errno.EINVAL and fd == self._direct:  # after a read that ended in the middle of a page
                    fd = self._plain
                    continue
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {start + done}: {e.strerror or e}; check the disk, or make the "
                    "file again"
                ) from None
            if n == 0:
                raise CheckpointError(
                    f"{self.path} was cut short: it ends before byte {start + done}, {self.n_bytes} expected"
                )
            done += n
        return done


class RowTable:
    """An embedding whose rows are read when a token asks for them.

    Args:
        start: of the first row in the file.
        shape: (vocabulary, width).
    """

    def __init__(self, file: WeightBytes, start: int, shape: tuple[int, int], dtype: np.dtype[np.generic]) -> None:
        self._file, self._start = file, start
        self.shape, self.dtype = shape, dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        """(N,) token ids -> (N, width). Raises CheckpointError."""
        row_bytes = self.shape[1] * self.dtype.itemsize
        rows = np.empty((len(ids), self.shape[1]), dtype=self.dtype)
        for row, token in zip(rows, ids.tolist(), strict=True):
            row[:] = self._file.read(self._start + token * row_bytes, row_bytes).view(self.dtype)
        return rows


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
        before = matrix_bytes(self._form(0, first), first, self.n_in) if first else 0
        return replace(self, format=self._form(first, first + n), n_out=n, start=self.start + before)

    def whole(self) -> Matrix:
        return Matrix(self.format, self.n_out, self.n_in, self.file.read(self.start, self.n_bytes), self.skip)

    def _form(self, first: int, last: int) -> str:
        return rows_form(self.format, self.n_out, [(first, last)])


class PanelTable:
    """Rows of a packed embedding that lies in a file; panels are read when rows of them are asked for, each once."""

    dtype = np.dtype(np.float32)

    def __init__(self, stored: StoredMatrix) -> None:
        self._stored, self.shape = stored, (stored.n_out, stored.n_in)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        """(N,) token ids -> float32 (N, width). Raises CheckpointError."""
        rows = np.empty((len(ids), self.shape[1]), dtype=np.float32)
        for first in np.unique(ids // PANEL * PANEL).tolist():
            one = self._stored.rows(first, min(PANEL, len(self) - first))
            data = one.file.read(one.start, one.n_bytes)
            own = (first <= ids) & (ids < first + PANEL)
            rows[own] = PackedRows(Matrix(one.format, one.n_out, one.n_in, data))[ids[own] - first]
        return rows


@dataclass(frozen=True)
class ByteRun:
    """Whole pages of a file, the bytes [start, stop), and their place in a unit's memory."""

    file: WeightBytes
    start: int
    stop: int
    at: int


class Unit:
    """Weights that are read at once: half a block, an expert, or rows of the head.

    Args:
        part: "block.<i>" or "head".
        piece: 0 is attention, 1 the MLP, `FIRST_EXPERT` + e expert e of it, if experts are apart; of the head, which rows.

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


def read_unit(unit: Unit, memory: np.ndarray) -> Iterator[int]:
    """Read a unit into memory, piece by piece; the bytes of each that has come. Raises CheckpointError."""
    view = memory.data
    for run in unit.runs:
        for start in range(run.start, run.stop, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, run.stop)
            at = run.at + start - run.start
            yield run.file.stream(start, view[at : at + stop - start])


def wait_for_disk(
    changed: threading.Condition, is_there: Callable[[], bool], last_sign: Callable[[], float], unit: Unit | None
) -> float:
    """Wait, with `changed` held, for what a thread reads.

    Args:
        is_there: may raise what reading has met.
        last_sign: when bytes came last, by time.monotonic().
        unit: for messages.

    Returns:
        seconds.

    Raises:
        CheckpointError: nothing came for too long.
    """
    begin = now = time.monotonic()
    next_word = begin + LOG_WAIT_S
    sign, silent_s = last_sign(), 0.0
    file = unit.runs[0].file.path if unit is not None and unit.runs else ""
    while not is_there():
        before = now
        changed.wait(1.0)
        now = time.monotonic()
        heard = last_sign()
        silent_s = silent_s + min(now - before, LONGEST_STEP_S) if heard == sign else 0.0
        sign = heard
        if silent_s > GIVEN_UP_S:
            raise CheckpointError(f"the disk has given nothing of {file} for {GIVEN_UP_S:.0f} s: check the disk")
        if now > next_word:
            next_word = now + LOG_WAIT_S
            logger.warning("waiting for the disk: %s (%.0f s)", file, now - begin)
    return time.monotonic() - begin


def pages(n_bytes: int) -> np.ndarray:
    """Memory on its own pages, uint8 (n_bytes), which is freed with the last array that uses it."""
    if not n_bytes:
        return np.empty(0, dtype=np.uint8)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError, ValueError):  # fewer, larger pages, where the system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


FIRST_EXPERT = 2
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def expert_units(parts: Mapping[str, Mapping[str, StoredMatrix]]) -> tuple[list[Unit], list[Unit]]:
    """As `block_units`, but without experts, and each expert of each block."""
    experts: dict[tuple[str, int], list[StoredMatrix]] = {}
    others: dict[str, dict[str, StoredMatrix]] = {part: {} for part in parts}
    for part, matrices in parts.items():
        for name, stored in matrices.items():
            if found := _EXPERT.search(name):
                experts.setdefault((part, FIRST_EXPERT + int(found[1])), []).append(stored)
            else:
                others[part][name] = stored
    return block_units(others), [Unit(*key, own) for key, own in experts.items()]


def block_units(parts: Mapping[str, Mapping[str, StoredMatrix]]) -> list[Unit]:
    """Attention and MLP of each block, in the order of `parts`, by name of the part."""
    units = []
    for part, matrices in parts.items():
        halves: tuple[list[StoredMatrix], list[StoredMatrix]] = ([], [])
        for name, stored in matrices.items():
            halves[".attn." not in name and ".delta." not in name].append(stored)
        units += [Unit(part, piece, half) for piece, half in enumerate(halves)]
    return units


def head_units(head: StoredMatrix, piece_bytes: int, multiple_of: int = 1, beside: int = 0) -> list[Unit]:
    """The head in pieces of rows.

    Args:
        piece_bytes: what one takes at most, if a single panel does not take more.
        multiple_of: together with `beside` other units they are a multiple of this, if there are panels enough.
    """
    n_panels = -(-head.n_out // PANEL)
    panel_bytes = max(matrix_bytes(piece.word, PANEL, head.n_in) for piece in matrix_pieces(head.format))
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
