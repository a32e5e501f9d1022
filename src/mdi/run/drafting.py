"""The small model that guesses tokens: a checkpoint with the same tokenizer, whole on the starter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mdi.cancel import Cancel
from mdi.checkpoint.parts import stage_parts
from mdi.engine.guesses import LEARN_ROWS, DraftModel
from mdi.engine.rows import ArrayRows
from mdi.errors import Code, UsageError
from mdi.host.threads import n_threads
from mdi.kernels.weight_formats import PACKED
from mdi.run.choice import Choice, starter_computing
from mdi.run.supply import StarterSupply
from mdi.spec.cluster import WeightMemory
from mdi.spec.extent import Extent
from mdi.spec.options import StarterOptions
from mdi.spec.window import window_of
from mdi.stages.building import WeightPlacer, kernel_weights
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.model_family import ModelFamily
from mdi.stages.starter_weights import StarterWeights
from mdi.stages.window_budget import work_bytes


def draft_memory(model: Choice, extent: Extent) -> int:
    """Bytes that the small model takes beside a window: its weights, the caches of all texts, and rows while it computes.

    0 without one, and where nothing is fitted into a limit. Raises as `open_draft`.
    """
    asked, family = model.options, model.family
    window = window_of(asked.weight_memory)
    if asked.draft in ("none", "auto") or window is None or window.memory is None:
        return 0
    weights, asked = _opened(family, Path(asked.draft), asked)
    try:
        computing = starter_computing(family, weights, asked)
        if computing.packing is None:
            return 0  # it is refused when it is opened
        own = replace(extent, max_length=min(extent.max_length, family.max_length(weights.model.spec)))
        spec = replace(StarterSupply("draft", weights, family, asked).spec(computing, own), window=None)
        caches = own.n_sequences * spec.run_bytes(family)
        return spec.weight_bytes({}) + caches + work_bytes(weights.model.spec, LEARN_ROWS, 1)
    finally:
        weights.close()


def _opened(family: ModelFamily, folder: Path, asked: StarterOptions) -> tuple[StarterWeights, StarterOptions]:
    """The small model's weights, in the format of the large one, or like that one in its file's own."""
    is_word = asked.quantize in (None, *PACKED)
    weights = family.open_weights(folder, None, 1, None, asked.quantize if is_word else None, False)
    if not is_word:
        weights.take_format(weights.own_formats)
        asked = replace(asked, quantize=weights.quantize, quantize_head=weights.quantize_head)
    return weights, asked


def open_draft(model: Choice, folder: Path, extent: Extent, cancel: Cancel) -> DraftModel:
    """Load the small model in the format of the large one.

    Raises:
        UsageError: its tokens are others, or it cannot be computed in the kernels.
        CheckpointError: it cannot be read.
    """
    family, asked = model.family, model.options
    codec = family.open_codec(folder, asked.prompt_style)
    if codec.tokens != model.codec.tokens:
        raise UsageError(
            f"--draft {folder}: its tokenizer has other tokens than that of {model.directory}, so it cannot guess them",
            code=Code.DRAFT,
        )
    weights, asked = _opened(family, folder, asked)
    try:
        computing = starter_computing(family, weights, asked)
        if computing.packing is None:
            raise UsageError(
                f"--draft {folder}: it cannot be computed in the kernels: {computing.why_torch}", code=Code.DRAFT
            )
        packing, placer = computing.packing, WeightPlacer(WeightMemory())
        names = stage_parts(0, weights.n_layer, starter=True)
        held = Resident(names, lambda name: kernel_weights(weights.source_of(name), name, packing, placer, cancel))
        kv_dtype = computing.cache_type(extent.kv_dtype)
        stage = KernelStage(weights.model.spec, 0, weights.n_layer, held, n_threads(), kv_dtype)
        length = min(extent.max_length, family.max_length(weights.model.spec))
        stage.prepare(length)
    finally:
        weights.close()
    return DraftModel(stage, ArrayRows(), length)
