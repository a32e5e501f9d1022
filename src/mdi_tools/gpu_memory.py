"""GPU memory in use, from nvidia-smi, or from tegrastats on a Jetson, whose GPU shares the RAM."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess

_DEADLINE_S = 10.0


class Gpu:
    """Attributes:
    is_shared: whether it has no memory of its own; then the value is that of the whole machine.
    baseline_bytes: memory in use on all GPUs before the command was started; None: there is no GPU.
    """

    def __init__(self) -> None:
        self.baseline_bytes = _smi_used_bytes()
        self.is_shared = self.baseline_bytes is None and (used := _tegra_used_bytes()) is not None
        if self.is_shared:
            self.baseline_bytes = used

    def by_process(self) -> dict[int, int]:
        """pid -> bytes; empty where the driver names none."""
        if self.baseline_bytes is None or self.is_shared:
            return {}
        found: dict[int, int] = {}
        for pid, mib in nvidia_smi("--query-compute-apps=pid,used_memory"):
            if pid.isdigit() and mib.isdigit():
                found[int(pid)] = found.get(int(pid), 0) + int(mib) * (1 << 20)
        return found

    def used_mb(self) -> list[int]:
        """In use on each GPU of its own memory, in MiB."""
        return [] if self.baseline_bytes is None or self.is_shared else _smi_used_mb()

    def growth_bytes(self, rss_bytes: int = 0) -> int | None:
        """How much more is in use than before; of shared memory, beyond the `rss_bytes` of the command's processes."""
        if self.baseline_bytes is None:
            return None
        used = _tegra_used_bytes() if self.is_shared else _smi_used_bytes()
        return max(0, (used or 0) - self.baseline_bytes - (rss_bytes if self.is_shared else 0))


def _smi_used_bytes() -> int | None:
    """In use on all GPUs; None if there is none."""
    sizes = _smi_used_mb()
    return sum(sizes) << 20 if sizes else None


def _smi_used_mb() -> list[int]:
    return [int(row[0]) for row in nvidia_smi("--query-gpu=memory.used") if row[0].isdigit()]


def nvidia_smi(query: str) -> list[list[str]]:
    """Rows of cells; none if the program does not exist or prints nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _tegra_used_bytes() -> int | None:
    """RAM in use on a Jetson; None if this is none. tegrastats writes a line per interval for ever: the first is read."""
    program = shutil.which("tegrastats")
    if program is None:
        return None
    command = [program, "--interval", "100"]
    with (
        contextlib.suppress(OSError),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child,
    ):
        try:
            assert child.stdout is not None
            match = re.search(r"\bRAM (\d+)/\d+MB", child.stdout.readline())
            return int(match[1]) << 20 if match else None
        finally:
            child.kill()
    return None
