"""What a benchmark measured, as a small file in benchmarks/results/ that says on which machine: the raw numbers of tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_BYTES = 300_000  # these files are committed
DIGITS = 5  # more are noise


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
    """The flags as they are written down."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in without}


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
    memory = psutil.virtual_memory().total / 1e9
    release = ".".join(platform.release().split(".")[:2])
    return (
        f"{n_cores} cores of {name}, {memory:.0f} GB, {platform.system()} {release} ({platform.machine()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result` with machine, date and load, numbers rounded; ValueError if that is no small file."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    record = {"machine": machine(), "date": time.strftime("%Y-%m-%d %H:%M"), "load_average": load, **result}
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
