"""Run the finisher of a NanoGPT ring: the last blocks, the final norm and the head. It returns logits.

It waits for its starter, which sends it its weights.

example:
  finisher.py --nodes-config settings/3nodes.json
"""

from __future__ import annotations

from gpt.commands.nano_intermediate import add_arguments, serve_as
from mdi.spec.options import Options

__all__ = ["add_arguments", "run"]

IS_ENDED_AT_ONCE = True


def run(options: Options) -> int:
    return serve_as(options, "finisher")
