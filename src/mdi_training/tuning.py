"""Steps of fine-tuning at the starter: their order, their learning rates, evaluation, and what is kept to go on later."""

from __future__ import annotations

import csv
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from safetensors.numpy import load, save

from mdi.checkpoint.safetensors_layout import read_header
from mdi.errors import CheckpointError, Code, MdiError, UsageError
from mdi.files import replacing
from mdi_training.examples import Example, digest_of
from mdi_training.frozen_head import Sum

STATE_FILE, LOSSES_FILE = "state.safetensors", "losses.csv"
WARMUP_SHARE = 0.05  # of all steps
SAVE_S = 60.0  # from one state that is written to the next, in a long pass
CLIP = 1.0  # largest norm of the gradient


@dataclass(frozen=True)
class TuningSettings:
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


class Tuning(ABC):
    """Steps over examples.

    Args:
        named: what is learned, by its names.
        n_train: the first examples are learned from, the others are held out.
        facts: of what is learned; a state of others is not gone on with.
        base: stands for the model's numbers; "" where something else has compared them.

    Attributes:
        n_steps: done so far, also before `restore`.
        n_tokens: of the texts of the steps that were made here; a text counts as often as it was learned from.
    """

    def __init__(
        self, named: Mapping[str, torch.nn.Parameter], examples: Sequence[Example], n_train: int, settings: TuningSettings,
        facts: Mapping[str, Any], base: str = "",
    ) -> None:  # fmt: skip
        self.settings, self.n_train = settings, n_train
        self._sources = {"examples": digest_of(examples), "n_train": n_train, "base": base}
        self.named, self.examples, self._facts = dict(named), examples, facts
        self._optimizer = torch.optim.AdamW(self.named.values(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.steps_per_epoch = -(-n_train // settings.batch_size)
        self.n_steps = self.n_tokens = 0

    @abstractmethod
    def learn(self, indices: Sequence[int]) -> float:
        """Add the gradients of the mean loss of these examples' rows, and return that."""

    @abstractmethod
    def sums(self, indices: Sequence[int]) -> Iterator[Sum]:
        """The losses of these examples' rows, some rows after the other, without gradients."""

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
        total = self.learn(indices)
        if not np.isfinite(total):
            raise MdiError(f"the loss is {total} at step {self.n_steps + 1}: try a smaller --lr", code=Code.LOSS)
        torch.nn.utils.clip_grad_norm_(self.named.values(), CLIP)
        self._optimizer.step()
        self.n_steps += 1
        self.n_tokens += sum(len(self.examples[index].ids) for index in indices)
        return total

    @torch.no_grad()
    def score(self, indices: Sequence[int]) -> Score:
        """Of some examples, as they are now."""
        loss, n_right = 0.0, 0
        for begin in range(0, len(indices), self.settings.batch_size):
            for found in self.sums(indices[begin : begin + self.settings.batch_size]):
                loss, n_right = loss + float(found.loss), n_right + found.n_right
        n_rows = sum(self.examples[index].n_rows for index in indices)
        return Score(loss / n_rows, n_right / n_rows)

    # To go on later

    def save(self, folder: Path) -> None:
        """Write all that the next steps depend on. Raises CheckpointError."""
        tensors = {f"weights/{name}": parameter.detach().numpy() for name, parameter in self.named.items()}
        for name, parameter in self.named.items():
            if own := self._optimizer.state.get(parameter):
                tensors |= {f"{key}/{name}": own[key].numpy() for key in ("exp_avg", "exp_avg_sq", "step")}
        facts = {"n_steps": self.n_steps, "settings": asdict(self.settings), "shape": self._facts, "of": self._sources}
        with replacing(folder / STATE_FILE) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(save(tensors, {"training": json.dumps(facts, sort_keys=True)}))

    def restore(self, folder: Path) -> bool:
        """Go on where `save` was, if that was a training of the same kind; returns whether it was.

        Raises:
            UsageError: it learned from other examples, or over another model.
            CheckpointError: the file is damaged.
        """
        path = folder / STATE_FILE
        if not path.is_file():
            return False
        try:
            facts = json.loads(read_header(path).metadata["training"])
            if facts.get("of") != self._sources:
                raise UsageError(
                    f"{path} is of a training with other examples, another model or other number formats: give those of that "
                    f"training, give another --out, or remove {folder}",
                    code=Code.EXISTS,
                )
            wanted = {
                "n_steps": facts["n_steps"],
                "settings": asdict(self.settings),
                "shape": self._facts,
                "of": self._sources,
            }
            if facts != json.loads(json.dumps(wanted)):
                return False
            tensors = {name: torch.from_numpy(array) for name, array in load(path.read_bytes()).items()}
            with torch.no_grad():
                for name, parameter in self.named.items():
                    parameter.copy_(tensors[f"weights/{name}"])
                    if f"step/{name}" in tensors:
                        keys = ("exp_avg", "exp_avg_sq", "step")
                        self._optimizer.state[parameter] = {key: tensors[f"{key}/{name}"] for key in keys}
            self.n_steps = int(facts["n_steps"])
        except (OSError, KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError) as e:
            raise CheckpointError(f"{path} is damaged: {e}") from e
        return True


class Steps(NamedTuple):
    """What `train` has done.

    Attributes:
        is_done: whether no step is left.
        n_tokens: of the texts of its steps.
        seconds: of these steps, without what is written between them.
    """

    is_done: bool
    n_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float | None:
        """None if there was no step."""
        return self.n_tokens / self.seconds if self.seconds else None


def train(
    training: Tuning, folder: Path, losses: Path, is_stopped: Callable[[], bool], say: Callable[[str], None],
    first_s: float = 0.0, clock: Callable[[], float] = time.perf_counter,
) -> Steps:  # fmt: skip
    """All steps that are left; the state is saved after each pass and each minute, and when it is stopped.

    Args:
        folder: for the state.
        losses: a CSV file, to which a line per step is added.
        is_stopped: asked after each step.
        first_s: seconds that belong to the first pass besides: those of the ring.
        clock: gives seconds.

    Raises:
        MdiError: the loss is no number any more, or a file cannot be written.
    """
    begin, total, count = clock(), 0.0, 0
    saved_s, n_before, step_s = begin, training.n_tokens, 0.0
    kept = _lines(losses, training.n_steps)
    while training.n_steps < training.n_all:
        step_begin = clock()
        loss = training.step()
        step_s += clock() - step_begin
        total, count = total + loss, count + 1
        kept.append([training.n_steps, repr(loss)])
        is_over, is_full = is_stopped(), training.n_steps % training.steps_per_epoch == 0
        if is_over or is_full or clock() > saved_s + SAVE_S:
            _write_lines(losses, kept)  # before the state: no state is without its losses
            training.save(folder)
            saved_s = clock()
        if is_full:
            epoch, now = training.n_steps // training.steps_per_epoch, clock()
            ring = f" and {first_s:.1f} s of the ring" if epoch == 1 and first_s else ""
            say(f"epoch {epoch}: loss {total / count:.4f}, {now - begin:.1f} s{ring}")
            begin, total, count = now, 0.0, 0
        if is_over:
            break
    return Steps(training.n_steps == training.n_all, training.n_tokens - n_before, step_s)


def _lines(path: Path, n: int) -> list[list[Any]]:
    """The first `n` steps of a file of losses, which a training that goes on has behind it; none if somebody removed it."""
    if not n:
        return []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return [list(row) for row in csv.reader(file) if row and row[0].isdigit() and int(row[0]) <= n]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UsageError(f"{path} cannot be read: {e.strerror or e}", code=Code.UNREADABLE) from e


def _write_lines(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    with replacing(path) as file:
        file.write("".join(f"{step},{loss}\n" for step, loss in [("step", "loss"), *rows]).encode())
