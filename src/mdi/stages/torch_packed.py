"""Layers in torch whose weights stay packed, for blocks that the kernels do not compute as a whole.

On a CPU the kernels multiply where they are, else the weight is unpacked for each product: slow, and equal within rounding.
Activations of int8, int4 and mxfp4 are then not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from mdi.errors import CheckpointError
from mdi.kernels.blocks import Context, Linear
from mdi.kernels.layout import Matrix, PackedRows, codes_of, e2m1, floats, unpack
from mdi.kernels.library import load
from mdi.kernels.weight_formats import HALVES, LAYOUTS

Weights = Mapping[str, torch.Tensor | Matrix | np.ndarray]


class Layers(Protocol):
    """Makes what packed weights become: on the CPU (`HostLayers`), or on a GPU (`DeviceLayers`)."""

    def linear(self, matrix: Matrix, bias: np.ndarray | None) -> nn.Module:
        """A linear layer; bias float32 (n_out)."""

    def embedding(self, table: np.ndarray, scale: np.ndarray) -> nn.Module:
        """int8 (vocabulary, n_embd) with a scale per token, float32 (vocabulary)"""

    def table(self, matrix: Matrix) -> nn.Module:
        """An embedding whose rows are those of a packed weight."""


def kernel_context() -> Context | None:
    """Shared state of one stage's packed layers; None without kernels."""
    return Context(torch.get_num_threads()) if load() is not None else None


class PackedLinear(nn.Module):
    """y = x W^T + b.

    Args:
        bias: float32 (n_out).
        context: of the kernels; None without them.
    """

    def __init__(self, matrix: Matrix, bias: np.ndarray | None, context: Context | None) -> None:
        super().__init__()
        self.in_features, self.out_features = matrix.n_in, matrix.n_out
        self._matrix, self._bias = matrix, bias
        self._linear = None if context is None else Linear(context, matrix, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out), on the CPU; computed in float32"""
        rows = x.reshape(-1, self.in_features).float().contiguous()
        return self._multiply(rows).view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        if self._linear is not None:
            return torch.from_numpy(self._linear(rows.detach().numpy()))
        bias = None if self._bias is None else torch.from_numpy(self._bias)
        return F.linear(rows, torch.from_numpy(unpack(self._matrix)), bias)


class PackedEmbedding(nn.Module):
    """An embedding with 8 bits a number and a scale per token.

    Args:
        table: int8 (vocabulary, n_embd).
        scale: float32 (vocabulary).
    """

    def __init__(self, table: np.ndarray, scale: np.ndarray) -> None:
        super().__init__()
        self._table, self._scale = table, scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, n_embd), float32"""
        rows = ids.numpy()
        return torch.from_numpy(self._table[rows].astype(np.float32) * self._scale[rows, None])


class PackedTable(nn.Module):
    """An embedding whose rows are those of a packed weight."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self._rows = PackedRows(matrix)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, width), float32"""
        return torch.from_numpy(self._rows[ids.numpy()])


class HostLayers:
    """The layers of the CPU, which share what the kernels need once for a stage."""

    def __init__(self) -> None:
        self._context = kernel_context()

    def linear(self, matrix: Matrix, bias: np.ndarray | None) -> nn.Module:
        return PackedLinear(matrix, bias, self._context)

    def embedding(self, table: np.ndarray, scale: np.ndarray) -> nn.Module:
        return PackedEmbedding(table, scale)

    def table(self, matrix: Matrix) -> nn.Module:
        return PackedTable(matrix)


class DeviceLinear(nn.Module):
    """y = x W^T + b, with W in int8, int4 or mxfp4 in a GPU's memory, unpacked for each product. Activations are not rounded.

    Args:
        bias: float32 (n_out).
        dtype: that is computed in.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, matrix: Matrix, bias: np.ndarray | None, device: torch.device, dtype: torch.dtype
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features = matrix.n_in, matrix.n_out
        self._format, self._dtype = matrix.format, dtype
        codes = codes_of(matrix)
        self.register_buffer("numbers", torch.from_numpy(codes.numbers).to(device))
        self.register_buffer("scales", torch.from_numpy(codes.scales).to(device))
        self.register_buffer("bias", None if bias is None else torch.from_numpy(bias.copy()).to(device, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)"""
        weight = unpacked(self.numbers, self.scales, self._format, self._dtype, self.in_features)
        return F.linear(x, weight, self.bias)


