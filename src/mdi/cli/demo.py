"""Three nodes on this machine write three texts with a small model that is installed with this package; then one node does.

It needs no network, no account and no other file.

examples:
  mdi demo
"""

from __future__ import annotations

from pathlib import Path

import mdi
from mdi.cancel import Cancel
from mdi.errors import UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser

NAME = "nano-llama"
PROMPTS = ("ROMEO:", "JULIET:", "First Citizen:")


def add_arguments(parser: Parser) -> None:
    nodes = {"help": "number of nodes, with the starter (%(default)s)", "default": 3}
    parser.options(None, "nodes", "n_tokens", *COMMON, nodes=nodes, n_tokens=200)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli import local_ring, options_of, parser_of

    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    argv = [
        "--ckpt",
        str(model_folder()),
        "--nodes",
        str(options.nodes),
        "--n-tokens",
        str(options.n_tokens),
        "--compare",
    ]
    parser = parser_of(local_ring)
    return local_ring.run(options_of(parser, parser.parse_args(argv + prompts)), cancel)


def model_folder() -> Path:
    """The embedded model: of the installed package, or of a clone. Raises UsageError."""
    package = Path(mdi.__file__).parent
    for folder in (package / NAME, package.parents[1] / "assets" / NAME):
        if folder.is_dir():
            return folder
    raise UsageError("the demo's model is neither in this package nor in a clone: install a wheel", code="missing")
