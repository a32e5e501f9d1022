#!/usr/bin/env python3
"""Where a stage's time goes: time per block against reading its weights, and how much of it multiplies by weights.

    benchmarks/stage_profile.py --formats bf16,int8,int4 --sequences 1,8,16
    benchmarks/stage_profile.py --formats int8 --sequences 1 --position 2000 --kv-dtype bf16
    benchmarks/stage_profile.py --formats int8 --blocks 2 --sequences 16 --position 1000,8000 --kv-dtype float32,fp16,bf16,int8
    benchmarks/stage_profile.py --formats int8 --blocks 2 --prompts 512,2048,8192 --chunks 64,256

A stage of a few blocks of a model's shape with random weights, in the kernels, decodes rows of so many sequences. Times are the
least of the repetitions, the reading speed is the best of loops over 512 MB taken in between. The products are the same
matrices alone, one after the other; norms, rotation, attention, activations and what calls them are the rest. Attention is what
a row takes more than one that sees only itself; with one thread it stands beside the larger of two bounds: the bytes of the
caches by the reading speed, and its products by the best speed of numpy's product of float32 matrices. Caches that fit the
processor's are read faster than that, so that the ratio may be below 1. Of each format it
first prints how fast one and two threads read the packed pages in the order in which kernels do, panel after panel, with the
clock that the system tells and what parts of the cores' time were stolen and used by other programs. --prompts measures prompts
instead, in frames of so many rows: the processor time per token of a block, of the whole prompt and of its last frame.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the loops that read; before torch is imported
# The best speed of numpy's products counts as the peak, so they must use the same instructions as the kernels.
if core := {"avx2": "Haswell", "avx2vnni": "Haswell", "avx512": "SkylakeX"}.get(os.environ.get("MDI_KERNELS", "")):
    os.environ["OPENBLAS_CORETYPE"] = core

import numpy as np  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mdi.checkpoint.packing import Packing  # noqa: E402
from mdi.checkpoint.parts import part_of  # noqa: E402
from mdi.checkpoint.shapes import model_shapes  # noqa: E402
from mdi.kernels.blocks import Context, Linear, Weights  # noqa: E402
from mdi.kernels.layout import Matrix  # noqa: E402
from mdi.kernels.pages import Pool  # noqa: E402
from mdi.kernels.slices import Slice  # noqa: E402
from mdi.kernels.weight_formats import LAYOUTS  # noqa: E402
from mdi.model.caches import CACHE_TYPES, PAGE, kind_of  # noqa: E402
from mdi.model.plain import ModelConfig, spec_of  # noqa: E402
from mdi.placement.kernel_bench import random_weights  # noqa: E402
from mdi.stages.kernel_stage import KernelStage, Resident  # noqa: E402
from packed_reading import read_packed  # noqa: E402
from peers.protocol import Case  # noqa: E402
from peers.read_test import ReadTest  # noqa: E402
from random_checkpoint import BLOOM_SHAPES, CONTEXT, SHAPES, config_of  # noqa: E402
from records import Usage  # noqa: E402

CHUNK = 64


class Profiled:
    """A stage of `n_blocks` blocks of a shape, and its matrices."""

    def __init__(self, shape: str, n_blocks: int, form: str, cache_type: str, n_threads: int) -> None:
        self.config = ModelConfig.from_litgpt(config_of(shape))
        shapes = model_shapes(self.config, shape)
        self.matrices: list[Matrix] = []

        def weights(part: str) -> Weights:
            made = random_weights({n: s for n, s in shapes.items() if part_of(n) == part}, Packing(form, form))
            self.matrices += [weight for weight in made.values() if isinstance(weight, Matrix)]
            return made

        resident = Resident([f"block.{i}" for i in range(n_blocks)], weights)
        self.stage = KernelStage(spec_of(self.config), 0, n_blocks, resident, n_threads, cache_type)
        self._context = Context(n_threads)

    def fill(self, n_sequences: int, position: int) -> None:
        """The first sequence is computed; the others get pages of their own with the same bytes."""
        for start in range(0, position, CHUNK):
            n_rows = min(CHUNK, position - start)
            self.stage(rows_of(n_rows, self.stage.n_embd), [Slice(0, start, n_rows)])
        caches = self.stage.caches
        for seq_id in range(1, n_sequences if position else 1):
            caches.extend(seq_id, 0, position)
            for pool, source, table in zip(caches.pools, caches.entries(0), caches.entries(seq_id), strict=True):
                assert isinstance(pool, Pool)
                pool.memory[table.ids] = pool.memory[source.ids]

    def products(self, n_rows: int) -> Callable[[], None]:
        """What multiplies such rows by all matrices."""
        layers = [Linear(self._context, matrix) for matrix in self.matrices]
        inputs = [rows_of(n_rows, matrix.n_in) for matrix in self.matrices]

        def run() -> None:
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)

        return run


def clock_mhz() -> float:
    """Of the fastest core now; 0 where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return max((float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")), default=0.0)


def describe_reading(profiled: Profiled, form: str) -> None:
    begin = Usage.now()
    one, two = read_packed(profiled.matrices, 1), read_packed(profiled.matrices, 2)
    shares = Usage.now().since(begin)
    print(
        f"{form}: its packed pages are read at {one / 1e9:.1f} GB/s by one thread, {two / 1e9:.1f} GB/s by two; "
        f"{clock_mhz():.0f} MHz, steal {shares['steal_share']:.1%}, others {shares['others_share']:.0%}", flush=True,
    )  # fmt: skip


def measure_prompt(profiled: Profiled, form: str, n_prompt: int, chunk: int, repeats: int) -> None:
    profiled.stage.prepare(n_prompt)
    rows, whole, last = rows_of(chunk, profiled.stage.n_embd), [], []
    for _ in range(repeats):
        profiled.stage.caches.clear()
        times = [time.thread_time()]
        for start in range(0, n_prompt, chunk):
            n_rows = min(chunk, n_prompt - start)
            profiled.stage(rows[:n_rows], [Slice(0, start, n_rows)])
            times.append(time.thread_time())
        whole.append((times[-1] - times[0]) / n_prompt)
        last.append((times[-1] - times[-2]) / n_rows)
    each = 1e6 / profiled.stage.n_blocks
    print(
        f"{form}, a prompt of {n_prompt} in frames of {chunk}: {min(whole) * each:.0f} us a token and block, "
        f"{min(last) * each:.0f} us in the last frame", flush=True,
    )  # fmt: skip


def rows_of(n_rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n_rows, width), dtype=np.float32)


def attention_work(config: ModelConfig, cache_type: str, n_sequences: int, position: int) -> tuple[int, int]:
    """Of attention in one block, one row of each sequence at `position`: bytes of caches, and operations (two a product)."""
    n_bytes = kind_of(spec_of(config).blocks[0]).block_bytes(cache_type) * -(-position // PAGE)
    n_operations = 2 * 2 * config.n_head * config.head_size * position  # keys, then values
    return n_sequences * n_bytes, n_sequences * n_operations


def peak_per_s(size: int = 512, repeats: int = 20) -> float:
    """Operations per second of one thread: the best of numpy's products of float32 matrices."""
    a, b = rows_of(size, size), rows_of(size, size)
    best_s = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        a @ b
        best_s = min(best_s, time.perf_counter() - begin)
    return 2 * size**3 / best_s


def describe_attention(
    profiled: Profiled, n_sequences: int, position: int, attention_s: float, read_per_s: float
) -> None:
    """attention_s: of one block."""
    cache_type = profiled.stage.cache_type
    n_bytes, n_operations = attention_work(profiled.config, cache_type, n_sequences, position)
    read_s, products_s = n_bytes / read_per_s, n_operations / peak_per_s()
    print(
        f"  attention, caches in {cache_type}: {attention_s * 1e6:.0f} us a block; to read the caches takes {read_s * 1e6:.0f} "
        f"us, the products {products_s * 1e6:.0f} us at the peak: {attention_s / max(read_s, products_s):.2f} times the larger",
        flush=True,
    )  # fmt: skip


def measure(
    profiled: Profiled, reader: ReadTest, form: str, n_sequences: int, position: int, repeats: int, n_threads: int
) -> None:
    profiled.stage.prepare(max(CONTEXT, position + repeats))
    profiled.stage.caches.clear()
    rows, products = rows_of(n_sequences, profiled.stage.n_embd), profiled.products(n_sequences)
    first_s = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        profiled.stage(rows, [Slice(s, 0, 1) for s in range(n_sequences)])
        first_s = min(first_s, time.perf_counter() - begin)
        profiled.stage.caches.clear()
    profiled.fill(n_sequences, position)
    whole_s = products_s = float("inf")
    speed = 0.0
    for i in range(repeats):
        begin = time.perf_counter()
        profiled.stage(rows, [Slice(s, position + i, 1) for s in range(n_sequences)])
        middle = time.perf_counter()
        products()
        products_s, whole_s = min(products_s, time.perf_counter() - middle), min(whole_s, middle - begin)
        if i % 8 == 0:
            speed = max(speed, reader.run(Case(0, 0, 0))["read_bytes_per_s"])
    n_blocks = profiled.stage.n_blocks
    read_s = sum(matrix.data.nbytes for matrix in profiled.matrices) / speed
    print(
        f"{form}, {n_sequences} sequences at {position}: {whole_s / n_blocks * 1e6:.0f} us a block; reading its weights at "
        f"{speed / 1e9:.1f} GB/s takes {read_s / n_blocks * 1e6:.0f} us ({read_s / whole_s:.0%}); its products take "
        f"{products_s / n_blocks * 1e6:.0f} us, the rest {(whole_s - products_s) / n_blocks * 1e6:.0f} us", flush=True,
    )  # fmt: skip
    if n_threads == 1 and position:
        describe_attention(profiled, n_sequences, position, (whole_s - first_s) / n_blocks, speed)


def numbers(listed: str) -> list[int]:
    return [int(n) for n in listed.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, *BLOOM_SHAPES], default="tiny-llama-1.1b")
    parser.add_argument("--blocks", type=int, default=10, help="more than the processor's caches hold (%(default)s)")
    parser.add_argument("--formats", default=",".join(LAYOUTS), help="(%(default)s)")
    parser.add_argument("--sequences", default="1,8,16")
    parser.add_argument("--position", default="100", help="tokens that each has already; may be several (%(default)s)")
    parser.add_argument(
        "--kv-dtype", default="float32", help=f"of the caches, of {', '.join(CACHE_TYPES)} (%(default)s)"
    )
    parser.add_argument("--prompts", help="tokens of prompts, such as 512,8192: measure these, on one thread")
    parser.add_argument("--chunks", default="64,256", help="rows of a prompt's frames (%(default)s)")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if unknown := [name for name in args.kv_dtype.split(",") if name not in CACHE_TYPES]:
        parser.error(f"unknown cache type {unknown[0]!r}: expected {', '.join(CACHE_TYPES)}")
    reader = ReadTest()
    for form, cache_type in itertools.product(args.formats.split(","), args.kv_dtype.split(",")):
        profiled = Profiled(args.shape, args.blocks, form, cache_type, 1 if args.prompts else args.threads)
        describe_reading(profiled, form)
        if args.prompts:
            for n_prompt, chunk in itertools.product(numbers(args.prompts), numbers(args.chunks)):
                measure_prompt(profiled, form, n_prompt, chunk, args.repeats)
            continue
        for n_sequences, position in itertools.product(numbers(args.sequences), numbers(args.position)):
            measure(profiled, reader, form, n_sequences, position, args.repeats, args.threads)


if __name__ == "__main__":
    main()
