"""Files that are whole or absent, the folder of what can be made again, and how another process finds this package."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mdi.errors import CheckpointError, MdiError


@contextlib.contextmanager
def replacing(path: Path, error: type[MdiError] = CheckpointError, makes_folder: bool = False) -> Iterator[BinaryIO]:
    """A binary file to write. It replaces `path` when the block ends without an error, and is removed otherwise.

    Args:
        makes_folder: make the folder of `path` if it is not there.

    Raises:
        error: the operating system refused (no space, no permission, ...); `path` is as it was.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        with open(part, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as e:
        raise error(f"cannot write {path}: {e.strerror or e}; the earlier file is unchanged") from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove what processes that were killed while they wrote this file have left."""
    import psutil  # here, so that commands that write no file can report missing libraries

    for part in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        number = part.name[len(path.name) + 1 : -len(".part")]
        if number.isascii() and number.isdigit() and not psutil.pid_exists(int(number)):
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def module_environment() -> dict[str, str]:
    """The environment in which another interpreter finds this package. A library that panics prints no backtrace."""
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "RUST_BACKTRACE": "0"}


def default_cache_dir() -> Path:
    """MDI_CACHE_DIR, else our folder in the system's place for cache files."""
    if os.environ.get("MDI_CACHE_DIR"):
        return Path(os.environ["MDI_CACHE_DIR"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "mdi-llm"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mdi-llm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdi-llm"


def lock_file(file: int, is_shared: bool = False) -> bool:
    """Lock an open file for this process, until it is closed; False if another process has it.

    Args:
        is_shared: others may have it so as well.
    """
    if sys.platform == "win32":
        import msvcrt

        with contextlib.suppress(OSError):
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            return True
        return False
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
