#!/usr/bin/env python3
"""What each weight format costs published models: memory, speed and perplexity, as a table for docs/models.md.

    benchmarks/real_table.py                  the models that `make real` has fetched
    benchmarks/real_table.py --formats own int8
    benchmarks/real_table.py --rounds 5       speeds are medians of so many runs, the formats in turns

Memory is that of the whole process at its peak, speed is one text with one thread, and the perplexity is that of the text that
`make real` has fetched, in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.mixtures import meant
from mdi.checkpoint.parts import part_of
from mdi.kernels.weight_formats import weight_format
from real.published import MODELS, TEXT, path_of
from records import add_json_flag, save, told
from rings import asked
from side_by_side.tables import markdown

FORMATS = ("own", "float32", "bf16", "int8", "q6_k", "q4_k", "int4")
N_TOKENS, N_CHARACTERS, WINDOW = 64, 16_000, 512


def bits_of(model: Path, form: str) -> float:
    """Of a weight in the blocks."""
    source = GgufSource(model)
    name = source.own_formats if form == "own" else meant(form, source.config)
    shapes = {name: spec.shape for name, spec in source.specs.items() if part_of(name).startswith("block.")}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    n_bytes = sum(weight_format(name or "").tensor_bytes(*one) for one in matrices.items())
    return 8 * n_bytes / sum(rows * columns for rows, columns in matrices.values())


def speed(model: Path, form: str) -> tuple[float, int]:
    """Tokens per second of one text with one thread, and the peak of memory in bytes."""
    text = ("--prompt", "The ring", "--n-tokens", N_TOKENS, "--temperature", "0", "--draft", "none")
    run, _ = asked("sample", "--ckpt", model, "--quantize", form, "--threads", "1", "--kv-dtype", "fp16", *text)
    return run["samples"][0]["tokens_per_s"], run["nodes"][0]["peak_rss_bytes"]


def perplexity(model: Path, form: str, text: Path) -> float:
    found, _ = asked("score", model, text, "--sequence-length", WINDOW, "--quantize", form)
    return float(found["perplexity"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="FORMAT")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    add_json_flag(parser, "real_table")
    args = parser.parse_args()
    text = path_of("scored.txt")
    text.write_text(path_of(TEXT).read_text(encoding="utf-8")[:N_CHARACTERS], encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        model = path_of(f"models/{name}.gguf")
        runs: dict[str, list[tuple[float, int]]] = {form: [] for form in args.formats}
        for _ in range(args.rounds):
            for form, found in runs.items():
                found.append(speed(model, form))
        for form, found in runs.items():
            row = {
                "model": name, "format": form, "bits": bits_of(model, form),
                "tokens_per_s": statistics.median(rate for rate, _ in found),
                "memory_bytes": max(memory for _, memory in found), "perplexity": perplexity(model, form, text),
            }  # fmt: skip
            rows.append(row)
            print(f"{name} {form}: {row['perplexity']:.3f}", file=sys.stderr)
    shown = [
        [row["model"], row["format"], f"{row['bits']:.1f}", f"{row['memory_bytes'] / 1e6:.0f}", f"{row['tokens_per_s']:.1f}",
         f"{row['perplexity']:.2f}"] for row in rows
    ]  # fmt: skip
    print(markdown(["model", "format", "bits a weight", "memory, MB", "one text, tokens/s", "perplexity"], shown))
    save(args.json, {"rows": rows, "arguments": told(args, "json")})


if __name__ == "__main__":
    main()
