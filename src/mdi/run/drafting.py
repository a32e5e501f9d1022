"""The small model that guesses tokens: a checkpoint with the same tokenizer, whole on the starter."""

from __future__ import annotations

from pathlib import Path

from mdi.cancel import Cancel
from mdi.checkpoint.parts import stage_parts
from mdi.engine.guesses import DraftModel
from mdi.engine.rows import ArrayRows
from mdi.errors import UsageError
from mdi.host.threads import n_threads
from mdi.kernels.weight_formats import AUTO
from mdi.run.choice import Choice, starter_computing
from mdi.spec.cluster import WeightMemory
from mdi.stages.building import WeightPlacer, kernel_weights
from mdi.stages.kernel_stage import KernelStage, Resident


def open_draft(model: Choice, folder: Path, max_length: int, cancel: Cancel) -> DraftModel:
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
            code="draft",
        )
    form = None if asked.quantize == AUTO else asked.quantize
    weights = family.open_weights(folder, None, 1, None, form, False)
    try:
        computing = starter_computing(family, weights, asked)
        if computing.packing is None:
            raise UsageError(
                f"--draft {folder}: it cannot be computed in the kernels: {computing.why_torch}", code="draft"
            )
        packing, placer = computing.packing, WeightPlacer(WeightMemory())
        names = stage_parts(0, weights.n_layer, starter=True)
        held = Resident(names, lambda name: kernel_weights(weights.source_of(name), name, packing, placer, cancel))
        stage = KernelStage(weights.config, 0, weights.n_layer, held, n_threads(), computing.kv_dtype)
        length = min(max_length, family.max_length(weights.config))
        stage.prepare(length)
    finally:
        weights.close()
    return DraftModel(stage, ArrayRows(), length)
