"""Run a whole ring on this machine: one process per node, on free ports. All processes end with the run.

All other flags are those of the starter; see mdi starter --help.

examples:
  mdi local-ring nano-llama --nodes 3 --prompt "Who are you?"
  mdi local-ring model.Q4_K_M.gguf --nodes 3 --compare
  mdi local-ring org/name --nodes 2 --devices cuda:0,cuda:1
  mdi local-ring org/name --nodes 2 --devices cuda:0,cpu --layers 20,12
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mdi.metrics import RunMetrics
    from mdi.run.local import LocalRing
    from mdi.run.nodes import NodeSource
    from mdi.stages.model_family import ModelFamily

logger = logging.getLogger("mdi")


FIRST = (
    "--nodes", "--ckpt", "--quantize", "--placement", "--prompt",
    "--n-samples", "--n-tokens", "--temperature", "--plots", "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    from mdi.cli import starter

    parser.options(None, "nodes", "spares", "devices", "pin", "compare",
                   nodes={"help": "number of nodes, with the starter (%(default)s)", "default": 3})  # fmt: skip
    starter.add_arguments(parser, is_resumable=False)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.run.local import LocalRing

    return run_ring(options, LocalRing, cancel)


def run_ring(
    options: Options, make_ring: type[LocalRing], cancel: Cancel, family: Callable[[], ModelFamily] | None = None
) -> int:
    """One run on a ring of child processes; `family` makes that of the model, None is litgpt's."""
    from mdi.cli.session import check_cut, on_processes, processes_of, with_model, with_seed
    from mdi.cli.starter import generate_on
    from mdi.errors import UsageError

    if options.nodes_config is not None:
        raise UsageError("mdi local-ring makes its own nodes file; to use yours, run mdi starter and mdi secondary")
    options, n_nodes = with_seed(options), options.nodes or 1

    def nodes() -> NodeSource:
        found = with_model(options, cancel, is_litgpt=family is None)
        check_cut(found, n_nodes)
        return processes_of(found, n_nodes, make_ring, _cores(found), _show_processes)

    metrics = generate_on(on_processes(options), nodes, cancel, family)
    if options.compare:
        _compare(options, metrics, cancel, family)
    return 0


def _show_processes(ring: LocalRing) -> None:
    from mdi.host.threads import fair_threads

    nodes = (*ring.cluster.nodes, *ring.cluster.spares)
    processes = "1 process" if len(nodes) == 1 else f"{len(nodes)} processes"
    logger.info("starting %s on this machine (CPU cores: %d; threads each: %d)", processes, fair_threads([]),
                ring.threads_of_starter)  # fmt: skip
    for node, pid in zip(nodes, [None, *ring.pids], strict=True):
        what = "this process" if pid is None else f"process {pid}" + (", a spare" if node.is_spare else "")
        logger.info("  %-12s control port %d, ring port %d, %s", node.name, node.port, node.port_in, what)


def _compare(options: Options, ring: RunMetrics, cancel: Cancel, family: Callable[[], ModelFamily] | None) -> None:
    """The same texts on one node with all cores, and the difference in words."""
    from mdi.cli import heed_interrupts
    from mdi.cli.session import nodes_of
    from mdi.cli.starter import generate_on
    from mdi.host.threads import fair_threads
    from mdi.run.report import format_comparison
    from mdi.spec.cluster import standalone

    # These say how a ring is laid out.
    options = replace(options, layers=None, placement=None, chunk=None, n_frames=None)
    print("\nthe same on one node ...", flush=True)
    heed_interrupts()
    alone = generate_on(options, lambda: nodes_of(options, standalone), cancel, family, is_reported=False)
    print(format_comparison(ring, alone, fair_threads([])))


def _cores(options: Options) -> Sequence[int] | None:
    """Cores to divide among the nodes; None if none is to be kept on any."""
    from mdi.run.local import pinnable_cores

    return pinnable_cores() if options.cores is None and options.pin else options.cores
