"""The model's own final norm and head in torch, in float32, and the loss of rows through them.

A row y has the logits y H' / length(y) + b, in which H is the head with the gains of the norm. A side network adds to a row x
of the blocks what has few numbers, s: y = x + s O'. So its logits are (x H' + s (H O)') / length(y) + b. x H' does not
change while the network learns, and can be kept (`kept`); H O is small, and computed once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from mdi.checkpoint.adapters import norm_gain
from mdi.checkpoint.packing import Packing, plain
from mdi.checkpoint.weights import WeightSource
from mdi.model.spec import ModelSpec
from mdi.model.tensors import FINAL_NORM

CHUNK_ROWS = 256  # whose logits are in memory at the same time
KEPT_ROWS = 32  # the same where a product has few numbers a row: as many logits as stay in the processor's caches


class Sum(NamedTuple):
    """Of some rows.

    Attributes:
        loss: the sum of their losses, with gradients.
        n_right: rows whose most probable answer is right; not counted where there are gradients.
    """

    loss: torch.Tensor
    n_right: int


class FrozenHead:
    """Its weights are not trained.

    Args:
        spec: of the model.
        weights: of the part "head", by their names in the model.
        norm: weight of the final norm, where that of the part was multiplied into its head. Only `normed` needs it.

    Attributes:
        weight: H, (padded_vocab_size, n_embd).
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, np.ndarray], norm: np.ndarray | None = None) -> None:
        tensors = {name: torch.from_numpy(np.array(array, dtype=np.float32)) for name, array in weights.items()}
        weight, bias = tensors["lm_head.weight"], tensors.get("lm_head.bias")
        gain, shift = tensors.get(FINAL_NORM), tensors.get("transformer.ln_f.bias")
        final = spec.ends.final_norm
        self._has_norm, self._is_rms = final is not None, final is None or final.kind == "rms"
        self._eps, offset = (final.eps, float(final.unit_offset)) if final is not None else (0.0, 0.0)
        self.cap = spec.ends.softcap
        if self._has_norm and shift is not None:
            bias = weight @ shift + (0 if bias is None else bias)
        if self._has_norm and gain is not None:
            gain = gain + offset
            weight *= gain
        if self._has_norm and not self._is_rms:  # such a norm takes the mean of a row away
            weight -= weight.mean(dim=1, keepdim=True)
        self.weight, self.bias = weight, bias
        if norm is not None:
            gain = torch.from_numpy(np.array(norm, dtype=np.float32)) + offset
        self._gain, self._shift = gain, shift  # of the norm

    @classmethod
    def of(cls, source: WeightSource, packing: Packing | None, has_classes: bool) -> FrozenHead:
        """That of a model, with the numbers that its head has in a format.

        Args:
            has_classes: `normed` is wanted, for classes that are read from its rows.

        Raises:
            CheckpointError: it is wanted, and the gains of the norm are not known any more, see `norm_gain`.
        """
        norm = norm_gain(source, FINAL_NORM) if has_classes else None
        return cls(source.spec, plain(source.weights("head", packing)), norm)

    def length(self, x: torch.Tensor) -> torch.Tensor:
        """What the norm divides each row by: (M, n_embd) -> (M, 1)"""
        if not self._has_norm:
            return x.new_ones(len(x), 1)
        square = x.square().mean(dim=1, keepdim=True) if self._is_rms else x.var(dim=1, keepdim=True, correction=0)
        return (square + self._eps).sqrt()

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The model's final norm: (M, n_embd) rows that went through all blocks -> the same"""
        if self._has_norm and not self._is_rms:
            found = (x - x.mean(dim=1, keepdim=True)) / self.length(x)
        else:
            found = x / self.length(x)
        if not self._has_norm or self._gain is None:
            return found
        found = found * self._gain
        return found if self._shift is None else found + self._shift

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(M, n_embd) rows that went through all blocks -> logits (M, padded_vocab_size)"""
        logits = functional.linear(x / self.length(x), self.weight, self.bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> Sum:
        """Of rows (M, n_embd), with gradients with respect to them."""
        return Sum(*_Cross.apply(x / self.length(x), self.weight, None, None, self.bias, self.cap, targets))

    @torch.no_grad()
    def kept(self, x: torch.Tensor) -> np.ndarray:
        """What `loss_of_kept` needs of rows: the logarithms of their probabilities, float16 (M, padded_vocab_size)

        The more probable, the nearer they are to zero, and the more exact.
        """
        found = [self(rows).log_softmax(dim=1).half() for rows in x.split(CHUNK_ROWS)]
        return torch.cat(found).numpy()

    def loss_of_kept(
        self, x: torch.Tensor, y: torch.Tensor, kept: torch.Tensor, added: torch.Tensor, projected: torch.Tensor,
        targets: torch.Tensor,
    ) -> Sum:  # fmt: skip
        """The same of rows y = x + added O', for heads without a cap.

        Args:
            kept: of x.
            added: (M, width), with gradients.
            projected: H O, (padded_vocab_size, width), with gradients.
        """
        length = self.length(y)
        ratio = self.length(x) / length
        return Sum(*_Cross.apply(added / length, projected, ratio, kept, self.bias, None, targets))


class _Cross(torch.autograd.Function):
    """Cross entropy of the logits a M' + ratio (kept - bias) + bias, of some rows at a time: their gradients are computed with
    them, so that nobody keeps as many numbers as the vocabulary has words for each row.
    """

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, matrix: torch.Tensor, ratio: torch.Tensor | None, kept: torch.Tensor | None,
        bias: torch.Tensor | None, cap: float | None, targets: torch.Tensor,
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        wants_a, wants_matrix = ctx.needs_input_grad[:2]
        total, n_right = a.new_zeros(()), 0
        da, dmatrix = torch.empty_like(a), torch.zeros_like(matrix) if wants_matrix else None
        dratio = None if ratio is None else torch.empty_like(ratio)
        n_rows = CHUNK_ROWS if kept is None else KEPT_ROWS
        for begin in range(0, len(a), n_rows):
            at = slice(begin, begin + n_rows)
            logits, base = a[at] @ matrix.T, None
            if kept is not None and ratio is not None:
                base = kept[at].to(a.dtype) if bias is None else kept[at].to(a.dtype) - bias
                logits.addcmul_(base, ratio[at])
            if bias is not None:
                logits += bias
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            slope = None if cap is None else 1 - (logits / cap).square()
            right = targets[at, None]
            most, given = logits.amax(dim=1, keepdim=True), logits.gather(1, right)
            n_right += 0 if wants_a else int((logits.argmax(dim=1, keepdim=True) == right).sum())
            parts = logits.sub_(most).exp_()
            whole = parts.sum(dim=1, keepdim=True)
            total += (whole.log() + most - given).sum()
            if not wants_a:
                continue
            gradient = parts.scatter_add_(1, right, -whole)  # divided by `whole` below, where there are fewer numbers
            if slope is not None:
                gradient *= slope
            da[at] = gradient @ matrix / whole
            if dmatrix is not None:
                dmatrix.addmm_(gradient.T, a[at] / whole)
            if dratio is not None:
                assert base is not None
                dratio[at] = torch.linalg.vecdot(gradient, base)[:, None] / whole
        ctx.gradients = da, dmatrix, dratio
        return total, n_right

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor, n_right: None) -> tuple[torch.Tensor | None, ...]:
        da, dmatrix, dratio = ctx.gradients
        scaled = (None if one is None else one * scale for one in (da, dmatrix, dratio))
        return (*scaled, None, None, None, None)
