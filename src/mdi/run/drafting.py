"""The small model that guesses tokens: a checkpoint with the same tokenizer, whole on the starter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mdi.cancel import Cancel
from mdi.engine.guesses import LEARN_ROWS, DraftModel
from mdi.engine.rows import ArrayRows
from mdi.errors import Code, UsageError
from mdi.files import default_cache_dir
from mdi.kernels.weight_formats import PACKED
from mdi.run.choice import Choice, starter_computing
from mdi.run.supply import StarterSupply
from mdi.spec.extent import Extent
from mdi.spec.options import StarterOptions
from mdi.spec.window import window_of
from mdi.stages.building import build_stage
from mdi.stages.model_family import ModelFamily
from mdi.stages.spec import StageSpec
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
        spec = _spec_of(weights, family, asked, extent)
        if spec.is_torch:
            return 0  # it is refused when it is opened
        caches = spec.extent.n_sequences * spec.run_bytes(family)
        return spec.weight_bytes({}) + caches + work_bytes(weights.model.spec, LEARN_ROWS, 1)
    finally:
        weights.close()


def _opened(family: ModelFamily, folder: Path, asked: StarterOptions) -> tuple[StarterWeights, StarterOptions]:
    """The small model's weights, in the format of the large one, or like that one in its file's own."""
    is_word = asked.quantize in (None, *PACKED)
    weights = family.open_weights(folder, None, 1, None, asked.quantize if is_word else None, False)
    if not is_word:
        weights.take_format(weights.own_formats, asked.cache_dir or default_cache_dir())
        asked = replace(asked, quantize=weights.quantize, quantize_head=weights.quantize_head)
    return weights, asked


def _spec_of(weights: StarterWeights, family: ModelFamily, asked: StarterOptions, extent: Extent) -> StageSpec:
    """All of it in memory, for as many texts as the large model has. Raises UsageError: nothing computes it."""
    length = min(extent.max_length, family.max_length(weights.model.spec))
    supply = StarterSupply("draft", weights, family, asked)
    return replace(
        supply.spec(starter_computing(family, weights, asked), replace(extent, max_length=length)), window=None
    )


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
        spec = _spec_of(weights, family, asked, extent)
        if spec.is_torch:
            raise UsageError(
                f"--draft {folder}: it cannot be computed in the kernels: {spec.computing.why_torch}", code=Code.DRAFT
            )
        stage = build_stage(
            spec, weights.source_of, {}, family, asked.weight_memory, asked.cache_dir or default_cache_dir(), cancel
        )
        stage.prepare(spec.extent.max_length)
    finally:
        weights.close()
    return DraftModel(stage, ArrayRows(), spec.extent.max_length)
