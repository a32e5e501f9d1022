"""The memory that this process may use, and what machine it runs on. Only reads what the system reports."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

from mdi.control_groups import CGROUPS, MEMBERSHIP, groups, number


def free_memory_bytes(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Main memory that is still free: that of the system, within the limits of the control groups."""
    available = psutil.virtual_memory().available
    return max(min([available, *(left for _, left in _limits(root, membership))]), 0)


def memory_bytes(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Main memory that this process may use: all of the machine's, within the limits of the control groups."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(root, membership))])


def device_free_bytes(device: str) -> int:
    """Free memory of the device that a node computes on; a GPU without a memory of its own has the machine's."""
    if device.startswith("cuda"):
        import torch  # only here: a local ring counts its cores before slow imports

        # torch keeps freed memory for the next use.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    return free_memory_bytes()


def machine_free_bytes(device: str) -> int:
    """Bytes that all processes together can still take of the device, whatever the limits of this one's groups."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def private_bytes() -> int:
    """Memory of this process without a file behind it; freeing it returns it to the system."""
    info = psutil.Process().memory_info()
    return int(info.rss) - int(getattr(info, "shared", 0))


def cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "Model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _limits(root: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Of the groups whose limit is below all memory that there is: the limit, and the bytes that the group may still take.

    Pages of files can be dropped, and do not count (those of shared memory cannot).
    """
    total = psutil.virtual_memory().total
    for folder in groups("memory", root, membership):
        for limit_name, used_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit = number(folder / limit_name)
            if limit is not None and limit < total and (used := number(folder / used_name)) is not None:
                dropped = _statistics(folder / "memory.stat", f"{prefix}active_file", f"{prefix}inactive_file")
                yield limit, limit - used + dropped
                break


def _statistics(path: Path, *names: str) -> int:
    """The sum of some lines "name bytes"; 0 without the file."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.partition(" ") for line in path.read_text(encoding="utf-8").splitlines())
        return sum(int(value) for name, _, value in lines if name in names)
    return 0