class DeviceTable(DeviceLinear):
    """An embedding whose rows are those of such a weight."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) -> (N, width)"""
        return unpacked(self.numbers[ids], self.scales[ids], self._format, self._dtype, self.in_features)


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
    """The weight (n_out, n_in) from numbers and scales (kernels.layout.Codes), rounded to `dtype` once."""
    n_out, group = len(numbers), LAYOUTS[form].group
    if form in HALVES:
        grouped = numbers.view(n_out, -1, group // 2)
        halves = torch.cat((grouped & 15, grouped >> 4), dim=2)
        values = torch.from_numpy(e2m1(np.arange(16))).to(halves.device)
        whole = halves.float() - 8 if form == "int4" else values[halves.int()]
    else:
        whole = numbers.view(n_out, -1, group).float()
    if form == "mxfp4":
        scales = (scales.int() << 23).view(torch.float32)  # the bits of 2^(s - 127), zero for s = 0
    return (whole * scales[..., None]).to(dtype).view(n_out, -1)[:, :n_in]


class DeviceLayers:
    """Makes the packed layers of one stage on a GPU; see Layers.

    Args:
        dtype: that is computed in.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def linear(self, matrix: Matrix, bias: np.ndarray | None) -> nn.Module:
        return DeviceLinear(matrix, bias, self._device, self._dtype)

    def embedding(self, table: np.ndarray, scale: np.ndarray) -> nn.Module:
        return DeviceEmbedding(table, scale, self._device, self._dtype)

    def table(self, matrix: Matrix) -> nn.Module:
        return DeviceTable(matrix, None, self._device, self._dtype)


def layers_for(device: torch.device, dtype: torch.dtype) -> Layers:
    """A maker of the packed layers of one stage."""
    return HostLayers() if device.type == "cpu" else DeviceLayers(device, dtype)


def is_packed(weights: Weights) -> bool:
    return any(isinstance(weight, Matrix) for weight in weights.values())


def install(root: nn.Module, weights: Weights, layers: Callable[[], Layers]) -> dict[str, torch.Tensor]:
    """Put the packed ones of some weights into the places of the layers and tables below `root`; the rest, as tensors.

    Args:
        layers: what makes them; not called if nothing is packed.

    Raises:
        CheckpointError: the layer does not exist, or has another shape.
    """
    rest: dict[str, torch.Tensor] = {}
    arrays = {name: weight for name, weight in weights.items() if isinstance(weight, np.ndarray)}
    packed = {name: weight for name, weight in weights.items() if isinstance(weight, Matrix)}
    for name, matrix in packed.items():
        path = name.removesuffix(".weight")
        _check(root, path, (matrix.n_out, matrix.n_in))
        is_table = isinstance(root.get_submodule(path), nn.Embedding)
        bias = arrays.pop(f"{path}.bias", None)
        _replace(root, path, layers().table(matrix) if is_table else layers().linear(matrix, bias))
    for name in [name for name, array in arrays.items() if array.dtype == np.int8]:
        table, scale = arrays.pop(name), arrays.pop(f"{name}_scale")
        path = name.removesuffix(".weight")
        _check(root, path, table.shape)
        _replace(root, path, layers().embedding(table, scale))
    rest.update({name: torch.from_numpy(floats(array).copy()) for name, array in arrays.items()})
    rest.update({name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)})
    return rest


def _check(root: nn.Module, path: str, shape: tuple[int, ...]) -> None:
    try:
        layer = root.get_submodule(path)
        found = tuple(layer.weight.shape)  # type: ignore[arg-type]
    except AttributeError:
        raise CheckpointError(f"the weights have {path}.weight, which this model does not have") from None
    if not isinstance(layer, (nn.Linear, nn.Embedding)) or found != shape:
        raise CheckpointError(f"{path}.weight is of shape {list(shape)}, expected {list(found)}")


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, child = path.rpartition(".")
    setattr(root.get_submodule(parent), child, module)
