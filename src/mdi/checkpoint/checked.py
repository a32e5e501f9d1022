"""Records which files were hashed and how they looked then, so that unchanged files are not hashed again.

Disks lose bits without a word, and without a change of any time: so what was hashed long ago is not believed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mdi.checkpoint.kept_json import read_kept, write_kept

BELIEVED_S = 7 * 24 * 3600.0
N_THREADS = 4  # one reads a gigabyte a second where the processor has instructions for SHA-256

Stamp = tuple[int, ...]


class CheckedFiles:
    """A JSON file from keys to stamps. Safe for threads. Of several processes the last one to write wins; the entries of the
    others are hashed again.

    Args:
        path: of the file; its folder need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._kept: dict[str, Any] = self._read()

    def knows(self, key: str, stamp: Stamp) -> bool:
        """Whether what `key` names was hashed, not too long ago, and its file has looked like this ever since."""
        with self._lock:
            entry = self._kept.get(key)
        return entry is not None and tuple(entry[:-1]) == stamp and _is_recent(entry)

    def add(self, key: str, stamp: Stamp) -> None:
        """Record that the file of `key` has just been hashed, and is as it should be."""
        self._change(key, [*stamp, int(time.time())])

    def follow(self, key: str, stamp: Stamp) -> None:
        """The file looks like this by our own doing; when it was hashed does not change."""
        with self._lock:
            entry = self._kept.get(key)
        if entry is not None:
            self._change(key, [*stamp, entry[-1]])

    def drop(self, key: str) -> None:
        self._change(key, None)

    def _change(self, key: str, entry: list[int] | None) -> None:
        with self._lock:
            kept = self._read()
            for some in (self._kept, kept):
                some.pop(key, None)
                if entry is not None:
                    some[key] = entry
            write_kept(self._path, kept, makes_folder=True)

    def _read(self) -> dict[str, Any]:
        entries: dict[str, list[int]] = read_kept(self._path, _entries, {})
        return {key: entry for key, entry in entries.items() if entry and _is_recent(entry)}


def stamp_of(file: int | Path) -> Stamp:
    """A file's size, times and identity. OSError if it is not there."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


def in_threads(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of some calls that hash; a few run at a time. An exception of one prevents those that have not begun."""
    with ThreadPoolExecutor(min(N_THREADS, os.cpu_count() or 1), thread_name_prefix="hash") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _entries(data: Any) -> dict[str, list[int]]:
    return {str(key): [int(n) for n in entry] for key, entry in data.items()}


def _is_recent(entry: list[int]) -> bool:
    return 0 <= time.time() - entry[-1] <= BELIEVED_S  # a clock that was set back would make it recent for ever
