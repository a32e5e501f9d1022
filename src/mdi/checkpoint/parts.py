"""A model as parts: "embedding", "block.<i>" and "head", each with canonical bytes and their sha256.

The canonical bytes of a part are those of a safetensors file with just its tensors: names in LitGPT's global form, wide types
first and then by name, so that equal weights have equal bytes everywhere (little-endian, as all machines that torch runs on in
practice). Plain weights have no metadata; packed ones name their format (checkpoint.packing), and begin on a page. Knows
nothing of configurations, nor of where tensors come from.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from mdi.checkpoint.safetensors_layout import TensorSpec, header_bytes, ordered
from mdi.errors import CheckpointError
from mdi.spec.decode import Meta, Name, Sha256

PIECE_BYTES = 4 << 20

_BLOCK = re.compile(r"transformer\.h\.(0|[1-9][0-9]*)\.")


class Part(Protocol):
    """A part as it is asked for and checked: its name, hash and size."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def n_bytes(self) -> int: ...


@dataclass(frozen=True)
class PartInfo:
    """A part's name, the sha256 (64 hex digits) of its canonical bytes, and how many bytes those are."""

    name: Name
    sha256: Sha256
    n_bytes: Annotated[int, Meta(ge=1)]


def part_of(tensor_name: str) -> str:
    """The part that a tensor of a LitGPT model belongs to.

    Raises:
        CheckpointError: no LitGPT model has a tensor of this name.
    """
    if match := _BLOCK.match(tensor_name):
        return f"block.{match[1]}"
    if tensor_name.startswith(("transformer.wte.", "transformer.wpe.", "transformer.wte_norm.", "transformer.inputs.")):
        return "embedding"
    if tensor_name.startswith(("transformer.ln_f.", "lm_head.")):
        return "head"
    raise CheckpointError(f"{tensor_name} is not the name of a tensor of a LitGPT model")


def stage_parts(start: int, stop: int, *, starter: bool) -> list[str]:
    """Parts of a stage with the blocks [start, stop), in the order in which they are computed."""
    blocks = [f"block.{i}" for i in range(start, stop)]
    return ["embedding", *blocks, "head"] if starter else blocks


def serialize(
    specs: Mapping[str, TensorSpec], array: Callable[[str], np.ndarray], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The canonical bytes, in pieces of at most 4 MiB.

    Args:
        array: gives tensors by their names, one after the other; zeros at their ends may be missing.
    """
    order = ordered(specs, bool(metadata))
    yield from _cut(memoryview(header_bytes(specs, order, metadata)))
    for name in order:
        yield from array_bytes(array(name), specs[name].n_bytes)


def spec_bytes(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> int:
    """Length of the canonical bytes of tensors that need not be in memory."""
    return len(header_bytes(specs, ordered(specs, bool(metadata)), metadata)) + sum(
        spec.n_bytes for spec in specs.values()
    )


def sha256_of(
    specs: Mapping[str, TensorSpec], array: Callable[[str], np.ndarray], metadata: Mapping[str, str] | None = None
) -> str:
    digest = hashlib.sha256()
    for piece in serialize(specs, array, metadata):
        digest.update(piece)
    return digest.hexdigest()


def array_bytes(array: np.ndarray, n_bytes: int) -> Iterator[memoryview]:
    """The raw data of one tensor, and zeros up to so many bytes, in pieces of at most 4 MiB."""
    if array.size:
        yield from _cut(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    yield from _cut(memoryview(bytes(n_bytes - array.nbytes)))


def _cut(data: memoryview) -> Iterator[memoryview]:
    for i in range(0, len(data), PIECE_BYTES):
        yield data[i : i + PIECE_BYTES]


def from_offset(pieces: Iterable[bytes | memoryview], skip: int) -> Iterator[bytes | memoryview]:
    """The pieces without their first `skip` bytes."""
    for piece in pieces:
        if skip >= len(piece):
            skip -= len(piece)
        else:
            yield piece[skip:]
            skip = 0
