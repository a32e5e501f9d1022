"""How fast this node is: memory, disk, and the blocks of one model in one format, measured in a few seconds.

Times are means over a fixed span, not best cases: a node under a CPU quota is halted and let go on in periods of 100 ms, and
the best case would be that of a node without one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config

from mdi.checkpoint.modelshapes import Shape
from mdi.checkpoint.packing import Packing, PartWeights
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.shapes import model_shapes
from mdi.errors import CheckpointError
from mdi.kernels.layout import LAYOUTS
from mdi.kernels.stage import KernelStage, KernelStarterStage
from mdi.model.few_rows import pad_few_rows
from mdi.model.kernel_stage import TensorStage
from mdi.model.packed_linear import Weights, install, kernel_context
from mdi.model.stage import Stage, StarterStage
from mdi.node.chance import chance_weights
from mdi.node.resources import device_free_bytes

ROWS = (1, 2, 3, 4, 16, 128)  # few rows do not lie on a straight line: kernels differ
CONTEXT = 64  # positions that a sequence has behind it when its next row is timed
SPAN_S = 0.35  # how long one thing is measured
WORKING_SET_BYTES = 128 << 20  # more blocks are built until they no longer fit a processor's cache
N_BLOCKS_LIMIT = 8
DISK_BYTES = 32 << 20

Times = tuple[tuple[int, float], ...]

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Speeds:
    """What is measured once and kept: see `mdi.partition.profile.NodeProfile`, whose fields these are."""

    disk_read_bytes_s: float
    read_bytes_s: float
    block_s: Times
    head_s: Times


class Bench:
    """Measures one node.

    Args:
        config: litgpt Config of the model as a plain dict.
        device, dtype: what the node computes with.
        quantize, quantize_head: weight formats of torch's path; None for plain numbers.
        span_s: how long each thing is measured.
        progress: told what is being measured, how many things are done, and how many there are.
        packing: what the kernels would read; None if torch computes.
    """

    def __init__(
        self,
        config: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        quantize: str | None,
        quantize_head: str | None = None,
        span_s: float = SPAN_S,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        packing: Packing | None = None,
    ) -> None:
        self._config_dict = config
        self._config = Config(**config)
        self._shapes = model_shapes(config, "the model to be measured")
        self._device, self._dtype = device, dtype
        self._packing = packing
        self._forms = (quantize, quantize_head) if packing is None else (packing.blocks, packing.head)
        self._span_s = span_s
        self._progress = progress
        self._generator = torch.Generator().manual_seed(1)

    def run(self, cache_dir: Path, with_head: bool) -> Speeds:
        """Measure everything.

        Args:
            cache_dir: on the disk whose speed is asked for.
            with_head: whether this node is to hold embedding, final norm and head.

        Raises:
            CheckpointError: one block of the model does not even fit into the memory that is free.
        """
        total = 3 + len(ROWS) + (1 if with_head else 0)
        self._progress("disk", 0, total)
        disk = disk_read_bytes_s(cache_dir)
        self._progress("memory", 1, total)
        memory = self._read_bytes_s()
        stage = self._blocks(lambda: self._progress("building blocks", 2, total))
        times = []
        for i, rows in enumerate(ROWS):
            self._progress(f"a block at {rows} rows", 3 + i, total)
            times.append((rows, self._block_s(stage, rows)))
        del stage
        head: Times = ()
        if with_head:
            self._progress("the head", total - 1, total)
            head = self._head_s()
        self._progress("done", total, total)
        return Speeds(disk, memory, tuple(times), head)

    def _read_bytes_s(self) -> float:
        """A product of matrix and vector, which reads each number once: what decoding does."""
        n = 4096  # numbers in a row; 128 MB in all, far more than a processor's cache, unless memory is short
        n_rows = min(2 * n, max(1, device_free_bytes(self._device) // 8 // (4 * n)))
        matrix = torch.zeros(n_rows, n, device=self._device).fill_(0.5)
        vector = torch.ones(n, device=self._device)
        return n_rows * n * 4 / self._mean_s(lambda: torch.mv(matrix, vector))

    def _blocks(self, check: Callable[[], None]) -> Stage | TensorStage:
        """A stage of blocks from the middle of the model, with weights of chance; `check` is called between them."""
        per_block = self._bytes_of(self._forms[0], f"transformer.h.{self._config.n_layer // 2}.")
        n_blocks = max(1, min(N_BLOCKS_LIMIT, self._config.n_layer, WORKING_SET_BYTES // max(per_block, 1)))
        self._check_room(n_blocks * per_block, "one block" if n_blocks == 1 else f"{n_blocks} blocks")
        start = min(self._config.n_layer // 2, self._config.n_layer - n_blocks)
        parts = [f"block.{i}" for i in range(start, start + n_blocks)]
        stage: Stage | TensorStage
        if self._packing is not None:
            inner = KernelStage(self._config_dict, start, start + n_blocks, torch.get_num_threads())
            stage = TensorStage(inner)
            stage.load(parts, self._packed_of(self._packing, check))
        else:
            stage = Stage(self._config, start, start + n_blocks, check)
            stage.load(parts, self._weights_of, self._device, self._dtype)
        stage.prepare(min(self._config.block_size, CONTEXT + max(ROWS)), self._device, self._dtype)
        return stage

    def _weights_of(self, part: str) -> Weights:
        """Of a part, for torch."""
        form = self._forms[0] if part.startswith("block.") else self._forms[1]
        if form is not None:
            return dict(chance_weights(self._shapes_of(part), Packing(form, form)))
        return {name: self._random(shape) for name, shape in self._shapes_of(part).items()}

    def _packed_of(self, packing: Packing, check: Callable[[], None]) -> Callable[[str], PartWeights]:
        """Gives those of a part, for the kernels; `check` is called before each."""

        def weights(part: str) -> PartWeights:
            check()
            return chance_weights(self._shapes_of(part), packing)

        return weights

    def _shapes_of(self, part: str) -> dict[str, Shape]:
        return {name: shape for name, shape in self._shapes.items() if part_of(name) == part}

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Numbers of a trained model's size, repeated: drawing each anew would take longer than measuring."""
        some = torch.randn(min(1 << 16, math.prod(shape)), generator=self._generator) * 0.02
        return some.repeat(-(-math.prod(shape) // some.numel()))[: math.prod(shape)].view(shape).to(self._dtype)

    def _block_s(self, stage: Stage | TensorStage, rows: int) -> float:
        """One row each of so many sequences, or, at the largest number, a piece of one prompt."""
        room = stage.max_length
        context = min(CONTEXT, room // 2)
        if rows == max(ROWS):
            slices = [(0, 0, min(rows, room))]
        else:
            slices = [(seq_id, context, 1) for seq_id in range(rows)]
            for seq_id in range(rows):
                stage(self._rows(context), [(seq_id, 0, context)])
        n_rows = sum(n for _, _, n in slices)
        x = self._rows(n_rows)
        seconds = self._mean_s(lambda: stage(x, slices)) * rows / n_rows  # a tiny context has no room for all rows
        stage.caches.clear()
        return seconds / (stage.stop - stage.start)

    def _rows(self, n: int) -> torch.Tensor:
        x = torch.randn(n, self._config.n_embd, generator=self._generator)
        return x.to(device=self._device, dtype=self._dtype)

    def _head_s(self) -> Times:
        """Final norm and head; the embedding only looks rows up. Nothing if there is no room to build them."""
        try:
            self._check_room(self._bytes_of(self._forms[1], "lm_head.", "transformer.ln_f."), "the head")
        except CheckpointError as e:
            logger.info("the head is not measured: %s", e)
            return ()
        stage = self._headed()
        times = []
        for rows in ROWS[:-1]:  # of a prompt only the last row goes through the head
            x = self._rows(rows)
            times.append((rows, self._mean_s(lambda x=x: stage.head(x), self._span_s / 2)))  # type: ignore[misc]
        return tuple(times)

    def _headed(self) -> StarterStage | TensorStage:
        """A stage without blocks."""
        if self._packing is not None:
            kernels = TensorStage(KernelStarterStage(self._config_dict, 0, torch.get_num_threads()))
            kernels.load(["embedding", "head"], self._packed_of(self._packing, lambda: None))
            return kernels
        stage = StarterStage(self._config, 0)
        given = install(stage, self._weights_of("head"), kernel_context() if self._forms[1] else None)
        stage.load_state_dict({name: t.to(self._device) for name, t in given.items()}, strict=False, assign=True)
        stage.requires_grad_(False)
        pad_few_rows(stage)
        return stage

    def _bytes_of(self, form: str | None, *prefixes: str) -> int:
        n = sum(math.prod(shape) for name, shape in self._shapes.items() if name.startswith(prefixes))
        return round(n * (LAYOUTS[form].bits / 8 if form else self._dtype.itemsize))

    def _check_room(self, n_bytes: int, what: str) -> None:
        free = device_free_bytes(self._device)
        if 1.5 * n_bytes > free:  # the format's weights stand beside the plain ones while they are made
            raise CheckpointError(
                f"{what} of the model takes {1.5 * n_bytes / 1e9:.2f} GB to be built and measured, but {free / 1e9:.2f} GB "
                "of memory are free"
            )

    @torch.inference_mode()
    def _mean_s(self, call: Callable[[], object], span_s: float | None = None) -> float:
        """Mean time of a call over the span, after one to warm up; at least two calls are timed."""
        span_s = self._span_s if span_s is None else span_s
        call()
        self._synchronize()
        n_calls, begin = 0, time.perf_counter()
        while True:
            call()
            n_calls += 1
            self._synchronize()
            taken = time.perf_counter() - begin
            if n_calls >= 2 and taken >= span_s:
                return taken / n_calls

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()


def disk_read_bytes_s(folder: Path, limit_s: float = 0.8) -> float:
    """How fast the disk under `folder` is read, past the system's cache; 0 if that cannot be told here."""
    if not hasattr(os, "posix_fadvise"):
        return 0.0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            piece = os.urandom(1 << 20)
            begin = time.perf_counter()
            written = 0
            while written < DISK_BYTES and time.perf_counter() - begin < limit_s:
                written += file.write(piece)
                os.fsync(file.fileno())  # so that a slow card's time is seen, not the memory's
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            read = 0
            while (n := len(file.read(1 << 20))) and time.perf_counter() - begin < limit_s:
                read += n
            return read / max(time.perf_counter() - begin, 1e-9)
    except OSError as e:
        with contextlib.suppress(Exception):
            logger.debug("the disk under %s cannot be measured: %s", folder, e)
        return 0.0
