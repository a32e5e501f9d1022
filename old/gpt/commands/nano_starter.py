"""Run a NanoGPT over its three roles, from the starter: it embeds, runs the first blocks, and samples from the logits that
the finisher returns. As many samples as nodes; no caches, so the cropped text travels each time.

examples:
  starter.py --ckpt checkpoints/nano-7 --nodes-config settings/3nodes.json --n-tokens 500
      (start intermediate.py and finisher.py with the same file on the other nodes)
  starter.py --ckpt checkpoints/nano-7 --nodes-config settings/2nodes.json --prompt "ROMEO:" --temperature 0
"""

from __future__ import annotations

import argparse
from pathlib import Path

SETTINGS = Path(__file__).resolve().parents[2] / "nanoGPT" / "settings"
N_TOKENS = 1000  # per sample: thesis, section 4.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from gpt.commands.left_out import describe_cut, leave_out
    from mdi.cli import starter as cli_starter

    cli_starter.add_arguments(parser, is_resumable=False)
    leave_out(parser)
    describe_cut(parser)
    parser.set_defaults(nodes_config=SETTINGS / "3nodes.json", n_tokens=N_TOKENS)


def run(args: argparse.Namespace) -> int:
    from gpt.commands.families import nano
    from gpt.nodes_file import load_nano_cluster
    from mdi.cli.starter import run_on

    cluster = load_nano_cluster(args.nodes_config)
    fill_in(args, cluster.n_nodes)
    return run_on(args, lambda: cluster, family=nano)


def fill_in(args: argparse.Namespace, n_nodes: int) -> None:
    """A sample for each node, from a line end if nothing else is given. Raises UsageError for another number."""
    from mdi.errors import UsageError

    args.prompt = args.prompt or ["\n"]
    if args.n_samples not in (None, n_nodes) or len(args.prompt) > n_nodes:
        wanted = args.n_samples or f"{len(args.prompt)} prompts"
        raise UsageError(f"NanoGPT's ring has as many samples as nodes: {n_nodes}, not {wanted}")
    args.n_samples = n_nodes
