"""Reads YAML and JSON files of others, with limits on what a small text can make a machine do. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mdi.errors import CheckpointError
from mdi.spec.limits import excess

TEXT_LIMIT_BYTES = 64 << 20  # of any file that is read as a whole
YAML_LIMIT_BYTES = 256 << 10  # real ones have a few kilobytes, and the parser takes seconds for a megabyte
VALUES_LIMIT = 20_000  # with aliases written out; a list with a number per block is the longest that models have


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """The content of a file. OSError if it cannot be read, or has more bytes: a device may have them without end."""
    with open(path, "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(f"it has more than {limit_bytes >> 20} MB, or no end")
    return content


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; see `parse_yaml`. Raises CheckpointError."""
    try:
        content = read_limited(path, TEXT_LIMIT_BYTES)
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from None
    return parse_yaml(content, str(path))


def parse_yaml(content: bytes, where: str) -> Any:
    """The values of a YAML text: mappings, lists and plain values.

    Raises:
        CheckpointError: it is not YAML, too large, or its aliases expand to too much (`where` names it).
    """
    import yaml

    if len(content) > YAML_LIMIT_BYTES:
        raise CheckpointError(f"{where} has more than {YAML_LIMIT_BYTES >> 10} KB: these are no settings of a model")
    try:
        data = yaml.safe_load(content.decode())
    except (yaml.YAMLError, ValueError) as e:
        raise CheckpointError(f"cannot read {where}: {' '.join(str(e).split())}") from None
    except RecursionError:
        raise CheckpointError(f"cannot read {where}: its values are nested too deeply") from None
    if _has_more(data, VALUES_LIMIT):
        raise CheckpointError(f"{where} stands for more than {VALUES_LIMIT} values: these are no settings of a model")
    return data


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, all of whose errors are a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def check_counts(settings: Mapping[str, Any], where: str) -> None:
    """Check the sizes of a model: whole numbers, and not more than any model has.

    Raises:
        CheckpointError: naming the field.
    """
    if too_much := excess(settings):
        raise CheckpointError(f"{where}: {too_much}")


def _has_more(data: Any, limit: int) -> bool:
    """Whether there are more than so many values, each alias counted as often as it is used."""
    n_values, waiting = 0, [data]
    while waiting and n_values <= limit:
        value = waiting.pop()
        n_values += 1
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set)):
            waiting += value
    return n_values > limit
