"""Prefixes that stay on the disk of each node: the one owner of their files, which answers a starter's tasks (prefix_tasks).

Blocks whose caches can be cut (pages without a window) have a file for each run of pages; what is behind the last whole run has
a shorter one, of which the newest few stay. The others (states, windows) have a file for each end of a text that is kept. Names
are hashes: of everything that the numbers depend on, of all ids up to the file's end (`memory.page_keys`), of the block, and of
a node's share of it in a group. So files are found whatever the cut, and a node never sees ids. The layout of a file:

    offset  size  field
    0       4     magic "MDIp"
    4       1     version
    5       1     cipher: 1 AES-256-GCM, 2 ChaCha20-Poly1305
    6       8     which key sealed it
    14      12    nonce
    26            sealed, the name as associated data: u32, JSON of so many bytes (type of the caches, first position, type and
                  shape of each array), the arrays

The tag of the seal is the checksum. A file that cannot be opened is removed, and counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import shutil
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil

from mdi.engine.prefix_tasks import FETCH, FETCH_BYTES, FILL, FILLED, FIND, KEEP, NAME, PrefixTask
from mdi.errors import EngineError, MdiError
from mdi.files import replacing
from mdi.kernels.stage_caches import CacheRun, Piece
from mdi.model.caches import PAGE, CacheClass, PageClass, Paged, kind_of
from mdi.model.spec import ModelSpec
from mdi.net.keys import TAG_BYTES, KeyFile, has_fast_aes, mac, new_secret, write_keys

FOLDER = "prefixes"  # in the cache folder
RUN_BYTES = 1 << 20  # of a block's file, at least, where a run need not be too long for that
RUN_PAGES = (8, 32)  # a shorter one makes many files, with a longer one more is computed again where texts part
TAILS_KEPT = 2  # of one run: the last answer may be asked for again
ENDS_KEPT = 4  # ends of one conversation of which states are kept
FREE_BYTES = 1 << 30  # that stay free on the disk
FOREIGN_S = 30 * 24 * 3600.0  # after which files of another key go
WAITING_BYTES = 64 << 20  # that may wait to be written
ROOM_S = 10.0  # that a file of another node waits for room among them
FAILING_S = 60.0  # after a file could not be written, in which no file of another node is taken
BYTES_PER_S = 32 << 20  # written: cards wear out, and readers of the same disk want to read
MEASURED_BYTES = 1 << 20  # with fewer, a reading says nothing about the disk
MOST_WANTED = 1024  # names of files that nodes lack, in one question
RATE_S = 600.0  # after which it is measured again: other programs may have kept it busy

logger = logging.getLogger("mdi")

_MAGIC, _VERSION = b"MDIp", 2
_HEAD = struct.Struct("<4sBB8s12s")
_CIPHERS = {1: "AESGCM", 2: "ChaCha20Poly1305"}
_SIZE = struct.Struct("<I")
_TYPES = {"float32": np.float32, "float16": np.float16, "uint16": np.uint16, "int8": np.int8}


class Caches(Protocol):
    """Of a stage: kernels.stage_caches.StageCaches."""

    @property
    def cache_type(self) -> str: ...
    @property
    def shares(self) -> Mapping[int, str]: ...
    def classes_of_blocks(self) -> dict[int, CacheClass]: ...
    def export(self, seq_id: int, start: int, stop: int, wanted: Collection[int] | None = None) -> CacheRun: ...
    def fill(self, seq_id: int, run: CacheRun) -> None: ...
    def free(self, seq_id: int) -> None: ...


def run_pages(spec: ModelSpec, cache_type: str) -> int:
    """Pages of a run, the same on all nodes: the largest block's file has RUN_BYTES, within RUN_PAGES."""
    sizes = [kind.block_bytes(cache_type) for block in spec.blocks if isinstance(kind := kind_of(block), Paged)]
    wanted = -(-RUN_BYTES // max(sizes, default=RUN_BYTES))
    return min(max(1 << (wanted - 1).bit_length(), RUN_PAGES[0]), RUN_PAGES[1])


class Secrets:
    """The secrets of a node from which keys for its files are made: of the cluster key, else of a file of its own.

    Raises:
        UsageError: there is no cluster key, and a file can neither be read nor written.
    """

    def __init__(self, folder: Path, keys: KeyFile | None) -> None:
        path = folder / "key"
        if keys is None and not path.exists():
            write_keys(path, (new_secret(),), replaces=False)
        self._keys = KeyFile(path) if keys is None else keys  # another node may have made it just now

    def all(self) -> list[bytes]:
        """The one that seals first; those of earlier keys open files."""
        return [mac(one, "kept prefixes") for one in self._keys.keys]

    def owner_folder(self, realm: str, owner: str) -> str:
        """Name of an owner's folder; who has no key cannot tell whose it is.

        Args:
            realm: whose owners are listed together (OWNERS).
        """
        secret = self.all()[0]
        return f"{self._hash(secret, 'realm', realm)}-{self._hash(secret, 'owner', realm, owner)}"

    @staticmethod
    def _hash(secret: bytes, label: str, *parts: str) -> str:
        return mac(secret, label, *(part.encode() for part in parts)).hex()[:16]


def kept_files(cache_dir: Path, limit_bytes: int, keys: KeyFile | None) -> KeptFiles | None:
    """The files of a node; None if it is to keep none, or cannot.

    Args:
        keys: of the cluster.
    """
    if not limit_bytes:
        return None
    folder = cache_dir / FOLDER
    try:
        return KeptFiles(folder, limit_bytes, Secrets(folder, keys))
    except MdiError as e:
        logger.warning("prefixes are not kept on this disk: %s", e)
        return None


class _Written(NamedTuple):
    """A file to write; then all but the newest `n_earlier` of some others go."""

    path: Path
    data: bytes
    earlier: list[Path]
    n_earlier: int


class _UnreadableError(EngineError):
    """A file that is not what it should be; it is removed."""


class _Room:
    """Memory for one file at a time, sealed and opened: to take it anew for each costs more than to decipher."""

    def __init__(self) -> None:
        self._memory = [bytearray(), bytearray()]

    def of(self, is_opened: bool, n_bytes: int) -> memoryview:
        """What was there is gone."""
        if len(self._memory[is_opened]) < n_bytes:
            self._memory[is_opened] = bytearray(n_bytes)
        return memoryview(self._memory[is_opened])[:n_bytes]


class KeptFiles:
    """The files of one node, which may share the folder with other nodes and runs.

    Args:
        folder: of all of them, made when the first is written.
        limit_bytes: of all files there together.
        free: bytes that are free on the disk; measured by default.
        bytes_per_s: that are written at most.

    Attributes:
        secrets: that seal them.
    """

    def __init__(
        self, folder: Path, limit_bytes: int, secrets: Secrets, free: Callable[[], int] | None = None,
        bytes_per_s: float = BYTES_PER_S,
    ) -> None:  # fmt: skip
        self._folder, self._limit_bytes, self.secrets = folder, limit_bytes, secrets
        self._free = free or (lambda: shutil.disk_usage(folder).free)
        self._bytes_per_s = bytes_per_s
        self._n_read = 0  # bytes so far
        self._failed: set[int] = set()  # sequences that could not be filled, until somebody asks (FILLED)
        self._wanted: set[str] = set()  # names of files that lacked here in the last round of FETCH
        self._rate: tuple[float, float] | None = None  # bytes per second of the last large reading, and when that was
        self._queue: queue.SimpleQueue[_Written | None] = queue.SimpleQueue()
        self._waiting: dict[Path, bytes] = {}  # of each file that is to be written, not sealed yet; they count as there
        self._failed_s = -FAILING_S  # by the monotonic clock, when the last file could not be written
        self._known_bytes: int | None = None  # of all files; None: they have to be counted
        self._uncounted_bytes = 0  # written since they were counted: others may have written as many
        self._ending, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Condition()  # told when nothing waits any more
        self._disk = threading.Lock()  # of what is counted: the thread that computes removes, too

    # Of the thread that computes

    def answer(self, task: PrefixTask, caches: Caches) -> PrefixTask:
        """Do this node's part of a task. Never raises for what is on the disk."""
        try:
            if task.kind == FIND:
                found = replace(task, ends=f"{task.possible & self.ends(task, caches):x}")
                some = f"{int(task.some, 16) | self._some(task, caches):x}"
                return replace(found, some=some, row_read_s=max(found.row_read_s, self._row_read_s(found, caches)))
            if task.kind == FETCH:
                return self._fetched(task, caches)
            if task.kind == FILL:
                self._failed.add(task.seq_id)  # if the disk fails, too
                if is_filled := self._fill(task, caches):
                    self._failed.discard(task.seq_id)
                return replace(task, is_done=task.is_done and is_filled)
            if task.kind == FILLED:
                is_filled = task.seq_id not in self._failed
                self._failed.discard(task.seq_id)
                return replace(task, is_done=task.is_done and is_filled)
            if task.kind == KEEP:
                return replace(task, is_done=self._keep(task, caches) and task.is_done)
            self._remove_others(task)
        except OSError as e:
            logger.debug("kept prefixes: %s", e)
            return replace(task, ends="0", is_done=task.kind == KEEP)  # it would fail again
        return task

    def ends(self, task: PrefixTask, caches: Caches) -> int:
        """The ends, of those that are possible, of which all files are here."""
        pages, folder, (cut, whole) = task.pages, self._folder / task.owner, _by_cut(caches)
        if not cut and not whole:
            return task.possible
        if not self._waiting and not folder.is_dir():
            return 0
        n = self._n_pages(folder, cut, pages, task.run_pages)
        found = task.possible & ((1 << n) - 1)
        for i in range(n) if whole else ():
            if found >> i & 1 and not self._all_there(folder, whole, pages[i]):
                found &= ~(1 << i)
        return found

    def _some(self, task: PrefixTask, caches: Caches) -> int:
        """Ends of which there are files of the first or the last block here: after another cut a node lacks some of a text.
        Where there are blocks with ends of their own, these count.
        """
        folder, (cut, whole) = self._folder / task.owner, _by_cut(caches)
        found, is_empty = 0, not self._waiting and not folder.is_dir()
        for block in {*cut[:1], *cut[-1:]} if not whole and not is_empty else ():
            found |= (1 << self._n_pages(folder, [block], task.pages, task.run_pages)) - 1
        for block in {*whole[:1], *whole[-1:]}:
            found |= sum(1 << i for i, key in enumerate(task.pages) if self._is_there(_path(folder, key, block)))
        return found & task.possible

    def _fetched(self, task: PrefixTask, caches: Caches) -> PrefixTask:
        """Take the files that are missing here from those that come with a task, and add what is here of what others want.
        They travel sealed: a node without the same key takes none. Another thread writes them, and they are read meanwhile.
        """
        folder, n = self._folder / task.owner, task.stop // PAGE
        files, wanted, (cut, whole) = task.attached, set(task.wanted.split()), _by_cut(caches)
        paths = [path for one in (*cut, *(whole if task.is_end else ())) for path in self._paths(task, n, one)]
        there = {path.name for path in paths if self._is_there(path)}
        missing = {path.name for path in paths} - there
        for name in self._wanted & there:  # it has come otherwise
            files.pop(name, None)
            wanted.discard(name)
        self._wanted = missing
        try:
            for name in missing & files.keys():
                data = bytes(self._opened(name, memoryview(files.pop(name)), _Room()))
                self._await_room()
                self._put(_Written(folder / name, data, [], 0))
                missing.discard(name)
                wanted.discard(name)
        except MdiError as e:
            logger.info("a file from another node is not taken: %s", e)
            return replace(task, files="", is_done=False)
        n_free = FETCH_BYTES - sum(map(len, files.values()))
        for path in [folder / name for name in sorted(wanted - missing - files.keys())]:
            if (waiting := self._waiting.get(path)) is not None:
                found = self._sealed(path.name, waiting)
            elif path.exists() and path.stat().st_size <= n_free:
                found = path.read_bytes()
            else:
                continue
            if len(found) <= n_free:
                files[path.name] = found
                n_free -= len(found)
        more = sorted(missing - wanted)[: max(0, MOST_WANTED - len(wanted))]
        return task.with_files(sorted(wanted.union(more)), files)

    def _n_pages(self, folder: Path, blocks: Sequence[_Block], pages: Sequence[bytes], run: int) -> int:
        """Pages from the first one on that are in the files of all these blocks."""
        if not blocks:
            return len(pages)
        n = 0
        while n + run <= len(pages) and self._all_there(folder, blocks, pages[n + run - 1]):
            n += run
        tail = range(min(n + run, len(pages)), n, -1)
        return next((end for end in tail if self._all_there(folder, blocks, pages[end - 1])), n)

    def _all_there(self, folder: Path, blocks: Sequence[_Block], key: bytes) -> bool:
        return all(self._is_there(_path(folder, key, block)) for block in blocks)

    def _is_there(self, path: Path) -> bool:
        return path in self._waiting or path.exists()

    def _paths(self, task: PrefixTask, n: int, block: _Block) -> list[Path]:
        """The files of a block for the first `n` pages of a task; what is behind the last whole run may be in a longer one."""
        pages, run, folder = task.pages, task.run_pages, self._folder / task.owner
        if not block.is_cut:
            return [_path(folder, pages[n - 1], block)]
        found = []
        for begin in range(0, n, run):
            longest, shortest = min(begin + run, len(pages)), min(begin + run, n)
            paths = [_path(folder, pages[end - 1], block) for end in range(longest, shortest - 1, -1)]
            found.append(next(filter(self._is_there, paths), paths[-1]))
        return found

    def _fill(self, task: PrefixTask, caches: Caches) -> bool:
        caches.free(task.seq_id)
        blocks = caches.classes_of_blocks()
        if not blocks:
            return True
        begin, n_before = time.monotonic(), self._n_read
        pieces = _FromFiles(self, task, caches)
        pieces.announce()
        try:
            caches.fill(task.seq_id, CacheRun(0, task.stop, caches.cache_type, pieces))
        except EngineError as e:
            logger.info("a kept prefix cannot be used: %s", e)
            return False
        if (n := self._n_read - n_before) >= MEASURED_BYTES:
            self._rate = n / max(time.monotonic() - begin, 1e-6), time.monotonic()
        return True

    def _row_read_s(self, task: PrefixTask, caches: Caches) -> float:
        """Seconds to read a position of the longest end of a task, as fast as the last reading was; 0: nobody knows."""
        n = task.possible.bit_length()
        if self._rate is None or not n or time.monotonic() - self._rate[1] > RATE_S:
            return 0.0
        cut, whole = _by_cut(caches)
        paths = [path for one in (*cut, *whole) for path in self._paths(task, n, one)]
        n_bytes = sum(path.stat().st_size for path in paths if path not in self._waiting)
        return n_bytes / self._rate[0] / (n * PAGE)

    def _keep(self, task: PrefixTask, caches: Caches) -> bool:
        """Have what is missing of a run written; False: too much waits already, to be asked again."""
        pages, folder, (cut, whole) = task.pages, self._folder / task.owner, _by_cut(caches)
        n = task.stop // PAGE - 1
        for block in (*cut, *(whole if task.is_end else ())):
            path = _path(folder, pages[n], block)
            if self._is_there(path):
                continue
            if self._waiting_bytes >= WAITING_BYTES:
                return False
            first = task.start if block.is_cut else 0
            try:
                piece = caches.export(task.seq_id, first, task.stop, (block.number,)).blocks[block.number]
            except EngineError as e:  # it cannot be cut to the end of a page any more
                logger.debug("not kept: %s", e)
                return True
            earlier = [_path(folder, page, block) for page in pages[first // PAGE : n]]
            n_kept = TAILS_KEPT if block.is_cut else ENDS_KEPT
            self._put(_Written(path, _packed(piece, caches.cache_type), earlier, n_kept - 1))
        return True

    @property
    def _waiting_bytes(self) -> int:
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def _await_room(self) -> None:
        """For a file of another node. Raises EngineError if the disk takes none."""
        with self._lock:
            has_room = self._lock.wait_for(lambda: self._waiting_bytes < WAITING_BYTES, ROOM_S)
        if not has_room or time.monotonic() - self._failed_s < FAILING_S:
            raise EngineError("this disk does not take it")

    def _remove_others(self, task: PrefixTask) -> None:
        """Remove folders of owners of the same realm that are not among those of the task."""
        own = task.owner.split()
        if own and self._folder.is_dir():
            for folder in self._folder.glob(f"{own[0].partition('-')[0]}-*"):
                if folder.name not in own:
                    shutil.rmtree(folder, ignore_errors=True)
                    self._count_again()

    def _count_again(self) -> None:
        with self._disk:
            self._known_bytes = None

    def _put(self, one: _Written) -> None:
        with self._lock:
            self._waiting[one.path] = one.data
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="kept-prefixes", daemon=True)
                self._thread.start()
        self._queue.put(one)

    def read(self, path: Path, cache_type: str, room: _Room | None = None) -> Piece:
        """What a file has, in memory of `room`. Raises EngineError; the file is removed if it is not what it should be."""
        room = room or _Room()
        if (waiting := self._waiting.get(path)) is not None:
            opened = room.of(True, len(waiting))
            opened[:] = waiting
            return _unpacked(opened, cache_type)
        try:
            with path.open("rb", buffering=0) as file:
                data = room.of(False, os.fstat(file.fileno()).st_size)
                data = data[: file.readinto(data)]
        except OSError as e:
            raise EngineError(f"{path.name}: {e.strerror or e}") from None
        try:
            piece = _unpacked(self._opened(path.name, data, room), cache_type)
        except _UnreadableError as e:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise EngineError(f"{path.name} is removed: {e}") from None
        with contextlib.suppress(OSError):
            os.utime(path)  # used just now
        self._n_read += len(data)
        return piece

    # Of the thread that writes

    def _write_all(self) -> None:
        try:
            self.sweep()
        except OSError as e:
            logger.debug("kept prefixes: %s", e)
        is_told = False
        while (item := self._queue.get()) is not None and not self._closed.is_set():
            path, data = item.path, item.data
            try:
                self._write(path, self._sealed(path.name, data))
                _keep_newest(item.earlier, item.n_earlier)
                self._failed_s = -FAILING_S
            except Exception as e:  # of one file; the thread goes on with the next one
                self._count_again()
                self._failed_s = time.monotonic()
                if not is_told:
                    logger.warning("prefixes are not kept on this disk: %s", e)
                is_told = True
            with self._lock:
                del self._waiting[path]
                self._lock.notify_all()
            self._ending.wait(len(data) / self._bytes_per_s)

    def _write(self, path: Path, sealed: bytes) -> None:
        with self._disk:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(len(sealed))
            with replacing(path) as file:
                file.write(sealed)
            if self._known_bytes is not None:
                self._known_bytes += len(sealed)
            self._uncounted_bytes += len(sealed)

    def _make_room(self, n_bytes: int) -> None:
        """Remove the files that were used longest ago, until there is room. Raises EngineError if there is none."""
        lacks = n_bytes + FREE_BYTES - self._free()
        if self._known_bytes is None or self._uncounted_bytes > self._limit_bytes // 16:
            self._known_bytes, self._uncounted_bytes = sum(size for _, size, _ in self.files()), 0
        lacks = max(lacks, self._known_bytes + n_bytes - self._limit_bytes)
        for path, size, _ in sorted(self.files(), key=lambda one: one[2]) if lacks > 0 else ():
            if lacks <= 0:
                break
            if path.suffix == ".part":
                continue  # another process writes it, or `sweep` removes it
            path.unlink(missing_ok=True)
            lacks -= size
            self._known_bytes -= size
        if lacks > 0:
            raise EngineError(f"no room for files of {n_bytes} bytes in {self._folder}")

    def files(self) -> Iterator[tuple[Path, int, float]]:
        """All files of prefixes there: path, bytes, and when it was used last, in seconds since 1970."""
        return files_in(self._folder)

    def sweep(self) -> None:
        """Remove files of another version, those that were never finished, and those that no key of this node has opened for
        long: others on this machine may have another key.
        """
        known = {_key_id(secret) for secret in self.secrets.all()}
        for path, _, used_s in self.files():
            if path.suffix == ".part":
                _unlink_unfinished(path)
                continue
            with contextlib.suppress(OSError):  # of one file
                with open(path, "rb") as file:
                    head = file.read(_HEAD.size)
                magic, version, _, key_id, _ = _HEAD.unpack(head if len(head) == _HEAD.size else bytes(_HEAD.size))
                is_foreign = key_id not in known and time.time() - used_s > FOREIGN_S
                if (magic, version) != (_MAGIC, _VERSION) or is_foreign:
                    path.unlink(missing_ok=True)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, as far as that goes in so much time, and then nothing more. Harmless if repeated."""
        self._ending.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._closed.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written that waits."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting, timeout_s)

    def _sealed(self, name: str, data: bytes) -> bytes:
        secret, nonce, cipher = self.secrets.all()[0], os.urandom(12), 1 if has_fast_aes() else 2
        head = _HEAD.pack(_MAGIC, _VERSION, cipher, _key_id(secret), nonce)
        return head + cipher_named(cipher, secret).encrypt(nonce, data, name.encode())

    def _opened(self, name: str, data: memoryview, room: _Room) -> memoryview:
        from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm

        if len(data) < _HEAD.size:
            raise _UnreadableError("it is cut off")
        magic, version, cipher, key_id, nonce = _HEAD.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION) or cipher not in _CIPHERS:
            raise _UnreadableError("it is of another version, or no file of ours")
        for secret in self.secrets.all():
            if _key_id(secret) == key_id:
                opened = room.of(True, max(0, len(data) - _HEAD.size - TAG_BYTES))
                try:
                    cipher_named(cipher, secret).decrypt_into(nonce, data[_HEAD.size :], name.encode(), opened)
                    return opened
                except (InvalidTag, ValueError):
                    raise _UnreadableError("it is damaged") from None
                except UnsupportedAlgorithm:
                    raise _UnreadableError("this machine does not have its cipher") from None
        raise _UnreadableError("it was sealed with another key")


class _FromFiles(Mapping[int, Piece]):
    """The pieces of all blocks of a stage, each read when it is asked for, into the memory of the one before."""

    def __init__(self, files: KeptFiles, task: PrefixTask, caches: Caches) -> None:
        self._files, self._task, self._type = files, task, caches.cache_type
        self._blocks = {one.number: one for blocks in _by_cut(caches) for one in blocks}
        self._room, self._arrays = _Room(), list[np.ndarray]()

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks  # without reading it

    def _paths(self, block: int) -> list[Path]:
        return self._files._paths(self._task, self._task.stop // PAGE, self._blocks[block])  # noqa: SLF001 (of this module)

    def announce(self) -> None:
        """Let the disk read all of them, while those that have come are deciphered."""
        for path in (path for block in self for path in self._paths(block) if hasattr(os, "posix_fadvise")):
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def __getitem__(self, block: int) -> Piece:
        paths, n_run = self._paths(block), self._task.run_pages * PAGE
        if not self._blocks[block].is_cut:
            return self._files.read(paths[0], self._type, self._room)
        for begin, path in zip(range(0, self._task.stop, n_run), paths, strict=True):
            piece, n = self._files.read(path, self._type, self._room), min(n_run, self._task.stop - begin)
            if not begin and _forms(piece.arrays) != _forms(self._arrays):
                self._arrays = [np.empty((self._task.stop, *one.shape[1:]), one.dtype) for one in piece.arrays]
            is_other = piece.first != begin or _forms(piece.arrays) != _forms(self._arrays)
            if is_other or any(len(one) < n for one in piece.arrays):
                raise EngineError("a file of other positions or shapes")
            for whole, one in zip(self._arrays, piece.arrays, strict=True):
                whole[begin : begin + n] = one[:n]
        return Piece(0, tuple(self._arrays))


def _forms(arrays: Sequence[np.ndarray]) -> list[tuple[Any, ...]]:
    """Of their rows."""
    return [(one.dtype, one.shape[1:]) for one in arrays]


def files_in(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """The files of prefixes in a folder: path, bytes, and when each was used last, in seconds since 1970."""
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where) / name
            with contextlib.suppress(OSError):  # removed meanwhile
                stat = path.lstat()
                if NAME.fullmatch(name) or name.endswith(".part"):
                    yield path, stat.st_size, stat.st_mtime


class _Block(NamedTuple):
    """What a node's cache has of a block: its number in the model, its share, and whether a text can be cut anywhere in it."""

    number: int
    share: str
    is_cut: bool


def _by_cut(caches: Caches) -> tuple[list[_Block], list[_Block]]:
    """Blocks that can be cut anywhere, and the others."""
    blocks = [
        _Block(i, caches.shares.get(i, ""), isinstance(one, PageClass) and one.window is None)
        for i, one in caches.classes_of_blocks().items()
    ]
    return [one for one in blocks if one.is_cut], [one for one in blocks if not one.is_cut]


def _path(folder: Path, key: bytes, block: _Block) -> Path:
    """Of what a block has up to the end of the page with this key."""
    name = key + _SIZE.pack(block.number) + block.share.encode()
    return folder / f"{hashlib.blake2b(name, digest_size=20).hexdigest()}.kv"


def _keep_newest(paths: Sequence[Path], n: int) -> None:
    there = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            there.append((path.stat().st_mtime, path))
    for _, path in sorted(there)[: max(0, len(there) - n)]:
        path.unlink(missing_ok=True)


def _unlink_unfinished(path: Path) -> None:
    """If who wrote it has ended, see files.replacing."""
    number = path.name.rpartition(".kv.")[2].removesuffix(".part")
    if number.isdigit() and not psutil.pid_exists(int(number)):
        path.unlink(missing_ok=True)


def _key_id(secret: bytes) -> bytes:
    return mac(secret, "key id")[:8]


def cipher_named(number: int, secret: bytes) -> Any:
    """Raises UnsupportedAlgorithm (of cryptography): this machine does not have it."""
    from cryptography.hazmat.primitives.ciphers import aead

    return getattr(aead, _CIPHERS[number])(secret)


def _packed(piece: Piece, cache_type: str) -> bytes:
    """A piece as bytes."""
    arrays = [[one.dtype.name, one.shape] for one in piece.arrays]
    head = json.dumps({"cache_type": cache_type, "first": piece.first, "arrays": arrays}).encode()
    return b"".join([_SIZE.pack(len(head)), head, *(one.tobytes() for one in piece.arrays)])


def _unpacked(data: memoryview, cache_type: str) -> Piece:
    """The reverse. What is sealed with our key was made here: only the type can be another one."""
    try:
        (n,) = _SIZE.unpack_from(data)
        head = json.loads(bytes(data[_SIZE.size : _SIZE.size + n]))
        if head["cache_type"] != cache_type:
            raise _UnreadableError("it has numbers of another type")
        arrays, at = [], _SIZE.size + n
        for name, shape in head["arrays"]:
            count = int(np.prod(shape))
            arrays.append(np.frombuffer(data, _TYPES[name], count, at).reshape(shape))
            at += arrays[-1].nbytes
        return Piece(int(head["first"]), tuple(arrays))
    except (ValueError, KeyError, TypeError, struct.error) as e:
        raise _UnreadableError(f"it cannot be read: {e}") from None
