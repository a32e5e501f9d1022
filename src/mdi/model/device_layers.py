"""Layers whose weights stay in int8 or int4 in a GPU's memory.

Rows as they come in decoding are multiplied by a kernel that reads the packed numbers (`model.triton_linear`); where Triton is
missing, and for many rows, the weight is unpacked for each product. Activations are not rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from mdi.kernels.codes import codes_of
from mdi.kernels.layout import Matrix
from mdi.model.packed_linear import HostLayers, Layers
from mdi.weight_formats import LAYOUTS

# Rows up to which a product waits for the weights to be read, not for the arithmetic. In float32 the kernel has no tensor
# cores, and tiles of 64 rows would not fit into the shared memory of smaller GPUs.
FEW_ROWS = {torch.float32: 16, torch.float16: 64, torch.bfloat16: 64}

# (x (M, n_in), numbers, scales, format) -> (M, n_out), see kernels.codes
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], torch.Tensor]

logger = logging.getLogger("mdi")


class DeviceLinear(nn.Module):
    """y = x W^T + b, with W in int8 or int4.

    Args:
        bias: float32 (n_out).
        dtype: that is computed in.
        product: multiplies few rows; None unpacks the weight for them, too.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, matrix: Matrix, bias: np.ndarray | None, device: torch.device, dtype: torch.dtype, product: Product | None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = matrix.n_in, matrix.n_out
        self._format, self._dtype, self._product = matrix.format, dtype, product
        codes = codes_of(matrix)
        self.register_buffer("numbers", torch.from_numpy(codes.numbers).to(device))
        self.register_buffer("scales", torch.from_numpy(codes.scales).to(device))
        self.register_buffer("bias", None if bias is None else torch.from_numpy(bias.copy()).to(device, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)"""
        rows = x.reshape(-1, self.in_features)
        if self._product is None or not 0 < len(rows) <= FEW_ROWS.get(x.dtype, 0):
            return F.linear(
                x, unpacked(self.numbers, self.scales, self._format, self._dtype, self.in_features), self.bias
            )
        y = self._product(rows, self.numbers, self.scales, self._format)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


class DeviceEmbedding(nn.Module):
    """An embedding with 8 bits a number and a scale per token.

    Args:
        table: int8 (vocabulary, n_embd).
        scale: float32 (vocabulary).
    """

    table: torch.Tensor
    scale: torch.Tensor

    def __init__(self, table: np.ndarray, scale: np.ndarray, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.register_buffer("table", torch.from_numpy(table.copy()).to(device))
        self.register_buffer("scale", torch.from_numpy(scale.copy()).to(device))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, n_embd)"""
        return (self.table[ids] * self.scale[ids, None]).to(self._dtype)


def unpacked(numbers: torch.Tensor, scales: torch.Tensor, form: str, dtype: torch.dtype, n_in: int) -> torch.Tensor:
    """The weight (n_out, n_in) from numbers and scales (kernels.codes), rounded to `dtype` once."""
    n_out, group = len(numbers), LAYOUTS[form].group
    if form == "int4":
        grouped = numbers.view(n_out, -1, group // 2)
        whole = torch.cat((grouped & 15, grouped >> 4), dim=2).float() - 8
    else:
        whole = numbers.view(n_out, -1, group).float()
    return (whole * scales[..., None]).to(dtype).view(n_out, -1)[:, :n_in]


class DeviceLayers:
    """Makes the packed layers of one stage on a GPU; see model.packed_linear.Layers.

    Args:
        dtype: that is computed in.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._product = product_for(device, dtype)

    def linear(self, matrix: Matrix, bias: np.ndarray | None) -> nn.Module:
        return DeviceLinear(matrix, bias, self._device, self._dtype, self._product)

    def embedding(self, table: np.ndarray, scale: np.ndarray) -> nn.Module:
        return DeviceEmbedding(table, scale, self._device, self._dtype)


def product_for(device: torch.device, dtype: torch.dtype) -> Product | None:
    """Triton's kernel, if it runs on this device: it is compiled and tried on a small product first."""
    if device.type != "cuda":
        return None
    try:
        from mdi.model.triton_linear import product

        for form in ("int8", "int4"):
            width = LAYOUTS[form].record_inputs
            numbers = torch.ones(16, width // (2 if form == "int4" else 1), device=device, dtype=torch.uint8)
            scales = torch.ones(16, width // LAYOUTS[form].group, device=device, dtype=torch.float16)
            product(torch.ones(1, width, device=device, dtype=dtype), numbers.view(_NUMBER_TYPES[form]), scales, form)
        torch.cuda.synchronize(device)
    except Exception as e:  # of many kinds: no Triton, no C compiler for its launcher, a GPU that it does not know
        why = (str(e).splitlines() or [type(e).__name__])[0]
        logger.warning(
            "int8 and int4 on %s are unpacked for each product, which is slow: Triton does not run (%s)", device, why
        )
        return None
    return product


_NUMBER_TYPES = {"int8": torch.int8, "int4": torch.uint8}


def layers_for(device: torch.device, dtype: torch.dtype) -> Layers:
    """What makes the packed layers of one stage."""
    return HostLayers() if device.type == "cpu" else DeviceLayers(device, dtype)
