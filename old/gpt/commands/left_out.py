"""The flags of src/'s commands that these models have no use for: they have no caches, chunks, placements or windows."""

from __future__ import annotations

import argparse
from typing import Any

# flag -> what a command finds in its place
LEFT_OUT: dict[str, Any] = {
    "--chunk": None,
    "--kv-dtype": "auto",
    "--kv-memory": None,
    "--window": None,
    "--retain": None,
    "--memory": None,
    "--weights": "auto",
    "--mlock": False,
    "--placement": None,
    "--fixed": True,
    "--silence-s": argparse.SUPPRESS,
    "--replay-memory": None,
    "--frames": None,
    "--parallel": "ring",
    "--shares": None,
    "--reduce": "auto",
    "--reduce-dtype": "float32",
    "--head": "starter",
}


class _Unknown(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"unrecognized arguments: {option}")


def leave_out(parser: argparse.ArgumentParser) -> None:
    """Take those flags from a command that has its arguments already."""
    group = parser.add_argument_group(conflict_handler="resolve")  # what is added takes the place of what was there
    for flag, value in LEFT_OUT.items():
        group.add_argument(flag, action=_Unknown, nargs="?", default=value, help=argparse.SUPPRESS)


def describe_cut(parser: argparse.ArgumentParser) -> None:
    """--layers where the thesis' tables are the default."""
    group = parser.add_argument_group("blocks", conflict_handler="resolve")
    group.add_argument("--layers", metavar="N,N,...", help="per node, starter first (default: see README.md)")
