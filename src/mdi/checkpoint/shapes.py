"""The shape of a model: its checked litgpt Config and the tensors that follow from it. Reads no weights."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mdi.checkpoint.modelshapes import Shape, shapes_of
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.errors import CheckpointError
from mdi.limits import excess
from mdi.litgpt_module import litgpt_module
from mdi.settings_file import check_counts, read_yaml


def read_config(path: Path) -> dict[str, Any]:
    """model_config.yaml as a litgpt Config with all defaults, as a plain dict. Raises CheckpointError."""
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected the settings of a model, found {type(data).__name__}")
    return full_config(data, str(path))


def full_config(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A litgpt Config as a plain dict, with every default filled in.

    Raises:
        CheckpointError: an unknown setting, one of the wrong kind, or ones that do not fit each other.
    """
    make = litgpt_module("config").Config
    defaults = asdict(make())
    for key, value in settings.items():
        if isinstance(defaults.get(key), (int, float)) and not isinstance(value, (int, float)):
            raise CheckpointError(f"{where}: {key}: expected a number such as {defaults[key]}, found {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{where}: {key}: expected a number, found {value}")
    check_counts(settings, where)
    try:
        config = asdict(make(**settings))
    except (TypeError, ValueError, AssertionError, AttributeError, KeyError, ArithmeticError) as e:
        raise CheckpointError(f"{where} describes no model that litgpt can build: {type(e).__name__}: {e}") from None
    if config["n_layer"] < 1:
        raise CheckpointError(f"{where}: n_layer: expected at least one block, found {config['n_layer']}")
    return config


def check_tensors(
    config: dict[str, Any], specs: Mapping[str, TensorSpec], parts: Iterable[str], where: str, packing: Packing | None = None
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
        if name not in specs:
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


def model_shapes(config: dict[str, Any], where: str) -> dict[str, Shape]:
    """Shape of every tensor of the model, by its name; nothing is built.

    Raises:
        CheckpointError: litgpt cannot build it.
    """
    return _known(config, where)[0]


def part_shapes(config: dict[str, Any], where: str, part: str) -> dict[str, Shape]:
    """As `model_shapes`, of the tensors of one part; nothing for a part that the model does not have."""
    return _known(config, where)[1].get(part, {})


_Known = tuple[dict[str, Shape], dict[str, dict[str, Shape]]]


def _known(config: dict[str, Any], where: str) -> _Known:
    try:
        return _model_shapes(json.dumps(config, sort_keys=True))
    except (ValueError, KeyError, TypeError, ArithmeticError) as e:
        raise CheckpointError(f"{where} describes no model that litgpt can build: {type(e).__name__}: {e}") from None


@functools.lru_cache(maxsize=4)
def _model_shapes(config_json: str) -> _Known:
    """All shapes, and by part: with many experts, to look through all names for each part takes seconds."""
    config = json.loads(config_json)
    if too_much := excess(config):
        raise ValueError(too_much)
    shapes = shapes_of(config)
    parts: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        parts.setdefault(part_of(name), {})[name] = shape
    return shapes, parts
