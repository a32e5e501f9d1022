"""The structures of the kernels as C has them, and how they are filled: the tensors of a block by name, with what comes from a
file checked."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from mdi.errors import KernelError
from mdi.kernels.layout import Matrix, matrix_bytes, pack
from mdi.weight_formats import LAYOUTS

CACHE_TYPES = {"float32": 0, "bf16": 1, "fp16": 2, "int8": 3}
NORM_TYPES = {"RMSNorm": 0, "LayerNorm": 1}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
PIECES = {"attention": 0, "mlp": 1, "project": 2, "attend": 3, "add_attention": 4, "add_mlp": 5}  # MdiPiece


class MdiMatrix(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        *((n, c_int32) for n in ("format", "n_out", "n_in", "skip")),
    ]

    @classmethod
    def of(cls, matrix: Matrix, bias: np.ndarray | None = None) -> MdiMatrix:
        """Refers to the memory of both, which must stay."""
        address = None if bias is None else bias.ctypes.data
        return cls(
            matrix.data.ctypes.data, address, LAYOUTS[matrix.format].number, matrix.n_out, matrix.n_in, matrix.skip
        )


class MdiNorm(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class MdiMlp(ctypes.Structure):
    _fields_ = [("fc_1", MdiMatrix), ("fc_2", MdiMatrix), ("proj", MdiMatrix)]


class MdiBlock(ctypes.Structure):
    _fields_ = [
        *((n, MdiNorm) for n in ("norm_1", "post_attention_norm", "norm_2", "post_mlp_norm", "norm_q", "norm_k")),
        *((n, MdiMatrix) for n in ("qkv", "attention_proj")),
        ("mlp", MdiMlp),
        ("router", MdiMatrix),
        ("experts", POINTER(MdiMlp)),
        *((n, c_int32) for n in ("n_expert", "window", "cache_class", "cache_layer", "rope_table", "reserved")),
    ]


class MdiModel(ctypes.Structure):
    _fields_ = [
        *((n, c_int32) for n in ("n_embd", "n_head", "n_groups", "head_size", "rope_n_elem", "rope_interleave")),
        *((n, c_int32) for n in ("norm_type", "unit_offset", "parallel_residual", "shared_attention_norm")),
        *((n, c_int32) for n in ("qk_norm_all_heads", "activation", "n_expert_per_token", "cache_type")),
        *((n, c_int32) for n in ("heads_per_group", "first_head")),
        *((n, c_float) for n in ("norm_eps", "scale", "softcap", "expert_scale")),
    ]


class MdiStage(ctypes.Structure):
    _fields_ = [
        ("model", POINTER(MdiModel)),
        ("blocks", POINTER(MdiBlock)),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rope_table_floats", c_int64),
        ("n_blocks", c_int32),
        ("n_classes", c_int32),
        ("n_finished", c_void_p),
    ]


class MdiFrame(ctypes.Structure):
    _fields_ = [
        ("rows", c_void_p),
        ("slices", c_char_p),  # the records of a slices.SliceTable
        ("pages", c_void_p),
        ("first", c_void_p),
        ("pool", c_void_p),
        ("page_bytes", c_void_p),
        ("n_slices", c_int32),
        ("n_rows", c_int32),
    ]


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
