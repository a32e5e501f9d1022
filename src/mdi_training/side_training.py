"""Trains a side network in torch, from the outputs of blocks on the disk; the formula is that of mdi.stages.side."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from safetensors.numpy import load, save
from torch.nn import functional

from mdi.checkpoint.safetensors_layout import read_header
from mdi.errors import CheckpointError, MdiError, UsageError
from mdi.files import replacing
from mdi.stages.side import LM, SideShape
from mdi_training.examples import Example
from mdi_training.features import Features, StoredRows
from mdi_training.frozen_head import FrozenHead, Sum

MICRO_ROWS = 1024  # that go through the network at the same time
EPS = 1e-6
STATE_FILE, LOSSES_FILE = "state.safetensors", "losses.csv"
WARMUP_SHARE = 0.05  # of all steps
CLIP = 1.0  # largest norm of the gradient


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


@dataclass(frozen=True)
class SideSettings:
    """How it is trained; see spec.options.TuningOptions."""

    epochs: int
    batch_size: int
    lr: float
    seed: int


class Score(NamedTuple):
    """Of some examples: the mean loss of a row, and the part of the rows whose most probable answer is right."""

    loss: float
    accuracy: float

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, {self.accuracy:.1%} right"


class SideTraining:
    """Steps over examples whose features are on the disk.

    Args:
        n_train: the first examples are learned from, the others are held out.
        head: the model's; None where classes are told apart.

    Attributes:
        n_steps: done so far.
    """

    def __init__(
        self, module: SideModule, head: FrozenHead | None, features: Features, examples: Sequence[Example], n_train: int,
        settings: SideSettings,
    ) -> None:  # fmt: skip
        self.module, self.settings, self.n_train = module, settings, n_train
        self._head, self._features, self._examples = head, features, examples
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.steps_per_epoch = -(-n_train // settings.batch_size)
        self.n_steps = 0

    @property
    def n_all(self) -> int:
        """Steps in all."""
        return self.settings.epochs * self.steps_per_epoch

    def step(self) -> float:
        """One step; returns the mean loss of its rows before it. Raises MdiError if that is no number."""
        epoch, place = divmod(self.n_steps, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        order = torch.randperm(self.n_train, generator=generator).tolist()
        indices = order[place * self.settings.batch_size : (place + 1) * self.settings.batch_size]
        n_warmup = max(1, int(WARMUP_SHARE * self.n_all))
        rise, fall = (self.n_steps + 1) / n_warmup, 1 - self.n_steps / self.n_all
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.lr * min(rise, 1) * fall
        self._optimizer.zero_grad()
        total, n_rows = 0.0, sum(self._examples[index].n_rows for index in indices)
        projected = self._projected()
        for found in self._sums(indices, projected):
            (found.loss / n_rows).backward()
            total += float(found.loss.detach()) / n_rows
        if projected is not None and self._head is not None:
            out = self.module.weights["out"]
            assert projected.grad is not None and out.grad is not None
            out.grad.addmm_(self._head.weight.T, projected.grad)
        if not np.isfinite(total):
            raise MdiError(f"the loss is {total} at step {self.n_steps + 1}: try a smaller --lr", code="loss")
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self._optimizer.step()
        self.n_steps += 1
        return total

    @torch.no_grad()
    def score(self, indices: Sequence[int]) -> Score:
        """Of some examples, as they are now."""
        loss, n_right, projected = 0.0, 0, self._projected()
        for begin in range(0, len(indices), self.settings.batch_size):
            for found in self._sums(indices[begin : begin + self.settings.batch_size], projected):
                loss, n_right = loss + float(found.loss), n_right + found.n_right
        n_rows = sum(self._examples[index].n_rows for index in indices)
        return Score(loss / n_rows, n_right / n_rows)

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
        targets = torch.tensor([target for index in indices for target in self._examples[index].targets])
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

    # To go on later

    def save(self, folder: Path) -> None:
        """Write all that the next steps depend on. Raises CheckpointError."""
        tensors = {f"weights/{name}": weight for name, weight in _state(self.module.named_parameters()).items()}
        for name, parameter in self.module.named_parameters():
            if own := self._optimizer.state.get(parameter):
                tensors |= {f"{key}/{name}": own[key].numpy() for key in ("exp_avg", "exp_avg_sq", "step")}
        facts = {"n_steps": self.n_steps, "settings": asdict(self.settings), "shape": asdict(self.module.shape)}
        with replacing(folder / STATE_FILE) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(save(tensors, {"training": json.dumps(facts, sort_keys=True)}))

    def restore(self, folder: Path) -> bool:
        """Go on where `save` was, if that was a training of the same kind; returns whether it was. Raises CheckpointError."""
        path = folder / STATE_FILE
        if not path.is_file():
            return False
        try:
            facts = json.loads(read_header(path).metadata["training"])
            wanted = {
                "n_steps": facts["n_steps"],
                "settings": asdict(self.settings),
                "shape": asdict(self.module.shape),
            }
            if facts != json.loads(json.dumps(wanted)):
                return False
            tensors = {name: torch.from_numpy(array) for name, array in load(path.read_bytes()).items()}
            with torch.no_grad():
                for name, parameter in self.module.named_parameters():
                    parameter.copy_(tensors[f"weights/{name}"])
                    if f"step/{name}" in tensors:
                        keys = ("exp_avg", "exp_avg_sq", "step")
                        self._optimizer.state[parameter] = {key: tensors[f"{key}/{name}"] for key in keys}
            self.n_steps = int(facts["n_steps"])
        except (OSError, KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError) as e:
            raise CheckpointError(f"{path} is damaged: {e}") from e
        return True


def _state(named: Iterator[tuple[str, torch.nn.Parameter]]) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in named}


def train(
    training: SideTraining, folder: Path, losses: Path, is_stopped: Callable[[], bool], say: Callable[[str], None],
    first_s: float = 0.0,
) -> bool:  # fmt: skip
    """All steps that are left; the state is saved after each pass, and when it is stopped.

    Args:
        folder: for the state.
        losses: a CSV file, to which a line per step is added.
        is_stopped: asked after each step.
        first_s: seconds that belong to the first pass besides: those of the ring.

    Returns:
        whether it has come to its end.

    Raises:
        MdiError: the loss is no number any more, or a file cannot be written.
    """
    begin, total, count = time.perf_counter(), 0.0, 0
    kept = _lines(losses, training.n_steps)
    while training.n_steps < training.n_all:
        loss = training.step()
        total, count = total + loss, count + 1
        kept.append([training.n_steps, repr(loss)])
        is_over, is_full = is_stopped(), training.n_steps % training.steps_per_epoch == 0
        if is_over or is_full:
            training.save(folder)
            _write_lines(losses, kept)
        if is_full:
            epoch, now = training.n_steps // training.steps_per_epoch, time.perf_counter()
            ring = f" and {first_s:.1f} s of the ring" if epoch == 1 and first_s else ""
            say(f"epoch {epoch}: loss {total / count:.4f}, {now - begin:.1f} s{ring}")
            begin, total, count = now, 0.0, 0
        if is_over:
            return training.n_steps == training.n_all
    return True


def _lines(path: Path, n: int) -> list[list[Any]]:
    """The first `n` steps of a file of losses, which a training that goes on has behind it."""
    if not n:
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return [list(row) for row in csv.reader(file)][1 : n + 1]
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}", code="unreadable") from e


def _write_lines(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    with replacing(path) as file:
        file.write("".join(f"{step},{loss}\n" for step, loss in [("step", "loss"), *rows]).encode())
