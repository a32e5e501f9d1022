"""The shape of a model: its checked configuration, and names and shapes of the tensors that follow from it. Reads no weights,
builds no model, and needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.errors import CheckpointError
from mdi.kernels.weight_formats import weight_format
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Attention, ModelSpec
from mdi.model.tensors import BLOCKS, Shape, Shapes, block_tensors, end_tensors
from mdi.spec.settings_file import read_yaml


def shapes_of(config: ModelConfig) -> Shapes:
    """Shape of every tensor, by its name.

    Raises:
        ValueError, KeyError, TypeError: there is no such model.
    """
    spec = spec_of(config)
    shapes = end_tensors(spec)
    kinds = {one: block_tensors(one, spec.width) for one in spec.kinds}
    for i, block in enumerate(spec.blocks):
        shapes.update({f"{BLOCKS}{i}.{name}": shape for name, shape in kinds[block].items()})
    if strange := next((name for name, shape in shapes.items() if any(type(n) is not int for n in shape)), None):
        raise ValueError(f"the shape of {strange} would be {shapes[strange]}")
    return shapes


def interleaved_rows(spec: ModelSpec) -> np.ndarray:
    """Where the rows of query, key and value are in a matrix that has them group by group; all queries come first."""
    mixer = spec.blocks[0].mixer  # the families that have such matrices have equal blocks
    assert isinstance(mixer, Attention)
    n_groups, per_group, size = mixer.n_groups, mixer.queries_per_group, mixer.head_size
    rows = np.arange(n_groups * (per_group + 2) * size).reshape(n_groups, per_group + 2, size)
    return np.concatenate([part.reshape(-1) for part in (rows[:, :per_group], rows[:, -2], rows[:, -1])])


def read_config(path: Path) -> ModelConfig:
    """Read a model_config.yaml. Raises CheckpointError."""
    return full_config(read_yaml(path), str(path))


def full_config(plain: Any, where: str) -> ModelConfig:
    """`ModelConfig.of`, but raises CheckpointError, which begins with `where`."""
    try:
        return ModelConfig.of(plain)
    except ValueError as e:
        raise CheckpointError(f"{where}: {e}") from None


def check_tensors(
    config: ModelConfig, specs: Mapping[str, TensorSpec], parts: Iterable[str], where: str, packing: Packing | None = None
) -> None:  # fmt: skip
    """Check that the tensors are just those of these parts of the model.

    Args:
        packing: the formats that they are stored in; None if they are plain.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape.
    """
    names = set(parts)
    wanted = {name: shape for name, shape in model_shapes(config, where).items() if part_of(name) in names}
    known = set(wanted)
    for name, shape in wanted.items():
        if name not in specs and not (packing is not None and packing.leaves_out(name)):
            raise CheckpointError(f"{where} lacks the tensor {name}, of shape {list(shape)}")
        if packing is not None:
            known |= packing.check(name, shape, specs, where)
        elif specs[name].shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has the shape {list(specs[name].shape)}, expected {list(shape)} by the model's config"
            )
    for name in specs:
        if name not in known:
            raise CheckpointError(f"{where} holds the tensor {name}, which the model's config does not ask for")


def model_shapes(config: ModelConfig, where: str) -> dict[str, Shape]:
    """Shape of every tensor of the model, by its name; nothing is built.

    Raises:
        CheckpointError: litgpt cannot build it.
    """
    return _known(config, where)[0]


def part_shapes(config: ModelConfig, where: str, part: str) -> dict[str, Shape]:
    """As `model_shapes`, of the tensors of one part; nothing for a part that the model does not have."""
    return _known(config, where)[1].get(part, {})


def packed_bytes(config: ModelConfig, where: str, parts: Iterable[str], form: str) -> int:
    """Memory of plain parts when they are packed in a format, and while rows of their widest tensor are packed."""
    found = weight_format(form)
    shapes = {name: shape for part in parts for name, shape in part_shapes(config, where, part).items()}
    whole = sum(found.tensor_bytes(name, shape) for name, shape in shapes.items())
    return round(whole) + found.load_bytes(widest(shapes.values()))


def widest(shapes: Iterable[Shape]) -> int:
    """Numbers in a row of the widest matrix."""
    return max((shape[1] for shape in shapes if len(shape) == 2), default=0)


_Known = tuple[dict[str, Shape], dict[str, dict[str, Shape]]]


def _known(config: ModelConfig, where: str) -> _Known:
    try:
        return _model_shapes(config)
    except (ValueError, KeyError, TypeError, ArithmeticError) as e:
        raise CheckpointError(f"{where} describes no model that litgpt can build: {type(e).__name__}: {e}") from None


@functools.lru_cache(maxsize=4)
def _model_shapes(config: ModelConfig) -> _Known:
    """All shapes, and by part: with many experts, to look through all names for each part takes seconds."""
    shapes = shapes_of(config)
    parts: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        parts.setdefault(part_of(name), {})[name] = shape
    return shapes, parts
