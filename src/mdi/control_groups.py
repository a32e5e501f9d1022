"""The limits of this process's control groups (cgroups), and the cores that they allow.

A container's limits stand there, in either of Linux' two forms; other systems have none. Limits hold for a group and all groups
below it, so the tightest on the way up counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def n_cores(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Cores that this process may use: by affinity, and by CPU quota (0.6 is 60 % of one core)."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for folder in groups("cpu", root, membership):
        quota = _quota_v2(folder) or _quota_v1(folder)
        if quota is not None:
            cores = min(cores, quota)
    return cores


def groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
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
    quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def number(path: Path) -> int | None:
    """The number in a file of a group; None if it is not there, or holds no number."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="utf-8"))
    return None
