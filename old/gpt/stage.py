"""Stages without caches: each frame brings the whole (cropped) text of a sample, from position 0 on.

This is what the two earlier systems did, and why their time per token grows with the text (thesis, section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn

from mdi.cancel import Cancel
from mdi.errors import Code, EngineError
from mdi.kernels.slices import Slices
from mdi.model.spec import ModelSpec
from mdi.stages.torch_attention import Positions, Texts
from mdi.stages.torch_block import norm_of
from mdi.stages.torch_cache import TorchCaches
from mdi.stages.torch_packed import Weights
from mdi.stages.torch_stage import Stage, StarterStage


class WholeTextStage(Stage):
    """Blocks [start, stop); keeps nothing between two frames."""

    def run_bytes(self, max_length: int, dtype: torch.dtype) -> int:
        """The widest activations of a block, over a full context."""
        return self.spec.max_length * self.spec.blocks[0].dense.width * dtype.itemsize

    def prepare(
        self, max_length: int, device: torch.device, dtype: torch.dtype, cache_limit: int | None = None
    ) -> None:
        self.max_length = max_length
        self.caches = TorchCaches(self.spec, 0, 0, max_length, device, dtype)  # of no blocks
        self._positions = Positions(self.spec.max_length, device)

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, slices: Slices, taps: Sequence[int] = ()) -> torch.Tensor:
        """(N, n_embd), the rows of all slices -> the same after the blocks. EngineError if a text does not come whole.

        The outputs of single blocks (`taps`) are not given.
        """
        outs, first = [], 0
        for seq_id, start, n_rows, *_ in slices:
            if start or n_rows > self.spec.max_length:
                raise EngineError(
                    f"positions {start} to {start + n_rows} of sequence {seq_id}: a stage without caches takes whole texts "
                    f"of at most {self.spec.max_length} tokens",
                    code=Code.LENGTH,
                )
            outs.append(self._run(x[first : first + n_rows]))
            first += n_rows
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of one text."""
        text = Texts(1, len(x), self._positions)
        for block in self.blocks:
            x = block(x, text)
        return x


class FinisherStage(WholeTextStage):
    """The last blocks, final norm and head: what it returns are logits, (N, vocabulary)."""

    def __init__(self, spec: ModelSpec, start: int, stop: int, cancel: Cancel | None = None) -> None:
        super().__init__(spec, start, stop, cancel)
        with torch.device("meta"):
            self.transformer["ln_f"] = norm_of(spec.ends.final_norm, spec.width)
            self.lm_head = nn.Linear(spec.width, spec.n_rows, bias=spec.ends.head_bias)
        self.eval().requires_grad_(False)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.transformer["ln_f"](super()._run(x)))
        return logits


class GPTStarterStage(WholeTextStage, StarterStage):
    """Embedding of tokens and positions, the first blocks, and the head for what comes back."""

    def __init__(self, spec: ModelSpec, stop: int) -> None:
        StarterStage.__init__(self, spec, stop)
        with torch.device("meta"):
            self.transformer["wpe"] = nn.Embedding(spec.max_length, spec.width)
        self.eval().requires_grad_(False)

    def load(
        self,
        parts: Sequence[str],
        weights: Callable[[str], Weights],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().load(parts, weights, device, dtype)
        # In a weight format they have no such weights any more.
        embedding = getattr(self.transformer["wte"], "weight", None)
        weight = getattr(getattr(self, "lm_head", None), "weight", None)
        if isinstance(embedding, torch.Tensor) and isinstance(weight, torch.Tensor) and torch.equal(embedding, weight):
            self.lm_head.weight = nn.Parameter(embedding, requires_grad=False)  # tied, and large: once is enough

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return super()._run(x + self.get_parameter("transformer.wpe.weight")[: x.size(0)])


class HeadlessStarterStage(GPTStarterStage):
    """Embedding and first blocks; logits come back from the finisher, and only have to be sampled."""

    is_head_shared = False

    def __init__(self, spec: ModelSpec, stop: int) -> None:
        super().__init__(spec, stop)
        del self.lm_head, self.transformer["ln_f"]

    @property
    def returned_width(self) -> int:
        return self.spec.n_rows

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return x
