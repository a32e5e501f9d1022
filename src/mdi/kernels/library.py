"""The library of kernels: where it is, and loading it into this process.

It lies beside this module, if it was installed with it, else in the cache folder, where the first process that needs it
compiles it. Its name has a hash of the sources, so that a library of other sources is never used. In the cache, which
machines may share, the name also has a hash of the compiler and its target.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mdi.errors import KernelError, UsageError
from mdi.files import default_cache_dir
from mdi.kernels import build
from mdi.terminal import reporting

ANY_NAME = "_mdi_kernels-*.so"
KEPT = 8  # libraries of other sources or compilers that stay in the cache
PACKAGE = Path(__file__).parent
NOTE = "not_compiled.txt"  # beside this module: why the installation has no library

logger = logging.getLogger("mdi")


def packaged_name() -> str:
    """Name of the library beside this module. Raises KernelError without sources."""
    return _name(build.sources_hash(build.CSRC))


def find_library() -> Path:
    """The library for this machine, compiled now if it is not there. Raises KernelError."""
    packaged = PACKAGE / packaged_name()
    return packaged if packaged.is_file() else compiled_library()


def compiled_library() -> Path:
    """The library in the cache folder. If it is missing, one process compiles it, and others wait for that."""
    if sys.platform == "win32":
        raise KernelError("the kernels are not made for Windows: run MDI-LLM under WSL")
    compiler = build.find_compiler()
    if compiler.machine != build.this_machine():
        raise KernelError(
            f"{shlex.join(compiler.command)} compiles for {compiler.machine}, but this machine is {build.this_machine()}: "
            "unset CXX, or set it to a compiler for this machine"
        )
    folder = default_cache_dir() / "kernels"
    path = folder / _name(f"{build.sources_hash(build.CSRC)}-{compiler.hash}")
    try:
        if is_safe(path):
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = "another process compiles the kernels"

        def advance(done: int, total: int) -> None:
            nonlocal state
            state = f"compiling the kernels, {done} of {total} files"

        with reporting(lambda: state), locked(folder):
            if not is_safe(path):
                if (note := PACKAGE / NOTE).is_file():
                    logger.warning("the installation compiled no kernels: %s", note.read_text(encoding="utf-8"))
                logger.warning(
                    "compiling the kernels with %s, once, for a minute or two (a small board: ten), into %s",
                    shlex.join(compiler.command),
                    folder,
                )
                begin_s = time.monotonic()
                build.remove_remains(folder)
                state = "compiling the kernels"
                build.compile_library(compiler, path, build.CSRC, advance)
                logger.warning("compiled the kernels in %.0f s", time.monotonic() - begin_s)
                _remove_old(folder, path)
    except OSError as e:
        raise KernelError(f"{folder} cannot be used ({e.strerror or e}): set MDI_CACHE_DIR to another place") from e
    return path


def _name(made_from: str) -> str:
    return ANY_NAME.replace("*", made_from)


def is_safe(path: Path) -> bool:
    """Whether it exists and only this user or the administrator can have written it, because its code will run."""
    return path.is_file() and path.stat().st_uid in (0, os.geteuid())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works in a folder; the lock ends with its process."""
    import fcntl

    with open(folder / "lock", "w") as file:
        # Some network file systems have no locks. Then several processes may compile the same, each beside its name.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_old(folder: Path, newest: Path) -> None:
    others = sorted(set(folder.glob(ANY_NAME)) - {newest}, key=lambda path: path.stat().st_mtime)
    for path in others[:-KEPT]:
        path.unlink(missing_ok=True)


OFF = "off"
FORCED = "MDI_KERNELS"  # the environment variable that forces one instruction set
_ONE = threading.Lock()  # several threads that need the library compile it once


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL | None
    why_not: str = ""


def load() -> ctypes.CDLL | None:
    """The library, found or compiled at the first call; None where it cannot be had or is not wanted.

    Raises UsageError if MDI_KERNELS asks for what this machine does not have.
    """
    return _loaded().library


def look_again() -> None:
    """Make the next call find the library again, after the environment, the compiler or the sources have changed."""
    _load.cache_clear()


def why_not() -> str:
    """Why the library is missing, and what to do about it; "" if it is there."""
    return _loaded().why_not


def instruction_set() -> str:
    """The instruction set in use, named as in MDI_KERNELS."""
    library = load()
    if library is None:
        return OFF
    library.mdi_instruction_set.restype = ctypes.c_char_p
    name: bytes = library.mdi_instruction_set()
    return name.decode()


def arithmetic() -> str:
    """The kind of arithmetic; nodes of one kind give the same bits.

    "fused" with multiply-adds that round once (AMX, AVX-512, AVX2, NEON), "plain" C++, or "torch" without kernels.
    """
    return {OFF: "torch", "plain": "plain"}.get(instruction_set(), "fused")


def _loaded() -> _Loaded:
    with _ONE:
        return _load()


@functools.cache
def _load() -> _Loaded:
    forced = os.environ.get(FORCED, "").strip().lower()
    choices = [s.name for s in build.INSTRUCTION_SETS]
    if forced == OFF:
        return _Loaded(None, f"{FORCED}={OFF}")
    if forced and forced not in choices:
        raise UsageError(f"{FORCED}={forced}: it must be one of {', '.join(choices)}, {OFF}")
    try:
        library = _open()
    except KernelError as e:
        if forced:
            raise UsageError(f"{FORCED}={forced}: {e}") from e
        logger.warning("%s. Until then this node computes in plain torch, which is slower", e)
        return _Loaded(None, str(e))
    if forced and library.mdi_force(forced.encode()) != 0:
        raise UsageError(
            f"{FORCED}={forced}: this machine does not have these instructions; plain works on every machine"
        )
    return _Loaded(library)


def _open() -> ctypes.CDLL:
    path = find_library()
    try:
        return ctypes.CDLL(os.fspath(path))
    except OSError as e:
        raise KernelError(f"the kernels cannot be loaded ({e}): remove {path}, and they are compiled again") from e
