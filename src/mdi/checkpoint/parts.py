"""Parts: the pieces in which a model is cut, stored, hashed and sent.

A part is the embedding, one block, or final norm and head, with its tensors under their names in the full model. Its
canonical bytes are those of a safetensors file that holds just its tensors, names sorted, without metadata: any
safetensors reader opens it, and its sha256 says which weights it holds, wherever they came from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mdi.errors import CheckpointError

PIECE_BYTES = 4 << 20
EMBEDDING, HEAD = "embedding", "head"

# torch dtype -> its name in a safetensors header
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class PartInfo:
    """Name of a part, sha256 (64 hex digits) and length of its canonical bytes."""

    name: str
    sha256: str
    n_bytes: int


def part_of(tensor_name: str) -> str:
    """The part that a tensor of litgpt's GPT belongs to; CheckpointError if it is no such tensor."""
    if tensor_name.startswith("transformer.h."):
        number = tensor_name.split(".")[2]
        if number.isdigit():
            return f"block.{int(number)}"
    if tensor_name.startswith("transformer.wte."):
        return EMBEDDING
    if tensor_name.startswith(("transformer.ln_f.", "lm_head.")):
        return HEAD
    raise CheckpointError(f"{tensor_name!r} is no tensor of a LitGPT model")


def stage_parts(start: int, stop: int, *, starter: bool) -> list[str]:
    """Parts of the stage with blocks [start, stop); the starter's has embedding and head as well."""
    blocks = [f"block.{i}" for i in range(start, stop)]
    return [EMBEDDING, *blocks, HEAD] if starter else blocks


def header(shapes: Mapping[str, tuple[str, list[int], int]], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors header, its length included.

    Args:
        shapes: tensor name -> (safetensors dtype, shape, bytes), in the order in which their data follow.
        metadata: strings to store beside them.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape, n_bytes) in shapes.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + n_bytes]}
        offset += n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def entry(tensor: torch.Tensor) -> tuple[str, list[int], int]:
    """What `header` needs to know of a tensor."""
    if tensor.dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"weights of type {tensor.dtype} cannot be stored")
    return SAFETENSORS_DTYPES[tensor.dtype], list(tensor.shape), tensor.numel() * tensor.element_size()


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in pieces of at most PIECE_BYTES."""
    if tensor.numel() == 0:
        return
    view = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for i in range(0, len(view), PIECE_BYTES):
        yield view[i : i + PIECE_BYTES]


def serialize(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The canonical bytes of a part, piece by piece, one tensor in memory at a time."""
    names = sorted(tensors)
    yield header({name: entry(tensors[name]) for name in names})
    for name in names:
        yield from pieces(tensors[name])


def serialized_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Length of the canonical bytes."""
    shapes = {name: entry(tensors[name]) for name in sorted(tensors)}
    return len(header(shapes)) + sum(n_bytes for _, _, n_bytes in shapes.values())


def sha256_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash of the canonical bytes."""
    digest = hashlib.sha256()
    for piece in serialize(tensors):
        digest.update(piece)
    return digest.hexdigest()


def write_part(path: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> PartInfo:
    """Write the canonical bytes to a file, whole or not at all."""
    digest = hashlib.sha256()
    unfinished = path.with_name(path.name + ".part")
    try:
        with open(unfinished, "wb") as file:
            for piece in serialize(tensors):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            n_bytes = file.tell()
        os.replace(unfinished, path)
    except OSError as e:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {e.strerror or e}") from None
    return PartInfo(name, digest.hexdigest(), n_bytes)
