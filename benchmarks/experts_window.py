#!/usr/bin/env python3
"""Experts that are read from the disk when they are chosen, beside reading whole blocks, with the same memory.

    benchmarks/experts_window.py FOLDER [--blocks 16] [--factor 8] [--texts 1 4 16] [--tokens 12] [--json FILE]

FOLDER gets a model of random weights, 128 experts of which a row chooses 8, about 0.21 GB for each block, which stays there.
--memory is its size divided by --factor. Tokens are drawn at temperature 1, so that the experts of a row say nothing of those
of the next one: the rate of hits nears the share of the experts that is in memory, which is printed beside it. Each row is a
process of its own with weights out of the system's memory, the two ways in turn; times are of the tokens after the first.
Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import on_path  # noqa: F401
from mdi.checkpoint.chunks import write_chunks
from mdi.checkpoint.packing import EMBEDDING_SCALE, int8_rows
from mdi.kernels.layout import Matrix
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING
from random_checkpoint import write_tokenizer
from random_packed import RandomPacked
from records import add_json_flag, save
from rings import after_first, asked
from window import drop

FORM, N_EXPERTS, N_USED = "int8", 128, 8
SIZES = {
    "n_embd": 1024, "n_head": 16, "n_query_groups": 4, "head_size": 64, "moe_intermediate_size": 512, "intermediate_size": 512,
    "n_expert": N_EXPERTS, "n_expert_per_token": N_USED, "vocab_size": 1024, "padded_vocab_size": 1024, "block_size": 256,
}  # fmt: skip
WAYS = {"chosen experts": (), "whole blocks": ("--window", "2")}


class OwnRouters(RandomPacked):
    """Routers and rows of the embedding are all different, and what blocks add to a row is small beside it."""

    _of_shape: dict[tuple[int, ...], Any] = {}

    def _weights(self, name: str) -> Mapping[str, Matrix | np.ndarray]:
        shape = self._shapes_of[name]
        if name == EMBEDDING or name.endswith("mlp.gate.weight"):
            rows = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
            if name != EMBEDDING:
                return {name: rows}
            table, scale = int8_rows(10 * rows)
            return {EMBEDDING: table, EMBEDDING_SCALE: scale}
        if shape not in self._of_shape:  # packing takes long
            self._of_shape[shape] = super()._weights(name)[name]
        return {name: self._of_shape[shape]}


def made(folder: Path, n_blocks: int) -> Path:
    """The chunk, made at the first call."""
    from litgpt.config import Config

    config = ModelConfig.from_litgpt(Config.from_name("Qwen3-30B-A3B", n_layer=n_blocks, **SIZES))
    folder.mkdir(parents=True, exist_ok=True)
    settings = yaml.safe_dump(config.plain())
    chunk = folder / "chunks" / f"1nodes-{FORM}" / "model_starter.safetensors"
    if not chunk.is_file() or (folder / "model_config.yaml").read_text(encoding="utf-8") != settings:
        write_chunks(OwnRouters(config, FORM), folder, (n_blocks,))
        (folder / "model_config.yaml").write_text(settings, encoding="utf-8")
        write_tokenizer(folder)
    return chunk


def measured(args: argparse.Namespace, chunk: Path, memory: int, n_texts: int, way: str) -> dict[str, Any]:
    """A run of one way."""
    drop([chunk])
    found, said = asked(
        "sample", "--ckpt", args.folder, "--quantize", FORM, "--prompt", "The ring", "--prompt-style", "none",
        "--n-samples", n_texts, "--n-tokens", args.tokens, "--temperature", 1, "--sequence-length", 64, "--draft", "none",
        "--memory", memory, "--threads", args.threads, *WAYS[way],
    )  # fmt: skip
    node, (first_s, tokens_s) = found["nodes"][0], after_first(found)
    hits, misses = node["expert_hits"], node["expert_misses"]
    share = re.search(r"has (\d+) of (\d+) experts in memory", said)
    return {
        "way": way, "texts": n_texts, "tokens_per_s": tokens_s, "first_token_s": first_s,
        "hit_rate": hits / (hits + misses) if misses else None,
        "share_in_memory": int(share[1]) / int(share[2]) if share else None,
        **{key: node[key] for key in ("weights_resident_bytes", "weights_read_bytes", "peak_rss_bytes", "disk_wait_s")},
        "disk_wait_share": node["disk_wait_s"] / node["compute_s"],
        "said": [line for line in said.splitlines() if " in memory" in line],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--factor", type=float, default=8.0, help="weights over memory (%(default)s)")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    add_json_flag(parser, "experts_window")
    args = parser.parse_args()
    chunk = made(args.folder, args.blocks)
    n_bytes = chunk.stat().st_size
    memory = int(n_bytes / args.factor)
    print(f"weights {n_bytes / 1e9:.2f} GB, --memory {memory / 1e6:.0f} MB, {N_USED} of {N_EXPERTS} experts for a row")
    rows = []
    for n_texts in args.texts:
        pair = [measured(args, chunk, memory, n_texts, way) for way in WAYS]
        rows += pair
        chosen, whole = (one["tokens_per_s"] for one in pair)
        print(
            f"{n_texts:3} texts: chosen experts {chosen:7.2f} tokens/s, whole blocks {whole:7.2f}, "
            f"{chosen / whole:.1f} times; hits {pair[0]['hit_rate']:.3f}, in memory {pair[0]['share_in_memory']:.3f}",
            flush=True,
        )
    save(args.json, {"weights_bytes": n_bytes, "memory_bytes": memory, "rows": rows})


if __name__ == "__main__":
    main()
