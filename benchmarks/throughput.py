#!/usr/bin/env python3
"""Decode throughput of rings on this machine: nodes x sequences x weight formats, on a model with random weights.

Speed does not depend on what the weights say. Every ring is `local_ring.py` with one thread per process; the combinations
take turns, and medians over the repeats are reported. Beside them, in the same run and on the same weights, litgpt's own
generation, one sequence.

    throughput.py --shape nano-llama-304m --nodes 1,2 --sequences 1,8 --formats none,fp16,int8 --json throughput.json
    throughput.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; the children inherit it
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

LLAMA = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "parallel_residual": False, "bias": False}
SHAPES: dict[str, dict[str, Any]] = {
    "small-30m": {"n_layer": 8, "n_embd": 512, "n_head": 8, "n_query_groups": 4, "intermediate_size": 1408},
    "nano-llama-304m": {"n_layer": 12, "n_embd": 1024, "n_head": 16, "n_query_groups": 4, "intermediate_size": 5632},
    "tiny-llama-1.1b": {"n_layer": 22, "n_embd": 2048, "n_head": 32, "n_query_groups": 4, "intermediate_size": 5632},
    "llama-2-7b": {"n_layer": 32, "n_embd": 4096, "n_head": 32, "n_query_groups": 32, "intermediate_size": 11008},
}


def make_checkpoint(folder: Path, shape: str) -> int:
    """A LitGPT checkpoint with random bfloat16 weights and a tokenizer of bytes; returns how many weights a token reads."""
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = Config(name=shape, vocab_size=32000, padded_vocab_size=32000, block_size=2048, rotary_percentage=1.0,
                    padding_multiple=64, **LLAMA, **SHAPES[shape])  # fmt: skip
    with torch.device("meta"):
        names = GPT(config).state_dict()
    weights = {
        name: torch.ones(t.shape, dtype=torch.bfloat16)
        if t.dim() == 1
        else torch.empty(t.shape, dtype=torch.bfloat16).normal_(0, 0.02)
        for name, t in names.items()
    }
    torch.save(weights, folder / "lit_model.pth")
    save_config(config, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return sum(t.numel() for name, t in weights.items() if t.dim() > 1 and "wte" not in name)


def read_bandwidth() -> float:
    """Bytes per second that one thread reads from memory: the best of nine sums over 256 MB."""
    import torch

    torch.set_num_threads(1)
    data = torch.ones(1 << 25, dtype=torch.int64)
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    return data.numel() * 8 / min(times)


def ring(ckpt: Path, nodes: int, sequences: int, fmt: str, prompt: str, n_tokens: int) -> dict[str, Any]:
    """One run of a ring; its JSON object."""
    command = [
        sys.executable, str(ROOT / "src" / "local_ring.py"), "--nodes", str(nodes), "--threads", "1", "--ckpt", str(ckpt),
        "--prompt", prompt, "--n-samples", str(sequences), "--n-tokens", str(n_tokens), "--temperature", "0",
        "--prompt-style", "none", "--json",
    ]  # fmt: skip
    if fmt in ("fp16", "int8"):
        command += ["--quantize", fmt]
    elif fmt != "none":
        command += ["--dtype", fmt]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measured(result: dict[str, Any], n_tokens: int) -> dict[str, float]:
    """Rates of one run. Decoding is counted from each sample's first token on, so that the prompt's share is left out."""
    samples = result["samples"]
    rate = statistics.mean(s["tokens_per_s"] for s in samples)
    secondaries = result["nodes"][1:]
    return {
        "decode_tokens_per_s": rate * len(samples),
        "per_stream_tokens_per_s": rate,
        "ttft_s": statistics.median(s["ttft_s"] for s in samples),
        "starter_peak_mb": result["nodes"][0]["peak_rss_bytes"] / 1e6,
        "secondary_peak_mb": max((n["peak_rss_bytes"] for n in secondaries), default=0) / 1e6,
        "wire_bytes_per_token": sum(n["bytes_sent"] for n in result["nodes"]) / (n_tokens * len(samples)),
    }


_LITGPT = """
import sys, time, torch
from pathlib import Path
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.generate.base import generate_fn
torch.set_num_threads(1)
folder, dtype, n_prompt, n_tokens = Path(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with torch.device("meta"):
    model = GPT(Config.from_file(folder / "model_config.yaml"))
weights = torch.load(folder / "lit_model.pth", weights_only=True, mmap=True)
model.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, assign=True)
model.max_seq_length = n_prompt + n_tokens
model.cos, model.sin = (t.to(dtype) for t in model.rope_cache())
with torch.inference_mode():
    model.set_kv_cache(1, dtype=dtype, device=torch.device("cpu"))
    times = []
    stream = generate_fn(model, torch.arange(1, n_prompt + 1), n_prompt + n_tokens, temperature=0.0, top_k=1, top_p=0.0,
                         include_prompt=False, include_eos=False)
    for _ in stream:
        times.append(time.perf_counter())
