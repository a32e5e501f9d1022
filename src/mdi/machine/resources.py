"""What this process may use of the memory of its machine, and what machine it is. Only reads what the system says."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import psutil

from mdi.control_groups import CGROUPS, MEMBERSHIP, groups, number


def free_memory_bytes(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Main memory that can still be taken: what the system has, and what the limits of the groups leave."""
    free = int(psutil.virtual_memory().available)
    for folder in groups("memory", root, membership):
        left = _memory_left(folder)
        if left is not None:
            free = min(free, left)
    return max(free, 0)


def device_free_bytes(device: str) -> int:
    """Free memory of the device that a node computes on; a GPU without a memory of its own has the machine's."""
    if device.startswith("cuda"):
        import torch  # only here: a local ring counts its cores before it loads what is slow

        # What was freed stays with torch, and is there for what comes next.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    return free_memory_bytes()


def machine_free_bytes(device: str) -> int:
    """What all processes together can still take of the device, whatever the limits of this one's groups."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def private_bytes() -> int:
    """Memory of this process that no file stands behind: it comes back when the process lets go of it."""
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


def _memory_left(folder: Path) -> int | None:
    """What a group may still take; pages of files can be dropped, and do not count (those of shared memory cannot)."""
    for limit_name, used_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = number(folder / limit_name), number(folder / used_name)
        if limit is not None and used is not None:
            files = (_statistic(folder / "memory.stat", f"{prefix}{kind}_file") for kind in ("active", "inactive"))
            return limit - used + sum(files)
    return None


def _statistic(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
