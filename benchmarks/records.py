"""What a benchmark measured, as a small file in benchmarks/results/: the raw numbers of tables.

Each file says on which machine, and how much of it other programs took meanwhile. Documents only have numbers of a machine
that was left alone (`disturbed`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_BYTES = 300_000  # these files are committed
DIGITS = 5  # more are noise

# What numbers of a document may have had beside them, as shares of all cores' time.
MOST_OTHERS, MOST_STEAL = 0.05, 0.02


@dataclass(frozen=True)
class Usage:
    """Processor time up to a moment, in seconds: of the machine, of this process and its children, and stolen.

    Stolen is what a virtual machine wanted and its host gave to others.
    """

    at_s: float
    busy_s: float
    own_s: float
    steal_s: float

    @classmethod
    def now(cls) -> Usage:
        import psutil

        now, times = time.monotonic(), psutil.cpu_times()._asdict()
        # Not idle is busy: Linux counts idle time exactly, and in ticks 0.80 of the cores under short quotas as 0.96.
        idle = sum(times.get(name, 0.0) for name in ("idle", "iowait", "steal"))
        this = psutil.Process()
        own_s = 0.0
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                own_s += sum(process.cpu_times()[:4])  # with those of its children that have ended
        return cls(now, now * (os.cpu_count() or 1) - idle, own_s, times.get("steal", 0.0))

    def since(self, begin: Usage) -> dict[str, float]:
        """Shares of all cores' time since `begin`: of other programs, and stolen."""
        cores_s = max(1e-9, (self.at_s - begin.at_s) * (os.cpu_count() or 1))
        others_s = (self.busy_s - begin.busy_s) - (self.own_s - begin.own_s)
        return {"others_share": max(0.0, others_s / cores_s), "steal_share": (self.steal_s - begin.steal_s) / cores_s}


BEGIN = Usage.now()


def disturbed(record: Mapping[str, Any]) -> str:
    """Why the numbers of a file must not stand in a document; "" if they may."""
    if "others_share" not in record:
        return "it does not say what other programs took"
    others, steal = record["others_share"], record["steal_share"]
    is_quiet = others <= MOST_OTHERS and steal <= MOST_STEAL
    return "" if is_quiet else f"other programs took {others:.0%} of the cores' time, and {steal:.1%} were stolen"


def add_json_flag(parser: argparse.ArgumentParser, name: str) -> None:
    path = RESULTS / f"{name}.json"
    parser.add_argument(
        "--json", type=Path, default=path, metavar="FILE",
        help=f"where the numbers are written (default: {path.relative_to(ROOT)})",
    )  # fmt: skip


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags of a benchmark; what follows `--` is for the program that it runs, and becomes `flags`."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:end])
    args.flags = given[end + 1 :]
    return args


def told(args: argparse.Namespace, *without: str) -> dict[str, Any]:
    """The flags as they are written down: files by their place in the project, others by their name alone."""
    return {k: _written(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in without}


def _written(path: Path) -> str:
    root, whole = Path(__file__).resolve().parents[1], path.resolve()
    return str(whole.relative_to(root)) if whole.is_relative_to(root) else path.name


def machine() -> str:
    """The machine in words."""
    import psutil
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = lines[0] if lines else name
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    release = ".".join(platform.release().split(".")[:2])
    return (
        f"{n_cores} core{'s' * (n_cores != 1)} of {name}, {psutil.virtual_memory().total / 1e9:.0f} GB, "
        f"{platform.system()} {release} ({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}"
    )


def save(path: Path, result: Mapping[str, Any], begin: Usage = BEGIN) -> None:
    """Write `result` with machine, date, and what others took since `begin`, rounded; ValueError if that is no small file."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    record = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "load_average": load,
        **Usage.now().since(begin),
    }
    record.update(result)
    text = json.dumps(rounded(record), indent=1) + "\n"
    if len(text) > LIMIT_BYTES:
        raise ValueError(f"{path.name} would take {len(text):,} bytes, more than {LIMIT_BYTES:,}: leave something out")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def rounded(value: Any) -> Any:
    """The same with floats of a few significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
