"""The memory of a command and its child processes, sampled while it runs.

RSS counts a page that two processes share twice; PSS (Linux) shares it out, so that sums are right; USS is what would be
free if the process ended. On a GPU it is what the driver says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from mdi.errors import UsageError
from mdi_tools.gpu_memory import Gpu

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP")  # by name: Windows has not all of them
COLUMNS = ("time_s", "n_processes", "rss_bytes", "pss_bytes", "uss_bytes", "gpu_bytes", "RAM_MB")  # and GPU<i>_MB
PROCESS_COLUMNS = ("time_s", "pid", "name", "rss_bytes", "pss_bytes", "uss_bytes", "gpu_bytes")
_PROGRAMS = ("starter", "secondary", "intermediate", "finisher", "sample", "chat", "train", "local_ring", "local-ring")
_END_DEADLINE_S = 10.0


@dataclass(frozen=True)
class ProcessUsage:
    """Memory of one process; None where the system does not say. `node`: see `node_of`."""

    pid: int
    name: str
    rss_bytes: int
    pss_bytes: int | None
    uss_bytes: int | None
    gpu_bytes: int | None
    node: str = ""


@dataclass(frozen=True)
class MemorySample:
    """What all the processes held at one moment, in seconds since the command was started.

    Attributes:
        gpu_bytes: of these processes; where the driver names no processes (as in containers), how much more of the
            GPUs is in use than before the start. None without a GPU.
        gpus_mb: in use on each GPU, by any process, in MiB.
    """

    time_s: float
    usages: tuple[ProcessUsage, ...]
    gpu_bytes: int | None = None
    gpus_mb: tuple[int, ...] = ()

    @property
    def rss_bytes(self) -> int:
        return sum(usage.rss_bytes for usage in self.usages)

    @property
    def pss_bytes(self) -> int | None:
        return _sum([usage.pss_bytes for usage in self.usages])

    @property
    def uss_bytes(self) -> int | None:
        return _sum([usage.uss_bytes for usage in self.usages])

    def row(self) -> list[str]:
        """As COLUMNS say, and of each GPU; empty where nothing is known. The first version had the last ones alone, in MiB."""
        sizes = (self.rss_bytes, self.pss_bytes, self.uss_bytes, self.gpu_bytes)
        return [
            f"{self.time_s:.3f}",
            str(len(self.usages)),
            *map(_cell, sizes),
            f"{self.rss_bytes / (1 << 20):.2f}",
            *map(str, self.gpus_mb),
        ]

    def process_rows(self) -> list[list[str]]:
        """As PROCESS_COLUMNS say, one for each process."""
        return [
            [
                f"{self.time_s:.3f}",
                str(u.pid),
                u.name,
                *map(_cell, (u.rss_bytes, u.pss_bytes, u.uss_bytes, u.gpu_bytes)),
            ]
            for u in self.usages
        ]


class Family:
    """A process and all its descendants, even those that have lost their parent."""

    def __init__(self, pid: int, gpu: Gpu) -> None:
        self._known: dict[int, psutil.Process] = {}
        self._gpu = gpu
        with contextlib.suppress(psutil.NoSuchProcess):
            self._known[pid] = psutil.Process(pid)

    def sample(self, time_s: float) -> MemorySample:
        self._look_around()
        on_gpu = self._gpu.by_process()
        usages = [usage for process in self._known.values() if (usage := _usage(process, on_gpu)) is not None]
        of_ours = _sum([usage.gpu_bytes for usage in usages if usage.gpu_bytes is not None])
        gpu_bytes = of_ours if of_ours else self._gpu.growth_bytes(sum(usage.rss_bytes for usage in usages))
        return MemorySample(time_s, tuple(usages), gpu_bytes, tuple(self._gpu.used_mb()))

    def _look_around(self) -> None:
        for process in list(self._known.values()):
            with contextlib.suppress(psutil.Error):
                for child in process.children(recursive=True):
                    self._known.setdefault(child.pid, child)
        self._known = {pid: process for pid, process in self._known.items() if process.is_running()}


def monitor(command: Sequence[str], interval_s: float, take: Callable[[MemorySample], object]) -> int:
    """Runs the command to its end, and takes a sample of its memory at once and then every `interval_s`.

    Passes Ctrl-C, SIGTERM and SIGHUP on to the command and its children, which then end by themselves.

    Returns:
        its exit status; 128 + n if signal n ended it.

    Raises:
        UsageError: it cannot be started.
    """
    gpu = Gpu()
    try:
        # In a session of its own; otherwise Ctrl-C would reach it twice, from the terminal and from here.
        child = subprocess.Popen(command, start_new_session=True)
    except OSError as e:
        raise UsageError(f"cannot start {command[0]!r}: {e.strerror or e}") from None
    before = _forward_signals(child)
    try:
        began = time.monotonic()
        family = Family(child.pid, gpu)
        n_taken = 0
        while child.poll() is None:
            take(family.sample(time.monotonic() - began))
            # Skips missed moments, so that the samples stay equally spaced.
            n_taken = max(n_taken + 1, int((time.monotonic() - began) / interval_s) + 1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, n_taken * interval_s - (time.monotonic() - began)))
        return child.returncode if child.returncode >= 0 else 128 - child.returncode
    except BaseException:
        _end(child)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward_signals(child: subprocess.Popen[bytes]) -> dict[signal.Signals, Any]:
    def forward(number: int, frame: FrameType | None) -> None:
        _send(child, number)

    before: dict[signal.Signals, Any] = {}
    for name in FORWARDED:
        if hasattr(signal, name):
            with contextlib.suppress(ValueError):  # not in the main thread
                before[getattr(signal, name)] = signal.signal(getattr(signal, name), forward)
    return before


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    """To the command and all of its process group, as a terminal does."""
    if child.poll() is not None:
        return
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Politely, then by force."""
    _send(child, signal.SIGTERM)
    try:
        child.wait(_END_DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _usage(process: psutil.Process, on_gpu: dict[int, int]) -> ProcessUsage | None:
    """None if it has ended, or is but an entry that its parent has not yet collected."""
    try:
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            name, rss = process.name(), process.memory_info().rss
            node = node_of(process.cmdline())
        try:
            full = process.memory_full_info()
        except psutil.AccessDenied:  # of another user, or on macOS
            full = None
    except psutil.Error:
        return None
    pss, uss = getattr(full, "pss", None), getattr(full, "uss", None)
    return ProcessUsage(process.pid, name, rss, pss, uss, on_gpu.get(process.pid), node)


def node_of(command: Sequence[str]) -> str:
    """The node that a command line starts: "starter", "secondary0", ...; else the name of its program, or "other"."""
    words = [Path(word).name.removesuffix(".py") for word in command[:4]]  # the interpreter, -m, mdi.cli, the command
    program = next((word for word in words if word in _PROGRAMS), None)
    if program == "secondary" and "--nodes-config" in command:
        index = command[command.index("--nodes-config") + 2 :][:1]
        return f"secondary{index[0]}" if index and index[0].isdigit() else program
    return program or "other"


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _cell(size: int | None) -> str:
    return "" if size is None else str(size)
