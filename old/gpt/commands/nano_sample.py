"""Generate text with a NanoGPT on this machine alone: a starter that holds everything.

example:
  sample.py --ckpt checkpoints/nano-7 --prompt "ROMEO:" --n-tokens 300
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpt.commands.left_out import leave_out
    from gpt.commands.nano_starter import N_TOKENS
    from mdi.cli import sample as cli_sample

    cli_sample.add_arguments(parser)
    leave_out(parser)
    parser.set_defaults(n_tokens=N_TOKENS)


def run(args: argparse.Namespace) -> int:
    from gpt.commands.families import nano
    from mdi.cli.starter import run_on
    from mdi.config import standalone

    args.prompt = args.prompt or ["\n"]
    return run_on(args, standalone, family=nano)
