"""Products of a few rows with an int8 or int4 weight, in a Triton kernel that reads the packed numbers once.

Each program computes 16 outputs of up to 64 rows: it walks along the inputs, unpacks a tile of the weight as the type of the
rows, and adds up in float32. The tiles were chosen by reasoning, not tuned: no GPU was at hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mdi.weight_formats import LAYOUTS

OUTPUTS = 16  # of a program: few, so that narrow layers have programs for all multiprocessors; tl.dot wants 16
BYTES = 128  # of each output that are read at once
LEAST_ROWS = 16  # tl.dot wants as many


@triton.jit
def _product(
    x_ptr, numbers_ptr, scales_ptr, y_ptr, n_rows, n_out, n_in, n_bytes, n_scales,
    GROUP: tl.constexpr, IS_INT4: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs[:, None] < n_out
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    group_bytes: tl.constexpr = GROUP // 2 if IS_INT4 else GROUP
    for first in range(0, n_bytes, BYTES):
        at = first + tl.arange(0, BYTES)
        is_here = is_output & (at[None, :] < n_bytes)
        packed = tl.load(numbers_ptr + outputs[:, None].to(tl.int64) * n_bytes + at[None, :], mask=is_here, other=0)
        groups = at // group_bytes
        scale = tl.load(scales_ptr + outputs[:, None] * n_scales + groups[None, :], mask=is_here, other=0.0)
        scale = scale.to(tl.float32)
        if IS_INT4:
            low_inputs = groups * GROUP + at % group_bytes
            sums += _tile(x_ptr, rows, n_rows, low_inputs, n_in, ((packed & 15).to(tl.float32) - 8.0) * scale)
            high_inputs = low_inputs + group_bytes
            sums += _tile(x_ptr, rows, n_rows, high_inputs, n_in, ((packed >> 4).to(tl.float32) - 8.0) * scale)
        else:
            sums += _tile(x_ptr, rows, n_rows, at, n_in, packed.to(tl.float32) * scale)
    is_result = (rows[:, None] < n_rows) & (outputs[None, :] < n_out)
    y = sums.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows[:, None] * n_out + outputs[None, :], y, mask=is_result)


@triton.jit
def _tile(x_ptr, rows, n_rows, inputs, n_in, weight):
    """What some inputs give: (ROWS, OUTPUTS) of weights (OUTPUTS, inputs)."""
    is_row = (rows[:, None] < n_rows) & (inputs[None, :] < n_in)
    x = tl.load(x_ptr + rows[:, None] * n_in + inputs[None, :], mask=is_row, other=0.0)
    return tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision="ieee")


def product(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, form: str) -> torch.Tensor:
    """(M, n_in) with numbers and scales of a weight (n_out, n_in), see kernels.codes -> (M, n_out)"""
    x = x.contiguous()
    (n_rows, n_in), n_out = x.shape, len(numbers)
    y = torch.empty(n_rows, n_out, device=x.device, dtype=x.dtype)
    _product[(triton.cdiv(n_out, OUTPUTS),)](
        x, numbers, scales, y, n_rows, n_out, n_in, numbers.size(1), scales.size(1),
        GROUP=LAYOUTS[form].group, IS_INT4=form == "int4", ROWS=max(LEAST_ROWS, triton.next_power_of_2(n_rows)),
        OUTPUTS=OUTPUTS, BYTES=BYTES,
    )  # fmt: skip
    return y
