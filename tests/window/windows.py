"""Tiny models in chunks, as stages that hold all their weights and as stages with a window over the same file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mdi.cancel import Cancel
from mdi.checkpoint.chunks import ChunkFile, write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.weights import WeightSource
from mdi.kernels.slices import Slice
from mdi.model.plain import spec_of
from mdi.spec.window import WindowOptions
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.window import StoredParts, Window, Windowed, open_window
from mdi.stages.window_budget import RunMemory, plan_window
from mdi.stages.window_files import expert_units
from tiny_models import tiny_lit

LENGTH = 96
FRAMES = (40, 1, 1, 1, 7, 1)  # rows of one sequence, frame after frame
NO_LIMIT = RunMemory(0, None, 0)


def checkpoint(folder: Path, family: str = "Llama-3.1-8B", **changes: object) -> LitCheckpoint:
    path, _ = tiny_lit(folder / "model", family, **changes)
    return LitCheckpoint(path)


def chunks(folder: Path, family: str = "Llama-3.1-8B", form: str = "float32", n_starter: int = 5) -> list[ChunkFile]:
    """The starter's chunk, and the other node's unless the starter has all blocks."""
    source = PackedSource(checkpoint(folder, family), Packing(form, form))
    n_layer = source.config.n_layer
    counts = (n_layer,) if n_starter >= n_layer else (n_starter, n_layer - n_starter)
    return [ChunkFile(path) for path in write_chunks(source, folder / "model", counts)]


def whole(source: WeightSource, start: int, stop: int, packing: Packing | None = None) -> KernelStage:
    """A stage that holds everything; the starter's if it begins with block 0."""
    weights = Resident(stage_parts(start, stop, starter=start == 0), lambda part: source.weights(part, packing))
    stage = KernelStage(spec_of(source.config), start, stop, weights)
    stage.prepare(LENGTH)
    return stage


def windowed(
    source: WeightSource, start: int, stop: int, options: WindowOptions, packing: Packing | None = None,
    folder: Path = Path("."), run: RunMemory = NO_LIMIT, cancel: Cancel | None = None,
) -> KernelStage:  # fmt: skip
    """The same with a window."""
    packing = packing or source.packing
    assert packing is not None
    parts = stage_parts(start, stop, starter=start == 0)
    weights = open_window("starter", options, parts, lambda part: source, packing, folder, run, cancel)
    stage = KernelStage(spec_of(source.config), start, stop, weights)
    stage.prepare(LENGTH)
    return stage


def run(stage: KernelStage, frames: Sequence[int] = FRAMES) -> list[np.ndarray]:
    """What comes out of a stage, frame after frame: on a starter the logits of the last row as well."""
    found, position = [], 0
    ids = np.random.default_rng(3).integers(0, stage.spec.n_vocab, sum(frames))
    for n_rows in frames:
        if stage.ends is not None:
            x = stage.embed(ids[position : position + n_rows])
        else:
            generator = np.random.default_rng(position)
            x = generator.standard_normal((n_rows, stage.n_embd), dtype=np.float32)
        y = stage(x, [Slice(0, position, n_rows)])
        position += n_rows
        found.append(y)
        if stage.ends is not None:
            found.append(stage.head(y[-1:]))
    return found


def same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def apart(
    source: WeightSource, start: int, stop: int, n_experts: int, retain: int | None = None, packing: Packing | None = None,
    folder: Path = Path("."), cache_type: str = "float32",
) -> KernelStage:  # fmt: skip
    """A stage that reads experts when they are chosen, with so many of them in memory."""
    packing = packing or source.packing
    assert packing is not None
    found = StoredParts(packing, folder)
    stored = {part: found.part(source, part) for part in stage_parts(start, stop, starter=start == 0)}
    found.finish()
    if "embedding" in stored:
        stored["embedding"].keep()
    blocks, experts = expert_units({part: one.matrices for part, one in stored.items() if part.startswith("block.")})
    head = stored["head"].matrices["lm_head.weight"] if "head" in stored else None
    plan = replace(plan_window(blocks, head, 2, retain), experts=tuple(experts), n_expert_slots=n_experts)
    window = Window(plan)
    window.on_close(found.close)
    stage = KernelStage(spec_of(source.config), start, stop, Windowed(stored, window), 2, cache_type)
    stage.prepare(LENGTH)
    return stage
