"""A GGUF file: its header, its tensors, and those that the kernels can use without a second rounding. Executes nothing.

The gguf package's own reader believes the counts in a file, and does not come to an end with some; here every count is
checked against the bytes that are there before anything is made of it.

Q4_0 is int4: 32 weights share a scale in half precision, and a half byte h stands for (h - 8) * scale. MXFP4 is mxfp4. Q8_0
is not int8: its scales are for 32 weights, the kernels' for 64.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mdi.checkpoint.safetensors_layout import TYPES, TensorSpec
from mdi.errors import CheckpointError
from mdi.kernels.layout import LARGEST_SCALE, Halves, bf16_from_float32, check_range, largest_of
from mdi.kernels.weight_formats import BLOCK_TYPES
from mdi.spec.cluster import nearest_existing
from mdi.spec.decode import shown

HEADER_LIMIT_BYTES = 256_000_000
NAME_LIMIT_BYTES = 1 << 16
COUNT_LIMIT = 4_000_000  # strings of a list, entries of a file
_MAX_DIMS = 4
_MAX_SHARDS = 999
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` has the rows first, as torch has it; `type_name` is ggml's, such as "Q4_K".

    `offset` counts from the start of the file; the last dimension's blocks lie one after the other.
    """

    path: Path
    type_name: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """`fields` has numbers, strings, lists of strings, and numpy arrays of numbers."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufHeader:
    """The head of a file; if the model is split into several, of all of them.

    Raises:
        CheckpointError: there is no such file, or it is not a GGUF file, damaged, cut short, or of an unknown version or type.
    """
    first = _read_one(path)
    n_files = first.fields.get("split.count", 1)
    if not isinstance(n_files, int) or n_files <= 1:
        return first
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[2]) != n_files or n_files > _MAX_SHARDS:
        raise CheckpointError(
            f"{path} is one of {n_files} files of a model, which must be named NAME-00001-of-{n_files:05}.gguf"
        )
    fields: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for i in range(n_files):
        shard = _read_one(path.with_name(f"{match[1]}-{i + 1:05}-of-{n_files:05}.gguf"))
        fields = {**shard.fields, **fields}  # the first file's go first
        if overlap := tensors.keys() & shard.tensors.keys():
            raise CheckpointError(
                f"{shard.path} holds the tensor {min(overlap)!r}, which another file of the model has, too"
            )
        tensors |= shard.tensors
    return GgufHeader(path, fields, tensors)


def _read_one(path: Path) -> GgufHeader:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except FileNotFoundError:
        raise CheckpointError(f"no such file: {path} (the nearest that exists is {nearest_existing(path)})") from None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from None
    except ValueError as e:  # an empty file cannot be mapped; bytes that are no text
        raise CheckpointError(f"{path} is not a GGUF file, or damaged: {e}") from None


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        self._size = len(data)
        self._limit = min(self._size, HEADER_LIMIT_BYTES)

    def parse(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            what = "is big-endian" if version in (2 << 24, 3 << 24) else f"has version {version}"
            raise ValueError(f"it {what}, only versions 2 and 3, little-endian, can be read")
        n_tensors, n_fields = self._count(24), self._count(13)
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self._string(NAME_LIMIT_BYTES)
            if key in fields:
                raise ValueError(f"it has the field {key!r} twice")
            fields[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {shown(alignment)}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, type_number, shape, offset in infos:
            if name in tensors:
                raise ValueError(f"it has the tensor {name!r} twice")
            tensors[name] = self._tensor(name, type_number, shape, start, offset, alignment)
        return GgufHeader(self._path, fields, tensors)

    def _tensor(
        self, name: str, type_number: int, shape: tuple[int, ...], start: int, offset: int, step: int
    ) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            value_type = GGMLQuantizationType(type_number)
            per_block, block_bytes = GGML_QUANT_SIZES[value_type]
        except (ValueError, KeyError):
            raise ValueError(f"the tensor {name!r} is of the type {type_number}, which is unknown") from None
        if shape[-1] % per_block:
            raise ValueError(
                f"the tensor {name!r} has rows of {shape[-1]}, no multiple of {value_type.name}'s {per_block}"
            )
        n_bytes = math.prod(shape) // per_block * block_bytes
        if offset % step or start + offset + n_bytes > self._size:
            raise ValueError(
                f"it is cut short: the tensor {name!r} takes the bytes {start + offset} to {start + offset + n_bytes} "
                f"of {self._size}"
            )
        return GgufTensor(self._path, value_type.name, shape, start + offset, n_bytes)

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string(NAME_LIMIT_BYTES)
        n_dims = self._number("I")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise ValueError(f"the tensor {name!r} has {n_dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(n_dims))[::-1]
        if not all(0 < n < 1 << 40 for n in shape):
            raise ValueError(f"the tensor {name!r} has the shape {list(shape)}")
        return name, self._number("I"), shape, self._number("Q")

    def _value(self, value_type: int, is_nested: bool = False) -> Any:
        if value_type in _SCALARS:
            return self._number(_SCALARS[value_type])
        if value_type == _STRING:
            return self._string()
        if value_type != _ARRAY or is_nested:  # lists of lists are in no model that can be used here
            raise ValueError(f"a field is of the type {value_type}, which is unknown")
        item = self._number("I")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
            n_items = self._count(dtype.itemsize)
            return np.frombuffer(self._take(n_items * dtype.itemsize), dtype=dtype)
        n_items = self._count(8)
        return [self._value(item, is_nested=True) for _ in range(n_items)]

    def _count(self, least_bytes: int) -> int:
        """A count of things of at least so many bytes each, which the file must have."""
        count = int(self._number("Q"))
        if count > COUNT_LIMIT or count * least_bytes > self._limit - self._at:
            raise ValueError(f"it announces {count} entries, which do not fit into its {self._size} bytes")
        return count

    def _string(self, limit: int = HEADER_LIMIT_BYTES) -> str:
        n_bytes = int(self._number("Q"))
        if n_bytes > limit:
            raise ValueError(f"a name or a text of {n_bytes} bytes is longer than any")
        return self._take(n_bytes).decode("utf-8")

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, n_bytes: int) -> bytes:
        if n_bytes > self._limit - self._at:
            raise ValueError(f"its head is cut short, or damaged, at byte {self._at}")
        self._at += n_bytes
        return bytes(self._data[self._at - n_bytes : self._at])


PLAIN = ("F32", "F16", "BF16")
_MXFP4 = "MXFP4"  # its numbers are those of bfloat16
_QUANTIZED = "F16"  # a scale of 11 bits times a few: what half precision rounds off is far below the format's own error


def read_tensor(tensor: GgufTensor, name: str) -> np.ndarray:
    """The numbers of a tensor, as `spec_of` says: plain ones unchanged, MXFP4 in bfloat16, others in half precision.

    Args:
        name: of the tensor, for errors.

    Raises:
        CheckpointError: the format cannot be read, the file has changed, or a number is not finite or beyond half precision.
    """
    rows = read_rows(tensor)
    spec = spec_of(tensor)
    if tensor.type_name in PLAIN:
        return rows.view(TYPES[spec.dtype].numpy).reshape(tensor.shape)
    if tensor.type_name == _MXFP4:
        _check_powers(rows.reshape(-1, 1 + _BLOCK // 2)[:, 0], f"{tensor.path}: {name}")
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        plain = dequantize(rows, GGMLQuantizationType[tensor.type_name])
    except NotImplementedError:
        raise CheckpointError(
            f"{tensor.path}: weights of the type {tensor.type_name} cannot be read; use a file in Q8_0, a K format, or F16"
        ) from None
    if tensor.type_name == _MXFP4:
        return bf16_from_float32(plain).reshape(tensor.shape)
    check_range("fp16", largest_of(plain), f"{tensor.path}: {name}", clips=False)
    return plain.astype(np.float16).reshape(tensor.shape)


def spec_of(tensor: GgufTensor) -> TensorSpec:
    """Type and shape of what `read_tensor` returns."""
    code = tensor.type_name if tensor.type_name in PLAIN else "BF16" if tensor.type_name == _MXFP4 else _QUANTIZED
    return TensorSpec(code, tensor.shape)


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


CARRIED_OVER = {"Q4_0": "int4", "MXFP4": "mxfp4"}  # ggml's name -> the kernels'
HELD = {**CARRIED_OVER, **{form.upper(): form for form in BLOCK_TYPES}}  # blocks that are kept as they are
OWN_FORMATS = {"F32": "float32", "F16": "fp16", "BF16": "bf16", **HELD}  # that lose nothing
ROUNDED_TO = "int8"  # what is in other types

_BLOCK = 32  # weights of a block: a scale, then 16 bytes, whose low halves are the first 16 weights, the high ones the others


def halves_of(type_name: str, rows: np.ndarray, name: str) -> Halves:
    """Rows of a weight in Q4_0 or MXFP4, for packing it with the same numbers.

    Args:
        type_name: a key of `CARRIED_OVER`.
        rows: uint8 (n_out, bytes of a row).
        name: of the tensor, for errors.

    Raises:
        CheckpointError: a scale is not finite.
    """
    scale_bytes = 2 if type_name == "Q4_0" else 1
    blocks = rows.reshape(len(rows), -1, scale_bytes + _BLOCK // 2)
    scales, both = np.ascontiguousarray(blocks[..., :scale_bytes]), blocks[..., scale_bytes:]
    if type_name == "Q4_0":
        scales = scales.view(np.float16)
        check_range("fp16", largest_of(scales), name, clips=False)
    else:
        _check_powers(scales, name)
    first, second = both & 15, both >> 4  # of 16 weights each: every two of them into one byte
    halves = np.concatenate(
        (first[..., ::2] | first[..., 1::2] << 4, second[..., ::2] | second[..., 1::2] << 4), axis=2
    )
    return Halves(scales[..., 0], halves.reshape(len(rows), -1))


def _check_powers(scales: np.ndarray, name: str) -> None:
    if scales.max(initial=0) > LARGEST_SCALE:
        check_range("float32", math.nan, name, clips=False)
