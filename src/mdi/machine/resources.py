"""What this process may use of its machine: cores, memory, disk. Reads what the system says, and changes nothing.

A container's limits stand in its control groups (cgroups), in either of Linux' two forms; other systems have none. Limits
hold for a group and all groups below it, so the tightest on the way up counts.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def n_cores(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Cores that this process may use: by affinity, and by CPU quota (0.6 is 60 % of one core)."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for folder in _groups("cpu", root, membership):
        quota = _quota_v2(folder) or _quota_v1(folder)
        if quota is not None:
            cores = min(cores, quota)
    return cores


def free_memory_bytes(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Main memory that can still be taken: what the system has, and what the limits of the groups leave."""
    free = int(psutil.virtual_memory().available)
    for folder in _groups("memory", root, membership):
        left = _memory_left(folder)
        if left is not None:
            free = min(free, left)
    return max(free, 0)


def device_free_bytes(device: str) -> int:
    """Free memory of the device that a node computes on; a GPU without a memory of its own has the machine's."""
    if device.startswith("cuda"):
        import torch  # only here: a local ring counts its cores before it loads what is slow

        return int(torch.cuda.mem_get_info(device)[0])
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


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Folders of the groups that this process is in, from its own up to the outermost that can be seen.

    Inside a container the path may be that of the host, which is not mounted: what cannot be found is passed over.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        inner = base / path.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(base) and ".." not in folder.parts and folder.is_dir():
                yield folder


def _quota_v2(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, _, period = (folder / "cpu.max").read_text(encoding="utf-8").strip().partition(" ")
        if quota != "max":
            return int(quota) / int(period or 100_000)
    return None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _memory_left(folder: Path) -> int | None:
    """What a group may still take; pages of files can be dropped, and do not count (those of shared memory cannot)."""
    for limit_name, used_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            files = (_statistic(folder / "memory.stat", f"{prefix}{kind}_file") for kind in ("active", "inactive"))
            return limit - used + sum(files)
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="utf-8"))
    return None


def _statistic(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
