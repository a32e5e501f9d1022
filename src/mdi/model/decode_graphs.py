"""Records decoding steps once and replays them as a whole, because on a GPU starting a kernel costs more than running it.

A step is one row each of up to 64 sequences through all blocks of a stage. It is a function of tensors that never move
(`model.fixed_batch`), so that one recording serves all frames of as many rows and pages. Rows and pages are rounded up, so that
there are few recordings. What a recording is, is the recorder's matter: CUDA's graphs here, and in the tests a list of calls.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from litgpt.model import LLaMAMoE

from mdi.errors import EngineError
from mdi.model.attention import CachedLatentAttention
from mdi.model.batch import Batch, Rows
from mdi.model.cache import TorchCaches
from mdi.model.fixed_batch import FixedBatch, FixedRows, widths_of

LARGEST = 64  # rows; what is larger waits for the arithmetic
LEAST_PAGES = 4
N_WARM_UP = 2  # steps before a recording: libraries take their memory, kernels are compiled

Step = Callable[[], None]
Recorder = Callable[[Step], Step]  # gives what repeats the step, whose tensors may have other numbers by then

logger = logging.getLogger("mdi")


class DecodingStage(Protocol):
    """A stage as it is recorded: model.stage.Stage."""

    caches: TorchCaches
    n_embd: int

    def through_blocks(self, x: torch.Tensor, batch: Batch | FixedBatch) -> torch.Tensor: ...


class RecordedStep:
    """A step of a fixed number of rows and pages.

    Args:
        record: see Recorder.
    """

    def __init__(
        self, stage: DecodingStage, n_rows: int, widths: Sequence[int], dtype: torch.dtype, record: Recorder
    ) -> None:
        device = stage.caches.device
        self._rows = FixedRows(n_rows, widths, device)
        self._x = torch.zeros(n_rows, stage.n_embd, dtype=dtype, device=device)
        self._y = torch.zeros_like(self._x)
        self._stage, self._record = stage, record
        self._replay: Step | None = None

    @property
    def is_recorded(self) -> bool:
        return self._replay is not None

    def __call__(self, x: torch.Tensor, rows: Sequence[Rows], scratch: Sequence[int]) -> torch.Tensor:
        """(n, n_embd) -> (n, n_embd), with n up to the number of rows"""
        self._rows.fill(rows, scratch)
        self._x[: len(rows)] = x
        if self._replay is None:
            self._replay = self._record(self._step)
        self._replay()
        return self._y[: len(rows)].clone()  # the next frame overwrites it

    def _step(self) -> None:
        batch = self._rows.batch(self._stage.caches)
        self._y.copy_(self._stage.through_blocks(self._x, batch))


class DecodeGraphs:
    """All recordings of one stage, as long as its caches exist.

    Attributes:
        n_recorded: how many there are.
    """

    def __init__(self, stage: DecodingStage, record: Recorder) -> None:
        self._stage: DecodingStage = weakref.proxy(stage)  # which has this: its memory must go as soon as it is dropped
        self._record = record
        self.steps: dict[tuple[int, torch.dtype, tuple[int, ...]], RecordedStep] = {}
        self._scratch: list[int] | None = None
        self._has_failed = False
        stage.caches.on_clear = self.drop

    @property
    def n_recorded(self) -> int:
        return len(self.steps)

    def __call__(self, x: torch.Tensor, rows: Sequence[Rows]) -> torch.Tensor | None:
        """(n, n_embd) of the blocks' rows -> (n, n_embd); None if a frame is none of those that are recorded."""
        caches = self._stage.caches
        is_decoding = 0 < len(rows) <= LARGEST and all(one.n_rows == 1 for one in rows)
        if self._has_failed or not is_decoding or not self._has_scratch():
            return None
        for c in range(len(caches.classes)):
            if any(not caches.are_fixed(c, one.tables[c].ids) for one in rows):
                return None
        widths = tuple(rounded_up(width, LEAST_PAGES) for width in widths_of(rows, len(caches.classes)))
        key = rounded_up(len(rows), 1), x.dtype, widths
        assert self._scratch is not None
        step = self.steps.get(key) or RecordedStep(self._stage, key[0], widths, x.dtype, self._record)
        try:
            found = step(x, rows, self._scratch)
        except RuntimeError as e:
            if step.is_recorded:
                raise
            self._give_up(e)
            return None
        self.steps[key] = step
        return found

    def _give_up(self, error: RuntimeError) -> None:
        self.drop()
        self._has_failed = True
        why = (str(error).splitlines() or [""])[0]
        logger.warning("decoding is slower, because CUDA graphs cannot be recorded: %s", why)

    def drop(self) -> None:
        """Free the recordings; they are made again when they are needed."""
        self.steps.clear()
        for pool, page in zip(self._stage.caches.pools, self._scratch or (), strict=False):
            pool.release([page])
        self._scratch = None

    def _has_scratch(self) -> bool:
        """Take the scratch pages, where the first pages are; False if all of these are in use."""
        caches = self._stage.caches
        if self._scratch is None:
            found = []
            for c, pool in enumerate(caches.pools):
                try:
                    found.append(pool.take())
                except EngineError:
                    break
                if not caches.are_fixed(c, found[-1:]):
                    break
            else:
                self._scratch = found
                return True
            for pool, page in zip(caches.pools, found, strict=False):
                pool.release([page])
        return self._scratch is not None


def rounded_up(n: int, least: int) -> int:
    """`n` or the next larger one of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again; never below `least`."""
    power = 1 << max(0, n - 1).bit_length()
    return max(least, power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power)


def can_record(blocks: Sequence[torch.nn.Module]) -> bool:
    """Whether every frame of the same size does the same: experts are called by what the rows hold, latent attention goes
    sequence by sequence."""
    return not any(isinstance(m, LLaMAMoE | CachedLatentAttention) for block in blocks for m in block.modules())


class CudaRecorder:
    """Records steps as CUDA graphs, which share their memory, for they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Raises RuntimeError if the step does something that cannot be recorded."""
        with torch.cuda.device(self._device):
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(N_WARM_UP):
                    step()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process, for example another node's, may continue meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        replay: Step = graph.replay
        return replay


def decode_graphs(stage: DecodingStage, blocks: Sequence[torch.nn.Module]) -> DecodeGraphs | None:
    """Those of a stage that is prepared, empty; None where steps cannot be recorded."""
    device = stage.caches.device
    if device.type != "cuda" or not can_record(blocks):
        return None
    return DecodeGraphs(stage, CudaRecorder(device))
