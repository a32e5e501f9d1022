"""The training loop: windows in, better weights out.

Knows a litgpt GPT, its optimizer and the schedule. Where the numbers are shown and where the weights are written is
decided by who calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from litgpt.model import GPT
from torch.nn import functional

from mdi.errors import Code, MdiError, UsageError
from mdi_training.processes import Processes
from mdi_training.schedule import learning_rate
from mdi_training.training_settings import TrainingSettings
from mdi_training.windows import Windows


@dataclass
class TrainingProgress:
    """The progress of a run: everything that resuming needs besides weights and optimizer.

    Attributes:
        n_steps: optimizer steps done.
        best_val_loss: nats per token; infinite before the first evaluation.
        n_worse: evaluations since the best one.
        elapsed_s: time spent training, over all sessions.
    """

    n_steps: int = 0
    best_val_loss: float = math.inf
    n_worse: int = 0
    elapsed_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class StepReport:
    """One line of the record. Losses are nats per token; `val_loss` only where an evaluation was made."""

    step: int
    lr: float
    train_loss: float
    val_loss: float | None
    tokens_per_s: float
    elapsed_s: float
    left_s: float


def make_optimizer(model: GPT, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, since shrinking norm weights and biases only does harm."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)


def _unwatched(news: object) -> None:
    """For who does not watch a run."""


class Trainer:
    """One training run, or one process's part of it.

    Args:
        model: with float32 weights, on the device to train on.
        train, val: windows of settings.sequence_length.
        forward: what computes the logits, if it is not the model itself (a compiled or wrapped one).
        progress: to resume from, together with the optimizer; a new run if not given.
        processes: that train together; grad_acc_steps has to be a multiple of their number.

    Raises:
        UsageError: it is not.
    """

    def __init__(
        self,
        model: GPT,
        train: Windows,
        val: Windows,
        settings: TrainingSettings,
        *,
        forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
        optimizer: torch.optim.AdamW | None = None,
        progress: TrainingProgress | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.progress = progress or TrainingProgress()
        self.optimizer = optimizer or make_optimizer(model, settings)
        self._train, self._val = train, val
        self._forward = model if forward is None else forward
        self._processes = processes or Processes()
        if settings.grad_acc_steps % self._processes.count:
            raise UsageError(
                f"--grad-acc-steps {settings.grad_acc_steps}: expected a multiple of the {self._processes.count} "
                "processes, which share these forward passes",
                code=Code.VALUE,
            )
        self._device = next(model.parameters()).device
        self._on_pass: Callable[[str], object] = _unwatched
        self._has_dropout = any(isinstance(module, torch.nn.Dropout) for module in model.modules())
        # float16 gradients underflow without scaling; for the other types the scaler does nothing.
        self.scaler = torch.amp.GradScaler(self._device.type, enabled=settings.dtype == "float16")

    def run(
        self,
        report: Callable[[StepReport], None],
        save: Callable[[bool], object],
        is_stopping: Callable[[], bool] = lambda: False,
        on_step: Callable[[StepReport], object] = _unwatched,
        on_pass: Callable[[str], object] = _unwatched,
    ) -> TrainingProgress:
        """Trains until max_iters, until `patience` evaluations brought nothing, or until asked to stop.

        Args:
            report: called every log_interval steps and at each evaluation.
            save: called after each evaluation with whether it was better than all before, and when stopping.
            is_stopping: asked after each step.
            on_step: called after each step that is not reported.
            on_pass: called before each forward pass with what is done, for a person.

        Raises:
            MdiError: the loss is no longer a number.
        """
        settings, progress = self.settings, self.progress
        self._on_pass = on_pass
        clock = _Clock(progress)
        while progress.n_steps < settings.max_iters:
            lr, train_loss = self.step()
            is_evaluated = progress.n_steps % settings.ckpt_interval == 0 or progress.n_steps == settings.max_iters
            val_loss = self.evaluate() if is_evaluated else None
            is_best = val_loss is not None and self._is_best(val_loss)
            clock.tick()
            is_reported = val_loss is not None or progress.n_steps % settings.log_interval == 0
            speed, left = clock.speed(settings.n_tokens_per_step), clock.left_s(settings.max_iters)
            news = StepReport(progress.n_steps, lr, train_loss, val_loss, speed, progress.elapsed_s, left)
            (report if is_reported else on_step)(news)
            stops = self._agreed(is_stopping())
            if val_loss is not None or stops:
                save(is_best)
            if stops or (settings.patience is not None and progress.n_worse >= settings.patience):
                break
        return progress

    def step(self) -> tuple[float, float]:
        """One optimizer step; returns its learning rate and its mean loss in nats per token."""
        settings = self.settings
        lr = self._set_learning_rate()
        self.model.train()
        parts = self._processes.share(settings.grad_acc_steps)
        total = 0.0
        with self._dropout_of_step():
            for i, part in enumerate(parts, 1):
                self._on_pass(f"step {self.progress.n_steps + 1}/{settings.max_iters}: pass {i} of {len(parts)}")
                index = (self.progress.n_steps * settings.grad_acc_steps + part) * settings.batch_size
                batch = self._train.batch(index, settings.batch_size)
                with self._processes.gathering(self._forward, is_last=part == parts[-1]):
                    loss = self._loss(self._forward, *batch) / len(parts)
                    self.scaler.scale(loss).backward()
                total += loss.item()
        total = self._processes.sums([total], self._device)[0] / self._processes.count
        if not math.isfinite(total):
            raise MdiError(
                f"the loss became {total} at step {self.progress.n_steps}; use a smaller --lr or --dtype float32",
                code=Code.LOSS,
            )
        if settings.grad_clip > 0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.n_steps += 1
        return lr, total

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats per token over the same held-out windows at every call."""
        self.model.eval()
        total, count = 0.0, 0
        forward = self._processes.unwrapped(self._forward)
        batches = self._val.in_order(self.settings.batch_size, self.settings.eval_iters)
        for i, (inputs, targets) in enumerate(batches):
            if i % self._processes.count == self._processes.rank:
                self._on_pass(f"step {self.progress.n_steps}/{self.settings.max_iters}: held out, pass {i + 1}")
                total += self._loss(forward, inputs, targets).item() * len(inputs)
                count += len(inputs)
        total, n_windows = self._processes.sums([total, count], self._device)
        return total / n_windows

    def _set_learning_rate(self) -> float:
        settings = self.settings
        lr = learning_rate(
            self.progress.n_steps,
            peak=settings.lr,
            floor=settings.min_lr,
            n_warmup=settings.warmup_iters,
            n_steps=settings.decay_iters or settings.max_iters,
            schedule=settings.schedule,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _loss(self, forward: Callable[[torch.Tensor], Any], *batch: torch.Tensor) -> torch.Tensor:
        inputs, targets = (ids.to(self._device) for ids in batch)
        with self._autocast():
            logits = forward(inputs)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, self.settings.dtype))

    @contextmanager
    def _dropout_of_step(self) -> Iterator[None]:
        """What is dropped depends on the seed, the step and the process alone, so that a resumed run drops the same."""
        if not self._has_dropout:
            yield
            return
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            n = self.progress.n_steps * self._processes.count + self._processes.rank
            torch.manual_seed((self.settings.seed * 1_000_003 + n) % (1 << 63))
            yield

    def _agreed(self, is_stopping: bool) -> bool:
        """Signals reach the processes at different moments; they have to stop after the same step."""
        return self._processes.sums([float(is_stopping)], self._device)[0] > 0

    def _is_best(self, val_loss: float) -> bool:
        if val_loss < self.progress.best_val_loss:
            self.progress.best_val_loss, self.progress.n_worse = val_loss, 0
            return True
        self.progress.n_worse += 1
        return False


class _Clock:
    """Time spent, speed and time left; a resumed run counts on from what it had spent."""

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress
        self._began, self._first, self._before_s = time.monotonic(), progress.n_steps, progress.elapsed_s

    def tick(self) -> None:
        self._progress.elapsed_s = self._before_s + time.monotonic() - self._began

    def speed(self, n_tokens_per_step: int) -> float:
        """Tokens per second of this session, evaluations included."""
        spent_s = self._progress.elapsed_s - self._before_s
        return self._n_done * n_tokens_per_step / spent_s if spent_s > 0 else math.inf

    def left_s(self, n_steps: int) -> float:
        spent_s = self._progress.elapsed_s - self._before_s
        return spent_s / self._n_done * (n_steps - self._progress.n_steps)

    @property
    def _n_done(self) -> int:
        return self._progress.n_steps - self._first
