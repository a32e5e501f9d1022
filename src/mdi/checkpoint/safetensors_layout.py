"""The safetensors format as this project writes and checks it: names, types, shapes, offsets; no data.

Knows nothing of models or parts. Reading of tensors is left to the safetensors library; the writing is here because the
library needs all tensors in memory at once.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mdi.errors import CheckpointError
from mdi.spec.cluster import nearest_existing

HEADER_LIMIT_BYTES = 100_000_000  # the library's own limit
STRANGERS_LIMIT_BYTES = 1 << 24  # of adapters: some 100,000 names and shapes, which take many times as much memory
PAGE_BYTES = 4096  # what a header that has metadata is padded to


@dataclass(frozen=True)
class NumberType:
    """A type of numbers: its usual name, and the numpy type that holds it (of its bits, where numpy has no such type)."""

    name: str
    numpy: np.dtype[Any]
    is_floating: bool = True


# By the format's codes.
TYPES = {
    "F64": NumberType("float64", np.dtype(np.float64)),
    "F32": NumberType("float32", np.dtype(np.float32)),
    "F16": NumberType("float16", np.dtype(np.float16)),
    "BF16": NumberType("bfloat16", np.dtype(np.uint16)),
    "F8_E4M3": NumberType("float8_e4m3fn", np.dtype(np.uint8)),
    "F8_E5M2": NumberType("float8_e5m2", np.dtype(np.uint8)),
    "I64": NumberType("int64", np.dtype(np.int64), is_floating=False),
    "I32": NumberType("int32", np.dtype(np.int32), is_floating=False),
    "I16": NumberType("int16", np.dtype(np.int16), is_floating=False),
    "I8": NumberType("int8", np.dtype(np.int8), is_floating=False),
    "U8": NumberType("uint8", np.dtype(np.uint8), is_floating=False),
    "BOOL": NumberType("bool", np.dtype(np.bool_), is_floating=False),
}
CODES = {kind.name: code for code, kind in TYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor that need not be in memory; `dtype` is one of the format's codes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return TYPES[self.dtype].numpy.itemsize

    @property
    def name(self) -> str:
        """ "bfloat16" for BF16."""
        return TYPES[self.dtype].name

    @property
    def is_floating(self) -> bool:
        return TYPES[self.dtype].is_floating

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class SafetensorsHeader:
    """The head of a safetensors file. `offsets` are (start, stop) in bytes from the start of the file."""

    metadata: dict[str, str]
    specs: dict[str, TensorSpec]
    offsets: dict[str, tuple[int, int]]


def main_dtype(specs: Iterable[TensorSpec]) -> str:
    """Name of the type that most bytes are stored in."""
    totals: dict[str, int] = {}
    for spec in specs:
        totals[spec.name] = totals.get(spec.name, 0) + spec.n_bytes
    return max(totals, key=lambda name: (totals[name], name)) if totals else "float32"


def ordered(specs: Mapping[str, TensorSpec], is_packed: bool = False) -> list[str]:
    """Names in the order of their data: by what each is aligned to, so that all data is, then by name."""
    return sorted(specs, key=lambda name: (-alignment(specs[name], is_packed), name))


def alignment(spec: TensorSpec, is_packed: bool) -> int:
    """Alignment of a tensor's data in bytes: its type's size; where weights are packed, a page if it fills
    whole ones, else a cache line.
    """
    if not is_packed:
        return spec.itemsize
    return PAGE_BYTES if spec.n_bytes % PAGE_BYTES == 0 else 64


def header_bytes(
    specs: Mapping[str, TensorSpec], order: Iterable[str], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The head of a file that holds the tensors in this order without gaps, always the same bytes for the same tensors.

    A multiple of 8 bytes, and with metadata a multiple of 4096, so that data can begin on a page.
    """
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in order:
        spec = specs[name]
        stop = position + spec.n_bytes
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(8 + len(text)) % (PAGE_BYTES if metadata else 8))
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path, limit_bytes: int = HEADER_LIMIT_BYTES) -> SafetensorsHeader:
    """Read and check the head of a file.

    Args:
        limit_bytes: that it may have.

    Raises:
        CheckpointError: there is no such file, it is not a safetensors file, or its length is not what its head says.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(limit_bytes, max(size - 8, 0)):
                raise CheckpointError(
                    f"{path} is not a safetensors file, or cut short: {size} bytes, a head of {length}"
                )
            text = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"no such file: {path} (the nearest that exists is {nearest_existing(path)})") from None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from None
    try:
        return _parse(json.loads(text), 8 + length, size, path)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path}: its head is damaged ({type(e).__name__}: {e})") from None


def _parse(entries: dict[str, Any], data_start: int, size: int, path: Path) -> SafetensorsHeader:
    metadata = entries.pop("__metadata__", None) or {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ holds something else than strings")
    specs: dict[str, TensorSpec] = {}
    offsets: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        shape = tuple(entry["shape"])
        if any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"tensor {name} has the shape {shape}")
        if entry["dtype"] not in TYPES:
            raise CheckpointError(f"{path}: tensor {name} is of type {entry['dtype']}, which is not supported")
        spec = TensorSpec(entry["dtype"], shape)
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
    return SafetensorsHeader(dict(metadata), specs, offsets)
