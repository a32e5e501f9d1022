"""Generate text on one device, with the same stage, caches and sampler as a ring.

example:
  mdi sample model.Q4_K_M.gguf --prompt "Once upon a time" --n-samples 1 --temperature 0
"""

from __future__ import annotations

from mdi.cancel import Cancel
from mdi.spec.options import COMMON, GENERATION, MODEL, OUTPUT, Options
from mdi.spec.parser import Parser

FIRST = (
    "--ckpt", "--quantize", "--memory", "--sequence-length", "--prompt", "--n-samples", "--n-tokens", "--temperature", "--json",
    "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.options("model", *MODEL)
    parser.options(None, "chunk", chunk={"help": ""})
    one = "texts to generate at once (default: one per prompt; 1 for a single one)"
    parser.options("generation", *GENERATION, n_tokens=800, n_samples={"help": one})
    parser.set_defaults(samples_of_one=1, fixed=True)
    parser.options("output", *OUTPUT)
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli.starter import run_on
    from mdi.spec.cluster import standalone

    return run_on(options, standalone, cancel)
