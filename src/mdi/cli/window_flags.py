"""Flags for weights that are read from the disk while they are computed with."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdi.config import WeightMemory
    from mdi.window.window_options import WindowOptions


def add_window_flags(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--window", type=int, metavar="W", help="keep only W halves of blocks (attention, MLP) in memory and read the "
        "next ones from the disk meanwhile, for models larger than memory (default: keep all; with --memory, as many as fit)",
    )  # fmt: skip
    parser.add_argument(
        "--retain", type=int, metavar="T", help="with a window, always keep every T-th block in memory (default: none; with "
        "--memory, as many as fit)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", metavar="SIZE", help="limit for this process, such as 700MB: window and kept blocks are chosen to fit, and "
        "the run ends if it needs more",
    )  # fmt: skip


def asked_window(args: argparse.Namespace) -> WindowOptions | None:
    """The window that the flags ask for; None without. Raises UsageError."""
    from mdi.config import parse_bytes
    from mdi.window.window_options import window_options

    return window_options(
        args.window, args.retain, None if args.memory is None else parse_bytes(args.memory, "--memory")
    )


def weight_memory(args: argparse.Namespace) -> WeightMemory:
    """Where weights are read from while computing, by --weights, --mlock and the flags of a window. Raises UsageError."""
    from mdi.config import WeightMemory
    from mdi.errors import UsageError
    from mdi.window.window_options import WindowMemory

    window = asked_window(args)
    if window is None:
        return WeightMemory(args.weights, args.mlock)
    if args.weights != "auto" or args.mlock:
        raise UsageError("--window and --memory read weights into memory of their own: leave --weights and --mlock out")
    return WindowMemory(window=window)