print((len(times) - 1) / (times[-1] - times[0]))
"""


def litgpt(ckpt: Path, dtype: str, n_prompt: int, n_tokens: int) -> float:
    """Tokens per second of litgpt's own generation, one sequence, after the first token."""
    command = [sys.executable, "-W", "ignore", "-c", _LITGPT, str(ckpt), dtype, str(n_prompt), str(n_tokens)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    n_weights = make_checkpoint(folder, args.shape)
    prompt = "a" * args.prompt_tokens
    cells = [(n, s, f) for f in args.formats for n in args.nodes for s in args.sequences]
    rounds: dict[str, list[dict[str, float]]] = {}
    for repeat in range(args.repeats):
        for nodes, sequences, fmt in cells:
            found = measured(ring(folder, nodes, sequences, fmt, prompt, args.new_tokens), args.new_tokens)
            rounds.setdefault(f"{fmt}/{nodes}/{sequences}", []).append(found)
        if not args.no_litgpt:
            for dtype in ("float32", "bfloat16"):
                rate = litgpt(folder, dtype, args.prompt_tokens, args.new_tokens)
                rounds.setdefault(f"litgpt {dtype}/1/1", []).append({"decode_tokens_per_s": rate})
        print(f"round {repeat + 1} of {args.repeats} is done", file=sys.stderr)
    medians = {
        cell: {key: statistics.median(found[key] for found in all_found) for key in all_found[0]}
        for cell, all_found in rounds.items()
    }
    bandwidth = read_bandwidth()
    for cell, found in medians.items():
        fmt, nodes, sequences = cell.split("/")
        itemsize = {"int8": 1, "fp16": 2, "none": 2, "bfloat16": 2, "float16": 2, "float32": 4}.get(fmt)
        if itemsize and nodes == sequences == "1":
            found["share_of_bandwidth"] = found["decode_tokens_per_s"] * n_weights * itemsize / bandwidth
    return {"shape": args.shape, "n_weights": n_weights, "read_bandwidth_bytes_per_s": bandwidth, "cells": medians}


def report(result: dict[str, Any]) -> None:
    print(f"{result['shape']}: {result['n_weights'] / 1e6:.0f} M weights per token, one thread reads "
          f"{result['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s\n")  # fmt: skip
    print(
        f"{'format':18} nodes  seqs  tokens/s  per seq  first token  peak MB (starter, secondary)  wire B/token  bandwidth"
    )
    for cell, m in result["cells"].items():
        fmt, nodes, sequences = cell.split("/")
        line = f"{fmt:18} {nodes:>5} {sequences:>5} {m['decode_tokens_per_s']:9.1f}"
        if "ttft_s" in m:
            line += f" {m['per_stream_tokens_per_s']:8.1f} {m['ttft_s'] * 1e3:9.0f} ms"
            line += f" {m['starter_peak_mb']:19.0f} {m['secondary_peak_mb']:9.0f} {m['wire_bytes_per_token']:13.0f}"
        if "share_of_bandwidth" in m:
            line += f" {m['share_of_bandwidth']:9.0%}"
        print(line)


def numbers(text: str) -> list[int]:
    return [int(field) for field in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="nano-llama-304m")
    parser.add_argument("--nodes", type=numbers, default=[1, 2])
    parser.add_argument("--sequences", type=numbers, default=[1, 8])
    parser.add_argument("--formats", type=lambda t: t.split(","), default=["none", "fp16", "int8"],
                        help="none (as local_ring.py chooses), float32, bfloat16, fp16, int8")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-litgpt", action="store_true", help="leave litgpt's own generation out")
    parser.add_argument("--quick", action="store_true", help="a small model, one repeat: does it work?")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    args = parser.parse_args()
    if args.quick:
        args.shape, args.repeats, args.new_tokens = "small-30m", 1, 24
    with tempfile.TemporaryDirectory(prefix="mdi-bench-") as folder:
        result = run(args, Path(folder))
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
