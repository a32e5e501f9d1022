"""Reads weights repeatedly from an open file, with or without the system's page cache."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import numpy as np

from mdi.errors import CheckpointError

PAGE_BYTES = 4096  # what direct reads are aligned to: offset, length and memory
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
