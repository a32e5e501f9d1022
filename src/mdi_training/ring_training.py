"""Trains through the blocks of a ring: forward and backward, some examples at a time, several such parts under way at once.

The starter has what is learned, its gradients and the optimizer; the nodes get the learned tensors once in each step,
return their gradients with each part, and keep nothing that cannot be computed or sent again. So a lost node costs the
questions that it was asked, which are asked again (mdi.run.passes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TypeVar

import numpy as np
import torch
from torch.nn import functional

from mdi.kernels.slices import Slice
from mdi.run.passes import Bytes
from mdi.run.run import Run
from mdi.spec.options import PREFIX
from mdi.units import size
from mdi_training.examples import Example
from mdi_training.frozen_head import FrozenHead, Sum
from mdi_training.ring_blocks import RingBlocks
from mdi_training.tuned_tensors import SCORE, TunedTensors, n_numbers
from mdi_training.tuning import Tuning, TuningSettings

PART_ROWS = 1024  # that go to a node with one question, at most, but for a single text

T = TypeVar("T")
Embed = Callable[[np.ndarray, int], np.ndarray]


def embedding_of(run: Run) -> Embed:
    """The rows before the first block, float32 (texts, tokens, n_embd), of token ids (texts, tokens) and the position of each
    text's first one, as the starter of a run computes them.
    """
    assert run.ring is not None, "open"
    stage = run.ring.stage.at_starter

    def embed(ids: np.ndarray, first: int) -> np.ndarray:
        slices = [Slice(i, first, ids.shape[1]) for i in range(len(ids))]
        return np.asarray(stage.embed(ids.reshape(-1), slices), dtype=np.float32).reshape(*ids.shape, -1)

    return embed


class TunedModel:
    """The model of a run with what is learned, as one function of token ids.

    Args:
        head: final norm and head of the model, in torch.
    """

    def __init__(self, run: Run, tuned: TunedTensors, head: FrozenHead) -> None:
        self.blocks, self.tuned = RingBlocks(run), tuned
        self._head, self._embed = head, embedding_of(run)

    def __call__(self, examples: Sequence[Example], tensors: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """All rows of the examples that are wanted behind the last block, one example after the other: (M, n_embd)

        Args:
            tensors: what is learned, see `learned`; None: the model alone.
        """
        before, _, of_blocks = (None, None, {}) if tensors is None else self._apart(tensors)
        ids = np.zeros((len(examples), max(len(one.ids) for one in examples)), dtype=np.int64)
        for i, one in enumerate(examples):
            ids[i, : len(one.ids)] = one.ids  # rows behind a text are seen by none of its own
        kind, n_before = self.tuned.kind, 0
        x = torch.from_numpy(self._embed(ids, kind.length if tensors is not None and kind.method == PREFIX else 0))
        if before is not None:
            n_before = len(before)
            x = torch.cat([before.expand(len(x), -1, -1), x], dim=1)
        found = self.blocks(x, of_blocks)
        rows = [found[i, n_before + one.read_from : n_before + len(one.ids)] for i, one in enumerate(examples)]
        return torch.cat(rows)

    def loss(self, examples: Sequence[Example], tensors: Sequence[torch.Tensor] | None) -> Sum:
        """Of these rows; arguments as above."""
        rows, targets = self(examples, tensors), torch.tensor([target for one in examples for target in one.targets])
        score = None if tensors is None else self._apart(tensors)[1]
        if score is None:
            return self._head.loss(rows, targets)
        logits = self.classes(rows, score)
        return Sum(
            functional.cross_entropy(logits, targets, reduction="sum"), int((logits.argmax(dim=1) == targets).sum())
        )

    def classes(self, rows: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        """(M, n_embd) rows behind the last block -> logits (M, classes)"""
        return functional.linear(self._head.normed(rows), score)

    def learned(self) -> list[torch.Tensor]:
        """All that is learned, as functions of `tuned.named`: rows before texts, classes, tensors of the blocks."""
        before = self.tuned.before()
        score = self.tuned.named.get(SCORE)
        return [one for one in (before, score) if one is not None] + list(self.tuned.of_blocks().values())

    def _apart(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, torch.Tensor]]:
        left = list(tensors)
        before = left.pop(0) if self.tuned.n_rows else None
        score = left.pop(0) if SCORE in self.tuned.named else None
        return before, score, dict(zip(self.tuned.of_blocks(), left, strict=True))


class RingTraining(Tuning):
    """Steps over examples that go through the nodes of a run.

    Args:
        n_train: the first examples are learned from, the others are held out.
        n_parts: of a step's examples, under way at the same time. Gradients are added in their order.
        base: see Tuning.

    Attributes:
        last_bytes: of the last step, to all other nodes and back.
    """

    def __init__(
        self, model: TunedModel, examples: Sequence[Example], n_train: int, settings: TuningSettings, n_parts: int,
        base: str = "",
    ) -> None:  # fmt: skip
        facts = {**asdict(model.tuned.kind), "parts": n_parts}
        super().__init__(model.tuned.named, examples, n_train, settings, facts, base)
        self._model, self._n_parts = model, n_parts
        self.last_bytes = Bytes()

    def check(self) -> None:
        """Raises UsageError, ControlError if a node cannot compute gradients; no example is sent."""
        with torch.no_grad():
            self._model.blocks(torch.zeros(1, 1, self._model.tuned.spec.width))

    @property
    def bytes_told(self) -> str:
        """What a step sends and gets back, for a person."""
        sent, received = map(size, self.last_bytes)
        if self.last_bytes.sent:
            return f"the last step sent {sent} to other nodes and got {received} back"
        n_bytes = 4 * n_numbers(self._model.tuned.of_blocks().values())
        return f"{size(n_bytes)} of them go to the nodes in each step, and their gradients back with each part of it"

    def learn(self, indices: Sequence[int]) -> float:
        learned = self._model.learned()
        n_rows = sum(self.examples[index].n_rows for index in indices)
        before = self._model.blocks.traffic.total

        def one(part: Sequence[int]) -> tuple[float, list[torch.Tensor]]:
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in learned]
            loss = self._model.loss([self.examples[index] for index in part], leaves).loss / n_rows
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            return float(loss.detach()), list(torch.autograd.grad(loss, wanted))

        total, sums = 0.0, list[torch.Tensor]()
        for loss, gradients in self._over_parts(one, indices):
            total += loss
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if bool(sums) else list(gradients)
        torch.autograd.backward([tensor for tensor in learned if tensor.requires_grad], sums)
        after = self._model.blocks.traffic.total
        self.last_bytes = Bytes(after.sent - before.sent, after.received - before.received)
        return total

    def sums(self, indices: Sequence[int]) -> Iterator[Sum]:
        learned = [tensor.detach() for tensor in self._model.learned()]

        def one(part: Sequence[int]) -> Sum:
            with torch.no_grad():  # which holds for a thread
                return self._model.loss([self.examples[index] for index in part], learned)

        yield from self._over_parts(one, indices)

    def _over_parts(self, work: Callable[[Sequence[int]], T], indices: Sequence[int]) -> Iterator[T]:
        """What `work` makes of each part, in order; several threads work, and all of them end with this."""
        parts = self._parts(indices)
        with ThreadPoolExecutor(min(self._n_parts, len(parts)), "tuning") as pool:
            yield from pool.map(work, parts)

    def _parts(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """At least `n_parts` of them, if there are so many examples, and of at most PART_ROWS rows; long texts are together."""
        order = sorted(indices, key=lambda index: (-len(self.examples[index].ids), index))
        most = -(-len(order) // self._n_parts)
        parts: list[list[int]] = []
        for index in order:
            width = self._model.tuned.n_rows + len(self.examples[parts[-1][0] if parts else index].ids)
            if not parts or len(parts[-1]) == most or (len(parts[-1]) + 1) * width > PART_ROWS:
                parts.append([])
            parts[-1].append(index)
        return list(parts)
