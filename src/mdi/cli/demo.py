"""Three nodes on this machine write three texts with a small model that is installed with this package; then one node does.

It needs no network, no account and no other file.

examples:
  mdi demo
"""

from __future__ import annotations

from mdi.cancel import Cancel
from mdi.errors import Code, UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser

PROMPTS = ("ROMEO:", "JULIET:", "First Citizen:")


def add_arguments(parser: Parser) -> None:
    nodes = {"help": "number of nodes, with the starter (%(default)s)", "default": 3}
    parser.options(None, "nodes", "n_tokens", *COMMON, nodes=nodes, n_tokens=200)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.checkpoint.model_store import embedded_model
    from mdi.cli import local_ring, options_of, parser_of

    if (folder := embedded_model()) is None:
        raise UsageError(
            "the demo's model is neither in this package nor in a clone: install a wheel", code=Code.MISSING
        )
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    argv = [
        "--ckpt",
        str(folder),
        "--nodes",
        str(options.nodes),
        "--n-tokens",
        str(options.n_tokens),
        "--compare",
    ]
    parser = parser_of(local_ring)
    return local_ring.run(options_of(parser, parser.parse_args(argv + prompts)), cancel)
