"""The blocks of a run's nodes as a module of torch, for programs of one's own: rows in, rows out, gradients.

with Run(nodes, options, n_tokens=64, n_texts=1, gradients=True) as run:
    blocks = RingBlocks(run)
    loss = own_head(blocks(own_embedding(ids))).mean()
    loss.backward()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mdi.block_ranges import block_span
from mdi.errors import Code, UsageError
from mdi.run.passes import Passes, Traffic
from mdi.run.run import Run


class RingBlocks(torch.nn.Module):
    """Blocks [start, stop) of the model; all of them by default. They have no parameters here: nodes keep theirs as they are.

    The nodes compute in torch, in float32, over the weights that their packed ones stand for, and keep nothing
    that cannot be computed again. A node that is lost meanwhile costs the question that it was asked. Calls from several
    threads are computed at the same time.

    Args:
        run: open, over nodes with torch that have their blocks in the kernels' form; with `gradients=True` others are refused
            before weights are sent to them.
    """

    def __init__(self, run: Run, start: int = 0, stop: int | None = None) -> None:
        super().__init__()
        n_layer = run.model.weights.n_layer
        self.start, self.stop = start, n_layer if stop is None else stop
        if not 0 <= self.start < self.stop <= n_layer:
            raise UsageError(f"{block_span(self.start, self.stop)} of a model of {n_layer}", code=Code.VALUE)
        self._passes, self._n_embd, self._max_length = run.passes, run.model.spec.width, run.max_length

    @property
    def traffic(self) -> Traffic:
        """Bytes that went to nodes and came back so far, see `mdi.run.passes`."""
        return self._passes.traffic

    def forward(self, x: torch.Tensor, trained: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """float32 (texts, tokens, n_embd), from the first position on -> the same behind the last of these blocks

        Args:
            trained: float32 tensors that the blocks compute with, see `mdi.stages.trained_tensors`; they have gradients, too.

        Raises:
            UsageError: another shape, or blocks without gradients. MdiError: a lost node was not replaced.
        """
        if x.dim() != 3 or x.size(2) != self._n_embd or not 0 < x.size(1) <= self._max_length or not len(x):
            raise UsageError(
                f"rows of shape {tuple(x.shape)}; expected (texts, at most {self._max_length} tokens, {self._n_embd})",
                code=Code.VALUE,
            )
        trained = trained or {}
        found: torch.Tensor = _Through.apply(x, self._passes, self.start, self.stop, tuple(trained), *trained.values())
        return found


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, passes: Passes, start: int, stop: int, names: tuple[str, ...], *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.passes, ctx.trained = passes, {name: _array(one) for name, one in zip(names, tensors, strict=True)}
        ctx.borders = passes.forward(_array(x), start, stop, ctx.trained)
        return _tensor(ctx.borders[-1][1], x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, learned = ctx.passes.backward(ctx.borders, _array(dy), ctx.trained)
        others = [_tensor(learned[name], dy) if name in learned else None for name in ctx.trained]
        return _tensor(dx, dy), None, None, None, None, *others


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().float().cpu().numpy()


def _tensor(rows: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(rows).to(device=like.device, dtype=like.dtype)
