"""The weights of a stage in a window: read from the disk while it computes, and the head in pieces of rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdi.cancel import Cancel
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.weights import WeightSource
from mdi.errors import KernelError
from mdi.kernels.blocks import Head, Weights
from mdi.kernels.context import Context
from mdi.kernels.layout import Matrix
from mdi.stages.kernel_stage import EmbeddingTable, HeadFunction, WeightUse
from mdi.units import size
from mdi.window.budget import MemoryLimit, RunMemory, choose_window, taken_bytes
from mdi.window.slot_plan import WindowPlan
from mdi.window.stored import StoredPart, StoredParts
from mdi.window.weight_units import HEAD, block_units
from mdi.window.window import Window
from mdi.window.window_options import WindowOptions

_HEAD, _HEAD_BIAS = "lm_head.weight", "lm_head.bias"

logger = logging.getLogger("mdi")


class Windowed:
    """See the module, and mdi.stages.kernel_stage.StageWeights.

    Args:
        stored: the parts of the stage, by name.
        window: over their matrices.
        cache_limit: what caches may take at most; None is not known.
        limit: of the process.
    """

    mapped_bytes = 0

    def __init__(
        self, stored: Mapping[str, StoredPart], window: Window, cache_limit: int | None = None,
        limit: MemoryLimit | None = None,
    ) -> None:  # fmt: skip
        self.window, self.cache_limit = window, cache_limit
        self._stored = stored
        self._small_bytes = sum(array.nbytes for part in stored.values() for array in part.arrays.values())
        self.check = (limit or MemoryLimit(None)).check

    def __contains__(self, part: str) -> bool:
        return part in self._stored

    def __getitem__(self, part: str) -> Weights:
        units = self.window.matrices(part) if part != HEAD else []
        return {**self._stored[part].arrays, **{name: matrix for unit in units for name, matrix in unit.items()}}

    def ready(self, block: int, half: int) -> contextlib.AbstractContextManager[None]:
        return self.window.unit(f"block.{block}", half)

    @property
    def n_bytes(self) -> int:
        return self.window.plan.resident_bytes + self._small_bytes

    @property
    def use(self) -> WeightUse:
        use = self.window.use
        return WeightUse(use.resident_bytes + self._small_bytes, use.read_bytes, use.wait_s)

    def table(self) -> EmbeddingTable | None:
        """Rows of the embedding are read as tokens ask for them."""
        return self._stored["embedding"].table

    def head(self, config: Mapping[str, Any], n_tokens: int, context: Context) -> HeadFunction:
        return PiecedHead(config, self._stored[HEAD].arrays, self.window, n_tokens, context)

    def close(self) -> None:
        self.window.close()


class PiecedHead:
    """Rows that went through all blocks -> logits, as kernels.head.Head, from pieces that are in memory while they are used.

    Args:
        config: litgpt's Config as a plain dict.
        weights: the small tensors of the part "head".
        n_tokens: how many of the vocabulary it is for.

    Raises:
        KernelError: the window's head has another number of rows.
    """

    def __init__(
        self, config: Mapping[str, Any], weights: Weights, window: Window, n_tokens: int, context: Context
    ) -> None:
        self._window, self._n_tokens = window, n_tokens
        self._pieces: list[Head] = []
        n_rows, bias = 0, weights.get(_HEAD_BIAS)
        for unit in window.matrices(HEAD):
            matrix = unit[_HEAD]
            of_piece: dict[str, Matrix | np.ndarray] = {**weights, _HEAD: matrix}
            if isinstance(bias, np.ndarray):
                of_piece[_HEAD_BIAS] = bias[n_rows : n_rows + matrix.n_out]
            self._pieces.append(Head(config, of_piece, matrix.n_out, context))
            n_rows += matrix.n_out
        if n_rows != n_tokens:
            raise KernelError(f"the head has {n_rows} rows, {n_tokens} expected")

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 (M, n_embd) -> (M, n_tokens)"""
        logits = np.empty((len(x), self._n_tokens), dtype=np.float32)
        first = 0
        for i, piece in enumerate(self._pieces):
            with self._window.unit(HEAD, i):
                part = piece(x)
            logits[:, first : first + part.shape[1]] = part
            first += part.shape[1]
        return logits


def open_window(
    name: str, options: WindowOptions, parts: Sequence[str], source: Callable[[str], WeightSource], packing: Packing,
    folder: Path, run: RunMemory, cancel: Cancel | None = None,
) -> Windowed:  # fmt: skip
    """The weights of a stage in a window.

    Args:
        name: of the node.
        source: gives that of each part.
        folder: for weights that must be packed first.

    Raises:
        LimitError: it does not fit into the memory.
        CheckpointError: the weights cannot be read.
    """
    cancel = cancel or Cancel()
    found = StoredParts(packing, folder, options.memory)
    try:
        stored = {}
        for part in parts:
            cancel.check()
            of = source(part)
            stored[part] = found.part(of, part)
            of.release()  # mapped pages count as this process's memory
        found.finish()
        blocks = block_units({part: stored[part].matrices for part in parts if part.startswith("block.")})
        head = stored[HEAD].matrices["lm_head.weight"] if HEAD in stored else None
        if head is not None and not head.n_bytes:  # a share of it without rows
            head = None
        plan = choose_window(name, options, blocks, head, run, taken_bytes())
        window = Window(plan, cancel)
    except BaseException:
        found.close()
        raise
    window.on_close(found.close)
    _log_plan(name, plan, window, found.packed_bytes)
    caches = run.caches if options.memory is None else run.cache_bytes
    return Windowed(stored, window, caches, MemoryLimit(options.memory))


def _log_plan(name: str, plan: WindowPlan, window: Window, packed_bytes: int) -> None:
    if packed_bytes:
        logger.info(
            "%s packed %s of weights for its window: prepare_model.py --quantize stores them so",
            name,
            size(packed_bytes),
        )
    kept = f", every {plan.retain}. block stays" if plan.retain else ""
    way = "direct" if window.reads_direct else "plain"
    rate = f", {way}: the disk gives {size(window.disk_bytes_s)}/s" if window.disk_bytes_s else ""
    logger.info(
        "%s has %s of weights in memory (a window of %d units%s), and reads %s for each pass%s",
        name, size(plan.resident_bytes), plan.n_slots, kept, size(plan.pass_bytes), rate,
    )  # fmt: skip
