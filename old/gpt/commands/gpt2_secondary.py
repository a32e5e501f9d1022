"""Run a secondary of a GPT-2 ring: a run of blocks. It waits for its starter, which sends it its weights.

example:
  secondary.py --nodes-config settings/3nodes.json 0
"""

from __future__ import annotations

from mdi.spec.options import Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    from gpt.commands.gpt2_starter import SETTINGS
    from gpt.commands.left_out import leave_out
    from mdi.cli import secondary as cli_secondary

    cli_secondary.add_arguments(parser)
    leave_out(parser)
    parser.set_defaults(nodes_config=[str(SETTINGS / "3nodes.json"), "0"])


def run(options: Options) -> int:
    from mdi.cli.secondary import place_of, serve
    from mdi.spec.cluster import load_nodes, load_secondary

    path, index = place_of(options)
    config = load_secondary(path, index)
    from gpt.commands.families import gpt2

    return serve(options, config, gpt2, load_nodes(path))
