"""A stage with a window, from the weights of its parts to the first unit that is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.weights import WeightSource
from mdi.units import size
from mdi.window.budget import MemoryLimit, RunMemory, choose_window, taken_bytes
from mdi.window.slot_plan import WindowPlan
from mdi.window.stored import StoredPart, StoredParts
from mdi.window.weight_units import HEAD, block_units
from mdi.window.window import Window
from mdi.window.window_options import WindowOptions


class Taker(Protocol):
    """A stage, or stages, that a window can give their weights: window.window_stage.WindowStage."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    def run_bytes(self, max_length: int) -> int: ...

    def take(
        self, stored: Mapping[str, StoredPart], window: Window, cache_bytes: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None: ...  # fmt: skip


AnyStage = TypeVar("AnyStage", bound=Taker)

logger = logging.getLogger("mdi")


def open_window(
    stage: AnyStage, name: str, options: WindowOptions, parts: Sequence[str], source: Callable[[str], WeightSource],
    packing: Packing, folder: Path, run: RunMemory, check: Callable[[], None] = lambda: None,
) -> AnyStage:  # fmt: skip
    """Give a stage its weights.

    Args:
        stage: made, not loaded.
        name: of the node.
        source: gives that of each part.
        folder: for weights that must be packed first.
        check: called repeatedly; its exceptions pass through.

    Raises:
        UsageError: it does not fit into the memory.
        CheckpointError: the weights cannot be read.
    """
    found = StoredParts(packing, folder, options.memory)
    try:
        stored = {}
        for part in parts:
            check()
            of = source(part)
            stored[part] = found.part(of, part)
            of.release()  # mapped pages count as this process's memory
        found.finish()
        blocks = block_units({part: stored[part].matrices for part in parts if part.startswith("block.")})
        head = stored[HEAD].matrices["lm_head.weight"] if HEAD in stored else None
        if head is not None and not head.n_bytes:  # a share of it without rows
            head = None
        plan = choose_window(name, options, blocks, head, run, taken_bytes())
        window = Window(plan, check)
    except BaseException:
        found.close()
        raise
    window.on_close(found.close)
    _tell(name, plan, window, found.packed_bytes)
    try:
        caches = run.caches if options.memory is None else run.cache_bytes
        stage.take(stored, window, caches, MemoryLimit(options.memory).check)
    except BaseException:
        window.close()
        raise
    return stage


def _tell(name: str, plan: WindowPlan, window: Window, packed_bytes: int) -> None:
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
