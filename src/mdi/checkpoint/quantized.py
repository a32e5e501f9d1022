"""Quantized tensors of Hugging Face folders: FP8 in blocks, MXFP4, and int4 of compressed-tensors.

Each is decoded when it is asked for, and stands under the name that a plain tensor would have. What is in half bytes can also
be had as it is stored, for weights that are packed without rounding them again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mdi.checkpoint.hfconfig import read_hf_config
from mdi.checkpoint.safetensors_layout import TYPES, TensorSpec
from mdi.errors import CheckpointError
from mdi.kernels.layout import (
    LARGEST_SCALE,
    Halves,
    bf16_from_float32,
    check_range,
    e2m1,
    floats,
    largest_of,
    power_scale,
)
from mdi.kernels.weight_formats import PACKED_ROWS
from mdi.spec.decode import shown

_FLOATS = ("F32", "BF16", "F16")
_NAN = 0x7F  # of FP8 without its sign


class TensorFile(Protocol):
    """A holder of tensors: a file, or one that is decoded from some of its tensors."""

    @property
    def path(self) -> Path: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def array(self, name: str, rows: slice | None = None) -> np.ndarray: ...


Files = Mapping[str, TensorFile]  # by the names of tensors


class Stored(NamedTuple):
    """A tensor in a file."""

    name: str
    file: TensorFile

    @property
    def spec(self) -> TensorSpec:
        return self.file.specs[self.name]

    def array(self, rows: slice | None = None) -> np.ndarray:
        return self.file.array(self.name, rows)

    def numbers(self, rows: slice | None = None) -> np.ndarray:
        """float32; raises CheckpointError if one is not finite."""
        array = self.array(rows)
        check_range("float32", largest_of(array), f"{self.file.path}: {self.name}", clips=False)
        return floats(array)


class Decoded(ABC):
    """A tensor (n_out, n_in) that several tensors of a file stand for.

    Attributes:
        form: of the kernels that has the same numbers; None if there is none.
    """

    form: str | None = None

    def __init__(self, name: str, path: Path, dtype: str, shape: tuple[int, int]) -> None:
        self.path = path
        self.specs = {name: TensorSpec(dtype, shape)}
        self._shape = shape

    def array(self, name: str, rows: slice | None = None) -> np.ndarray:
        """As `WeightFile.array`. Raises CheckpointError: a number is not finite."""
        spec = self.specs[name]
        first, last, _ = (rows or slice(None)).indices(self._shape[0])
        if last - first <= PACKED_ROWS:
            return self._numbers(first, last)
        found = np.empty((last - first, self._shape[1]), dtype=TYPES[spec.dtype].numpy)
        for start in range(first, last, PACKED_ROWS):
            stop = min(start + PACKED_ROWS, last)
            found[start - first : stop - first] = self._numbers(start, stop)
        return found

    @abstractmethod
    def _numbers(self, first: int, last: int) -> np.ndarray:
        """Of the rows [first, last)."""

    @property
    def has_halves(self) -> bool:
        """Whether `form` can hold it with the very numbers. Raises CheckpointError: a scale is not finite."""
        return False

    def halves(self, rows: slice) -> Halves:
        """Rows as they are stored, where it `has_halves`. Raises CheckpointError as `array`."""
        raise NotImplementedError


def read_quantization(folder: Path) -> Mapping[str, Any] | None:
    """The words of config.json on quantized weights; None if they are plain.

    Raises:
        CheckpointError: in a way that is not read.
    """
    config = read_hf_config(folder / "config.json", is_whole=True)
    nested = config.get("text_config")
    places = (config, nested if isinstance(nested, Mapping) else {})
    keys = ("quantization_config", "compression_config")
    found = next((place[key] for place in places for key in keys if place.get(key) is not None), None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method not in _METHODS:
        raise _refused(folder, f"by the method {shown(method)}, of which nothing is read (only {', '.join(_METHODS)})")
    _method_of(found).check(folder, found)
    return dict(found)


def decoded(folder: Path, files: Files, settings: Mapping[str, Any] | None) -> Files:
    """The tensors of a folder, those that are quantized decoded.

    Args:
        settings: as `read_quantization` gives them.

    Raises:
        CheckpointError: a tensor is missing, or does not fit to the others that it is decoded with.
    """
    found = dict(files)
    if settings is not None:
        method = _method_of(settings)
        for marker in [name for name in files if name.endswith(method.endings[0])]:
            stem = marker.removesuffix(method.endings[0])
            names = [stem + ending for ending in method.endings]
            if missing := [name for name in names if name not in files]:
                raise CheckpointError(
                    f"{folder}: the tensor {missing[0]} is missing, without which {marker} says nothing"
                )
            for name in names:
                del found[name]
            for one in method.decode(stem, *(Stored(name, files[name]) for name in names), settings):
                found |= dict.fromkeys(one.specs, one)
    for name, file in found.items():
        if file.specs[name].dtype.startswith("F8"):
            raise CheckpointError(f"{folder}: the tensor {name} is in FP8, without scales")
    return found


class Fp8Tensor(Decoded):
    """FP8 (E4M3) with a scale for each block; the last blocks of rows and columns may be short.

    Args:
        block: rows and columns of a block; None is one row.
    """

    def __init__(self, name: str, scale: Stored, weight: Stored, block: Sequence[int] | None) -> None:
        shape = weight.spec.shape
        self._weight, self._scale = weight, scale
        self._block = (1, max(1, *shape[-1:])) if block is None else tuple(block)
        blocks = tuple(-(-n // size) for n, size in zip(shape, self._block, strict=False))
        if weight.spec.dtype != "F8_E4M3" or len(shape) != 2:
            raise _odd(weight, "a matrix in float8_e4m3fn")
        if scale.spec.dtype not in _FLOATS or scale.spec.shape != blocks:
            raise _odd(scale, f"{list(blocks)} numbers, for blocks of {' x '.join(map(str, self._block))}")
        super().__init__(name, weight.file.path, "F32", (shape[0], shape[1]))

    def _numbers(self, first: int, last: int) -> np.ndarray:
        rows = self._weight.array(slice(first, last))
        if ((rows & _NAN) == _NAN).any():
            raise _not_finite(self._weight)
        height, width = self._block
        start = first // height
        scales = self._scale.numbers(slice(start, -(-last // height)))
        factors = np.repeat(scales, width, axis=1)[:, : self._shape[1]]
        if len(factors) > 1:
            factors = factors[np.arange(first, last) // height - start]
        numbers = _E4M3[rows]
        return np.multiply(numbers, factors, out=numbers)


class Mxfp4Tensor(Decoded):
    """MXFP4 (`_blocks`, `_scales`): a byte of 32 / 2 holds element 2i in its low half, and 2i + 1 in its high one.

    Args:
        expert: which of the stacked matrices, or None if there is one.
    """

    form = "mxfp4"

    def __init__(self, name: str, blocks: Stored, scales: Stored, expert: int | None) -> None:
        self._blocks, self._scales, self._expert = blocks, scales, expert
        n_out, n_groups = scales.spec.shape[-2:]
        super().__init__(name, blocks.file.path, "BF16", (n_out, 32 * n_groups))

    def _numbers(self, first: int, last: int) -> np.ndarray:
        scales, halves = self.halves(slice(first, last))
        numbers = e2m1(np.stack((halves & 15, halves >> 4), axis=2)).reshape(*scales.shape, 32)
        numbers *= power_scale(scales)[..., None]
        return bf16_from_float32(numbers).reshape(len(halves), -1)

    @property
    def has_halves(self) -> bool:
        return True

    def halves(self, rows: slice) -> Halves:
        scales, blocks = (self._rows(stored, rows) for stored in (self._scales, self._blocks))
        if scales.max(initial=0) > LARGEST_SCALE:
            raise _not_finite(self._scales)
        return Halves(scales, blocks.reshape(len(blocks), -1))

    def _rows(self, stored: Stored, rows: slice) -> np.ndarray:
        if self._expert is None:
            return stored.array(rows)
        return stored.array(slice(self._expert, self._expert + 1))[0, rows]


class PackedInt4(Decoded):
    """Int4 of compressed-tensors: eight numbers in an int32, the first in its lowest bits, each 8 too large."""

    form = "int4"

    def __init__(self, stem: str, packed: Stored, scale: Stored, shape: Stored, settings: Mapping[str, Any]) -> None:
        self._packed, self._scale = packed, scale
        sizes = shape.array().tolist() if shape.spec == TensorSpec("I64", (2,)) else []
        if len(sizes) != 2 or packed.spec != TensorSpec("I32", (sizes[0], -(-sizes[1] // 8))):
            raise _odd(packed, f"int32 for the {sizes} numbers of {shape.name}")
        n_out, n_in = sizes
        self._group = -(-n_in // scale.spec.shape[1]) if len(scale.spec.shape) == 2 and scale.spec.shape[1] else 0
        sizes_said = {weights.get("group_size") or n_in for weights in _weights_of_groups(settings)}
        is_whole = scale.spec.dtype in _FLOATS and scale.spec.shape[:1] == (n_out,) and self._group in sizes_said
        if not is_whole:
            raise _odd(scale, f"{n_out} rows of scales for groups of {' or '.join(map(str, sorted(sizes_said)))}")
        super().__init__(f"{stem}.weight", packed.file.path, "F32", (n_out, n_in))

    def _numbers(self, first: int, last: int) -> np.ndarray:
        rows, width = slice(first, last), self._shape[1]
        codes, scales = self._bytes(rows), self._scale.numbers(rows)
        numbers = np.stack((codes & 15, codes >> 4), axis=2).reshape(len(codes), -1)[:, :width]
        factors = np.repeat(scales, self._group, axis=1)[:, :width]
        return np.multiply(numbers.astype(np.float32) - 8, factors)

    @property
    def has_halves(self) -> bool:
        if self._group % 32 or self._shape[1] % 32:
            return False
        with np.errstate(over="ignore"):
            for first in range(0, self._shape[0], PACKED_ROWS):
                scales = self._scale.numbers(slice(first, min(first + PACKED_ROWS, self._shape[0])))
                if not np.array_equal(scales.astype(np.float16).astype(np.float32), scales):
                    return False
        return True

    def halves(self, rows: slice) -> Halves:
        scales = self._scale.numbers(rows).astype(np.float16)
        scales = np.repeat(scales, self._group // 32, axis=1)[:, : self._shape[1] // 32]
        return Halves(scales, self._bytes(rows))

    def _bytes(self, rows: slice) -> np.ndarray:
        return np.ascontiguousarray(self._packed.array(rows)).view(np.uint8)


def _mxfp4_tensors(stem: str, blocks: Stored, scales: Stored, settings: Mapping[str, Any]) -> list[Mxfp4Tensor]:
    """A matrix, or one for each expert, `...experts.<i>.<layer>.weight`."""
    shape = scales.spec.shape
    if len(shape) not in (2, 3) or scales.spec.dtype != "U8" or blocks.spec != TensorSpec("U8", (*shape, 16)):
        raise _odd(blocks, f"bytes in blocks of 16 for {scales.name} of the shape {list(shape)}")
    stem = stem.removesuffix(".weight")
    if len(shape) == 2:
        return [Mxfp4Tensor(f"{stem}.weight", blocks, scales, None)]
    module, _, layer = stem.rpartition(".")
    return [Mxfp4Tensor(f"{module}.{i}.{layer}.weight", blocks, scales, i) for i in range(shape[0])]


def _check_fp8(folder: Path, settings: Mapping[str, Any]) -> None:
    size = settings.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        raise _refused(folder, f"in FP8 with weight_block_size {shown(size)}, only blocks such as [128, 128] are read")
    _check_values(folder, settings, "FP8", fmt=("e4m3", "float8_e4m3fn"), activation_scheme=("dynamic",))


def _check_compressed(folder: Path, settings: Mapping[str, Any]) -> None:
    formats = ("pack-quantized", "float-quantized")
    _check_values(folder, settings, "compressed-tensors", format=formats, quantization_status=("compressed",))
    groups = _weights_of_groups(settings)
    if not groups:
        raise _refused(folder, "by compressed-tensors without config_groups")
    own: dict[str, tuple[Any, ...]] = {"num_bits": (4,), "type": ("int",), "strategy": ("group", "channel")}
    if settings.get("format") == "float-quantized":
        own = {"num_bits": (8,), "type": ("float",), "strategy": ("channel",)}
    for weights in groups:
        _check_values(
            folder,
            weights,
            "compressed-tensors",
            **own,
            symmetric=(True,),
            actorder=("static", "weight"),
            dynamic=(False,),
        )


def _weights_of_groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    values = [*groups.values()] if isinstance(groups, Mapping) else []
    found = [group.get("weights") if isinstance(group, Mapping) else None for group in values]
    return [weights if isinstance(weights, Mapping) else {} for weights in found]


def _check_values(folder: Path, settings: Mapping[str, Any], how: str, **allowed: tuple[Any, ...]) -> None:
    """Raises CheckpointError for a setting that changes what is stored; one that is not there has its usual value."""
    for key, values in allowed.items():
        if settings.get(key) is not None and settings[key] not in values:
            only = f", only {' or '.join(map(str, values))} is read" if values else ", which is not read"
            raise _refused(folder, f"in {how} with {key} {shown(settings[key])}{only}")


def _refused(folder: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: its weights are quantized {how}: take the model's original weights, or a GGUF file"
    )


def _odd(tensor: Stored, expected: str) -> CheckpointError:
    found = f"{tensor.spec.name}, {list(tensor.spec.shape)}"
    return CheckpointError(f"{tensor.file.path}: tensor {tensor.name} is {found}, expected {expected}")


def _not_finite(tensor: Stored) -> CheckpointError:
    return CheckpointError(
        f"{tensor.file.path}: {tensor.name} has numbers that are not finite: the checkpoint is damaged, fetch it again"
    )


def _e4m3() -> np.ndarray:
    """float32 of each byte: a sign, four bits of an exponent (bias 7), three of a fraction; two are NaN and not used."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(exponent, np.ldexp(8.0 + fraction, exponent - 10), np.ldexp(0.0 + fraction, -9))
    return np.where(code & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3()


class _Method(NamedTuple):
    """A way to quantize.

    Attributes:
        endings: of the names of tensors that belong together; the first one is found nowhere else.
    """

    check: Callable[[Path, Mapping[str, Any]], None]
    endings: tuple[str, ...]
    decode: Callable[..., Sequence[Decoded]]


_METHODS = {
    "fp8": _Method(
        _check_fp8,
        ("_scale_inv", ""),
        lambda name, scale, weight, settings: [Fp8Tensor(name, scale, weight, settings["weight_block_size"])],
    ),
    "mxfp4": _Method(lambda folder, settings: None, ("_blocks", "_scales"), _mxfp4_tensors),
    "compressed-tensors": _Method(
        _check_compressed,
        (".weight_packed", ".weight_scale", ".weight_shape"),
        lambda *stored: [PackedInt4(*stored)],
    ),
}
_FLOATS_OF_ROWS = _Method(
    _check_compressed,
    (".weight_scale", ".weight"),
    lambda stem, scale, weight, settings: [Fp8Tensor(f"{stem}.weight", scale, weight, None)],
)


def _method_of(settings: Mapping[str, Any]) -> _Method:
    if settings["quant_method"] == "compressed-tensors" and settings.get("format") == "float-quantized":
        return _FLOATS_OF_ROWS
    return _METHODS[settings["quant_method"]]
