"""Plain float32 layers with two or three rows, which some processors multiply more slowly than four.

torch's BLAS (MKL) has a kernel for a few rows at once on some processors; on others it takes two or three rows one after the
other and reads all weights for each. A layer of 2048 to 5632 took 2.2, 5.0, 7.6 and 4.7 ms for 1 to 4 rows on an AMD EPYC,
but 1.5, 1.5, 1.5 and 3.1 ms on an Intel Xeon. So each stage tries it when it is loaded, with its own weights. Two or three
rows that are computed as four give what they would give among four: a row depends on the others no more than without.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

FULL = 4
FEW = (2, 3)
LARGE = 1 << 20  # number of weights from which a layer's time is that of reading them
GAIN = 0.85  # of the time that must be left, so that noise does not decide
TRIES = 5


class PaddedLinear(nn.Linear):
    """A linear layer that computes some small numbers of rows as four; its weight and bias are those of another one."""

    padded: frozenset[int]

    @classmethod
    def of(cls, linear: nn.Linear, padded: frozenset[int]) -> PaddedLinear:
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.padded = padded
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)"""
        n_rows = x.numel() // self.in_features
        if n_rows not in self.padded:
            return F.linear(x, self.weight, self.bias)
        rows = F.pad(x.reshape(n_rows, self.in_features), (0, 0, 0, FULL - n_rows))
        return F.linear(rows, self.weight, self.bias)[:n_rows].view(*x.shape[:-1], self.out_features)


def pad_few_rows(root: nn.Module) -> None:
    """Replace the large plain float32 layers below `root`, if that makes some numbers of rows faster on this processor."""
    large = [(path, m) for path, m in root.named_modules() if type(m) is nn.Linear and _is_large(m.weight)]
    if not large:
        return
    padded = rows_to_pad(large[0][1])
    for path, module in large if padded else ():
        parent, _, child = path.rpartition(".")
        setattr(root.get_submodule(parent), child, PaddedLinear.of(module, padded))


def _is_large(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() >= LARGE


@torch.inference_mode()
def rows_to_pad(linear: nn.Linear, seconds: Callable[[Callable[[], object]], float] | None = None) -> frozenset[int]:
    """Numbers of rows for which this layer is clearly faster with four.

    Args:
        seconds: times a call; None takes the shortest of a few.
    """
    measure = seconds or _shortest_s
    rows = torch.ones(FULL, linear.in_features)
    full_s = measure(lambda: linear(rows))
    return frozenset(n for n in FEW if full_s < GAIN * measure(lambda n=n: linear(rows[:n])))  # type: ignore[misc]


def _shortest_s(call: Callable[[], object]) -> float:
    call()
    taken = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)
