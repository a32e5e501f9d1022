"""Trains a side network in torch, from the outputs of blocks on the disk; the formula is that of mdi.stages.side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch.nn import functional

from mdi.stages.side import LM, SideShape
from mdi_training.examples import Example
from mdi_training.features import Features, StoredRows
from mdi_training.frozen_head import FrozenHead, Sum
from mdi_training.tuning import Tuning, TuningSettings

MICRO_ROWS = 1024  # that go through the network at the same time
EPS = 1e-6


class SideModule(torch.nn.Module):
    """A side network that computes what its own formula says, untrained: it adds nothing to the model's rows."""

    def __init__(self, shape: SideShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, of in shape.tensors().items():
            scale = 0.0 if name in ("out", "bias") else of[-1] ** -0.5
            made[name.replace(".", "_")] = torch.nn.Parameter(scale * torch.randn(of, generator=generator))
        self.weights = torch.nn.ParameterDict(made)

    def forward(self, x: torch.Tensor, seen: Sequence[torch.Tensor]) -> torch.Tensor:
        """(M, n_embd) of the last block and of each tap -> rows for the model's head (M, n_embd), or logits (M, classes)"""
        if self.shape.head == LM:
            return x + self.added(x, seen) @ self.weights["out"].T
        return self._state(x, seen) @ self.weights["classes"].T + self.weights["bias"]

    def added(self, x: torch.Tensor, seen: Sequence[torch.Tensor]) -> torch.Tensor:
        """What is added to rows for the head, before its last matrix, "out": (M, width)"""
        return _rms(x) * self._state(x, seen)

    def _state(self, x: torch.Tensor, seen: Sequence[torch.Tensor]) -> torch.Tensor:
        own = self.weights
        state = x.new_zeros(len(x), self.shape.width)
        for i, rows in enumerate((*seen, x)):
            state = state + _normed(rows) @ own[f"down_{i}"].T
            inner = _normed(state) @ own[f"up_{i}"].T
            state = state + functional.silu(inner) @ own[f"back_{i}"].T
        return _normed(state)

    def tensors(self) -> dict[str, np.ndarray]:
        """By the names of SideShape.tensors."""
        return {name: self.weights[name.replace(".", "_")].detach().numpy() for name in self.shape.tensors()}


def _rms(x: torch.Tensor) -> torch.Tensor:
    return (x.square().mean(dim=1, keepdim=True) + EPS).sqrt()


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x / _rms(x)


class SideTraining(Tuning):
    """Steps over examples whose features are on the disk.

    Args:
        n_train: the first examples are learned from, the others are held out.
        head: the model's; None where classes are told apart.
    """

    def __init__(
        self, module: SideModule, head: FrozenHead | None, features: Features, examples: Sequence[Example], n_train: int,
        settings: TuningSettings,
    ) -> None:  # fmt: skip
        super().__init__(dict(module.named_parameters()), examples, n_train, settings, asdict(module.shape))
        self.module, self._head, self._features = module, head, features

    def learn(self, indices: Sequence[int]) -> float:
        total, n_rows = 0.0, sum(self.examples[index].n_rows for index in indices)
        projected = self._projected()
        for found in self._sums(indices, projected):
            (found.loss / n_rows).backward()
            total += float(found.loss.detach()) / n_rows
        if projected is not None and self._head is not None:
            out = self.module.weights["out"]
            assert projected.grad is not None and out.grad is not None
            out.grad.addmm_(self._head.weight.T, projected.grad)
        return total

    def sums(self, indices: Sequence[int]) -> Iterator[Sum]:
        return self._sums(indices, self._projected())

    def keep_logits(self) -> float:
        """Have the head's logits of all rows on the disk; returns the seconds that this took."""
        begin, logits = time.perf_counter(), self._features.logits
        if logits is None or self._head is None:
            return 0.0
        for index in logits.missing():
            logits.add(index, 0, self._head.kept(torch.from_numpy(self._features.read([index])[0])).view(np.uint8))
            logits.finish(index)
        return time.perf_counter() - begin

    @property
    def _kept(self) -> StoredRows | None:
        return None if self._head is None else self._features.logits

    def _projected(self) -> torch.Tensor | None:
        """See `FrozenHead.loss_of_kept`; the same for all rows of a step."""
        if self._kept is None or self._head is None:
            return None
        return (self._head.weight @ self.module.weights["out"].detach()).requires_grad_(torch.is_grad_enabled())

    def _sums(self, indices: Sequence[int], projected: torch.Tensor | None) -> Iterator[Sum]:
        """The losses of these examples' rows, some rows after the other."""
        rows = torch.from_numpy(self._features.read(indices))
        targets = torch.tensor([target for index in indices for target in self.examples[index].targets])
        for begin in range(0, len(targets), MICRO_ROWS):
            at = slice(begin, begin + MICRO_ROWS)
            x, seen, right = rows[0, at], list(rows[1:, at]), targets[at]
            if self._head is None:
                logits = self.module(x, seen)
                n_right = int((logits.argmax(dim=1) == right).sum())
                yield Sum(functional.cross_entropy(logits, right, reduction="sum"), n_right)
            elif self._kept is None or projected is None:
                yield self._head.loss(self.module(x, seen), right)
            else:
                added = self.module.added(x, seen)
                y = x + added @ self.module.weights["out"].T
                kept = torch.from_numpy(self._kept.read(indices, at).view(np.float16))
                yield self._head.loss_of_kept(x, y, kept, added, projected, right)
