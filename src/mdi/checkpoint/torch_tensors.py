"""Converts between arrays, which need no torch, and torch's tensors, without copying."""

from __future__ import annotations

import numpy as np
import torch

from mdi.checkpoint.safetensors_layout import CODES, TensorSpec
from mdi.errors import CheckpointError

_CODES = {getattr(torch, name): code for name, code in CODES.items()}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_BITS = {1: torch.uint8, 2: torch.int16}  # types that both sides have, for those that numpy lacks


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Raises CheckpointError: it is of a type that no file can hold."""
    if tensor.dtype not in _CODES:
        raise CheckpointError(f"a tensor of type {str(tensor.dtype).removeprefix('torch.')}, which cannot be stored")
    return TensorSpec(_CODES[tensor.dtype], tuple(tensor.shape))


def as_tensor(array: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """The array as a tensor; copied if it may not be written to (torch knows no such tensors), or is not aligned."""
    if not (array.flags.writeable and array.flags.aligned):
        array = array.copy()
    if str(array.dtype) == spec.name:
        return torch.from_numpy(array)
    bits = array.reshape(-1).view(f"i{spec.itemsize}" if spec.itemsize > 1 else "u1")
    return torch.from_numpy(bits).view(_DTYPES[spec.dtype]).view(spec.shape)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor on the CPU as an array; bits, where numpy lacks the type."""
    spec = tensor_spec(tensor)
    if not spec.is_floating or spec.itemsize > 2 or spec.dtype == "F16":
        return tensor.detach().numpy()
    flat = tensor.detach().contiguous().reshape(-1).view(_BITS[spec.itemsize])
    return flat.numpy().view(f"u{spec.itemsize}").reshape(spec.shape)


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of the storage that a tensor on the CPU looks into, without copying."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
