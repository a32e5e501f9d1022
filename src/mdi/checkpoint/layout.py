"""The safetensors format, as far as this project writes and checks it: names, types, shapes, offsets; no data.

Knows nothing of models or parts. Reading of tensors is left to the safetensors library; the writing is here because the
library wants all tensors in memory at once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mdi.config import nearest_existing
from mdi.errors import CheckpointError

HEADER_LIMIT_BYTES = 100_000_000  # the library's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor that need not be in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def n_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What the head of a safetensors file says. `offsets` are (start, stop) in bytes from the start of the file."""

    metadata: dict[str, str]
    specs: dict[str, TensorSpec]
    offsets: dict[str, tuple[int, int]]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def main_dtype(specs: Iterable[TensorSpec]) -> str:
    """Name of the type that most bytes are stored in."""
    totals: dict[torch.dtype, int] = {}
    for spec in specs:
        totals[spec.dtype] = totals.get(spec.dtype, 0) + spec.n_bytes
    return dtype_name(max(totals, key=lambda d: (totals[d], str(d)))) if totals else "float32"


def ordered(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names in the order of their data: wide types first, so that all data is aligned, then by name."""
    return sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))


def header_bytes(
    specs: Mapping[str, TensorSpec], order: Iterable[str], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The head of a file that holds the tensors in this order without gaps; a multiple of 8 bytes, always the same.

    Raises:
        CheckpointError: a tensor is of a type that the format does not have.
    """
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in order:
        spec = specs[name]
        if spec.dtype not in _CODES:
            raise CheckpointError(f"tensor {name} is of type {dtype_name(spec.dtype)}, which cannot be stored")
        stop = position + spec.n_bytes
        entries[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> Header:
    """Read and check the head of a file.

    Raises:
        CheckpointError: there is no such file, it is no safetensors file, or its length is not what its head says.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(HEADER_LIMIT_BYTES, max(size - 8, 0)):
                raise CheckpointError(f"{path} is no safetensors file, or cut short: {size} bytes, a head of {length}")
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"no such file: {path} (the nearest that exists is {nearest_existing(path)})") from None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from None
    try:
        return _parse(json.loads(text), 8 + length, size, path)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path}: its head is damaged ({type(e).__name__}: {e})") from None


def _parse(entries: dict[str, Any], data_start: int, size: int, path: Path) -> Header:
    metadata = entries.pop("__metadata__", None) or {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ holds something else than strings")
    specs: dict[str, TensorSpec] = {}
    offsets: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        shape = tuple(entry["shape"])
        if any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"tensor {name} has the shape {shape}")
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name} is of type {entry['dtype']}, which is not supported")
        spec = TensorSpec(DTYPES[entry["dtype"]], shape)
        start, stop = entry["data_offsets"]
        if type(start) is not int or type(stop) is not int or stop - start != spec.n_bytes:
            raise ValueError(f"tensor {name}: {spec.n_bytes} bytes by its shape, {stop} - {start} by its offsets")
        specs[name] = spec
        offsets[name] = (data_start + start, data_start + stop)
    position = data_start
    for start, stop in sorted(offsets.values()):
        if start != position:
            raise ValueError(f"there is a gap or an overlap at byte {position}")
        position = stop
    if position != size:
        what = "cut short" if size < position else "longer than it should be"
        raise CheckpointError(f"{path} is {what}: {size} bytes, {position} expected")
    return Header(dict(metadata), specs, offsets)
