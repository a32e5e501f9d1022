"""Run the finisher of a NanoGPT ring: the last blocks, the final norm and the head. It returns logits.

It waits for its starter, which sends it its weights.

example:
  finisher.py --nodes-config settings/3nodes.json
"""

from __future__ import annotations

import argparse

from gpt.commands.nano_intermediate import add_arguments, serve_as

__all__ = ["add_arguments", "run"]

IS_ENDED_AT_ONCE = True


def run(args: argparse.Namespace) -> int:
    return serve_as(args, "finisher")
