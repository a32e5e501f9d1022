"""The temporary folder of a local ring. It is removed with the ring, even if its process was killed.

The process that uses such a folder holds a lock on a file in it, which the system releases however the process ends. So a
folder with a free lock is unused, and the ring's own children or the next ring remove it. Without such locks (Windows), a
folder stays if its process was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

PREFIX = "mdi-ring-"
LOCK = "in-use"


class RingFolder:
    """Made at once; `close` removes it."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        new = self.path / f"{LOCK}.new"
        self._file = open(new, "wb")  # noqa: SIM115 - held until close
        _lock(self._file.fileno())
        new.rename(self.path / LOCK)  # under its name it is locked from the beginning

    def close(self) -> None:
        self._file.close()  # first, for Windows removes no open file
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of rings whose process was killed."""
    if sys.platform == "win32":
        return
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or in use
            file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                _lock(file)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(file)


def _lock(file: int) -> None:
    """Raises OSError if another process has it."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
