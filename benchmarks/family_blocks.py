#!/usr/bin/env python3
"""One block of a family, in the shape of its real model, beside a Llama block of as many weights per row.

For each: milliseconds and bytes read per second of one row; milliseconds and products per second of 64 rows. There, an
expert meets a few rows (64 * used / all): so the Llama block stands there with so many rows, too, as the bound of few rows
by a matrix. Random weights in one format (of gpt-oss mxfp4); routers choose the experts of random rows; both blocks take turns.
A small block stands there several times, each with weights of its own, so that none is read from the processor's cache. Of
one thread, its processor time counts, which other programs disturb less.

    family_blocks.py --format int4
    family_blocks.py --family minimax-m2 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from records import add_json_flag, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "tests"))

from mdi.checkpoint.hfconfig import derive_config  # noqa: E402
from mdi.checkpoint.packing import Packing, PartWeights  # noqa: E402
from mdi.checkpoint.parts import part_of  # noqa: E402
from mdi.checkpoint.shapes import full_config, model_shapes  # noqa: E402
from mdi.kernels.slices import Slice  # noqa: E402
from mdi.kernels.weight_formats import weight_format  # noqa: E402
from mdi.placement.kernel_bench import random_weights  # noqa: E402
from mdi.stages.kernel_stage import KernelStage, Resident  # noqa: E402
from real_configs import OWN  # noqa: E402

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # a form of config.json in the tests, and other sizes
    "gpt-oss-20b": ("gpt-oss 20B", {}),
    "glm-4.5-air": ("GLM 4.5 Air", {}),
    "glm-4.5": ("GLM 4.5", {}),
    "minimax-m2": ("MiniMax M2", {}),
    "bloom-7b1": ("BLOOM 560M", {"n_embed": 4096, "num_attention_heads": 32}),
    "falcon-rw-7b": ("Falcon RW 1B", {"hidden_size": 4096, "num_attention_heads": 64}),
    "gpt2-xl": ("GPT-2", {"n_embd": 1600, "n_head": 25}),
    "opt-6.7b": (
        "OPT 125M",
        {"hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32, "word_embed_proj_dim": 4096},
    ),
}
LENGTH, ROWS = 256, 64
ROUNDS = 16  # with a time of each case of one row; of many rows in every fourth
COLD_BYTES = 256_000_000  # more than processors' caches


class Block:
    """One block with random weights, several times.

    Attributes:
        row_bytes, macs: bytes that one row reads, and its products.
    """

    def __init__(self, config: dict[str, Any], form: str, n_threads: int) -> None:
        index = config["first_k_dense_replace"] or 0
        self.n_embd, part = config["n_embd"], f"block.{index}"
        shapes = _shapes({**config, "n_layer": index + 1}, part)
        used = config["n_expert_per_token"] / (config["n_expert"] or 1)
        shares = {name: used if ".experts." in name else 1.0 for name in shapes}
        bits = weight_format(form)
        self.row_bytes = sum(bits.tensor_bytes(name, shape) * shares[name] for name, shape in shapes.items())
        self.macs = sum(np.prod(shape) * shares[name] for name, shape in shapes.items() if len(shape) == 2)
        block_bytes = sum(bits.tensor_bytes(name, shape) for name, shape in shapes.items())
        self.copies = max(1, round(COLD_BYTES / block_bytes))
        stop, windows = index + self.copies, config["sliding_window_indices"]
        config = {**config, "n_layer": stop, "sliding_window_indices": windows and [1] * stop}
        parts = [f"block.{i}" for i in range(index, stop)]
        weights = Resident(parts, lambda part: _weights(_shapes(config, part), form))
        self._stage = KernelStage(config, index, stop, weights, n_threads)
        self._stage.prepare(LENGTH)
        self._random = np.random.default_rng(1)
        self._clock = time.process_time if n_threads == 1 else time.perf_counter

    def seconds(self, n_rows: int) -> float:
        rows = self._random.standard_normal((n_rows, self.n_embd), dtype=np.float32)
        begin = self._clock()
        self._stage(rows, [Slice(1, 0, n_rows, n_rows)])
        return (self._clock() - begin) / self.copies


def _shapes(config: dict[str, Any], part: str) -> dict[str, tuple[int, ...]]:
    shapes = model_shapes({**config, "padded_vocab_size": 64, "vocab_size": 64}, "")
    return {name: shape for name, shape in shapes.items() if part_of(name) == part}


def _weights(shapes: dict[str, tuple[int, ...]], form: str) -> PartWeights:
    weights = random_weights(shapes, Packing(form, form))
    for name, weight in weights.items():  # gains of one and no corrections: each row has experts of its own
        if isinstance(weight, np.ndarray) and weight.ndim == 1:
            weights[name] = np.full_like(weight, float("norm" in name))
    return weights


def llama_beside(config: dict[str, Any]) -> dict[str, Any]:
    """A Llama of the same attention, whose MLP is as wide as all experts that a row is sent to, or has as many weights."""
    n_experts = config["n_expert_per_token"] + (config["n_shared_expert"] or 0)
    names = ("n_embd", "n_head", "head_size", "n_query_groups")
    own = {
        "mlp_class_name": "LLaMAMLP", "n_layer": 1, "rotary_percentage": 1.0, "block_size": LENGTH, "bias": False,
        "norm_class_name": "RMSNorm", "parallel_residual": False,
    }  # fmt: skip
    width = n_experts * (config["moe_intermediate_size"] or config["intermediate_size"])
    width = width or 2 * config["intermediate_size"] // 3
    return full_config({**{name: config[name] for name in names}, **own, "intermediate_size": width}, "a Llama")


def measured(config: dict[str, Any], form: str, n_threads: int) -> dict[str, Any]:
    few = max(1, round(ROWS * config["n_expert_per_token"] / config["n_expert"])) if config["n_expert"] else ROWS
    blocks = {"own": Block(config, form, n_threads), "llama": Block(llama_beside(config), form, n_threads)}
    cases = [*dict.fromkeys([("own", 1), ("llama", 1), ("own", ROWS), ("llama", ROWS), ("llama", few)])]
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for turn in range(ROUNDS + 1):
        for name, n_rows in cases:
            if n_rows > 1 and turn % 4:
                continue
            taken = blocks[name].seconds(n_rows)
            if turn:
                times[name, n_rows].append(taken)
    found: dict[str, Any] = {"format": form, "few_rows": few}
    for (name, n_rows), of_case in times.items():
        taken, block = statistics.median(of_case), blocks[name]
        found[f"{name} {n_rows}"] = {
            "ms": 1e3 * taken, "gigabytes_s": block.row_bytes / taken / 1e9,
            "gigaproducts_s": n_rows * block.macs / taken / 1e9,
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(FAMILIES), help="only this one")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--threads", type=int, default=1)
    add_json_flag(parser, "family_blocks")
    args = parser.parse_args()
    found = {}
    for family in [args.family] if args.family else FAMILIES:
        known, sizes = FAMILIES[family]
        config = derive_config({**OWN[known][1], **sizes}, family, Path("config.json"))
        form = "mxfp4" if config.get("glu_limit") else args.format
        found[family] = measured({**config, "block_size": LENGTH}, form, args.threads)
        few = found[family]["few_rows"]
        print(f"{family}, {form}, {args.threads} threads: own and Llama's block")
        for n_rows, unit in ((1, "gigabytes_s"), (ROWS, "gigaproducts_s")):
            own, llama = (found[family][f"{name} {n_rows}"] for name in ("own", "llama"))
            print(
                f"  {n_rows:>2} rows: {own['ms']:.1f} and {llama['ms']:.1f} ms; {own[unit]:.1f} and {llama[unit]:.1f} {unit}, "
                f"{own[unit] / llama[unit]:.2f}"
            )
        bound = found[family][f"llama {few}"]["gigaproducts_s"]
        print(
            f"  Llama's block with {few} rows, as many as an expert has of {ROWS}: {bound:.1f} gigaproducts_s",
            flush=True,
        )
    save(args.json, {"format": args.format, "threads": args.threads, "blocks": found})


if __name__ == "__main__":
    main()
