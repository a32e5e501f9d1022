"""Files that appear whole or not at all, and paths named so that a typo shows.

Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mdi.config import nearest_existing
from mdi.errors import CheckpointError, MdiError, UsageError

PIECE_BYTES = 1 << 20


@contextlib.contextmanager
def replacing(path: Path, error: type[MdiError] = CheckpointError) -> Iterator[BinaryIO]:
    """Opens `<path>.part` for writing; when the block ends well it is synced and takes the place of `path`.

    If the block raises, `path` stays as it was and the part is removed.

    Raises:
        error: the operating system refused (no space, no permission, ...); says which file.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(part, path)
    except OSError as err:
        raise error(
            f"{path} could not be written: {err.strerror or err}; "
            "what was there before is unchanged; free some space or choose another folder"
        ) from err
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Creates the folder and its parents.

    Raises:
        UsageError: it cannot be created, or a file stands in its way.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(f"the folder {path} cannot be made: {err.strerror or err}") from err


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while piece := handle.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def missing(path: Path, what: str) -> str:
    """One line for a path that does not exist; names the nearest folder above it that does."""
    return f"{what} {path} does not exist (the nearest that does is {nearest_existing(path)})"
