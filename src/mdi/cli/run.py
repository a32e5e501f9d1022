"""Answer a text, or chat, with a model that is named: one of the hub, of the store, a folder or a GGUF file.

examples:
  mdi run Qwen/Qwen3-0.6B "Why is the sky blue?"
  mdi run Qwen/Qwen3-0.6B --machines 3         a chat on three machines: prints a line for the other two

A model that is not here is downloaded to the store (`mdi list` shows where that is), once, and read as it is. Without NAME it
is the model that was used last.
"""

from __future__ import annotations

from mdi.cancel import Cancel
from mdi.spec.options import ACCESS, COMMON, DISCOVERY, DRAWING, MODEL, RING, Options
from mdi.spec.parser import Parser

FIRST = (
    "--quantize", "--memory", "--sequence-length", "--n-tokens", "--temperature", "--key", "--machines", "--nodes-config",
    "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.options("model", *MODEL, "hf_token", "revision", quantize={"default": "auto"})
    parser.options("text", "words", *DRAWING, n_tokens=500)
    parser.options("several machines", *ACCESS, *DISCOVERY, "nodes_config", *RING, "stop_nodes",
                   nodes_config={"help": "nodes file: run over the ring of these nodes"},
                   stop_nodes={"help": "end the secondaries' processes afterwards"})  # fmt: skip
    parser.options("output", "trace")
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli.access import open_keys
    from mdi.cli.chat import converse

    return converse(options, cancel, " ".join(options.words), is_distributed=open_keys(options) is not None)
