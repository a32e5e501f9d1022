"""The learning rate over a training run. Pure numbers."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant")


def learning_rate(
    step: int, *, peak: float, floor: float, n_warmup: int, n_steps: int, schedule: str = "cosine"
) -> float:
    """Linear from peak / n_warmup at step 0 to `peak`, then down to `floor` at step n_steps - 1.

    Steps past the end stay at `floor`. A constant schedule stays at `peak` after the warm-up.

    Args:
        schedule: "cosine" (half a one), "linear", or "constant".
    """
    if step < n_warmup:
        return peak * (step + 1) / n_warmup
    if schedule == "constant":
        return peak
    n_decay = n_steps - 1 - n_warmup
    done = min(1.0, (step - n_warmup) / n_decay) if n_decay > 0 else 1.0
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (peak - floor) * left
