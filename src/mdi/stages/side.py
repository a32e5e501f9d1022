"""A side network: a small one beside the frozen blocks, at the starter, that reads their outputs (`mdi finetune`).

It sees a row's outputs of some blocks, the taps, and of the last one, and nothing of other positions; these the blocks
have looked at. With rms(x) = sqrt(mean(x ** 2) + 1e-6) and norm(x) = x / rms(x), over the numbers of a row:

    s = 0; for each tap t, and for the last block's x:   s += norm(t) D';   s += silu(norm(s) U') V'
    lm:       x + rms(x) * (norm(s) O')   goes into the model's own final norm and head
    classes:  norm(s) C' + b              are the logits of the classes

Sources: Sung et al. 2022, LST: Ladder Side-Tuning, section 3; Ouyang et al. 2024, Pluto and Charon (PAC), section 4.
In the kernels a row's result has the same bits in any company, as that of the head.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from mdi.checkpoint.safetensors_layout import STRANGERS_LIMIT_BYTES, TensorSpec, header_bytes, read_header
from mdi.control.messages import MOST_TAPS
from mdi.errors import CheckpointError, Code, KernelError, UsageError
from mdi.files import replacing
from mdi.kernels.blocks import Context, Linear
from mdi.kernels.layout import pack
from mdi.model.spec import ModelSpec
from mdi.spec.decode import Meta, Name, Text, decode_text, one_of
from mdi.spec.options import SIDE_FILE

KEY = "mdi_side"  # of the file's metadata
LM, CLASSES = "lm", "classes"
MOST_LABELS = 10_000
WIDTH_LIMIT = 1 << 14
EPS = np.float32(1e-6)

Tensors = Mapping[str, np.ndarray]  # float32, by the names of `SideShape.tensors`


@dataclass(frozen=True)
class Base:
    """The model that a side network belongs to.

    Attributes:
        model: its name.
        config_hash: of its config.
        sha256: of its last block, as `form` has it; the same block in another form has another hash.
    """

    model: Text
    config_hash: Text
    sha256: Text
    form: Text


@dataclass(frozen=True)
class SideShape:
    """The shape of a side network, without its numbers.

    Attributes:
        n_embd: of the model.
        taps: blocks whose outputs it reads, rising; the last block's outputs come always.
        width: numbers of its own state in a row.
        head: LM or CLASSES; labels are those of the classes.
    """

    base: Base
    n_embd: Annotated[int, Meta(ge=1, le=1 << 17)]
    taps: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MOST_TAPS)]
    width: Annotated[int, Meta(ge=1, le=WIDTH_LIMIT)]
    head: Annotated[str, one_of((LM, CLASSES))]
    labels: Annotated[tuple[Name, ...], Meta(max_length=MOST_LABELS)] = ()
    version: int = 1

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by its name."""
        found: dict[str, tuple[int, ...]] = {}
        for i in range(len(self.taps) + 1):
            found[f"down.{i}"] = self.width, self.n_embd
            found[f"up.{i}"] = 2 * self.width, self.width
            found[f"back.{i}"] = self.width, 2 * self.width
        if self.head == LM:
            return {**found, "out": (self.n_embd, self.width)}
        return {**found, "classes": (len(self.labels), self.width), "bias": (len(self.labels),)}


class SideNetwork:
    """Computes a text's rows at the starter, from the taps of its blocks.

    Args:
        tensors: of the shape's names and shapes.
        n_threads: of the kernels; without kernels numpy computes, and a row may differ in its last bits in other company.
        sha256: of its file; "" if it is of none.
    """

    def __init__(self, shape: SideShape, tensors: Tensors, n_threads: int = 1, sha256: str = "") -> None:
        self.shape, self.sha256 = shape, sha256
        try:
            context: Context | None = Context(n_threads)
        except KernelError:
            context = None
        self._bias = tensors.get("bias")
        self._layers = {name: _layer(context, tensors[name]) for name in shape.tensors() if name != "bias"}

    def __call__(self, x: np.ndarray, *seen: np.ndarray) -> np.ndarray:
        """float32 rows (M, n_embd) of the last block, and of each tap -> (M, n_embd), for final norm and head"""
        found: np.ndarray = x + _rms(x) * self._layers["out"](self._state(x, seen))
        return found

    def classify(self, x: np.ndarray, *seen: np.ndarray) -> np.ndarray:
        """The same rows -> float32 (M, classes)"""
        assert self._bias is not None
        found: np.ndarray = self._layers["classes"](self._state(x, seen)) + self._bias
        return found

    def _state(self, x: np.ndarray, seen: tuple[np.ndarray, ...]) -> np.ndarray:
        """float32 (M, width)"""
        assert len(seen) == len(self.shape.taps)
        state = np.zeros((len(x), self.shape.width), dtype=np.float32)
        for i, rows in enumerate((*seen, x)):
            state = state + self._layers[f"down.{i}"](_normed(rows))
            inner = self._layers[f"up.{i}"](_normed(state))
            state = state + self._layers[f"back.{i}"](inner / (1 + np.exp(-inner)))
        return _normed(state)


