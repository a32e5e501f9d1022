#!/usr/bin/env python3
"""How fast a GGUF file runs at its own bits: its block types beside int4 and int8, beside llama.cpp, and on published files.

    own_bits.py --types                                           blocks of the 1.1 B shape, with random weights
    own_bits.py --types --formats int8 int4 bf16 float32 --rows 1 16 64     with what MDI_KERNELS names
    own_bits.py --file Q4_K_M.gguf --peers-python PYTHON          files, also by llama.cpp (LLAMA_CPP_LIB_PATH is its library)
    own_bits.py --published                                       the models that `make real` has fetched, beside int4

All cases take turns in each round, and ratios are formed within a round. --types: the bytes read per second of one row, as a
share of what one thread reads of memory, and billions of products per second of more rows. --file and --published: tokens per
second, one thread, fp16 caches, flash attention; of published files also times the bytes of weights that a token reads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import on_path  # noqa: F401
from family_blocks import LENGTH, ONE_ROW_TIMES, ROWS, Block
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.ggufsource import GgufSource, gguf_directory
from mdi.checkpoint.packing import Packing
from mdi.model.plain import ModelConfig
from peers.protocol import Case
from peers.read_test import ReadTest
from random_checkpoint import config_of
from real_table import MODELS, path_of
from records import add_json_flag, save
from side_by_side.runner import LOAD_S, MODULES
from side_by_side.workers import Worker

BENCHMARKS = Path(__file__).resolve().parent
BESIDE = {"q4_k": "int4", "q5_k": "int4", "q6_k": "int8", "q8_0": "int8"}
CASES = {"one text": Case(1, 16, 48), "sixteen texts": Case(16, 16, 24), "prompt of 512": Case(1, 512, 1)}
Rounds = dict[str, list[float]]


def of_types(formats: list[str], rows: list[int], n_rounds: int) -> Rounds:
    """In each round: share of the read bandwidth of one row, billions of products per second of more, and ratios of both."""
    reader, clock = ReadTest(), time.process_time
    reader.run(Case(0, 0, 0))
    config = replace(ModelConfig.from_litgpt(config_of("tiny-llama-1.1b")), block_size=LENGTH)
    blocks = {form: Block(config, form, 1, clock) for form in formats}
    found: Rounds = {}
    for i in range(n_rounds + 1):  # the first one warms up
        read_per_s = reader.bytes_per_s(clock)
        rates: dict[str, float] = {"read GB/s": 1e-9 * read_per_s}
        for n in rows:
            times: dict[str, list[float]] = {form: [] for form in blocks}
            for _ in range(ONE_ROW_TIMES if n == 1 else 1):
                for form, block in blocks.items():
                    times[form].append(block.seconds(n))
            for form, block in blocks.items():
                seconds = statistics.median(times[form])
                rates[f"{form} {n}"] = (
                    block.row_bytes / seconds / read_per_s if n == 1 else 1e-9 * n * block.macs / seconds
                )
            for form, other in BESIDE.items():
                if form in blocks and other in blocks:
                    rates[f"{form} / {other} {n}"] = rates[f"{form} {n}"] / rates[f"{other} {n}"]
        for name, value in rates.items():
            found.setdefault(name, []).extend([value] if i else [])
    return found


def rate(worker: Worker, case: Case) -> float:
    """Tokens per second: of the prompts to the first token, if there is no other; else of what follows it."""
    times_s = worker.run(case.to_json(), 400)["times_s"]
    if case.n_new == 1:
        return case.n_sequences * case.n_prompt / max(one[-1] for one in times_s)
    begin = max(one[0] for one in times_s)
    return sum(t > begin for one in times_s for t in one) / (max(one[-1] for one in times_s) - begin)


def of_workers(workers: dict[str, Worker], cases: dict[str, Case], n_rounds: int) -> Rounds:
    """Tokens per second of each system and case in each round; the last system is what the others are divided by."""
    for worker in workers.values():
        worker.wait_ready(LOAD_S)
        rate(worker, Case(1, 16, 4))
    found: Rounds = {}
    for _ in range(n_rounds):
        for label, case in cases.items():
            rates = {name: rate(worker, case) for name, worker in workers.items()}
            *others, last = rates
            rates |= {f"{name} / {last}": rates[name] / rates[last] for name in others}
            for name, value in rates.items():
                found.setdefault(f"{label}, {name}", []).append(value)
    return found


def started(file: Path, form: str, folder: Path) -> Worker:
    """One node with one thread, and the weights of a file in a format."""
    flags = ["--quantize", form, "--kv-dtype", "fp16", "--device", "cpu"]
    where = {"ckpt": str(gguf_directory(file, folder)), "cores": [0]}
    options = {**where, "nodes": 1, "threads": 1, "max_length": 600, "flags": flags}
    return Worker(f"{form}-{file.stem}", sys.executable, MODULES["ring"], options, [0], folder, {})


def llama(file: Path, python: str, folder: Path) -> Worker:
    paths = [str(BENCHMARKS), str(BENCHMARKS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    options = {"gguf": str(file), "threads": 1, "cache": "f16"}
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    return Worker("llama.cpp", python, MODULES["llama.cpp"], options, [0], folder, environment)


def token_bytes(file: Path, form: str) -> int:
    """Bytes of weights that one token reads: all parts in a format, without the rows of an embedding of its own."""
    source = GgufSource(file)
    own = (source.own_formats or "") if form == "own" else form
    packed = PackedSource(source, Packing(own, own).tied(source.tied_type))
    return sum(packed.n_bytes(part) for part in packed.part_names() if part != "embedding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", action="store_true")
    parser.add_argument("--formats", nargs="+", default=[*dict.fromkeys(BESIDE.values()), *BESIDE], metavar="FORMAT")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, ROWS], metavar="N")
    parser.add_argument("--file", type=Path, nargs="+", default=[])
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=5)
    add_json_flag(parser, "own_bits")
    args = parser.parse_args()
    python = args.peers_python
    found: dict[str, Rounds] = {"types": of_types(args.formats, args.rows, args.rounds)} if args.types else {}
    files = [(file, "llama.cpp", CASES) for file in args.file]
    if args.published:
        files += [(path_of(f"models/{name}.gguf"), "int4", {"one text": CASES["one text"]}) for name in MODELS]
    with tempfile.TemporaryDirectory() as folder:
        for file, other, cases in files:
            workers = {"own": started(file, "own", Path(folder))}
            try:
                workers[other] = (
                    started(file, other, Path(folder)) if other == "int4" else llama(file, python, Path(folder))
                )
                rounds = of_workers(workers, cases, args.rounds)
            finally:
                for worker in workers.values():
                    worker.kill()
            if other == "int4":
                ratio = token_bytes(file, "own") / token_bytes(file, other)
                rounds["own / int4, bytes per second"] = [ratio * one for one in rounds["one text, own / int4"]]
            found[file.stem] = rounds
    for subject, rounds in found.items():
        for name, values in rounds.items():
            print(f"{subject}: {name}: {statistics.median(values):.3f} [{min(values):.3f} .. {max(values):.3f}]")
    save(args.json, {"rounds": found})


if __name__ == "__main__":
    main()
