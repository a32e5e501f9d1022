#!/usr/bin/env python3
"""From a Hugging Face folder to the first token, beside the LitGPT checkpoint that the same folder was converted to.

    python benchmarks/folder_start.py [--shape nano-llama-304m] [--rounds 5] [--quantize int8]

Random weights in bfloat16. Each start is a process of its own (`sample.py`, one token); the two forms take turns, so that a
noisy neighbour hits both. "first" has an empty cache folder but for the kernels, so that weights are packed and hashed;
"again" finds what that start kept. Wall time of the whole process, its processor time, and its peak resident memory, mapped
files included. Medians; nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import on_path  # noqa: F401
from random_checkpoint import SHAPES, make_checkpoint
from records import ROOT, add_json_flag, save

FORMS = ("folder", "converted")
KERNELS = "kernels"  # in the cache folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="nano-llama-304m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantize", help="weight format (default: as stored)")
    add_json_flag(parser, "folder_start")
    args = parser.parse_args()
    flags = [] if args.quantize is None else ["--quantize", args.quantize]
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        models = make_models(where, args.shape)
        results = measure(models, where, args.rounds, flags)
    for (form, when), runs in results.items():
        wall_s, cpu_s, peak_bytes = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{form:10} {when:6} {wall_s:7.2f} s, processor {cpu_s:7.2f} s, peak {peak_bytes / 1e6:8.0f} MB")
    named = {f"{form}, {when}": runs for (form, when), runs in results.items()}
    save(args.json, {"shape": args.shape, "quantize": args.quantize, "wall_cpu_peak": named})


def make_models(where: Path, shape: str) -> dict[str, Path]:
    """The same model in both forms."""
    sys.path.insert(0, str(ROOT / "src"))
    from mdi.checkpoint.export import export_hf
    from mdi.checkpoint.source import open_source

    models = {form: where / form / shape for form in FORMS}
    make_checkpoint(models["converted"], shape)
    source = open_source(models["converted"])
    models["folder"].parent.mkdir()
    export_hf(source, models["converted"], models["folder"], lambda done, total: None)
    source.close()
    return models


def measure(
    models: dict[str, Path], where: Path, n_rounds: int, flags: Sequence[str]
) -> dict[tuple[str, str], list[tuple[float, float, int]]]:
    """(wall s, processor s, peak bytes) of each start, by form and whether something was kept."""
    primed = where / "primed"
    start(models["converted"], primed, flags)
    results: dict[tuple[str, str], list[tuple[float, float, int]]] = {
        (form, when): [] for when in ("first", "again") for form in FORMS
    }
    for i in range(n_rounds):
        for form in FORMS if i % 2 else FORMS[::-1]:
            cache = where / f"cache-{form}"
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(primed / KERNELS, cache / KERNELS)
            (models[form] / "parts.json").unlink(missing_ok=True)
            for when in ("first", "again"):
                results[form, when].append(start(models[form], cache, flags))
    return results


def start(model: Path, cache: Path, flags: Sequence[str]) -> tuple[float, float, int]:
    command = [
        sys.executable,
        str(ROOT / "src" / "sample.py"),
        "--ckpt",
        str(model),
        "--prompt",
        "a",
        "--n-tokens",
        "1",
        *flags,
    ]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, "MDI_CACHE_DIR": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(said)
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
