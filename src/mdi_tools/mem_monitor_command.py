"""Run a command and record the memory (RAM and GPU) of this process and all processes that it starts.

The exit status is that of the command; Ctrl-C is passed on to it. Without --output the table is printed when the command ends.

examples:
  mdi mem-monitor -i 0.5 -o memory.csv --img memory.png -- mdi local-ring --nodes 3 --ckpt org/model
  mdi mem-monitor --img nodes.png --per-node -- mdi local-ring --nodes 3 --ckpt org/model
  mdi mem-monitor "mdi sample --ckpt org/model --prompt 'Who are you?'"
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import logging
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mdi.errors import UsageError
from mdi.spec.parser import Parser
from mdi.units import size

if TYPE_CHECKING:
    from mdi_tools.process_memory import MemorySample

logger = logging.getLogger("mdi")


def add_arguments(parser: Parser) -> None:
    from mdi.spec.options import COMMON

    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="CSV file for the samples (default: print them)"
    )
    parser.add_argument("--processes", type=Path, metavar="FILE", help="another CSV file, with a row per process")
    parser.add_argument("-i", "--interval", type=float, default=1.0, metavar="S", help="seconds between samples (1)")
    parser.add_argument("--img", type=Path, metavar="FILE", help="draw a figure of the memory over time")
    parser.add_argument("--per-node", action="store_true", help="draw a line per node instead of sums")
    parser.options(None, *COMMON)
    parser.add_argument(
        "command", metavar="CMD", nargs=argparse.REMAINDER, action=_Command,
        help="the command and its arguments, or all in one string, which may stand before the flags",
    )  # fmt: skip


class _Command(argparse.Action):
    """What follows a command in one string are flags of this program, as in the first version."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        namespace.command = values
        if len(values) > 1 and any(map(str.isspace, values[0])) and shutil.which(values[0]) is None:
            parser.parse_args(values[1:], namespace)
            namespace.command = [*values[:1], *namespace.command]


def run(args: argparse.Namespace) -> int:
    from mdi_tools.gpu_memory import Gpu
    from mdi_tools.plots import plot_memory
    from mdi_tools.process_memory import COLUMNS, PROCESS_COLUMNS, monitor

    command = split_command(args.command)
    if not 0.01 <= args.interval <= 86_400:
        raise UsageError(f"--interval {args.interval}: expected seconds, from 0.01 to 86400")
    samples: list[MemorySample] = []
    gpus = [f"GPU{i}_MB" for i in range(len(Gpu().used_mb()))]
    with contextlib.ExitStack() as stack:
        total = _table(stack, args.output, (*COLUMNS, *gpus))
        each = _table(stack, args.processes, PROCESS_COLUMNS)

        def take(sample: MemorySample) -> None:
            samples.append(sample)
            for table, rows in ((total, [sample.row()]), (each, sample.process_rows())):
                if table is not None:
                    csv.writer(table).writerows(rows)
                    table.flush()

        try:
            status = monitor(command, args.interval, take)
        except OSError as e:
            raise UsageError(f"the samples cannot be written: {e.strerror or e}") from e
    if args.output is None:
        csv.writer(sys.stdout).writerows([(*COLUMNS, *gpus), *(sample.row() for sample in samples)])
    logger.info("%s", summary(samples))
    if args.img is not None:
        plot_memory(args.img, series_of_nodes(samples) if args.per_node else series(samples), title_of(command))
        logger.info("figure: %s", args.img)
    return status


def title_of(command: Sequence[str]) -> str:
    """The command, cut between words where it is too long for a figure's title."""
    return textwrap.shorten(shlex.join(command), 200, placeholder=" ...")


def split_command(words: Sequence[str]) -> list[str]:
    """The command to run: words after an optional --, or one string that is taken apart as a shell does.

    Raises:
        UsageError: there is none, or its quotes are not closed.
    """
    words = list(words[1:] if words[:1] == ["--"] else words)
    if len(words) == 1:
        try:
            words = shlex.split(words[0])
        except ValueError as e:
            raise UsageError(f"CMD {words[0]!r}: {e}") from None
    if not words:
        raise UsageError("no command: give one after the flags, e.g. mdi mem-monitor -o memory.csv -- mdi sample ...")
    return words


def summary(samples: Sequence[MemorySample]) -> str:
    """One line: the most that was held at once."""
    if not samples:
        return "the command ended before its memory could be looked at"
    peak = max(samples, key=lambda sample: sample.rss_bytes)
    parts = [f"most memory: RSS {size(peak.rss_bytes)} at {peak.time_s:.1f} s in {len(peak.usages)} processes"]
    for name in ("pss", "uss", "gpu"):
        sizes = [n for sample in samples if (n := getattr(sample, f"{name}_bytes")) is not None]
        if sizes:
            parts.append(f"{name.upper()} {size(max(sizes))}")
    return ", ".join(parts) + f"; {len(samples)} samples"


def series(samples: Sequence[MemorySample]) -> dict[str, list[tuple[float, float]]]:
    """What to draw: sums of the processes in bytes over time, where they are known."""
    found = {}
    for name in ("rss", "pss", "uss", "gpu"):
        points = [(s.time_s, size) for s in samples if (size := getattr(s, f"{name}_bytes")) is not None]
        if points:
            found[name.upper()] = points
    return found


def series_of_nodes(samples: Sequence[MemorySample]) -> dict[str, list[tuple[float, float]]]:
    """The lines of --per-node: PSS of each node if the system has it, else RSS; bytes over time."""
    found: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        sums: dict[str, int] = {}
        for usage in sample.usages:
            size = usage.rss_bytes if usage.pss_bytes is None else usage.pss_bytes
            sums[usage.node or "other"] = sums.get(usage.node or "other", 0) + size
        for node, size in sums.items():
            found.setdefault(node, []).append((sample.time_s, size))
    return dict(sorted(found.items()))


def _table(stack: contextlib.ExitStack, path: Path | None, columns: Sequence[str]) -> TextIO | None:
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        table = stack.enter_context(path.open("w", newline="", encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror or e}") from e
    csv.writer(table).writerow(columns)
    return table
