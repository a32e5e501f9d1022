"""A control group with a limit of memory below the one that this process is in: what wants more there is killed.

Linux only, and only where control groups may be made (version 1 or 2).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NAME = "mdi-benchmark"


class MemoryGroup:
    """See the module.

    Args:
        folder: of the group, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_v1 = (folder / "memory.limit_in_bytes").exists()

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs a command in the group."""
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "sh", *command]

    def peak_bytes(self) -> int:
        """The most that was taken, pages of files among it."""
        name = "memory.max_usage_in_bytes" if self._is_v1 else "memory.peak"
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / name).read_text())
        return 0

    def n_killed(self) -> int:
        """Processes that were."""
        name = "memory.oom_control" if self._is_v1 else "memory.events"
        with contextlib.suppress(OSError):
            for line in (self._folder / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0


@contextlib.contextmanager
def memory_group(limit_bytes: int, name: str = NAME) -> Iterator[MemoryGroup]:
    """A group with this limit, gone afterwards. Raises OSError where none can be made."""
    folder = _own_group() / f"{name}-{os.getpid()}"
    folder.mkdir()
    try:
        limit = folder / "memory.limit_in_bytes"
        (limit if limit.exists() else folder / "memory.max").write_text(str(limit_bytes))
        yield MemoryGroup(folder)
    finally:
        folder.rmdir()


def _own_group() -> Path:
    """The folder of the group of memory that this process is in."""
    unified = ROOT
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return ROOT / "memory" / path.strip("/")
        if not controllers:
            unified = ROOT / path.strip("/")
    return unified
