"""Run a whole ring on this machine: one process per node, on free ports. All processes end with the run.

All other flags are those of the starter; see starter.py --help.

examples:
  local_ring.py --nodes 3 --ckpt checkpoints/org/model --prompt "Who are you?"
  local_ring.py --nodes 3 --ckpt checkpoints/org/model --compare
  local_ring.py --nodes 2 --devices cuda:0,cuda:1 --ckpt checkpoints/org/model
  local_ring.py --nodes 2 --devices cuda:0,cpu --ckpt checkpoints/org/model --layers 20,12
"""

from __future__ import annotations

import argparse
import copy
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mdi.metrics import RunMetrics
    from mdi.node.local import LocalRing
    from mdi.run.nodes import NodeSource
    from mdi.stages.model_family import ModelFamily

logger = logging.getLogger("mdi")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import starter as cli_starter

    parser.add_argument(
        "--nodes", type=int, default=3, metavar="N", help="number of nodes, with the starter (%(default)s)"
    )
    parser.add_argument(
        "--spares", type=int, default=0, metavar="N", help="extra nodes, which replace lost ones (%(default)s)"
    )  # fmt: skip
    parser.add_argument("--devices", metavar="DEV,DEV,...", help="device of each node, starter first")
    parser.add_argument("--pin", action="store_true", help="run each node on its own share of --cores, or of all cores")
    parser.add_argument(
        "--compare", action="store_true", help="then generate the same texts on one node, and compare the speeds"
    )
    cli_starter.add_arguments(parser, is_resumable=False)
    parser.set_defaults(nodes_config=None)


def run(args: argparse.Namespace) -> int:
    from mdi.node.local import LocalRing

    return run_ring(args, LocalRing)


def run_ring(
    args: argparse.Namespace, make_ring: type[LocalRing], family: Callable[[], ModelFamily] | None = None
) -> int:
    """One run on a ring of child processes; `family` makes that of the model, None is litgpt's."""
    from mdi.cli.checks import check_cut
    from mdi.cli.session_flags import processes_of
    from mdi.cli.starter import generate_on
    from mdi.errors import UsageError

    if args.nodes_config is not None:
        raise UsageError("local_ring.py makes its own nodes file; to use yours, run starter.py and secondary.py")
    if args.compare and (args.json or args.ckpt is None):
        raise UsageError("--compare needs the whole model (--ckpt), and prints for people (no --json)")
    as_given = copy.copy(args)

    def nodes() -> NodeSource:
        if args.nodes >= 1:
            check_cut(args, args.nodes)
        return processes_of(args, make_ring, _cores(args), args.spares, _tell_processes)

    metrics = generate_on(args, nodes, family)
    if args.compare:
        as_given.seed = args.seed
        _compare(as_given, metrics, family)
    return 0


def _tell_processes(ring: LocalRing) -> None:
    from mdi.machine.neighbours import fair_threads

    nodes = (*ring.cluster.nodes, *ring.cluster.spares)
    processes = "1 process" if len(nodes) == 1 else f"{len(nodes)} processes"
    logger.info("starting %s on this machine (CPU cores: %d; threads each: %d)", processes, fair_threads([]),
                ring.threads_of_starter)  # fmt: skip
    for node, pid in zip(nodes, [None, *ring.pids], strict=True):
        what = "this process" if pid is None else f"process {pid}" + (", a spare" if node.is_spare else "")
        logger.info("  %-12s control port %d, ring port %d, %s", node.name, node.port, node.port_in, what)


def _compare(args: argparse.Namespace, ring: RunMetrics, family: Callable[[], ModelFamily] | None) -> None:
    """The same texts on one node with all cores, and the difference in words."""
    from mdi.cli import heed_interrupts
    from mdi.cli.session_flags import nodes_of
    from mdi.cli.starter import generate_on
    from mdi.config import standalone
    from mdi.machine.neighbours import fair_threads
    from mdi.run.report import format_comparison

    for name in ("layers", "placement", "chunk", "frames"):  # these say how a ring is laid out
        setattr(args, name, None)
    print("\nthe same on one node ...", flush=True)
    heed_interrupts()
    alone = generate_on(args, lambda: nodes_of(args, standalone), family, is_reported=False)
    print(format_comparison(ring, alone, fair_threads([])))


def _cores(args: argparse.Namespace) -> Sequence[int] | None:
    """Cores to divide among the nodes; None if none is to be kept on any."""
    from mdi.cli.session_flags import cores_of
    from mdi.node.local import pinnable_cores

    return pinnable_cores() if args.cores is None and args.pin else cores_of(args)
