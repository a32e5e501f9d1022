#!/usr/bin/env python3
"""Where a stage's time goes: time per block against reading its weights, and how much of it multiplies by weights.

    benchmarks/stage_profile.py --formats bf16,int8,int4 --sequences 1,8,16
    benchmarks/stage_profile.py --formats int8 --sequences 1 --position 2000 --kv-dtype bf16

A stage of a few blocks of a model's shape with random weights, in the kernels, decodes rows of so many sequences. Times are the
least of the repetitions, the reading speed is the best of loops over 512 MB taken in between. The products are the same
matrices alone, one after the other; norms, rotation, attention, activations and what calls them are the rest.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the loops that read; before torch is imported

import numpy as np  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mdi.checkpoint.packing import Packing  # noqa: E402
from mdi.checkpoint.parts import part_of  # noqa: E402
from mdi.checkpoint.shapes import model_shapes  # noqa: E402
from mdi.kernels.blocks import Context, Linear, Weights, model_of  # noqa: E402  # noqa: E402
from mdi.kernels.layout import Matrix  # noqa: E402
from mdi.kernels.page_sizes import CACHE_TYPES  # noqa: E402
from mdi.kernels.slices import Slice  # noqa: E402
from mdi.kernels.weight_formats import LAYOUTS  # noqa: E402
from mdi.placement.kernel_bench import random_weights  # noqa: E402
from mdi.stages.kernel_stage import KernelStage, Resident  # noqa: E402
from peers.protocol import Case  # noqa: E402
from peers.read_test import ReadTest  # noqa: E402
from random_checkpoint import BLOOM_SHAPES, CONTEXT, SHAPES, config_of  # noqa: E402

CHUNK = 64


class Profiled:
    """A stage of `n_blocks` blocks of a shape, and its matrices."""

    def __init__(self, shape: str, n_blocks: int, form: str, cache_type: str, n_threads: int) -> None:
        self.config = asdict(config_of(shape))
        shapes = model_shapes(self.config, shape)
        self.matrices: list[Matrix] = []

        def weights(part: str) -> Weights:
            made = random_weights({n: s for n, s in shapes.items() if part_of(n) == part}, Packing(form, form))
            self.matrices += [weight for weight in made.values() if isinstance(weight, Matrix)]
            return made

        resident = Resident([f"block.{i}" for i in range(n_blocks)], weights)
        self.stage = KernelStage(self.config, 0, n_blocks, resident, n_threads, cache_type)
        self.stage.prepare(CONTEXT)
        self._context, self._model = Context(n_threads), model_of(self.config)

    def fill(self, n_sequences: int, position: int) -> None:
        self.stage.caches.clear()
        for seq_id in range(n_sequences):
            for start in range(0, position, CHUNK):
                n_rows = min(CHUNK, position - start)
                self.stage(rows_of(n_rows, self.stage.n_embd), [Slice(seq_id, start, n_rows)])

    def products(self, n_rows: int) -> Callable[[], None]:
        """What multiplies such rows by all matrices."""
        layers = [Linear(self._context, self._model, None, matrix, None) for matrix in self.matrices]
        inputs = [rows_of(n_rows, matrix.n_in) for matrix in self.matrices]

        def run() -> None:
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)

        return run


def rows_of(n_rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n_rows, width), dtype=np.float32)


def measure(profiled: Profiled, reader: ReadTest, form: str, n_sequences: int, position: int, repeats: int) -> None:
    profiled.fill(n_sequences, position)
    rows, products = rows_of(n_sequences, profiled.stage.n_embd), profiled.products(n_sequences)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, *BLOOM_SHAPES], default="tiny-llama-1.1b")
    parser.add_argument("--blocks", type=int, default=10, help="more than the processor's caches hold (%(default)s)")
    parser.add_argument("--formats", default=",".join(LAYOUTS), help="(%(default)s)")
    parser.add_argument("--sequences", default="1,8,16")
    parser.add_argument("--position", type=int, default=100, help="tokens that each has already (%(default)s)")
    parser.add_argument("--kv-dtype", choices=CACHE_TYPES, default="float32", help="of the caches (%(default)s)")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    reader = ReadTest()
    for form in args.formats.split(","):
        profiled = Profiled(args.shape, args.blocks, form, args.kv_dtype, args.threads)
        for n_sequences in (int(n) for n in args.sequences.split(",")):
            measure(profiled, reader, form, n_sequences, args.position, args.repeats)


if __name__ == "__main__":
    main()
