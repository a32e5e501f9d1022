"""Run an intermediate node of a NanoGPT ring: blocks, and nothing else.

It waits for its starter, which sends it its weights.

example:
  intermediate.py --nodes-config settings/3nodes.json 0
"""

from __future__ import annotations

from mdi.spec.options import Options
from mdi.spec.parser import Parser

IS_ENDED_AT_ONCE = True


def add_arguments(parser: Parser) -> None:
    from gpt.commands.left_out import leave_out
    from gpt.commands.nano_starter import SETTINGS
    from mdi.cli import secondary as cli_secondary

    cli_secondary.add_arguments(parser)
    leave_out(parser)
    parser.set_defaults(nodes_config=[str(SETTINGS / "3nodes.json")])


def run(options: Options) -> int:
    return serve_as(options, "intermediate")


def serve_as(options: Options, role: str) -> int:
    """Be a node of the ring in this role."""
    from gpt.nodes_file import load_nano_cluster, load_nano_node
    from mdi.cli.secondary import place_of, serve

    path, index = place_of(options)
    config = load_nano_node(path, role, index)
    from gpt.commands.families import nano

    return serve(options, config, lambda: nano(role), load_nano_cluster(path).nodes)
