"""Turns the tensors of a block into the structures of the kernels, and checks what comes from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mdi.errors import KernelError
from mdi.kernels.layout import Matrix, matrix_bytes, pack
from mdi.kernels.structures import MdiMatrix, MdiMlp, MdiNorm
from mdi.weight_formats import LAYOUTS

Tensors = Mapping[str, Matrix | np.ndarray]


class BlockReader:
    """Takes the tensors of a block by name, checks their shapes, and keeps their memory.

    Args:
        norms_are_plain: the norms of this model have no weights (OLMo's first version).
    """

    def __init__(self, block: int, tensors: Tensors, kept: list[Any], norms_are_plain: bool) -> None:
        self._block, self._tensors, self._kept = block, tensors, kept
        self._norms_are_plain = norms_are_plain

    def norm(self, name: str, size: int, is_there: bool) -> MdiNorm:
        if not is_there:
            return MdiNorm(None, None)
        if f"{name}.weight" not in self._tensors and self._norms_are_plain:
            ones = np.ones(size, dtype=np.float32)
            self._kept.append(ones)
            return MdiNorm(ones.ctypes.data, None)
        weight = self._array(f"{name}.weight", size)
        bias = self._array(f"{name}.bias", size) if f"{name}.bias" in self._tensors else None
        return MdiNorm(weight.ctypes.data, None if bias is None else bias.ctypes.data)

    def matrix(self, name: str, n_out: int, n_in: int) -> MdiMatrix:
        matrix = self._tensors.get(f"{name}.weight")
        if not isinstance(matrix, Matrix) or (matrix.n_out, matrix.n_in - matrix.skip) != (n_out, n_in):
            raise KernelError(f"block {self._block}: {name}.weight is no packed weight of {n_out} x {n_in}")
        check_matrix(matrix)
        bias = self._array(f"{name}.bias", n_out) if f"{name}.bias" in self._tensors else None
        self._kept.append(matrix)
        return MdiMatrix.of(matrix, bias)

    def router(self, name: str, n_expert: int, n_embd: int) -> MdiMatrix:
        """Files hold it in plain numbers."""
        weight = self._tensors.get(f"{name}.weight")
        if isinstance(weight, np.ndarray) and weight.shape == (n_expert, n_embd):
            self._tensors = {**self._tensors, f"{name}.weight": pack("float32", weight)}
        return self.matrix(name, n_expert, n_embd)

    def mlp(self, name: str, n_embd: int, width: int, is_gated: bool) -> MdiMlp:
        if not is_gated:
            return MdiMlp(
                fc_1=self.matrix(f"{name}.fc", width, n_embd), proj=self.matrix(f"{name}.proj", n_embd, width)
            )
        return MdiMlp(
            self.matrix(f"{name}.fc_1", width, n_embd),
            self.matrix(f"{name}.fc_2", width, n_embd),
            self.matrix(f"{name}.proj", n_embd, width),
        )

    def _array(self, name: str, size: int) -> np.ndarray:
        array = self._tensors.get(name)
        if not isinstance(array, np.ndarray) or array.shape != (size,):
            raise KernelError(f"block {self._block}: {name} is no row of {size} numbers")
        array = np.ascontiguousarray(array, dtype=np.float32)
        self._kept.append(array)
        return array


def check_matrix(matrix: Matrix) -> None:
    """Raises KernelError if its bytes are not just those of its shape: the kernels read them unchecked."""
    if matrix.format not in LAYOUTS:
        raise KernelError(f"unknown weight format {matrix.format!r}")
    data, n_bytes = matrix.data, matrix_bytes(matrix.format, matrix.n_out, matrix.n_in)
    if data.dtype != np.uint8 or data.shape != (n_bytes,) or not data.flags.c_contiguous:
        raise KernelError(
            f"a weight of {matrix.n_out} x {matrix.n_in} in {matrix.format} has {n_bytes} bytes, not {data.size}"
        )
    if not 0 <= matrix.skip <= matrix.n_in:
        raise KernelError(f"a weight of {matrix.n_in} inputs that begins with input {matrix.skip}")
