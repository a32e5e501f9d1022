"""Nodes slowed alike: a share of one core for a process, by the kernel's own CPU quota (control groups).

Needs write access to the control groups, which root has on most machines. Version 2 (cpu.max) and version 1
(cpu.cfs_quota_us) are known.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000  # short, so that a node is slow and not by turns fast and asleep
SHORTEST_US = 1000  # quota that the kernel gives


class QuotaError(Exception):
    """This machine does not let us set quotas; the message says why."""


class Quotas:
    """One control group per process, gone at `close`.

    Args:
        period_us: of each quota.
    """

    def __init__(self, period_us: int = PERIOD_US) -> None:
        self._period_us = period_us
        self._folders: list[Path] = []

    def limit(self, pid: int, share: float, *others: int) -> None:
        """Give a process, and others with it, with all their threads, at most `share` of one core. Raises QuotaError."""
        parent = _parent()
        folder = parent / f"mdi-bench-{os.getpid()}-{pid}"
        try:
            folder.mkdir()
            self._folders.append(folder)
            for name, text in settings(share, is_v2=(folder / "cpu.max").exists(), period_us=self._period_us):
                (folder / name).write_text(text)
            for one in (pid, *others):
                (folder / "cgroup.procs").write_text(str(one))
        except OSError as e:
            raise QuotaError(f"cannot set a CPU quota in {folder}: {e.strerror}; it needs root") from None

    def close(self) -> None:
        """Let the processes go free again."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                home = (folder.parent / "cgroup.procs").open("w")
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        home.write(pid)
                        home.flush()
                home.close()
            with contextlib.suppress(OSError):
                folder.rmdir()
        self._folders = []


def settings(share: float, is_v2: bool, period_us: int = PERIOD_US) -> list[tuple[str, str]]:
    """Files and what is to be written into them, in this order."""
    quota_us = max(SHORTEST_US, round(share * period_us))
    # A quota is a limit and no promise: on a busy machine the group must also come before other programs.
    if is_v2:
        return [("cpu.weight", "800"), ("cpu.max", f"{quota_us} {period_us}")]
    return [("cpu.shares", "8192"), ("cpu.cfs_period_us", str(period_us)), ("cpu.cfs_quota_us", str(quota_us))]


def _parent() -> Path:
    """Where groups with a CPU controller can be made."""
    if "cpu" in _words(ROOT / "cgroup.subtree_control"):
        return ROOT
    for name in ("cpu", "cpu,cpuacct"):
        if (ROOT / name / "cpu.cfs_quota_us").exists() or (ROOT / name / "cgroup.procs").exists():
            return ROOT / name
    raise QuotaError(f"no control groups with CPU quotas below {ROOT}")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
