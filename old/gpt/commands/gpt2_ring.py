"""Run a whole GPT-2 ring on this machine: a starter and its secondaries, a process each.

Every other flag goes to the starter; see starter.py --help.

example:
  local_ring.py --nodes 3 --ckpt checkpoints/gpt2 --prompt "Once upon a time" --n-samples 4
"""

from __future__ import annotations

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    from gpt.commands.gpt2_starter import N_TOKENS
    from gpt.commands.left_out import describe_cut, leave_out
    from mdi.cli import local_ring as cli_local_ring

    cli_local_ring.add_arguments(parser)
    leave_out(parser)
    describe_cut(parser)
    parser.set_defaults(n_tokens=N_TOKENS)


def run(options: Options, cancel: Cancel) -> int:
    from gpt.commands.families import gpt2
    from gpt.rings import GPT2Ring
    from mdi.cli.local_ring import run_ring

    return run_ring(options, GPT2Ring, cancel, gpt2)
