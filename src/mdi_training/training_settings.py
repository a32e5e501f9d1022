"""The user's choices for a training run, checked once. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from mdi.errors import Code, UsageError
from mdi_training.schedule import SCHEDULES

DTYPES = ("float32", "bfloat16", "float16")
# The matrices that litgpt's LoRA can adapt, by the names of its settings (lora_query, ...).
LORA_TARGETS = ("query", "key", "value", "projection", "mlp", "head")


@dataclass(frozen=True)
class TrainingSettings:
    """Counts are of optimizer steps; one step sees batch_size * grad_acc_steps windows of sequence_length tokens.

    With several processes a step sees just as many: each takes its share of the grad_acc_steps.

    Attributes:
        dtype: type of the matrix products; weights and optimizer stay float32.
        save_dtype: type of the weights on disk.
        schedule: how the learning rate falls after the warm-up.
        decay_iters: step at which it has reached min_lr; None: max_iters.
        eval_iters: batches per evaluation at most.
        patience: evaluations without a better held-out loss after which to stop; None: never.
        always_update: the checkpoint follows the last evaluation, not the best one.
    """

    sequence_length: int
    batch_size: int = 10
    grad_acc_steps: int = 10
    max_iters: int = 100
    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup_iters: int = 10
    schedule: str = "cosine"
    decay_iters: int | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0
    eval_iters: int = 200
    ckpt_interval: int = 20
    log_interval: int = 10
    patience: int | None = None
    always_update: bool = False
    seed: int = 10137
    dtype: str = "float32"
    save_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in (
            "sequence_length",
            "batch_size",
            "grad_acc_steps",
            "max_iters",
            "eval_iters",
            "ckpt_interval",
            "log_interval",
        ):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("patience", self.patience is None or self.patience >= 1, "at least 1")
        self._check("warmup_iters", self.warmup_iters >= 0, "at least 0")
        self._check("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._check("decay_iters", self.decay_iters is None or self.decay_iters >= 1, "at least 1")
        self._check("lr", self.lr > 0, "more than 0")
        self._check("min_lr", 0 <= self.min_lr <= self.lr, f"from 0 to --lr {self.lr}")
        self._check("weight_decay", self.weight_decay >= 0, "at least 0")
        self._check("beta1", 0 <= self.beta1 < 1, "from 0 to less than 1")
        self._check("beta2", 0 <= self.beta2 < 1, "from 0 to less than 1")
        self._check("eps", self.eps > 0, "more than 0")
        self._check("grad_clip", self.grad_clip >= 0, "at least 0 (0: no clipping)")
        self._check("seed", self.seed >= 0, "at least 0")
        self._check("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._check("save_dtype", self.save_dtype in DTYPES, f"one of {', '.join(DTYPES)}")

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected {expected}", code=Code.VALUE)

    @property
    def n_tokens_per_step(self) -> int:
        return self.batch_size * self.grad_acc_steps * self.sequence_length


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adaptation (Hu et al. 2021, section 4.1): W + alpha / r * B A, where only A and B are trained.

    Attributes:
        r: rank of the update.
        dropout: of what goes into A, while training.
        targets: which matrices; of LORA_TARGETS.
    """

    r: int
    alpha: int = 16
    dropout: float = 0.05
    targets: tuple[str, ...] = ("query", "value")

    def __post_init__(self) -> None:
        _lora_check("r", self.r, self.r >= 1, "at least 1")
        _lora_check("alpha", self.alpha, self.alpha >= 1, "at least 1")
        _lora_check("dropout", self.dropout, 0 <= self.dropout < 1, "from 0 to less than 1")
        good = bool(self.targets) and set(self.targets) <= set(LORA_TARGETS)
        _lora_check("targets", ",".join(self.targets), good, f"some of {', '.join(LORA_TARGETS)}, with commas")


def _lora_check(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise UsageError(f"--lora-{name} {value}: expected {expected}", code=Code.VALUE)
