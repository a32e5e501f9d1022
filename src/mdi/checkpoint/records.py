"""Records of which bytes have which hash, so that they are not hashed again: `parts.json` beside weights, `checked.json` in
a node's cache.

Both are JSON files that save work for the next start; a missing or damaged one counts as empty. Disks lose bits without a
word, and without a change of any time: so what was hashed long ago is not believed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mdi.checkpoint.parts import PartInfo
from mdi.errors import CheckpointError
from mdi.files import replacing
from mdi.spec.settings_file import parse_json

T = TypeVar("T")


def read_kept(path: Path, take: Callable[[Any], T], nothing: T) -> T:
    """Read the file with `take`, which may fail as reading from JSON does."""
    try:
        return take(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return nothing


def write_kept(path: Path, data: Any, makes_folder: bool = False) -> None:
    """Best effort: a place that cannot be written to will do."""
    with contextlib.suppress(CheckpointError), replacing(path, makes_folder=makes_folder) as file:
        file.write(json.dumps(data, indent=1).encode())


FORMAT_VERSION = 2  # also of what the packed forms of a part are

_SHA256 = re.compile(r"[0-9a-f]{64}")


class PartHashes:
    """Hashes by form and part, in memory."""

    def __init__(self) -> None:
        self._infos: dict[str, dict[str, PartInfo]] = {}

    def get(self, form: str, part: str) -> PartInfo | None:
        """The part's hash in one form: "stored", the name of a type that weights are cast to, or what they are packed in."""
        return self._infos.get(form, {}).get(part)

    def put(self, form: str, info: PartInfo) -> None:
        self._infos.setdefault(form, {})[info.name] = info


class HashCache(PartHashes):
    """`parts.json`: valid as long as sizes and times of the weight files are those it was made for.

    Args:
        path: of the cache.
        weights: the weight files whose parts they are.
        config_hash: of the model.
    """

    def __init__(self, path: Path, weights: Sequence[Path], config_hash: str) -> None:
        super().__init__()
        self._path = path
        files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in weights]
        self._stamp = {"format_version": FORMAT_VERSION, "files": files, "config_hash": config_hash}
        self._infos = read_kept(path, self._taken, {})

    def put(self, form: str, info: PartInfo) -> None:
        if self.get(form, info.name) != info:
            super().put(form, info)
            self._write()

    def _taken(self, data: Any) -> dict[str, dict[str, PartInfo]]:
        if {key: data[key] for key in self._stamp} != self._stamp:
            return {}
        return {
            form: {name: _info(name, entry) for name, entry in entries.items()}
            for form, entries in data["parts"].items()
        }

    def _write(self) -> None:
        parts = {
            form: {name: [info.sha256, info.n_bytes] for name, info in infos.items()}
            for form, infos in self._infos.items()
        }
        write_kept(self._path, {**self._stamp, "parts": parts}, makes_folder=True)


def _info(name: str, entry: Any) -> PartInfo:
    sha256, n_bytes = entry
    if not _SHA256.fullmatch(sha256) or type(n_bytes) is not int:
        raise ValueError("not a hash")
    return PartInfo(name, sha256, n_bytes)


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
