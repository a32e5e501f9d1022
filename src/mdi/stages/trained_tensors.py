"""Tensors that are trained at the starter and that a node computes with for questions: their names, shapes, bytes and hashes.

    transformer.h.<i>.<layer>.1.<first>.a, .b, norm_1.gain, norm_2.gain   LoRA, as in a part of adapters (checkpoint.adapters)
    transformer.h.<i>.prompt                     (n, n_embd), added to the first n rows of a text before block i (deep prompts)
    transformer.h.<i>.prefix_key, prefix_value   (n, query groups * head_size), what all rows see before the first one; the
                                                 rows then have the positions from n on (prefix tuning)

Sources: Hu et al. 2021 (LoRA); Lester et al. 2021 (prompts); Liu et al. 2021, P-Tuning v2 (deep prompts); Li and Liang 2021
(prefixes); Borzunov et al. 2023, section 2.2 (all of them over servers that keep their blocks).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Generic, TypeVar

import numpy as np

from mdi.block_ranges import ADAPTER_PREFIX
from mdi.checkpoint.adapters import check_stored
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.virtual_rows import MOST_VIRTUAL, row_widths
from mdi.errors import CheckpointError, ControlError
from mdi.model.plain import ModelConfig, spec_of
from mdi.spec.decode import Meta, decode_text

T = TypeVar("T")

Trained = Mapping[str, np.ndarray]  # float32, by name
Shapes = dict[str, tuple[int, ...]]
_ShapesForm = dict[str, Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 24)], ...], Meta(min_length=1, max_length=2)]]

N_KEPT = 2  # sets of tensors, of a run at a node: those of a step, and of the one before
NONE: Trained = {}
_NAME = re.compile(r"transformer\.h\.(\d+)\.(.+)")


def block_of(name: str) -> int:
    """The block that a tensor belongs to. Raises ControlError (400)."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ControlError(f"{name[:200]!r} is no tensor of a block", 400)
    return int(match[1])


def of_blocks(trained: Trained, start: int, stop: int) -> Trained:
    """The tensors of some blocks, in the order in which they travel."""
    return {name: trained[name] for name in sorted(trained) if start <= block_of(name) < stop}


def is_learned(name: str) -> bool:
    """Whether gradients with respect to it are wanted."""
    return not name.endswith(".gain")


def joined_bytes(arrays: Sequence[np.ndarray]) -> memoryview:
    """Arrays of float32, one after the other, little-endian."""
    flat = [np.ascontiguousarray(array, dtype="<f4").reshape(-1) for array in arrays] or [np.empty(0, dtype="<f4")]
    return (flat[0] if len(flat) == 1 else np.concatenate(flat)).view(np.uint8).data


def header_of(trained: Trained) -> bytes:
    """Names and shapes, which travel before the numbers."""
    return json.dumps({name: tensor.shape for name, tensor in trained.items()}).encode() if trained else b""


def hash_of(trained: Trained) -> str:
    """Of a set of tensors: the sha256 of its bytes as they travel, the header and then the numbers."""
    found = hashlib.sha256(header_of(trained))
    for tensor in trained.values():
        found.update(joined_bytes([tensor]))
    return found.hexdigest()


class LastSets(Generic[T]):
    """The last N_KEPT sets of tensors that were used, by their hashes, each with a value. May be used from any thread."""

    def __init__(self) -> None:
        self._lock, self._is_closed = threading.Lock(), False
        self._sets: OrderedDict[str, T] = OrderedDict()

    def put(self, sha256: str, what: T) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._sets[sha256] = what
            self._sets.move_to_end(sha256)
            while len(self._sets) > N_KEPT:
                self._sets.popitem(last=False)

    def use(self, sha256: str) -> T | None:
        with self._lock:
            if sha256 in self._sets:
                self._sets.move_to_end(sha256)
            return self._sets.get(sha256)

    def forget(self, sha256: str, what: T) -> None:
        """No longer know a set, unless something else has become known of it."""
        with self._lock:
            if self._sets.get(sha256) is what:
                del self._sets[sha256]

    def close(self) -> None:
        """Forget all, and keep nothing from now on."""
        with self._lock:
            self._is_closed = True
            self._sets.clear()


def read_shapes(data: bytes | bytearray, config: ModelConfig, start: int, stop: int) -> Shapes:
    """Names and shapes of tensors for these blocks. Raises ControlError (400) if such blocks cannot have them."""

    def refused(message: str) -> ControlError:
        return ControlError(message, 400)

    shapes: Shapes = dict(decode_text(_ShapesForm, bytes(data), "the tensors", refused)) if data else {}
    adapters: dict[int, dict[str, TensorSpec]] = {}
    n_virtual = set[tuple[str, int]]()
    width = row_widths(spec_of(config))
    for name, shape in shapes.items():
        block, what = block_of(name), name.split(".", 3)[3]
        if not start <= block < stop:
            raise refused(f"{name}: a tensor of another block than {start} to {stop - 1}")
        if what not in width:
            adapters.setdefault(block, {})[name] = TensorSpec("F32", shape)
        elif len(shape) != 2 or shape[0] > MOST_VIRTUAL or shape[1] != width[what]:
            raise refused(f"{name} is of shape {list(shape)}; expected (at most {MOST_VIRTUAL}, {width[what]})")
        else:
            n_virtual.add((what.partition("_")[0], shape[0]))
    if len(n_virtual) > 1:
        raise refused("prompts or prefixes of several lengths")
    _check_pairs(shapes, refused)
    for block, specs in adapters.items():
        try:
            check_stored(specs, f"{ADAPTER_PREFIX}{block}", config, "tensors that are trained")
        except CheckpointError as e:
            raise refused(str(e)) from None
    return shapes


def _check_pairs(shapes: Shapes, refused: Callable[[str], ControlError]) -> None:
    for name in shapes:
        stem, _, kind = name.rpartition("_")
        if stem.endswith(".prefix") and f"{stem}_{'value' if kind == 'key' else 'key'}" not in shapes:
            raise refused(f"{name} without keys or values that belong to it")
