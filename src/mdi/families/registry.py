"""All families, and which one a model belongs to whose files do not say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mdi.errors import CheckpointError
from mdi.families.config_json import Json
from mdi.families.family import Family
from mdi.families.gguf import ROPE_FACTORS, Fields, Gguf, fields_of, rope_factors
from mdi.families.names import Held, Names, Piece, held
from mdi.model.plain import ModelConfig
from mdi.model.tensors import Shape

from . import (
    bloom,
    deepseek,
    ernie,
    falcon,
    gemma,
    gemma4,
    glm,
    gpt2,
    gpt_oss,
    llama,
    minimax,
    neox,
    olmo,
    opt,
    phi,
    qwen,
    qwen_next,
    smollm,
    stablelm,
)

_FILES = (
    llama, qwen, qwen_next, phi, glm, minimax, deepseek, gpt_oss, gemma, gemma4, olmo, stablelm, neox, falcon, bloom, opt, gpt2,
    ernie, smollm,
)  # fmt: skip
# By the model_type of config.json. A model that several can hold is taken for one of the first of them.
FAMILIES: dict[str, Family] = {family.model_type: family for file in _FILES for family in file.FAMILIES}
# Those of which GGUF files are read, by their architecture there.
GGUF: dict[str, list[tuple[Family, Gguf]]] = {}
for _family in FAMILIES.values():
    if _family.gguf is not None:
        GGUF.setdefault(_family.gguf.architecture, []).append((_family, _family.gguf))
# not what is computed
_NOT_COMPARED = ("name", "hf_config", "vocab_size", "padding_multiple")


def stated_family(hf: Json) -> Family | None:
    """That which config.json names; None if it names none that is here."""
    return FAMILIES.get(str(hf.get("model_type")))


def family_in_gguf(fields: Fields) -> tuple[Family, Gguf] | None:
    """That of a file; None if it is of an architecture that is not here. Raises ValueError."""
    known = GGUF.get(fields.arch, ()) if isinstance(fields.arch, str) else ()
    return next((found for found in known if found[1].is_one(fields)), None)


def written(config: ModelConfig) -> tuple[Family, Json]:
    """The family of a model, and its config.json: the first one whose config.json is read back as the same model.

    Raises:
        CheckpointError: transformers has no model with these settings.
    """
    found = _nearest(config)
    if found.differing:
        key = found.differing[0]
        raise CheckpointError(
            f"a Hugging Face {found.family.model_type} model has no such settings: {key} is {vars(config)[key]!r} here, and "
            f"would be {vars(found.again)[key]!r} there"
        )
    return found.family, found.hf


def family_of(config: ModelConfig) -> Family:
    """As `written`; of a model that no family has, the one that comes nearest to it."""
    return _nearest(config).family


class _Written(NamedTuple):
    """config.json of a model in a family, what it is read back as, and which settings are others then."""

    family: Family
    hf: Json
    again: ModelConfig
    differing: list[str]


def _nearest(config: ModelConfig) -> _Written:
    found = min(_all_written(config), key=lambda one: len(one.differing), default=None)
    if found is None:
        raise CheckpointError("a Hugging Face model has no such settings")
    return found


def _all_written(config: ModelConfig) -> Iterator[_Written]:
    ours = vars(config)
    for family in FAMILIES.values():
        if family.write is not None:
            try:
                hf = family.config_json(config)
                again = ModelConfig.of({**family.settings(hf), "name": config.name})
            except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
                continue  # nothing that the family has
            theirs = vars(again)
            yield _Written(
                family, hf, again, [key for key in ours if key not in _NOT_COMPARED and theirs[key] != ours[key]]
            )


def written_in_gguf(config: ModelConfig, shapes: Mapping[str, Shape], stated: Family | None = None) -> GgufWritten:
    """The architecture, fields and names with which a file is read back as the same model.

    Other programs compute by the architecture, perhaps otherwise than is read here. So only those families are asked whose
    tensors have the names of the model's own.

    Args:
        shapes: of all its tensors, by our names.
        stated: the family that the model's files name; None: the one whose config.json is read back as the same model.

    Raises:
        CheckpointError: there is none.
    """
    nearest = None if stated else min(_all_written(config), key=lambda one: len(one.differing), default=None)
    own = stated or (nearest.family if nearest and not nearest.differing else None)
    least: list[str] | None = None
    for family in FAMILIES.values() if own is None else (own, *FAMILIES.values()):
        if family.gguf is None or (own is not None and family.names(config) != own.names(config)):
            continue
        found = _in_gguf(family, family.gguf, config, shapes)
        if isinstance(found, GgufWritten):
            return found
        least = found if least is None or len(found) < len(least) else least
    told = f": {least[0]} would be another" if least and least[0] else ""
    raise CheckpointError(f"a GGUF file has no such settings as those of {config.name or 'this model'}{told}")


class GgufWritten(NamedTuple):
    """A model as a file has it.

    Attributes:
        fields: its metadata, with general.architecture.
        pieces: the tensors of the file that hold each of ours.
        more: tensors that none of ours is, by their names there.
        architecture, names: see Gguf.
    """

    fields: Json
    pieces: dict[str, tuple[Piece, ...]]
    more: dict[str, np.ndarray]
    architecture: str
    names: Names


def _in_gguf(family: Family, of: Gguf, config: ModelConfig, shapes: Mapping[str, Shape]) -> GgufWritten | list[str]:
    """Which settings would be others, if it is not the same model; "" where there is no telling."""
    values: Json = {"general.architecture": of.architecture}
    factors = rope_factors(config)
    more = {} if factors is None else {ROPE_FACTORS: factors}
    try:
        said = fields_of(config, of.own(config))
        values |= {f"{of.architecture}.{name}": _as_read(value) for name, value in said.items()}
        pieces = {name: of.names.places(name, shape, config)[0] for name, shape in shapes.items()}
        held = {piece.tensor: piece.shape for some in pieces.values() for piece in some}
        fields = Fields(values, held | {name: array.shape for name, array in more.items()}, more.__getitem__)
        if not of.is_one(fields):
            return [""] * len(vars(config))
        hf = {"model_type": family.model_type, **of.config_json(fields)}
        read = ModelConfig.of({**family.settings(hf), "name": config.name})
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError):
        return [""] * len(vars(config))
    again, theirs = vars(read), rope_factors(read)
    differing = [
        key
        for key, value in vars(config).items()
        if key not in _NOT_COMPARED and _as_read(value) != _as_read(again[key])
    ]
    if factors is not None and theirs is not None and np.allclose(factors, theirs, rtol=1e-3):
        differing = [
            key for key in differing if key != "rope_adjustments"
        ]  # files have the factors that follow from them
    return differing or GgufWritten(values, pieces, more, of.architecture, of.names)


def _as_read(value: Any) -> Any:
    """Numbers that are not whole have single precision in files."""
    if isinstance(value, Mapping):
        return {key: _as_read(one) for key, one in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value


def places_of(config: ModelConfig, layer: str) -> list[Held]:
    """What holds a layer of ours in a block, in any family: adapters name the modules of the model that they were made for."""
    found = [family.names(config).block.get(layer) for family in FAMILIES.values()]
    return list({(where.modules, where.heads): where for where in (held(one) for one in found if one)}.values())
