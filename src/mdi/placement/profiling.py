"""Measure this node in a few seconds: memory, disk, and the blocks of one model in one format.

Times are means over a fixed span, not best cases: a CPU quota halts a node for parts of every 100 ms, and the best case
would be that of a node without a quota. Kernels and torch have modules of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mdi.cancel import Cancel
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.shapes import model_shapes
from mdi.errors import CheckpointError
from mdi.host.computing import Computing
from mdi.host.resources import device_free_bytes
from mdi.host.threads import n_threads
from mdi.kernels import library
from mdi.kernels.blocks import Context, Linear
from mdi.kernels.layout import Matrix, aligned_bytes, matrix_bytes
from mdi.kernels.slices import Slice
from mdi.model.caches import CHUNK_ROWS
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Attention
from mdi.placement.model import model_shape
from mdi.units import size

WIDTH = 1024  # numbers in a row


def reader(n_bytes: int, device: str) -> tuple[Callable[[], object], int]:
    """A function that reads about so many bytes of a device's memory on the node's threads, and their number.

    Uses the kernels if there are some, else torch.
    """
    n_rows = max(16, n_bytes // (4 * WIDTH) // 16 * 16)
    is_ready = device == "cpu" and library.load() is not None
    return (_in_kernels(n_rows) if is_ready else _in_torch(n_rows, device)), 4 * WIDTH * n_rows


def _in_kernels(n_rows: int) -> Callable[[], object]:
    data = aligned_bytes(matrix_bytes("float32", n_rows, WIDTH))
    data.view(np.float32)[:] = 0.5
    matrix = Matrix("float32", n_rows, WIDTH, data)
    context, vector = Context(n_threads()), np.ones((1, WIDTH), dtype=np.float32)
    linear = Linear(context, matrix)
    return lambda: linear(vector)


def _in_torch(n_rows: int, device: str) -> Callable[[], object]:
    import torch

    matrix = torch.full((n_rows, WIDTH), 0.5, device=device)
    vector = torch.ones(WIDTH, device=device)

    def read() -> None:
        torch.mv(matrix, vector)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    return read


ROWS = (1, 2, 3, 4, 16, CHUNK_ROWS, 128)  # times of few rows are not linear, because kernels differ
CONTEXT = 64  # positions that a sequence has behind it when its next row is timed
PROMPT_CONTEXT = 1024  # ... and when attention over a prompt is
SPAN_S = 0.35  # how long one thing is measured
WORKING_SET_BYTES = 128 << 20  # more blocks are built until they no longer fit a processor's cache
N_BLOCKS_LIMIT = 8
READ_BYTES = 128 << 20  # far more than a processor's cache, unless memory is short
DISK_BYTES = 32 << 20

Times = tuple[tuple[int, float], ...]

logger = logging.getLogger("mdi")


@dataclass(frozen=True)
class Subject:
    """The subject of a measurement: one model, computed as on this node.

    Attributes:
        config: of the model; `config_hash` is its hash.
        with_head: whether the node would hold embedding, final norm and head as well.
    """

    config: ModelConfig
    config_hash: str
    computing: Computing
    with_head: bool = False


@dataclass(frozen=True)
class Speeds:
    """Measurements that are kept: see `mdi.placement.profile.NodeProfile`, whose fields these are."""

    disk_read_bytes_s: float
    read_bytes_s: float
    block_s: Times
    head_s: Times
    attention_macs_s: float = 0.0


class Bench(ABC):
    """Measures one node.

    Args:
        span_s: how long each thing is measured.
        progress: called with the present measurement, how many are done, and how many there are.
        cancel: checked between the blocks that are built.
    """

    def __init__(
        self,
        subject: Subject,
        span_s: float = SPAN_S,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        cancel: Cancel | None = None,
    ) -> None:
        self._subject = subject
        self._shapes = model_shapes(subject.config, "the model to be measured")
        self._spec = spec_of(subject.config)
        self._span_s = span_s
        self._n_blocks, self._row_width = 1, self._spec.width
        self.progress = progress
        self._cancel = cancel or Cancel()

    def run(self, cache_dir: Path, with_head: bool) -> Speeds:
        """Measure everything.

        Args:
            cache_dir: on the disk whose speed is asked for.
            with_head: whether this node is to hold embedding, final norm and head.

        Raises:
            CheckpointError: one block of the model does not even fit into the memory that is free.
        """
        total = 4 + len(ROWS) + (1 if with_head else 0)
        self.progress("disk", 0, total)
        disk = disk_read_bytes_s(cache_dir)
        self.progress("memory", 1, total)
        memory = self._read_bytes_s()
        self.progress("building blocks", 2, total)
        stage = self._blocks()
        times = []
        for i, rows in enumerate(ROWS):
            self.progress(f"a block at {rows} rows", 3 + i, total)
            times.append((rows, self._block_s(stage, rows)))
        del stage
        self.progress("attention", 3 + len(ROWS), total)
        attention = self._attention_macs_s()
        head: Times = ()
        if with_head:
            self.progress("the head", total - 1, total)
            head = self._head_s()
        self.progress("done", total, total)
        return Speeds(disk, memory, tuple(times), head, attention)

    @abstractmethod
    def blocks_of(self, start: int, stop: int, max_length: int) -> Any:
        """Blocks of the model, with random weights, as a stage: called with rows and slices, and with caches."""

    @abstractmethod
    def head(self) -> Callable[[Any], object]:
        """Final norm and head, with random weights: called with rows."""

    @abstractmethod
    def rows(self, n: int) -> Any:
        """(n, width) of the numbers that the stage takes"""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all calls are done."""

    @abstractmethod
    def bytes_of(self, name: str) -> float:
        """Bytes of a tensor of the model while random weights are made."""

    def _read_bytes_s(self) -> float:
        n_bytes = min(READ_BYTES, device_free_bytes(self._subject.computing.device) // 8)
        read, n_bytes = reader(n_bytes, self._subject.computing.device)
        return n_bytes / self._mean_s(read)

    def _blocks(self) -> Any:
        """A stage of blocks from the middle of the model."""
        n_layer, context = self._spec.n_layer, self._spec.max_length
        per_block = self._all_bytes(f"transformer.h.{n_layer // 2}.")
        n_blocks = max(1, min(N_BLOCKS_LIMIT, n_layer, int(WORKING_SET_BYTES // max(per_block, 1))))
        self._check_capacity(n_blocks * per_block, "one block" if n_blocks == 1 else f"{n_blocks} blocks")
        start = max(cut for cut in self._spec.allowed_cuts() if cut <= min(n_layer // 2, n_layer - n_blocks))
        self._n_blocks, self._row_width = n_blocks, self._spec.row_at(start).width
        return self.blocks_of(start, start + n_blocks, min(context, CONTEXT + max(ROWS)))

    def _block_s(self, stage: Any, rows: int) -> float:
        """One row each of `rows` sequences or, where they are many, a piece of one prompt."""
        length = stage.max_length
        context = min(CONTEXT, length // 2)
        if rows >= CHUNK_ROWS:
            n = min(rows, length)
            slices = [Slice(0, 0, n, n)]  # all give logits, so that no block skips some
        else:
            slices = [Slice(seq_id, context, 1, 1) for seq_id in range(rows)]
            for seq_id in range(rows):
                stage(self.rows(context), [Slice(seq_id, 0, context, context)])
        n_rows = sum(one.n_rows for one in slices)
        x = self.rows(n_rows)
        seconds = self._mean_s(lambda: stage(x, slices)) * rows / n_rows  # a tiny context has no room for all rows
        stage.caches.clear()
        return seconds / self._n_blocks

    def _attention_macs_s(self) -> float:
        """Of a piece of a prompt, in a block as narrow as can be, so that little else is computed; 0 without attention."""
        mixers = [one.mixer for one in self._spec.blocks if isinstance(one.mixer, Attention)]
        if not mixers:
            return 0.0
        width = 64
        config = ModelConfig(
            name="attention", n_layer=1, n_embd=width, intermediate_size=width, padded_vocab_size=width,
            block_size=2 * PROMPT_CONTEXT,
            n_head=mixers[0].n_head, n_query_groups=mixers[0].n_groups, head_size=mixers[0].head_size,
            norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", parallel_residual=False, bias=False,
        )  # fmt: skip
        computing = self._subject.computing
        packing = computing.packing and Packing("float32", "float32")
        plain = replace(computing, quantize=None, quantize_head=None, packing=packing)
        bench = type(self)(Subject(config, "", plain), self._span_s, cancel=self._cancel)
        bench._row_width = width
        stage = bench.blocks_of(0, 1, PROMPT_CONTEXT + CHUNK_ROWS)
        for start in range(0, PROMPT_CONTEXT, CHUNK_ROWS):
            stage(bench.rows(CHUNK_ROWS), [Slice(0, start, CHUNK_ROWS, CHUNK_ROWS)])
        x, last = bench.rows(CHUNK_ROWS), [Slice(0, PROMPT_CONTEXT, CHUNK_ROWS, CHUNK_ROWS)]
        seconds = bench._mean_s(lambda: stage(x, last))
        return model_shape(config, "float32").reference.attention_macs(PROMPT_CONTEXT, CHUNK_ROWS) / seconds

    def _head_s(self) -> Times:
        """Final norm and head; the embedding only looks rows up. Empty if there is no memory to build them."""
        try:
            self._check_capacity(self._all_bytes("lm_head.", "transformer.ln_f."), "the head")
        except CheckpointError as e:
            logger.info("the head is not measured: %s", e)
            return ()
        head = self.head()
        times = []
        for rows in ROWS[:-2]:  # of a prompt only the last row goes through the head
            x = self.rows(rows)
            times.append((rows, self._mean_s(lambda x=x: head(x), self._span_s / 2)))  # type: ignore[misc]
        return tuple(times)

    def _all_bytes(self, *prefixes: str) -> float:
        return sum(self.bytes_of(name) for name in self._shapes if name.startswith(prefixes))

    def _check_capacity(self, n_bytes: float, what: str) -> None:
        free = device_free_bytes(self._subject.computing.device)
        if n_bytes > free:
            raise CheckpointError(
                f"{what} of the model take {size(n_bytes)} to be built and measured, but {size(free)} of memory are free"
            )

    def _mean_s(self, call: Callable[[], object], span_s: float | None = None) -> float:
        """Mean time of a call over the span, after one to warm up; at least two calls are timed."""
        span_s = self._span_s if span_s is None else span_s
        call()
        self.synchronize()
        n_calls, begin = 0, time.perf_counter()
        while True:
            call()
            n_calls += 1
            self.synchronize()
            taken = time.perf_counter() - begin
            if n_calls >= 2 and taken >= span_s:
                return taken / n_calls


def disk_read_bytes_s(folder: Path, limit_s: float = 0.8) -> float:
    """Read rate of the disk of `folder` without the page cache, in bytes per second; 0 if it cannot be measured."""
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
