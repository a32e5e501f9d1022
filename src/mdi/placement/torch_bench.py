"""Blocks and head in torch for `mdi.placement.profiling`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.placement.kernel_bench import random_weights
from mdi.placement.profiling import Bench
from mdi.stages.torch_packed import Weights, install, layers_for
from mdi.stages.torch_stage import Stage, StarterStage


class TorchBench(Bench):
    """See `Bench`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        computing = self._subject.computing
        self._device, self._dtype = torch.device(computing.device), getattr(torch, computing.dtype)
        self._generator = torch.Generator().manual_seed(1)

    def blocks_of(self, start: int, stop: int, max_length: int) -> Stage:
        stage = Stage(self._spec, start, stop, self._cancel)
        parts = [f"block.{i}" for i in range(start, stop)]
        stage.load(parts, self._weights, self._device, self._dtype)
        stage.prepare(max_length, self._device, self._dtype)
        return stage

    def _weights(self, part: str) -> Weights:
        form = self._subject.computing.quantize if part.startswith("block.") else self._subject.computing.quantize_head
        shapes = {name: shape for name, shape in self._shapes.items() if part_of(name) == part}
        if form is not None:
            return dict(random_weights(shapes, Packing(form, form).untied))
        return {name: self._random(shape) for name, shape in shapes.items()}

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Numbers of a trained model's size, repeated: drawing each anew would take longer than measuring."""
        some = torch.randn(min(1 << 16, math.prod(shape)), generator=self._generator) * 0.02
        return some.repeat(-(-math.prod(shape) // some.numel()))[: math.prod(shape)].view(shape).to(self._dtype)

    def head(self) -> Callable[[torch.Tensor], object]:
        stage = StarterStage(self._spec, 0)
        given = install(stage, self._weights("head"), lambda: layers_for(self._device, self._dtype))
        stage.load_state_dict({name: t.to(self._device) for name, t in given.items()}, strict=False, assign=True)
        stage.requires_grad_(False)
        return stage.head

    def rows(self, n: int) -> torch.Tensor:
        x = torch.randn(n, self._row_width, generator=self._generator)
        return x.to(device=self._device, dtype=self._dtype)

    def bytes_of(self, name: str) -> float:
        """Half as much again: the format's weights stand beside the plain ones while they are made."""
        return 1.5 * math.prod(self._shapes[name]) * self._dtype.itemsize

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
