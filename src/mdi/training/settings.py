"""What a training run is asked to do, checked once. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mdi.errors import UsageError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TrainingSettings:
    """Counts are of optimizer steps; one step sees batch_size * grad_acc_steps windows of sequence_length tokens.

    Attributes:
        dtype: type of the matrix products; weights and optimizer stay float32.
        save_dtype: type of the weights on disk.
        eval_iters: batches per evaluation at most.
        patience: evaluations without a better held-out loss after which to stop; None: never.
    """

    sequence_length: int
    batch_size: int = 10
    grad_acc_steps: int = 10
    max_iters: int = 100
    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup_iters: int = 10
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    eval_iters: int = 200
    ckpt_interval: int = 20
    log_interval: int = 10
    patience: int | None = None
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
        self._check("lr", self.lr > 0, "more than 0")
        self._check("min_lr", 0 <= self.min_lr <= self.lr, f"from 0 to --lr {self.lr}")
        self._check("weight_decay", self.weight_decay >= 0, "at least 0")
        self._check("beta1", 0 <= self.beta1 < 1, "from 0 to less than 1")
        self._check("beta2", 0 <= self.beta2 < 1, "from 0 to less than 1")
        self._check("grad_clip", self.grad_clip >= 0, "at least 0 (0: no clipping)")
        self._check("seed", self.seed >= 0, "at least 0")
        self._check("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._check("save_dtype", self.save_dtype in DTYPES, f"one of {', '.join(DTYPES)}")

    def _check(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected {expected}")

    @property
    def n_tokens_per_step(self) -> int:
        return self.batch_size * self.grad_acc_steps * self.sequence_length
