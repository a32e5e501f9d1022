"""Models that litgpt's table lacks, by their names on the hub: what of their config.json says how large they are.

A plan for a model whose files are not here needs no more. The files themselves, where they are, are read and never compared.
"""

from __future__ import annotations

from pathlib import Path

from mdi.checkpoint.hfconfig import derive_config
from mdi.families.config_json import Json
from mdi.families.registry import FAMILIES
from mdi.spec.model import ModelConfig

# name on the hub -> config.json, without the fields that say nothing of sizes or have the value that is assumed
PUBLISHED: dict[str, Json] = {name: hf for family in FAMILIES.values() for name, hf in family.published.items()}


def published_config(name: str) -> ModelConfig | None:
    """The configuration of a model of `PUBLISHED`; None if it is not there.

    Args:
        name: with its organisation or without.

    Raises:
        CheckpointError: nothing here computes this model.
    """
    found = next((hub for hub in PUBLISHED if name in (hub, hub.partition("/")[2])), None)
    return None if found is None else derive_config(PUBLISHED[found], found.partition("/")[2], Path(found))
