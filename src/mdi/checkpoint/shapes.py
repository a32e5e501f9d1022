"""The shape of a model: its litgpt Config, read and checked, and the tensors that litgpt's own GPT then has.

The GPT is built without memory. Knows no weights.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mdi.checkpoint.layout import TensorSpec
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.errors import CheckpointError
from mdi.limits import excess
from mdi.settings import check_counts, read_yaml

BLOCKS = "transformer.h."

Shape = tuple[int, ...]

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


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
    from litgpt.config import Config

    defaults = asdict(Config())
    for key, value in settings.items():
        if isinstance(defaults.get(key), (int, float)) and not isinstance(value, (int, float)):
            raise CheckpointError(f"{where}: {key}: expected a number such as {defaults[key]}, found {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{where}: {key}: expected a number, found {value}")
    check_counts(settings, where)
    try:
        config = asdict(Config(**settings))
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
    """Shape of every tensor of the model, by its name; one block of each sort is built, however many there are.

    Raises:
        CheckpointError: litgpt cannot build it.
    """
    try:
        return _model_shapes(json.dumps(config, sort_keys=True))
    except Exception as e:  # whatever a config that makes no sense leads to, deep in the model's code
        raise CheckpointError(f"{where} describes no model that litgpt can build: {type(e).__name__}: {e}") from None


@functools.lru_cache(maxsize=4)
def _model_shapes(config_json: str) -> dict[str, Shape]:
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT

    settings = json.loads(config_json)
    if too_much := excess(settings):
        raise ValueError(too_much)
    config = Config(**settings)
    small = copy(config)
    small.n_layer, small.n_expert = 1, min(config.n_expert, 2)
    with torch.device("meta"):
        model = GPT(small)
    around = {name: tuple(t.shape) for name, t in model.state_dict().items() if not name.startswith(BLOCKS)}
    n_dense = min(config.first_k_dense_replace or 0, config.n_layer)  # the first ones may have no experts
    dense = _block_shapes(config, 0) if n_dense else {}
    other = _block_shapes(config, n_dense) if n_dense < config.n_layer else {}
    blocks = {
        f"{BLOCKS}{i}.{name}": shape
        for i in range(config.n_layer)
        for name, shape in (dense if i < n_dense else other).items()
    }
    return {**around, **blocks}


def _block_shapes(config: Any, index: int) -> dict[str, Shape]:
    """Shapes of block `index`, by their names within it. Experts are all alike, so that two of them tell of a thousand."""
    import torch
    from litgpt.model import Block

    def built(n_expert: int) -> dict[str, Shape]:
        small = copy(config)
        small.n_expert = n_expert
        with torch.device("meta"):
            return {name: tuple(t.shape) for name, t in Block(small, index).state_dict().items()}

    if config.n_expert <= 3:
        return built(config.n_expert)
    two, three = built(2), built(3)
    found = {}
    for name, shape in two.items():
        if match := _EXPERT.fullmatch(name):
            if match[2] == "0":
                found.update({f"{match[1]}{i}{match[3]}": shape for i in range(config.n_expert)})
        else:  # what is as long as there are experts, such as the router
            found[name] = tuple(
                n if n == other else config.n_expert for n, other in zip(shape, three[name], strict=True)
            )
    return found
