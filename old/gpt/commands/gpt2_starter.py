"""Run a GPT-2 over a ring of nodes, from its starter: it has the embeddings, the first blocks, the final norm and the head.
Any number of samples; no caches, so the whole text travels each time.

examples:
  starter.py --ckpt checkpoints/gpt2 --nodes-config settings/3nodes.json --prompt "Once upon a time"
      three samples over the nodes of that file (start secondary.py on the others)
  starter.py --ckpt checkpoints/gpt2-xl --prompt FILE:prompts.txt --n-tokens 200
"""

from __future__ import annotations

from pathlib import Path

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.spec.parser import Parser

SETTINGS = Path(__file__).resolve().parents[2] / "GPT2" / "settings"
N_TOKENS = 400  # per sample: thesis, section 4.2


def add_arguments(parser: Parser) -> None:
    from gpt.commands.left_out import describe_cut, leave_out
    from mdi.cli import starter as cli_starter

    cli_starter.add_arguments(parser, is_resumable=False)
    leave_out(parser)
    describe_cut(parser)
    parser.set_defaults(nodes_config=SETTINGS / "3nodes.json", n_tokens=N_TOKENS)


def run(options: Options, cancel: Cancel) -> int:
    from gpt.commands.families import gpt2
    from mdi.cli.starter import run_on
    from mdi.spec.cluster import load_cluster

    return run_on(options, lambda: load_cluster(options.nodes_config or SETTINGS / "3nodes.json"), cancel, family=gpt2)
