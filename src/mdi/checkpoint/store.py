"""Parts that a node has received, kept on its disk under the hash of their content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from mdi.checkpoint.source import open_safetensors
from mdi.errors import CheckpointError

PIECE_BYTES = 1 << 20


class _Info(Protocol):
    """A PartInfo, or whatever else says these three things."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def n_bytes(self) -> int: ...


class BlockStore:
    """Files `<sha256>.safetensors` in one directory; what is incomplete is `<sha256>.part` and can be gone on with.

    A file under its final name has been verified, so nobody need hash it again.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, sha256: str) -> Path:
        return self.directory / f"{sha256}.safetensors"

    def _unfinished(self, sha256: str) -> Path:
        return self.directory / f"{sha256}.part"

    def has(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def partial_bytes(self, sha256: str) -> int:
        """How much of a part has arrived."""
        try:
            return self._unfinished(sha256).stat().st_size
        except OSError:
            return 0

    def tensors(self, sha256: str) -> dict[str, torch.Tensor]:
        """The tensors of a part, mapped into memory."""
        handle = open_safetensors(self.path(sha256))
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118

    def free_bytes(self) -> int:
        """Free space on the disk of the store."""
        place = self.directory.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def receive(
        self, info: _Info, offset: int, read: Callable[[int], bytes], on_bytes: Callable[[int], None] | None = None
    ) -> None:
        """Take the bytes of a part from `offset` on; it is in the store when this returns.

        Args:
            offset: how much is there already, see `partial_bytes`.
            read: gives up to n bytes of what is coming; b"" at its end.
            on_bytes: told how many bytes came.

        Raises:
            CheckpointError: cut off (what came is kept), wrong content (nothing is kept), or no room on the disk.
        """
        path = self._unfinished(info.sha256)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(path, "r+b" if path.exists() else "w+b") as file:
                digest = self._resume(file, path, offset)
                while offset < info.n_bytes:
                    piece = self._read(read, min(PIECE_BYTES, info.n_bytes - offset))
                    if not piece:
                        raise CheckpointError(f"{info.name} was cut off at {offset} of {info.n_bytes} bytes")
                    file.write(piece)
                    digest.update(piece)
                    offset += len(piece)
                    if on_bytes is not None:
                        on_bytes(len(piece))
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            raise self._no_room(e, info, path) from None
        if digest.hexdigest() != info.sha256:
            path.unlink(missing_ok=True)
            raise CheckpointError(
                f"{info.name} arrived damaged: its sha256 is {digest.hexdigest()}, expected {info.sha256}"
            )
        os.replace(path, self.path(info.sha256))

    @staticmethod
    def _read(read: Callable[[int], bytes], n_bytes: int) -> bytes:
        try:
            return read(n_bytes)
        except OSError as e:  # of the network, not of the disk
            raise CheckpointError(f"the connection broke while weights arrived: {e}") from None

    @staticmethod
    def _resume(file: object, path: Path, offset: int) -> hashlib._Hash:
        """Hash what is there before `offset`, and go on behind it."""
        digest = hashlib.sha256()
        left = offset
        while left:
            piece = file.read(min(PIECE_BYTES, left))  # type: ignore[attr-defined]
            if not piece:
                raise CheckpointError(f"cannot go on at byte {offset}: only {offset - left} are there")
            digest.update(piece)
            left -= len(piece)
        file.truncate(offset)  # type: ignore[attr-defined]
        file.seek(offset)  # type: ignore[attr-defined]
        return digest

    def _no_room(self, error: OSError, info: _Info, path: Path) -> CheckpointError:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            return CheckpointError(f"cannot store weights in {self.directory}: {error.strerror or error}")
        with contextlib.suppress(OSError):
            path.unlink()
        return CheckpointError(
            f"no room for {info.name} ({info.n_bytes / 1e6:.1f} MB) in {self.directory}: {error.strerror}, "
            f"{self.free_bytes() / 1e6:.1f} MB free"
        )
