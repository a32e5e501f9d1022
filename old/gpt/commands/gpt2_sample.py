"""Generate text with a GPT-2 on this machine alone.

example:
  sample.py --ckpt checkpoints/gpt2 --prompt "Once upon a time" --n-tokens 100
"""

from __future__ import annotations

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    from gpt.commands.gpt2_starter import N_TOKENS
    from gpt.commands.left_out import leave_out
    from mdi.cli import sample as cli_sample

    cli_sample.add_arguments(parser)
    leave_out(parser)
    parser.set_defaults(n_tokens=N_TOKENS)


def run(options: Options, cancel: Cancel) -> int:
    from gpt.commands.families import gpt2
    from mdi.cli.starter import run_on
    from mdi.spec.cluster import standalone

    return run_on(options, standalone, cancel, family=gpt2)
