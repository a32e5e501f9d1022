"""Parts from other nodes, on disk under their sha256. Does not use the network: a function gives the bytes."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mdi.cancel import Cancel
from mdi.checkpoint.chunks import PartFile
from mdi.checkpoint.disk_space import free_bytes
from mdi.checkpoint.parts import Part, PartInfo
from mdi.checkpoint.records import BELIEVED_S, HashRecord, in_threads, stamp_of
from mdi.errors import CheckpointError, Code
from mdi.files import lock_file
from mdi.model.plain import ModelConfig
from mdi.spec.settings_file import parse_json
from mdi.units import size

PIECE_BYTES = 1 << 20

logger = logging.getLogger("mdi")

_MARK = "use-"
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A process or machine that is short of something for the moment: this says nothing of the file.
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


def _coming(message: str) -> CheckpointError:
    """After it the sender must ask again which parts are missing."""
    return CheckpointError(message, code=Code.BUSY)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _is_taken(path: Path) -> bool:
    """Whether a process writes to a file just now, or has it mapped (see weightfile.map_bytes). Raises OSError."""
    with open(path, "r+b") as file:
        try:
            return not lock_file(file.fileno())
        except OSError:  # a disk without locks
            return False


def _remove_oldest(files: list[tuple[Path, int, float]], n_bytes: float, spares_mapped: bool = True) -> int:
    """Remove the least recently used of some files, but none that is written to; returns how many bytes were removed.

    Args:
        files: as `BlockStore.files` has them.
        n_bytes: that are to go at least.
        spares_mapped: also leave those that a process has mapped, whose bytes stay on the disk until it ends.
    """
    removed = 0
    for path, n, _ in sorted(files, key=lambda file: file[2]):
        if removed >= n_bytes:
            break
        with contextlib.suppress(OSError):  # Windows cannot remove mapped files
            if not ((spares_mapped or path.suffix == ".part") and _is_taken(path)):
                path.unlink()
                removed += n
    return removed


@contextlib.contextmanager
def _mark(directory: Path, shas: Collection[str]) -> Iterator[None]:
    """A file that tells other processes which parts are in use. Its lock ends with the process."""
    path, made = directory / f"{_MARK}{os.getpid()}-{secrets.token_hex(4)}", directory / f".{secrets.token_hex(8)}"
    file: int | None = None
    try:
        if shas:
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
                file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                os.write(file, json.dumps(sorted(shas)).encode())
                lock_file(file)
                os.replace(made, path)  # nobody sees it without its lock
        yield
    finally:
        for one in (made, path) if file is not None else ():
            with contextlib.suppress(OSError):
                one.unlink()
        if file is not None:
            os.close(file)


def _marked(directory: Path) -> Iterator[set[str]]:
    """The parts in the marks of processes that live; marks of others are removed."""
    for path in directory.glob(f"{_MARK}*"):
        with contextlib.suppress(OSError, ValueError, TypeError), open(path, "rb") as file:
            if lock_file(file.fileno(), is_shared=True):
                path.unlink()
            else:
                yield set(map(str, parse_json(file.read())))


class BlockStore:
    """Files `<sha256>.safetensors` in one directory; `<sha256>.part` is one that has not come whole yet.

    A file under its final name was correct when it came; `has` checks whether it still is. Several parts can be
    received at a time, in as many threads. The directory is made when the first part comes. Several processes may have the same
    directory: who writes to a `.part` has locked it, and another one hears that the part is coming.

    Args:
        limit_bytes: limit for all files together, see `free_space`; None is the usual one: half of what these files and the
            free space of the disk are together, which refuses nothing.
    """

    def __init__(self, directory: str | Path, limit_bytes: int | None = None) -> None:
        self.directory = Path(directory)
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._coming: set[str] = set()
        self._in_use: list[Collection[str]] = []
        self.checked = HashRecord(self.directory / "checked.json", believed_s=BELIEVED_S)

    def has(self, sha256: str, cancel: Cancel | None = None) -> bool:
        """Whether the part is here, and what its name says. A file that is not is removed, so that the part can come again.

        A file is hashed again when it looks otherwise than it did then, and when that was long ago. One that the disk cannot
        read counts as missing, and stays until the part has come again.

        Args:
            cancel: looked at again and again while a file is hashed.

        Raises:
            CheckpointError: this process may open no more files, or there is no memory: nobody knows.
        """
        path = self.path(sha256)
        digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
        try:
            with open(path, "rb", buffering=0) as file:
                stamp = stamp_of(file.fileno())
                if self.checked.find(sha256, stamp) is not None:
                    return True
                while n_bytes := file.readinto(buffer):
                    if cancel is not None:
                        cancel.check()
                    digest.update(buffer[:n_bytes])
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as e:
            if e.errno in _SHORT:
                raise CheckpointError(
                    f"{path} cannot be checked: {e.strerror}; end other programs, or allow more open files (ulimit -n), and "
                    "try again"
                ) from None
            logger.warning("%s cannot be read, and has to come again: %s; check the disk", path, e.strerror or e)
            return False
        if digest.hexdigest() == sha256:
            self.checked.put(sha256, PartInfo("", sha256, stamp[0]), stamp)
            return True
        logger.warning("%s was damaged on the disk and is removed", path)
        self.checked.drop(sha256)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def have(
        self, shas: Collection[str], cancel: Cancel | None = None, on_part: Callable[[], None] = lambda: None
    ) -> set[str]:  # fmt: skip
        """The parts of a list that are here, see `has`; a few are hashed at a time.

        Args:
            on_part: called after each that was looked for.
        """

        def look(sha256: str) -> bool:
            is_here = self.has(sha256, cancel)
            on_part()
            return is_here

        found = in_threads(functools.partial(look, sha256) for sha256 in shas)
        return {sha256 for sha256, is_here in zip(shas, found, strict=True) if is_here}

    def path(self, sha256: str) -> Path:
        """The path of the part. Raises CheckpointError if this is not a sha256 (it may come from the network)."""
        if not _SHA256.fullmatch(sha256):
            raise CheckpointError(f"{sha256!r} is not a sha256 (64 hexadecimal digits)")
        return self.directory / f"{sha256}.safetensors"

    def pieces(self, sha256: str) -> Iterator[bytes]:
        """The bytes of a part that is here."""
        with open(self.path(sha256), "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def partial_bytes(self, sha256: str) -> int:
        """How many bytes of a part an interrupted transfer left."""
        try:
            return self._partial(sha256).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def parts(self) -> tuple[str, ...]:
        """The sha256 of every part that is here whole."""
        try:
            return tuple(sorted(p.stem for p in self.directory.glob("*.safetensors") if _SHA256.fullmatch(p.stem)))
        except OSError:
            return ()

    def free_bytes(self) -> int:
        return free_bytes(self.directory)

    def free_space(self, n_bytes: int, keep: Collection[str]) -> int:
        """Free space for `n_bytes` more within the limit: remove the least recently used files.

        Args:
            keep: sha256 of parts, whole or not, that are not removed in any case.

        Returns:
            How many bytes were removed. The usual limit removes nothing that a process has mapped, and may be exceeded.

        Raises:
            CheckpointError: the files to keep and the new ones exceed the limit that was given; nothing was removed.
                Code "disk" if they would not without what is in use.
        """
        with self._lock:  # what comes into use now is looked for afterwards
            return self._free_space(n_bytes, keep)

    def remove(self, shas: Collection[str] | None = None, n_bytes: float = math.inf) -> int:
        """Remove parts, whole or not, that no process uses, the least recently used first.

        Args:
            shas: of parts that may go; None is all.
            n_bytes: that are to go at least, as far as there are so many.

        Returns:
            How many bytes were removed.
        """
        with self._lock:
            used = self._used()
            files = [f for f in self.files() if f[0].stem not in used and (shas is None or f[0].stem in shas)]
            return _remove_oldest(files, n_bytes)

    @contextlib.contextmanager
    def in_use(self, shas: Collection[str]) -> Iterator[None]:
        """Within it, neither this process nor another one removes any of these parts, whole or not, for whom ever.

        `shas` may grow meanwhile; what it grows by is safe from other processes once it is mapped.
        """
        with self._lock:
            self._in_use.append(shas)
        try:
            with _mark(self.directory, shas):
                yield
        finally:
            with self._lock:
                del self._in_use[next(i for i, one in enumerate(self._in_use) if one is shas)]

    def _used(self) -> set[str]:
        """Parts that come just now or are in use, here or in another process."""
        return self._coming.union(*self._in_use, *_marked(self.directory))

    def _free_space(self, n_bytes: int, keep: Collection[str]) -> int:
        used = self._used().difference(keep)
        files = self.files()
        own = sum(n for _, n, _ in files)
        others = [f for f in files if f[0].stem not in keep and f[0].stem not in used]
        if self.limit_bytes is None:
            excess = own + n_bytes - (own + self.free_bytes()) // 2
            return _remove_oldest(others, excess) if excess > 0 else 0
        limit_bytes = self.limit_bytes
        kept = sum(n for path, n, _ in files if path.stem in keep)
        if kept + n_bytes > limit_bytes:
            raise CheckpointError(
                f"the weights of this run take {size(kept + n_bytes)} in {self.directory}, which may hold "
                f"{size(limit_bytes)}: allow more with --cache-size, or give this node fewer blocks"
            )
        busy_bytes = sum(n for path, n, _ in files if path.stem in used)
        if kept + busy_bytes + n_bytes > limit_bytes:
            busy = CheckpointError(
                f"the weights of this run take {size(kept + n_bytes)} in {self.directory}, which may hold {size(limit_bytes)}, "
                f"but other runs are loading {size(busy_bytes)} there: allow more with --cache-size, or start it again later"
            )
            busy.code = Code.DISK
            raise busy
        return _remove_oldest(others, own + n_bytes - limit_bytes, spares_mapped=False)

    def files(self) -> list[tuple[Path, int, float]]:
        """All parts, whole or not: path, bytes, when it was used last."""
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in self.directory.iterdir():
                if path.suffix in (".safetensors", ".part") and _SHA256.fullmatch(path.stem):
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        found.append((path, status.st_size, max(status.st_atime, status.st_mtime)))
        return found

    def receive(
        self, info: Part, offset: int, read: Callable[[int], bytes], on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Stream the bytes of a part from `offset` on to the disk, and check them.

        Args:
            info: the expected part.
            offset: where in the part the bytes start; at most `partial_bytes`.
            read: gives at most so many bytes, b"" at the end. Its exceptions pass through; received bytes are kept.
            on_bytes: called with the size of each written piece.

        Raises:
            CheckpointError: bytes are missing (received ones are kept), do not match the sha256, or the disk is full
                (received bytes are removed); code BUSY if it is coming already, to this process or another one, or has just
                come or been lost.
        """
        with self._alone(info):
            if self.has(info.sha256):
                raise _coming(f"{info.name} is here already")
            self._receive_alone(info, offset, read, on_bytes)

    @contextlib.contextmanager
    def _alone(self, info: Part) -> Iterator[None]:
        """One transfer of a part at a time: one that was cut off may not have noticed yet when the next one begins."""
        with self._lock:
            if info.sha256 in self._coming:
                raise _coming(f"{info.name} is being received already")
            self._coming.add(info.sha256)
        try:
            yield
        finally:
            with self._lock:
                self._coming.discard(info.sha256)

    def _receive_alone(
        self, info: Part, offset: int, read: Callable[[int], bytes], on_bytes: Callable[[int], None] | None
    ) -> None:
        partial = self._partial(info.sha256)
        with self._locked(info, partial) as (file, is_locked):
            have = os.fstat(file.fileno()).st_size
            is_here = self.has(info.sha256)  # another process may just have had it
            if is_here or not 0 <= offset <= min(have, info.n_bytes):
                if is_here or not have:
                    self._drop(partial, file)
                where = f"cannot continue at byte {offset} of {info.n_bytes}: {have} bytes of it are stored"
                raise _coming(f"{info.name} {'is here already' if is_here else where}")
            with self._disk(info):
                digest = self._resume(file, offset)
            self._receive(file, digest, info, offset, read, on_bytes)
            with self._disk(info):
                os.fsync(file.fileno())
            if (found := digest.hexdigest()) != info.sha256:
                self._drop(partial, file)
                raise CheckpointError(
                    f"the bytes of {info.name} are not the ones expected: sha256 {found}, expected {info.sha256}"
                )
            if sys.platform == "win32":  # an open file cannot be renamed
                file.close()
            self._keep(partial, info, is_locked)

    @contextlib.contextmanager
    def _locked(self, info: Part, partial: Path) -> Iterator[tuple[BinaryIO, bool]]:
        """The open file of a part that has not come whole, which no other process writes to; and whether that is sure: not on a
        disk without locks. Raises CheckpointError BUSY: another process writes to it, or has just renamed or removed it.
        """
        with self._disk(info):
            self.directory.mkdir(parents=True, exist_ok=True)
            file: BinaryIO = open(os.open(partial, _OPEN, 0o666), "r+b", buffering=0)  # noqa: SIM115 - closed below
        with file:
            try:
                is_locked = lock_file(file.fileno())
            except OSError:
                yield file, False
                return
            if not is_locked or not _is_at(file, partial):
                raise _coming(f"{info.name} is being received by another process")
            yield file, True

    @staticmethod
    def _drop(partial: Path, file: BinaryIO) -> None:
        if sys.platform == "win32":
            file.close()
        with contextlib.suppress(OSError):
            partial.unlink()

    def _keep(self, partial: Path, info: Part, is_locked: bool) -> None:
        """A whole file becomes a part, which is hashed when it is used if another process may have written to it."""
        try:
            if is_locked:
                self.take(partial, info)
            else:
                with self._disk(info):
                    os.replace(partial, self.path(info.sha256))
        except CheckpointError:
            if partial.exists():
                raise
            raise _coming(f"{info.name} was taken or removed by another process") from None

    def take(self, path: Path, info: Part) -> None:
        """A whole file on the same disk, hashed just now, becomes a part of this store."""
        with self._disk(info):
            os.replace(path, self.path(info.sha256))
            self.checked.put(
                info.sha256, PartInfo(info.name, info.sha256, info.n_bytes), stamp_of(self.path(info.sha256))
            )

    def part(self, info: Part, config: ModelConfig, config_hash: str) -> PartFile:
        """A part that is here, to read weights from; `config` is the model's.

        Raises:
            CheckpointError: the part is not here, or its file was damaged since it came; then it is not here any more.
        """
        path = self.path(info.sha256)
        if not self.has(info.sha256):
            raise CheckpointError(f"{path} is missing or was damaged: start the run again, and it is sent")
        file = PartFile(path, info, config, config_hash)
        with contextlib.suppress(OSError):
            # So that used files stay; many systems do not record access times. The other time says that a file was written to.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            self.checked.follow(info.sha256, stamp_of(path))
        return file

    def _receive(
        self,
        file: BinaryIO,
        digest: Any,
        info: Part,
        position: int,
        read: Callable[[int], bytes],
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        while position < info.n_bytes:
            piece = read(min(PIECE_BYTES, info.n_bytes - position))
            if not piece:
                raise CheckpointError(f"{info.name} was cut off at {position} of {info.n_bytes} bytes")
            view = memoryview(piece)
            while len(view):  # an unbuffered file may take less than it is given, before it says that the disk is full
                with self._disk(info):
                    view = view[file.write(view) :]
            digest.update(piece)
            position += len(piece)
            if on_bytes is not None:
                on_bytes(len(piece))

    @staticmethod
    def _resume(file: BinaryIO, offset: int) -> Any:
        """Keep the first `offset` bytes of a file; returns their sha256 to continue with."""
        file.truncate(offset)
        digest = hashlib.sha256()
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
        return digest

    @contextlib.contextmanager
    def _disk(self, info: Part) -> Iterator[None]:
        """Turns errors of the disk, and only those, into errors of ours."""
        try:
            yield
        except OSError as e:
            if e.errno not in _FULL:
                raise CheckpointError(f"cannot store {info.name} in {self.directory}: {e.strerror or e}") from None
            free = self.free_bytes()
            with contextlib.suppress(OSError):
                self._partial(info.sha256).unlink()
            full = CheckpointError(
                f"the disk is full ({e.strerror}): {info.name} needs {info.n_bytes} bytes in {self.directory}, "
                f"where {free} are free"
            )
            full.code = Code.DISK
            raise full from None

    def _partial(self, sha256: str) -> Path:
        return self.path(sha256).with_suffix(".part")
