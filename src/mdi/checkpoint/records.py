"""Records of which bytes have which hash, so that they are not hashed again: `parts.json` beside LitGPT's weights, `folders/`
in the cache for other folders, `checked.json` in a node's cache.

They are JSON files that save work for the next start; a missing or damaged one counts as empty. Disks lose bits without a
word, and without a change of any time: so what was hashed long ago is not believed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
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


FORMAT_VERSION = 3  # also of what the packed forms of a part are
BELIEVED_S = 7 * 24 * 3600.0  # of files that a node keeps
N_THREADS = 4  # one reads a gigabyte a second where the processor has instructions for SHA-256

Stamp = tuple[int | str, ...]

_SHA256 = re.compile(r"[0-9a-f]{64}")


class HashRecord:
    """Hashes by key, each with what its file looked like then. Safe for threads. Of several processes the last one to write
    wins; the entries of the others are hashed again.

    Args:
        path: of the file, whose folder need not exist yet; None keeps them in memory.
        stamp: of entries that are found and put without one.
        believed_s: what was hashed longer ago is forgotten.
    """

    def __init__(self, path: Path | None = None, stamp: Stamp = (), believed_s: float = math.inf) -> None:
        self._path, self._stamp, self._believed_s = path, stamp, believed_s
        self._lock = threading.Lock()
        self._kept = self._read()

    def find(self, key: str, stamp: Stamp | None = None) -> PartInfo | None:
        """The hash, if the file has looked like this ever since."""
        with self._lock:
            entry = self._kept.get(key)
        expected = self._stamp if stamp is None else stamp
        return entry.info if entry is not None and entry.stamp == expected and self._is_recent(entry) else None

    def put(self, key: str, info: PartInfo, stamp: Stamp | None = None) -> None:
        """Record what has just been hashed."""
        self._change(key, _Entry(self._stamp if stamp is None else stamp, int(time.time()), info))

    def follow(self, key: str, stamp: Stamp) -> None:
        """The file looks like this by our own doing; when it was hashed does not change."""
        with self._lock:
            entry = self._kept.get(key)
        if entry is not None:
            self._change(key, replace(entry, stamp=stamp))

    def drop(self, key: str) -> None:
        self._change(key, None)

    def _change(self, key: str, entry: _Entry | None) -> None:
        with self._lock:
            kept = self._kept if self._path is None else self._read()
            for some in (self._kept, kept):
                some.pop(key, None)
                if entry is not None:
                    some[key] = entry
            if self._path is not None:
                entries = {name: [e.stamp, e.at_s, *astuple(e.info)] for name, e in kept.items()}
                write_kept(self._path, {"format_version": FORMAT_VERSION, "hashes": entries}, makes_folder=True)

    def _read(self) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {} if self._path is None else read_kept(self._path, _entries, {})
        return {key: entry for key, entry in entries.items() if self._is_recent(entry)}

    def _is_recent(self, entry: _Entry) -> bool:
        if self._believed_s == math.inf:
            return True
        return (
            0 <= time.time() - entry.at_s <= self._believed_s
        )  # a clock that was set back would make it recent for ever


@dataclass(frozen=True)
class _Entry:
    stamp: Stamp
    at_s: int
    info: PartInfo


def _entries(data: Any) -> dict[str, _Entry]:
    if data["format_version"] != FORMAT_VERSION:
        return {}
    return {key: _entry(*entry) for key, entry in data["hashes"].items()}


def _entry(stamp: Any, at_s: Any, name: Any, sha256: Any, n_bytes: Any) -> _Entry:
    if not _SHA256.fullmatch(sha256) or type(n_bytes) is not int or not isinstance(name, str):
        raise ValueError("not a hash")
    return _Entry(tuple(stamp), int(at_s), PartInfo(name, sha256, n_bytes))


def weights_stamp(files: Iterable[Path], config_hash: str) -> Stamp:
    """Names, sizes and times of a model's files. OSError if one is not there."""
    status = [(path.name, path.stat()) for path in files]
    return config_hash, *(field for name, one in status for field in (name, one.st_size, one.st_mtime_ns))


def stamp_of(file: int | Path) -> tuple[int, ...]:
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
