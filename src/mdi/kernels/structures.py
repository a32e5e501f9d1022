"""The structures of csrc/model.h, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p

import numpy as np

from mdi.kernels.layout import Matrix
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
