"""Reads the tensors of a GGUF file, as stored or as plain numbers."""

from __future__ import annotations

import numpy as np

from mdi.checkpoint.ggufheader import GgufTensor
from mdi.checkpoint.safetensors_layout import TYPES, TensorSpec
from mdi.errors import CheckpointError
from mdi.kernels.weight_range import check_range, largest_of

PLAIN = ("F32", "F16", "BF16")
_QUANTIZED = "F16"  # a scale of 11 bits times a few: what half precision rounds off is far below the format's own error


def read_tensor(tensor: GgufTensor, name: str) -> np.ndarray:
    """The numbers of a tensor, as `spec_of` says: plain ones unchanged, others in half precision.

    Args:
        name: of the tensor, for errors.

    Raises:
        CheckpointError: the format cannot be read, the file has changed, or a number is not finite or beyond half precision.
    """
    rows = read_rows(tensor)
    spec = spec_of(tensor)
    if tensor.type_name in PLAIN:
        return rows.view(TYPES[spec.dtype].numpy).reshape(tensor.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        plain = dequantize(rows, GGMLQuantizationType[tensor.type_name])
    except NotImplementedError:
        raise CheckpointError(
            f"{tensor.path}: weights of the type {tensor.type_name} cannot be read; use a file in Q8_0, a K format, or F16"
        ) from None
    check_range("fp16", largest_of(plain), f"{tensor.path}: {name}", clips=False)
    return plain.astype(np.float16).reshape(tensor.shape)


def spec_of(tensor: GgufTensor) -> TensorSpec:
    """Type and shape of what `read_tensor` returns."""
    return TensorSpec(tensor.type_name if tensor.type_name in PLAIN else _QUANTIZED, tensor.shape)


def read_rows(tensor: GgufTensor) -> np.ndarray:
    """uint8 (rows, bytes of a row), of our own"""
    n_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    try:
        data = np.fromfile(tensor.path, dtype=np.uint8, count=tensor.n_bytes, offset=tensor.offset)
    except OSError as e:
        raise CheckpointError(f"cannot read {tensor.path}: {e.strerror or e}") from None
    if data.size != tensor.n_bytes:
        raise CheckpointError(f"{tensor.path} became shorter while it was read")
    return data.reshape(n_rows, -1)


def slice_tensor(tensor: GgufTensor, start: int, stop: int, shape: tuple[int, ...]) -> GgufTensor:
    """Some of a tensor along its first dimension."""
    step = tensor.n_bytes // tensor.shape[0]
    return GgufTensor(tensor.path, tensor.type_name, shape, tensor.offset + start * step, (stop - start) * step)
