#!/usr/bin/env python3
"""One node's share of a 70 B model under a window, run from real files of a few layers: peak memory of the process.

    benchmarks/window_share.py FOLDER TOKENIZER_FOLDER [--nodes 8] [--layers 2] [--memory 3100000000] [--json FILE]

The share is that of window_memory.py: Llama 2-70B in float32 over so many nodes, with embedding and head, as on the paper's
master. More layers take more of the disk, and no memory but their caches. FOLDER is filled with a chunk of random weights, some
gigabytes; tokenizer.json and tokenizer_config.json are taken from TOKENIZER_FOLDER.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import on_path  # noqa: F401
from memory_group import memory_group
from random_packed import RandomPacked
from records import add_json_flag, save
from rings import asked
from window_memory import share_of


class RandomShare(RandomPacked):
    """With an embedding in bfloat16, as formats have it that are not rounded."""

    def _weights(self, name: str) -> Mapping[str, Any]:
        if name != "transformer.wte.weight":
            return super()._weights(name)
        rows = np.random.default_rng(0).integers(0x3B80, 0x3C80, (256, self._shapes_of[name][1]), dtype=np.uint16)
        return {name: np.resize(rows, self._shapes_of[name])}


def write(folder: Path, tokenizer: Path, n_nodes: int, n_layer: int) -> None:
    from litgpt.config import Config

    from mdi.checkpoint.chunks import write_chunks
    from mdi.model.plain import ModelConfig

    whole = ModelConfig.from_litgpt(Config.from_name("Llama-2-70b-hf"))
    whole = replace(whole, intermediate_size=whole.intermediate_size // n_nodes * n_nodes)
    config = replace(share_of(whole, n_nodes), n_layer=n_layer, name="share-of-70b", hf_config={})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config.plain()), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    write_chunks(RandomShare(config, "float32"), folder, (n_layer,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--memory", type=int, default=3_100_000_000)
    add_json_flag(parser, "window_share")
    args = parser.parse_args()
    chunk = args.folder / "chunks" / "1nodes-float32" / "model_starter.safetensors"
    if not chunk.is_file():
        write(args.folder, args.tokenizer, args.nodes, args.layers)
    with memory_group(args.memory) as group:
        found, _ = asked(
            "sample", "--chunk", chunk, "--quantize", "float32", "--window", 2, "--n-samples", 1, "--prompt", "The ring",
            "--prompt-style", "none", "--n-tokens", 3, "--temperature", 0, "--sequence-length", 256, "--draft", "none",
            inside=group.command([]),
        )  # fmt: skip
    node = found["nodes"][0]
    result = {"nodes": args.nodes, "layers": args.layers, "limit_bytes": args.memory, "chunk_bytes": chunk.stat().st_size,
              **{key: node[key] for key in ("peak_rss_bytes", "weights_resident_bytes", "weights_read_bytes")}}  # fmt: skip
    print(json.dumps(result))
    save(args.json, result)


if __name__ == "__main__":
    main()
