"""The range of numbers of each weight format. Others are refused by the tensor's name, before they turn into wrong results."""

from __future__ import annotations

import math

import numpy as np

from mdi.errors import CheckpointError

_HALF, _BF16, _FLOAT = 65504.0, 3.3895313892515355e38, 3.4028234663852886e38  # the largest finite numbers

# The largest absolute value of a weight. A scale of int8 and int4 is in half precision, and stands for 127 or 8 steps.
MOST = {
    "float32": _FLOAT, "bf16": _BF16, "fp16": _HALF, "int8": 127 * _HALF, "int4": 8 * _HALF,
    "bfloat16": _BF16, "float16": _HALF,
}  # fmt: skip


def largest_of(weight: np.ndarray) -> float:
    """The largest absolute value; NaN or infinity if a number is not finite.

    Args:
        weight: of any floating-point type, or uint16 that holds the bits of bfloat16.
    """
    if not weight.size:
        return 0.0
    if weight.dtype == np.uint16:  # the bits of positive numbers are in their order, then come infinity and NaN
        return float((np.uint32((weight & 0x7FFF).max()) << np.uint32(16)).view(np.float32))
    if weight.dtype == np.float16:
        return float((weight.view(np.uint16) & 0x7FFF).max().view(np.float16))
    return max(float(weight.max()), -float(weight.min()))  # both are NaN if one number is


def check_range(form: str, most: float, name: str, clips: bool) -> bool:
    """Whether a weight must be clipped to `MOST` to be held.

    Args:
        form: a key of MOST.
        most: largest absolute value.
        name: of the tensor.
        clips: whether weights may be clipped.

    Raises:
        CheckpointError: it is not finite, or larger than the format holds and may not be clipped.
    """
    if most <= MOST[form]:
        return False
    if not math.isfinite(most):
        raise CheckpointError(
            f"{name} has numbers that are not finite: the checkpoint is damaged, fetch or convert it again"
        )
    if not clips:
        wider = [f for f in _WIDER.get(form, ("bf16", "float32")) if most <= MOST[f]]
        instead = f"choose {wider[0]}" if wider else "no format holds that"
        raise CheckpointError(
            f"{name} has numbers up to {most:.5g}, and {form} holds {MOST[form]:.5g} at most: {instead}, or clip them with "
            "--allow-clipping"
        )
    return True


_WIDER = {"int4": ("int8", "bf16", "float32"), "float16": ("bfloat16", "float32"), "bfloat16": ("float32",)}
