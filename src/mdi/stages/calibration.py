"""How large the inputs of each linear layer are in a text: what its rounding errors are weighed by (`Packing.means`).

One block after the other, or those that share keys and values, is in memory, in float32 and in torch; all rows of the text go
through it before the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from mdi.cancel import Cancel
from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.weights import WeightSource
from mdi.errors import UsageError
from mdi.kernels.slices import Slice
from mdi.model.tensors import HEAD
from mdi.stages.torch_stage import Stage, StarterStage

WINDOW, MOST_WINDOWS = 512, 64  # tokens, and how many windows of a text are read

Means = dict[str, np.ndarray]


def windows_of(ids: Sequence[int], context: int) -> list[list[int]]:
    """The beginning of a text in windows. Raises UsageError: there is none."""
    length = min(WINDOW, context)
    found = [list(ids[i : i + length]) for i in range(0, len(ids), length)][:MOST_WINDOWS]
    if not found:
        raise UsageError("--calibrate: the text is empty")
    return found


@torch.inference_mode()
def mean_squares(source: WeightSource, windows: Sequence[Sequence[int]], cancel: Cancel | None = None) -> Means:
    """The mean square of each input of each linear layer over the rows of a text, by the names of their weights.

    Layers that no row reaches, as experts that none is sent to, are left out.

    Args:
        source: of the whole model.
        windows: token ids, each at most the model's context.

    Raises:
        CheckpointError: a part cannot be read.
    """
    spec = source.spec
    longest = max(map(len, windows))
    sums: dict[str, tuple[torch.Tensor, int]] = {}

    def add(name: str, x: torch.Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).double()
        before, n = sums.get(name, (torch.zeros(rows.shape[1], dtype=torch.float64), 0))
        sums[name] = before + rows.square().sum(dim=0), n + len(rows)

    def see(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        add(name, inputs[0])

    def watch(stage: Stage) -> None:
        for name, module in stage.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(partial(see, f"{name}.weight"))

    ends = StarterStage(spec, 0)
    _load(ends, source, stage_parts(0, 0, starter=True), longest)
    watch(ends)
    slices = [
        [Slice(i, 0, len(one), len(one))] for i, one in enumerate(windows)
    ]  # all give logits, so no block skips one
    rows = [ends.embed(torch.tensor(list(window)), own) for window, own in zip(windows, slices, strict=True)]
    final = ends.transformer["ln_f"]
    for start, stop in pairwise(spec.allowed_cuts()):
        if cancel is not None:
            cancel.check()
        stage = Stage(spec, start, stop)
        _load(stage, source, stage_parts(start, stop, starter=False), longest)
        watch(stage)
        for i, own in enumerate(slices):
            rows[i] = stage(rows[i], own)
            stage.caches.free(i)
        source.release()
    for x in rows:
        add(HEAD, final(x))
    return {name: (total / n).float().numpy() for name, (total, n) in sums.items() if n}


def _load(stage: Stage, source: WeightSource, parts: list[str], longest: int) -> None:
    stage.load(parts, source.tensors, torch.device("cpu"), torch.float32)
    stage.prepare(longest, torch.device("cpu"), torch.float32)
