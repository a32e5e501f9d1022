"""The learning rate over a training run. Pure numbers."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, floor: float, n_warmup: int, n_steps: int) -> float:
    """Linear from peak / n_warmup at step 0 to `peak`, then half a cosine down to `floor` at step n_steps - 1.

    Steps past the end stay at `floor`.
    """
    if step < n_warmup:
        return peak * (step + 1) / n_warmup
    n_decay = n_steps - 1 - n_warmup
    done = min(1.0, (step - n_warmup) / n_decay) if n_decay > 0 else 1.0
    return floor + 0.5 * (peak - floor) * (1.0 + math.cos(math.pi * done))
