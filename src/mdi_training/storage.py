"""Folders, hashes of files, and error messages that show a mistyped path.

Knows nothing of what is in the files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mdi.errors import Code, UsageError
from mdi.spec.cluster import nearest_existing

PIECE_BYTES = 1 << 20


def make_folder(path: Path) -> None:
    """Creates the folder and its parents.

    Raises:
        UsageError: it cannot be created, or a file stands in its way.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(f"the folder {path} cannot be made: {err.strerror or err}", code=Code.UNWRITABLE) from err


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while piece := handle.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def missing(path: Path, what: str) -> str:
    """One line for a path that does not exist; names the nearest folder above it that does."""
    return f"{what} {path} does not exist (the nearest that does is {nearest_existing(path)})"
