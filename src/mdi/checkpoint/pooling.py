"""How a model that embeds texts makes one row of all rows of a text, as its folder says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mdi.checkpoint.folder import POOLING_FILES
from mdi.errors import CheckpointError
from mdi.spec.settings_file import parse_json, read_limited

LIMIT_BYTES = 1 << 16
MODULES, POOLING = POOLING_FILES
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
# By the numbers of llama.cpp; those of models that rank texts are another head's.
_OF_GGUF = {
    1: "pooling_mode_mean_tokens",
    2: "pooling_mode_cls_token",
    3: "pooling_mode_lasttoken",
    4: "pooling_mode_rank",
}
_DONE = ("Transformer", "Pooling", "Normalize")  # modules that are computed here


def pooling_of(folder: Path) -> str | None:
    """One of spec.options.POOLINGS; None if the folder says nothing: its model was not made for this.

    Raises:
        CheckpointError: it says something else than a mean of all rows or the last one, or a file is damaged.
    """
    modules, pooling = (_read(folder / name) for name in (MODULES, POOLING))
    names = [str(one.get("type")).rpartition(".")[2] if isinstance(one, dict) else "" for one in modules or ()]
    if others := [name for name in names if name not in _DONE]:
        raise CheckpointError(f"{folder / MODULES}: modules {', '.join(_DONE)} are supported, found {others[0]!r:.60}")
    if pooling is None:
        return None
    stated = pooling.items() if isinstance(pooling, dict) else ()
    chosen = [name for name, value in stated if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise CheckpointError(f"{folder / POOLING}: expected one of {', '.join(_MODES)}, found {chosen!r:.200}")
    return _MODES[chosen[0]]


def write_pooling(folder: Path, number: Any) -> None:
    """Write what the field pooling_type of a GGUF file says, if it says something. The folder may not be writable: OSError."""
    if (mode := _OF_GGUF.get(number)) is not None:
        (folder / POOLING).parent.mkdir(exist_ok=True)
        (folder / POOLING).write_text(json.dumps({mode: True}), encoding="utf-8")


def _read(path: Path) -> Any:
    """None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return parse_json(read_limited(path, LIMIT_BYTES))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None
