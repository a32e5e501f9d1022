"""All families, and which one a model belongs to whose files do not say it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mdi.errors import CheckpointError
from mdi.families.config_json import Json
from mdi.families.family import Family
from mdi.families.gguf import Fields, Gguf
from mdi.families.names import Held, held
from mdi.model.plain import ModelConfig

from . import (
    bloom,
    ernie,
    falcon,
    gemma,
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
    llama, qwen, qwen_next, phi, glm, minimax, gpt_oss, gemma, olmo, stablelm, neox, falcon, bloom, opt, gpt2, ernie, smollm,
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


def places_of(config: ModelConfig, layer: str) -> list[Held]:
    """What holds a layer of ours in a block, in any family: adapters name the modules of the model that they were made for."""
    found = [family.names(config).block.get(layer) for family in FAMILIES.values()]
    return list({where.modules: where for where in (held(one) for one in found if one)}.values())
