"""Run the finisher of a NanoGPT ring: the last blocks, the final norm and the head. It returns logits.

It waits for its starter, which sends it its weights.

example:
  finisher.py --nodes-config settings/3nodes.json
"""

from __future__ import annotations

import argparse

IS_ENDED_AT_ONCE = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpt.commands.nano_starter import SETTINGS
    from mdi.cli import secondary as cli_secondary

    cli_secondary.add_arguments(parser, is_litgpt=False)
    parser.set_defaults(nodes_config=[str(SETTINGS / "3nodes.json")])


def run(args: argparse.Namespace) -> int:
    from gpt.nodes_file import load_nano_cluster, load_nano_node
    from mdi.cli.secondary import place_of, serve

    path, index = place_of(args)
    config = load_nano_node(path, "finisher", index)
    from gpt.commands.families import nano

    return serve(args, config, lambda: nano("finisher"), load_nano_cluster(path).nodes)
