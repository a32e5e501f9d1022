"""Checks that a file fits on its disk before its first byte is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from mdi.errors import Code, MdiError
from mdi.spec.cluster import nearest_existing
from mdi.units import size


def free_bytes(folder: Path) -> int:
    """Of the disk on which a folder is, or will be made."""
    return shutil.disk_usage(nearest_existing(folder)).free


def check_disk(folder: Path, n_bytes: float, what: str, error: type[MdiError], advice: str = "") -> None:
    """Raise `error` if the disk of `folder` has less than `n_bytes` free.

    Args:
        what: needs them, such as "converting".
        advice: what to do then.
    """
    free = free_bytes(folder)
    if n_bytes > free:
        message = f"{what} needs {size(n_bytes)} in {folder}, but only {size(free)} are free there"
        raise error(f"{message}: {advice}" if advice else message, code=Code.DISK)
