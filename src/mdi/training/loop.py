"""The training loop: windows in, better weights out.

Knows a litgpt GPT, its optimizer and the schedule. Where the numbers are shown and where the weights are written is
decided by who calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from litgpt.model import GPT
from torch.nn import functional

from mdi.errors import MdiError
from mdi.training.schedule import learning_rate
from mdi.training.settings import TrainingSettings
from mdi.training.windows import Windows


@dataclass
class Progress:
    """Where a run stands: all that is needed, besides weights and optimizer, to go on from there.

    Attributes:
        n_steps: optimizer steps done.
        best_val_loss: nats per token; infinite before the first evaluation.
        n_worse: evaluations since the best one.
    """

    n_steps: int = 0
    best_val_loss: float = math.inf
    n_worse: int = 0


@dataclass(frozen=True)
class Report:
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
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2))


class Trainer:
    """One training run.

    Args:
        model: with float32 weights, on the device to train on.
        train, val: windows of settings.sequence_length.
        forward: what computes the logits, if it is not the model itself (a compiled or wrapped one).
        progress: to go on from, together with the optimizer; a new run if not given.
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
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.progress = progress or Progress()
        self.optimizer = optimizer or make_optimizer(model, settings)
        self._train, self._val = train, val
        self._forward = model if forward is None else forward
        self._device = next(model.parameters()).device
        # float16 gradients underflow without scaling; for the other types the scaler does nothing.
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=settings.dtype == "float16")

    def run(self, report: Callable[[Report], None], save: Callable[[], object]) -> Progress:
        """Trains until max_iters, or until `patience` evaluations brought nothing.

        Args:
            report: called every log_interval steps and at each evaluation.
            save: called after each evaluation that was better than all before; writes the weights.

        Raises:
            MdiError: the loss is no longer a number.
        """
        settings, progress = self.settings, self.progress
        began, first = time.monotonic(), progress.n_steps
        while progress.n_steps < settings.max_iters:
            lr, train_loss = self.step()
            last = progress.n_steps == settings.max_iters
            val_loss = None
            if progress.n_steps % settings.ckpt_interval == 0 or last:
                val_loss = self.evaluate()
                if self._is_best(val_loss):
                    save()
            if val_loss is not None or progress.n_steps % settings.log_interval == 0:
                elapsed = time.monotonic() - began
                n_done = progress.n_steps - first
                speed = n_done * settings.n_tokens_per_step / elapsed if elapsed > 0 else math.inf
                left = elapsed / n_done * (settings.max_iters - progress.n_steps)
                report(Report(progress.n_steps, lr, train_loss, val_loss, speed, elapsed, left))
            if settings.patience is not None and progress.n_worse >= settings.patience:
                break
        return progress

    def step(self) -> tuple[float, float]:
        """One optimizer step; returns its learning rate and its mean loss in nats per token."""
        settings = self.settings
        lr = learning_rate(
            self.progress.n_steps,
            peak=settings.lr,
            floor=settings.min_lr,
            n_warmup=settings.warmup_iters,
            n_steps=settings.max_iters,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        total = 0.0
        for i in range(settings.grad_acc_steps):
            index = (self.progress.n_steps * settings.grad_acc_steps + i) * settings.batch_size
            loss = self._loss(*self._train.batch(index, settings.batch_size)) / settings.grad_acc_steps
            self._scaler.scale(loss).backward()
            total += loss.item()
        if not math.isfinite(total):
            raise MdiError(
                f"the loss became {total} at step {self.progress.n_steps}; use a smaller --lr or --dtype float32"
            )
        if settings.grad_clip > 0:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.n_steps += 1
        return lr, total

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss in nats per token over the same held-out windows at every call."""
        self.model.eval()
        total, count = 0.0, 0
        for inputs, targets in self._val.in_order(self.settings.batch_size, self.settings.eval_iters):
            total += self._loss(inputs, targets).item() * len(inputs)
            count += len(inputs)
        return total / count

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inputs, targets = inputs.to(self._device), targets.to(self._device)
        with self._autocast():
            logits = self._forward(inputs)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, self.settings.dtype))

    def _is_best(self, val_loss: float) -> bool:
        if val_loss < self.progress.best_val_loss:
            self.progress.best_val_loss, self.progress.n_worse = val_loss, 0
            return True
        self.progress.n_worse += 1
        return False
