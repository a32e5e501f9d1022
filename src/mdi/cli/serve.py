"""Serve models to programs and people: OpenAI's API over a ring of nodes, for many texts at once.

examples:
  serve.py --ckpt checkpoints/org/model                                   on this machine alone
  serve.py --ckpt checkpoints/org/model --nodes 3                         a ring of three processes here
  serve.py --ckpt checkpoints/org/model --nodes-config nodes.json --host 0.0.0.0 --api-key-file keys.txt
      over the nodes of that file, for everybody in the network with a key

Programs that use OpenAI's API need http://127.0.0.1:8000/v1 as their base URL. Without --sequence-length, a text may have up
to 8,192 tokens, or as many as the model allows. Ctrl-C or SIGTERM ends the server when the texts under way are finished, or
after 15 seconds.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdi.run.nodes import NodeSource
    from mdi.run.run import Run
    from mdi.serve.process import ApiProcess
    from mdi.serve.serve_settings import ServeSettings

CONTEXT_LIMIT = 8192  # without --sequence-length: enough for a long chat, little enough for position tables

logger = logging.getLogger("mdi")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags
    from mdi.cli.access import add_access_flags
    from mdi.cli.flags import add_model_flags, add_ring_flags
    from mdi.cli.output import add_trace_flag
    from mdi.cli.parallel_flags import add_parallel_flags
    from mdi.cli.serve_flags import add_serve_flags

    add_model_flags(parser)
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument("--nodes", type=int, metavar="N", help="a ring of N processes on this machine")
    nodes.add_argument("--nodes-config", type=Path, metavar="FILE", help="nodes file: a ring of these nodes")
    nodes.add_argument("--devices", metavar="DEV,DEV,...", help="with --nodes: device of each node, starter first")
    add_access_flags(nodes)
    add_ring_flags(nodes)
    add_parallel_flags(nodes)
    add_trace_flag(add_serve_flags(parser))
    parser.set_defaults(prompt_style="none")
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from mdi.cli import Obeyed, ignore_interrupts
    from mdi.cli.checks import check_computing, check_cut, check_model
    from mdi.cli.serve_flags import serve_settings
    from mdi.cli.session_flags import starter_options
    from mdi.errors import UsageError

    check_computing(args)
    if args.nodes is not None and args.nodes_config is not None:
        raise UsageError("--nodes makes a ring of its own; --nodes-config has one already: give one of them")
    if args.ckpt is None:
        raise UsageError("give the model: --ckpt DIRECTORY")
    settings = serve_settings(args)
    check_model(args)
    check_cut(args, 1 if args.nodes is None else args.nodes)
    starter_options(args)

    from mdi.serve.process import ApiProcess

    api = ApiProcess(settings, args.ckpt_folder, args.ckpt)
    try:
        logger.info("%s answers as soon as the model is loaded", api.url)
        _serve(args, api, settings)
    except KeyboardInterrupt:
        pass
    finally:
        ignore_interrupts()
        api.close()
    logger.info("the server has ended")
    return Obeyed(0)


def _serve(args: argparse.Namespace, api: ApiProcess, settings: ServeSettings) -> None:
    """Until the API process ends, or an interrupt that has been obeyed."""
    from mdi.cli import ignore_interrupts
    from mdi.cli.session_flags import starter_options
    from mdi.errors import MdiError
    from mdi.serve.backend import Backend
    from mdi.serve.catalog import Catalog
    from mdi.serve.host import ModelHost
    from mdi.serve.questions import handlers
    from mdi.serve.snapshot import Snapshots
    from mdi.tracing.recorder import SERVE_SPANS

    nodes = _nodes(args)  # first, because it decides the placement on processes of this machine
    options = starter_options(args)
    if not options.n_spans:  # the page shows how long frames take on each link
        options = replace(options, n_spans=SERVE_SPANS)
    with nodes:
        host = ModelHost(
            nodes, options, Catalog(args.ckpt_folder, args.ckpt), args.sequence_length or CONTEXT_LIMIT, api.lines,
            _after(args), lambda name: logger.info("ready: %s answers on %s; Ctrl-C ends the server", name, api.url),
        )  # fmt: skip
        snapshots = Snapshots(host)
        backend = Backend(api.lines, host, handlers(host, snapshots), snapshots.take)
        if args.open and _has_display():
            webbrowser.open(api.url)
        try:
            host.run()
            raise MdiError("the API process has ended by itself; its last lines are above")
        except KeyboardInterrupt:
            ignore_interrupts()
            logger.info("no more requests are accepted; the server ends as soon as those under way are finished")
            api.drain()
        finally:
            ignore_interrupts()
            host.close()
            backend.close()


def _has_display() -> bool:
    """Without one, a browser of text would take this terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _after(args: argparse.Namespace) -> Callable[[Run], None] | None:
    """What is done when a ring has ended: the last one's trace is what --trace leaves."""
    from mdi.cli.output import write_trace_of

    return None if args.trace is None else lambda node: write_trace_of(node, args.trace)


def _nodes(args: argparse.Namespace) -> NodeSource:
    from mdi.cli.session_flags import cores_of, nodes_of, processes_of
    from mdi.config import load_cluster, standalone
    from mdi.node.local import LocalRing

    if args.nodes is not None:
        return processes_of(args, LocalRing, cores_of(args), is_revived=True)
    return nodes_of(args, lambda: load_cluster(args.nodes_config) if args.nodes_config else standalone())
