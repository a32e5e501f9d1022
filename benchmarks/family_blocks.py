#!/usr/bin/env python3
"""One block of a family, in the shape of its real model, beside a Llama block of as many weights per row.

For each: the bytes read per second of one row, as a share of what one thread (or --threads) reads of memory in the same round
(peers/read_test.py), and the products per second of 64 rows. There, an expert meets a few rows (64 * used / all): so the Llama
block stands there with so many rows, too. The bound is a block whose experts multiply as fast as that, and all else as fast as
the Llama block with 64 rows. Random weights; routers choose the experts of random rows; all cases take turns in each round. A
small block stands there several times, each with weights of its own, so that none is read from the processor's cache. Of one
thread, its processor time counts, which other programs disturb less.

    family_blocks.py                                 all families in int4 (gpt-oss always in mxfp4)
    family_blocks.py --formats int4,int8,bf16        a block of GLM 4.5 takes 8 GB in bf16
    family_blocks.py --family minimax-m2 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import on_path  # noqa: F401
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.packing import Packing, PartWeights
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.shapes import full_config, model_shapes
from mdi.kernels.slices import Slice
from mdi.kernels.weight_formats import LAYOUTS, weight_format
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import DeltaNet
from mdi.placement.kernel_bench import random_weights
from mdi.stages.kernel_stage import KernelStage, Resident
from peers.protocol import Case
from peers.read_test import ReadTest
from real_configs import OWN
from records import add_json_flag, save

_QWEN_3_5: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000_000, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
    "num_experts_per_tok": 8, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu",
}  # fmt: skip
FAMILIES: dict[
    str, tuple[str | dict[str, Any], dict[str, Any]]
] = {  # a form of config.json in the tests, and other sizes
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
    "qwen3.5-35b-a3b": (_QWEN_3_5, {}),  # a block with a gated delta net
    "qwen3.5-35b-a3b-dense": (
        {key: value for key, value in _QWEN_3_5.items() if "expert" not in key},
        {"model_type": "qwen3_5_text", "intermediate_size": 4608},  # as wide as the experts that a row is sent to
    ),
}
LENGTH, ROWS = 256, 64
ONE_ROW_TIMES = 4  # in each round; many rows take longer, and are measured once
COLD_BYTES = 256_000_000  # more than processors' caches


class Block:
    """One block with random weights, several times.

    Attributes:
        row_bytes, macs: bytes that one row reads, and its products. A state that it changes is read, and written.
        expert_share: of its products, those of experts that the router chooses.
    """

    def __init__(self, config: ModelConfig, form: str, n_threads: int, clock: Callable[[], float]) -> None:
        index = config.first_k_dense_replace or 0
        self.n_embd, part = config.n_embd, f"block.{index}"
        shapes = _shapes(_of_blocks(config, index + 1), part)
        used = config.n_expert_per_token / (config.n_expert or 1)
        shares = {name: used if ".experts." in name else 1.0 for name in shapes}
        bits = weight_format(form)
        self.row_bytes = sum(bits.tensor_bytes(name, shape) * shares[name] for name, shape in shapes.items())
        if isinstance(net := spec_of(_of_blocks(config, index + 1)).blocks[index].mixer, DeltaNet):
            self.row_bytes += 2 * 4 * net.n_head * net.k_size * net.v_size
        macs = {name: float(np.prod(shape)) * shares[name] for name, shape in shapes.items() if len(shape) == 2}
        self.macs = sum(macs.values())
        self.expert_share = sum(n for name, n in macs.items() if ".experts." in name) / self.macs
        block_bytes = sum(bits.tensor_bytes(name, shape) for name, shape in shapes.items())
        self.copies = max(1, round(COLD_BYTES / block_bytes))
        stop, windows = index + self.copies, config.sliding_window_indices
        config = _of_blocks(replace(config, sliding_window_indices=windows and (1,) * stop), stop)
        parts = [f"block.{i}" for i in range(index, stop)]
        weights = Resident(parts, lambda part: _weights(_shapes(config, part), form))
        self._stage = KernelStage(spec_of(config), index, stop, weights, n_threads)
        self._stage.prepare(LENGTH)
        self._random = np.random.default_rng(1)
        self._clock = clock

    def seconds(self, n_rows: int) -> float:
        rows = self._random.standard_normal((n_rows, self.n_embd), dtype=np.float32)
        begin = self._clock()
        self._stage(rows, [Slice(1, 0, n_rows, n_rows)])
        return (self._clock() - begin) / self.copies


def _of_blocks(config: ModelConfig, n: int) -> ModelConfig:
    """With so many blocks; if the model has delta nets, each has one."""
    net = config.delta_net
    return replace(config, n_layer=n, delta_net=net and {**net, "blocks": (1,) * n})


def _shapes(config: ModelConfig, part: str) -> dict[str, tuple[int, ...]]:
    shapes = model_shapes(replace(config, padded_vocab_size=64, vocab_size=64), "")
    return {name: shape for name, shape in shapes.items() if part_of(name) == part}


def _weights(shapes: dict[str, tuple[int, ...]], form: str) -> PartWeights:
    weights = random_weights(shapes, Packing(form, form))
    for name, weight in weights.items():  # gains of one and no corrections: each row has experts of its own
        if isinstance(weight, np.ndarray) and weight.ndim == 1:
            weights[name] = np.full_like(weight, float("norm" in name))
    return weights


def llama_beside(config: ModelConfig) -> ModelConfig:
    """A Llama of the same attention, whose MLP is as wide as all experts that a row is sent to, or has as many weights.

    For a delta net, its attention has as many weights as that, in heads of 128 numbers.
    """
    n_experts = config.n_expert_per_token + (config.n_shared_expert or 0)
    names = ("n_embd", "n_head", "head_size", "n_query_groups")
    own = {
        "mlp_class_name": "LLaMAMLP", "n_layer": 1, "rotary_percentage": 1.0, "block_size": LENGTH, "bias": False,
        "norm_class_name": "RMSNorm", "parallel_residual": False,
    }  # fmt: skip
    width = n_experts * (config.moe_intermediate_size or config.intermediate_size)
    is_gated = config.mlp_class_name == "LLaMAMLP"
    width = width or (config.intermediate_size if is_gated else 2 * config.intermediate_size // 3)
    of_attention = {name: getattr(config, name) for name in names}
    if config.delta_net is not None:
        shapes = _shapes(_of_blocks(config, 1), "block.0")
        n_weights = sum(np.prod(shape) for name, shape in shapes.items() if ".delta." in name and len(shape) == 2)
        n_heads = round(n_weights / (2 * 128 * config.n_embd) / 1.125)  # of queries; eight share a key and a value
        own["delta_net"] = None
        of_attention |= {"n_head": n_heads // 8 * 8, "head_size": 128, "n_query_groups": n_heads // 8}
    return full_config({**of_attention, **own, "intermediate_size": width}, "a Llama")


def measured(
    config: ModelConfig, form: str, n_threads: int, n_rounds: int, seconds: float, reader: ReadTest
) -> dict[str, Any]:
    """Milliseconds of each case and bytes per second of the read test in each round, and what follows from them.

    Args:
        seconds: no round is begun later than so many after the first.
    """
    few = max(1, round(ROWS * config.n_expert_per_token / config.n_expert)) if config.n_expert else ROWS
    clock = time.process_time if n_threads == 1 else time.perf_counter
    blocks = {
        "own": Block(config, form, n_threads, clock),
        "llama": Block(llama_beside(config), form, n_threads, clock),
    }
    cases = [*dict.fromkeys([("own", 1), ("llama", 1), ("own", ROWS), ("llama", ROWS), ("llama", few)])]
    rounds: list[dict[str, float]] = []
    begin = time.monotonic()
    for i in range(n_rounds + 1):  # the first one warms up
        if i > 1 and time.monotonic() - begin > seconds:
            break
        found = {"read_gb_s": reader.bytes_per_s(clock) / 1e9}
        times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
        for turn in range(ONE_ROW_TIMES):
            for name, n_rows in cases:
                if n_rows == 1 or turn == 0:
                    times[name, n_rows].append(blocks[name].seconds(n_rows))
        found |= {f"{name} {n_rows}, ms": 1e3 * statistics.median(of) for (name, n_rows), of in times.items()}
        if i:
            rounds.append(found)
    return {"few_rows": few, "rounds": rounds, **summary(rounds, few, blocks["own"], blocks["llama"])}


def summary(rounds: list[dict[str, float]], few: int, own: Block, llama: Block) -> dict[str, float]:
    """Medians of what each round had: shares of what the read test read, products per second, and ratios of both."""
    found: dict[str, list[float]] = {}
    for one in rounds:
        shares = [
            1e-6 * block.row_bytes / one[f"{name} 1, ms"] / one["read_gb_s"]
            for name, block in (("own", own), ("llama", llama))
        ]
        rates = [
            1e-6 * n_rows * block.macs / one[f"{name} {n_rows}, ms"]
            for name, block, n_rows in (("own", own, ROWS), ("llama", llama, ROWS), ("llama", llama, few))
        ]
        bound = 1 / ((1 - own.expert_share) / rates[1] + own.expert_share / rates[2])
        of_round = {
            "read_gb_s": one["read_gb_s"], "own_share": shares[0], "llama_share": shares[1],
            "read_ratio": shares[0] / shares[1], "own_products": rates[0], "llama_products": rates[1],
            "products_ratio": rates[0] / rates[1], "few_rows_products": rates[2], "bound_products": bound,
            "of_bound": rates[0] / bound,
        }  # fmt: skip
        for name, value in of_round.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def all_cases(families: list[str], formats: list[str]) -> Iterator[tuple[str, str, ModelConfig]]:
    """Family, format and config of each block. Models of gpt-oss come in mxfp4, and are measured in it alone."""
    for family in families:
        known, sizes = FAMILIES[family]
        hf = OWN[known][1] if isinstance(known, str) else known
        config = derive_config({**hf, **sizes}, family, Path("config.json"))
        for form in ["mxfp4"] if config.glu_limit else formats:
            yield family, form, replace(config, block_size=LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(FAMILIES), help="only this one")
    parser.add_argument("--formats", default="int4", help=f"some of {', '.join(LAYOUTS)} (%(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=20, help="of a block, after which no round is begun (%(default)s)"
    )
    add_json_flag(parser, "family_blocks")
    args = parser.parse_args()
    formats = args.formats.split(",")
    if unknown := [name for name in formats if name not in LAYOUTS]:
        parser.error(f"unknown format {unknown[0]!r}: expected {', '.join(LAYOUTS)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    reader, begin, blocks = ReadTest(args.threads), time.monotonic(), []
    reader.run(Case(0, 0, 0))
    cases = list(all_cases([args.family] if args.family else list(FAMILIES), formats))
    for i, (family, form, config) in enumerate(cases, 1):
        found = measured(config, form, args.threads, args.rounds, args.seconds, reader)
        blocks.append({"family": family, "format": form, **found})
        told = {name: round(value, 2) for name, value in found.items() if isinstance(value, float)}
        print(f"{i} of {len(cases)}, {time.monotonic() - begin:.0f} s: {family}, {form}: {told}", flush=True)
        save(args.json, {"formats": formats, "threads": args.threads, "rows": ROWS, "blocks": blocks})


if __name__ == "__main__":
    main()
