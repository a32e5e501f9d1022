"""Answer a text, or chat, with a model that is named: one of the hub, of the store, a folder or a GGUF file.

examples:
  mdi run Qwen/Qwen3-0.6B "Why is the sky blue?"
  mdi run TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M       one GGUF file of many; without a text a chat begins
  mdi run ~/models/tinyllama.Q4_K_M.gguf
  mdi run --key cluster.key org/name                           over the nodes that have the key
  mdi run                                                      the model that was used last

A model that is not here is downloaded to the store (`mdi list` shows where that is), once, and read as it is. It runs on this
machine, or on the nodes of --nodes-config or --key.
"""

from __future__ import annotations

from mdi.cancel import Cancel
from mdi.spec.options import ACCESS, COMMON, DISCOVERY, DRAWING, MODEL, RING, Options
from mdi.spec.parser import Parser

FIRST = (
    "--quantize", "--memory", "--sequence-length", "--nodes-config", "--key",
    "--machines", "--n-tokens", "--temperature", "--adapter", "--verb",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    parser.options("model", *MODEL, "words", "hf_token", "revision", quantize={"default": "auto"})
    parser.options(None, "nodes_config", *ACCESS, *DISCOVERY, *RING, "stop_nodes",
                   nodes_config={"help": "nodes file: run over the ring of these nodes"},
                   stop_nodes={"help": "end the secondaries' processes afterwards"})  # fmt: skip
    parser.options("generation", *DRAWING, n_tokens=500)
    parser.options("output", "trace")
    parser.options(None, *COMMON)


def run(options: Options, cancel: Cancel) -> int:
    from mdi.cli.access import open_keys
    from mdi.cli.chat import converse

    return converse(options, cancel, " ".join(options.words), is_distributed=open_keys(options) is not None)
