"""Flags that say how several nodes compute one model: blocks of their own each, or a share of every block."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mdi.net.wire import REDUCE_DTYPES
from mdi.partition.sum_cost import CHOICES

if TYPE_CHECKING:
    from mdi.node.options import ParallelOptions

MODES = ("ring", "tensor", "auto")


def add_parallel_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--parallel", choices=MODES, default="ring", help="ring: each node has some blocks, for many texts; tensor: all nodes "
        "compute a share of every block, for few texts; auto: the fastest by measurement, also a ring of groups of near nodes "
        "(%(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--shares", metavar="X,X,...", help="with --parallel tensor: how much of every block each node takes, starter first, "
        "like 3,2,2 (default: as the nodes measure themselves; equal with --placement even)",
    )  # fmt: skip
    group.add_argument(
        "--reduce", choices=CHOICES, default="auto", help="... how the nodes sum their results (%(default)s: "
        "exchange)",
    )  # fmt: skip
    group.add_argument(
        "--reduce-dtype",
        choices=REDUCE_DTYPES,
        default="float32",
        help="... number format of partial sums on the links (%(default)s)",
    )
    group.add_argument(
        "--head", choices=("starter", "shared"), default="starter", help="... the starter computes all logits, or each "
        "node a share of them (%(default)s)",
    )  # fmt: skip


def parallel_options(args: argparse.Namespace) -> ParallelOptions:
    """Raises UsageError for shares that are none."""
    from mdi.errors import UsageError
    from mdi.node.options import ParallelOptions

    parts = None
    if getattr(args, "shares", None) is not None:
        try:
            parts = tuple(float(part) for part in args.shares.split(","))
        except ValueError:
            parts = ()
        if not parts or not all(0 <= part < float("inf") for part in parts) or not sum(parts):
            raise UsageError(f"--shares {args.shares}: expected a number for each node, like 3,2,2")
    return ParallelOptions(
        getattr(args, "parallel", "ring"),
        parts,
        getattr(args, "reduce", "auto"),
        getattr(args, "reduce_dtype", "float32"),
        getattr(args, "head", "starter") == "shared",
    )