def _layer(context: Context | None, weight: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    if context is None:
        return lambda x: np.asarray(x @ weight.T, dtype=np.float32)
    linear = Linear(context, pack("float32", weight))
    return lambda x: linear(np.ascontiguousarray(x, dtype=np.float32))


def _rms(x: np.ndarray) -> np.ndarray:
    """float32 (M, n) -> (M, 1)"""
    found: np.ndarray = np.sqrt(np.square(x, dtype=np.float64).mean(axis=1, keepdims=True) + EPS).astype(np.float32)
    return found


def _normed(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = x / _rms(x)
    return found


# Its file: an adapter is a stranger's


def write_side(folder: Path, shape: SideShape, tensors: Tensors) -> Path:
    """Write its file into `folder`, which is made. Raises CheckpointError."""
    wanted = shape.tensors()
    specs = {name: TensorSpec("F32", wanted[name]) for name in wanted}
    path = folder / SIDE_FILE
    with replacing(path, makes_folder=True) as file:
        file.write(header_bytes(specs, list(wanted), {KEY: json.dumps(asdict(shape), sort_keys=True)}))
        for name in wanted:
            file.write(np.ascontiguousarray(tensors[name], dtype="<f4").tobytes())
    return path


def read_shape(folder: Path) -> SideShape:
    """The shape of the side network in a folder; its numbers are not read. Raises CheckpointError, UsageError."""
    path = folder / SIDE_FILE
    if not path.is_file():
        raise UsageError(
            f"{folder} has no {SIDE_FILE}: give a folder that `mdi finetune` wrote, or NAME=DIR for a folder in PEFT's form",
            code=Code.MISSING,
        )
    header = read_header(path, STRANGERS_LIMIT_BYTES)
    if KEY not in header.metadata:
        raise CheckpointError(f"{path} is no side network of `mdi finetune`")
    shape = decode_text(SideShape, header.metadata[KEY], str(path), CheckpointError)
    if shape.version != 1:
        raise CheckpointError(f"{path} is of version {shape.version}; this program reads version 1")
    if (shape.head == CLASSES) != bool(shape.labels) or list(shape.taps) != sorted(set(shape.taps)):
        raise CheckpointError(f"{path}: its labels do not fit its head, or its blocks do not rise")
    if header.specs != {name: TensorSpec("F32", of) for name, of in shape.tensors().items()}:
        raise CheckpointError(f"{path}: its tensors are not those of its description")
    return shape


def read_side(folder: Path, n_threads: int = 1) -> SideNetwork:
    """The side network in a folder. Raises CheckpointError, UsageError."""
    shape, path = read_shape(folder), folder / SIDE_FILE
    header = read_header(path, STRANGERS_LIMIT_BYTES)
    try:
        data = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from None
    tensors: dict[str, np.ndarray] = {}
    for name, of in shape.tensors().items():
        start, stop = header.offsets[name]
        if stop > len(data):
            raise CheckpointError(f"{path} was changed while it was read")
        tensors[name] = np.frombuffer(data[start:stop], dtype="<f4").reshape(of)
        if not np.isfinite(tensors[name]).all():
            raise CheckpointError(f"{path}: {name} has numbers that are not finite")
    return SideNetwork(shape, tensors, n_threads, hashlib.sha256(data).hexdigest())


def check_base(shape: SideShape, base: Base, spec: ModelSpec, folder: Path) -> None:
    """Raises UsageError if the side network in `folder` belongs to another model than `base`, which has that spec."""
    own = shape.base
    is_other = own.config_hash != base.config_hash or (own.form == base.form and own.sha256 != base.sha256)
    fits = shape.n_embd == spec.width and all(tap < spec.n_layer for tap in shape.taps)
    if is_other or not fits:
        raise UsageError(
            f"{folder} was trained for {own.model}, whose weights or shape are not those of {base.model}",
            code=Code.SHAPE,
        )
