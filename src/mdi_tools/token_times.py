"""Reads the files that `--plots` writes: the time of each token, for several node counts."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mdi.errors import Code, UsageError

_NAMES = [
    re.compile(rf"tokens_time_samples_{rest}\.csv")
    for rest in (
        r"(?P<nodes>\d+)nodes_(?P<model>.+)_(?P<samples>\d+)samples",
        r"mdi_(?P<model>.+)_(?P<samples>\d+)samples_(?P<nodes>\d+)nodes",  # these two of the first version, for GPT-2
        r"standalone_?(?P<model>.+)_(?P<samples>\d+)samples",
    )
]


@dataclass(frozen=True)
class RunFile:
    """A file of tokens over time, by its name."""

    path: Path
    n_nodes: int
    model: str
    n_samples: int


def parse_name(path: Path) -> RunFile | None:
    """None if this is not the name of a run's file."""
    for name in _NAMES:
        if match := name.fullmatch(path.name):
            found = match.groupdict()
            return RunFile(path, int(found.get("nodes", 1)), found["model"], int(found["samples"]))
    return None


def find_runs(folder: Path, names: Sequence[str], n_samples: int) -> list[RunFile]:
    """The files of a model's runs with so many samples, by rising node count.

    Args:
        names: that the model may have in them; compared as a whole, so that a name does not find longer ones.

    Raises:
        UsageError: there are none; names the existing ones.
    """
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}; mdi starter --plots writes its files there", code=Code.MISSING)
    all_runs = [run for path in sorted(folder.glob("*.csv")) if (run := parse_name(path)) is not None]
    plain = {re.sub(r"[^\w.+-]+", "-", name).strip("-.").lower() for name in names}
    found = [run for run in all_runs if run.model.lower() in plain and run.n_samples == n_samples]
    if not found:
        have = sorted({f"{run.model} ({run.n_samples} samples)" for run in all_runs})
        raise UsageError(
            f"{folder} holds no run of {' or '.join(names)} with {n_samples} samples; it has "
            f"{', '.join(have) or 'none at all'}; mdi starter --plots writes them",
            code=Code.MISSING,
        )
    return sorted(found, key=lambda run: run.n_nodes)


def read_token_times(path: Path) -> list[tuple[float, int]]:
    """(time_s, tokens until then) for every token, rising; with or without the line of column names.

    Raises:
        UsageError: it cannot be read, or a row is not such a pair; names the line.
    """
    points: list[tuple[float, int]] = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for n, row in enumerate(csv.reader(file), start=1):
                if not row or (n == 1 and row == ["time_s", "tokens"]):
                    continue
                points.append(_point(row, points, f"{path}, line {n}"))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise UsageError(f"{path} cannot be read: {e}", code=Code.UNREADABLE) from e
    if not points:
        raise UsageError(f"{path} holds no tokens", code=Code.EMPTY)
    return points


def _point(row: list[str], before: list[tuple[float, int]], where: str) -> tuple[float, int]:
    try:
        time_s, n_tokens = float(row[0]), int(float(row[1]))
        good = len(row) == 2 and 0 <= time_s < math.inf and n_tokens >= 0
    except (ValueError, IndexError, OverflowError):
        good = False
    if not good or (before and (time_s < before[-1][0] or n_tokens < before[-1][1])):
        raise UsageError(
            f"{where}: expected a time in seconds and a count of tokens, both rising, found {','.join(row)!r}",
            code=Code.VALUE,
        )
    return time_s, n_tokens
