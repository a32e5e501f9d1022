"""Generate text on one device, with the same stage, caches and sampler as a ring.

example:
  sample.py --ckpt checkpoints/org/model --prompt "Once upon a time" --n-samples 1 --temperature 0
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags
    from mdi.cli.flags import add_generation_flags, add_model_flags
    from mdi.cli.output import add_output_flags

    add_model_flags(parser)
    parser.add_argument("--chunk", type=Path, help=argparse.SUPPRESS)
    add_generation_flags(parser, n_tokens=800, n_samples=1)
    add_output_flags(parser)
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from mdi.cli.starter import run_on
    from mdi.config import standalone

    return run_on(args, standalone)
