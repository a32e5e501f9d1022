"""Generate text with a NanoGPT on this machine alone: a starter that holds everything.

example:
  sample.py --ckpt checkpoints/nano-7 --prompt "ROMEO:" --n-tokens 300
"""

from __future__ import annotations

from dataclasses import replace

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    from gpt.commands.left_out import leave_out
    from gpt.commands.nano_starter import N_TOKENS
    from mdi.cli import sample as cli_sample

    cli_sample.add_arguments(parser)
    leave_out(parser)
    parser.set_defaults(n_tokens=N_TOKENS)


def run(options: Options, cancel: Cancel) -> int:
    from gpt.commands.families import nano
    from mdi.cli.starter import run_on
    from mdi.spec.cluster import standalone

    options = replace(options, prompt=options.prompt or ("\n",))
    return run_on(options, standalone, cancel, family=nano)
