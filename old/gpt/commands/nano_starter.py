"""Run a NanoGPT over its three roles, from the starter: it embeds, runs the first blocks, and samples from the logits that
the finisher returns. As many samples as nodes; no caches, so the cropped text travels each time.

examples:
  starter.py --ckpt checkpoints/nano-7 --nodes-config settings/3nodes.json --n-tokens 500
      (start intermediate.py and finisher.py with the same file on the other nodes)
  starter.py --ckpt checkpoints/nano-7 --nodes-config settings/2nodes.json --prompt "ROMEO:" --temperature 0
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.spec.parser import Parser

SETTINGS = Path(__file__).resolve().parents[2] / "nanoGPT" / "settings"
N_TOKENS = 1000  # per sample: thesis, section 4.1


def add_arguments(parser: Parser) -> None:
    from gpt.commands.left_out import describe_cut, leave_out
    from mdi.cli import starter as cli_starter

    cli_starter.add_arguments(parser, is_resumable=False)
    leave_out(parser)
    describe_cut(parser)
    parser.set_defaults(nodes_config=SETTINGS / "3nodes.json", n_tokens=N_TOKENS)


def run(options: Options, cancel: Cancel) -> int:
    from gpt.commands.families import nano
    from gpt.nodes_file import load_nano_cluster
    from mdi.cli.starter import run_on

    cluster = load_nano_cluster(options.nodes_config or SETTINGS / "3nodes.json")
    return run_on(filled_in(options, cluster.n_nodes), lambda: cluster, cancel, family=nano)


def filled_in(options: Options, n_nodes: int) -> Options:
    """The options with a sample for each node, from a line end without a prompt. UsageError for another number."""
    from mdi.errors import UsageError

    prompt = options.prompt or ("\n",)
    if options.n_samples not in (None, n_nodes) or len(prompt) > n_nodes:
        wanted = options.n_samples or f"{len(prompt)} prompts"
        raise UsageError(f"NanoGPT's ring has as many samples as nodes: {n_nodes}, not {wanted}")
    return replace(options, prompt=prompt, n_samples=n_nodes)
