"""JSON files that save work for the next start. A missing or damaged file counts as empty."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mdi.errors import CheckpointError
from mdi.settings_file import parse_json
from mdi.whole_files import replacing

T = TypeVar("T")


def read_kept(path: Path, take: Callable[[Any], T], nothing: T) -> T:
    """Read the file with `take`, which may fail as reading from JSON does."""
    try:
        return take(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return nothing


def write_kept(path: Path, data: Any, makes_folder: bool = False) -> None:
    """Best effort: a place that cannot be written to will do."""
    with contextlib.suppress(CheckpointError), replacing(path, makes_folder=makes_folder) as file:
        file.write(json.dumps(data, indent=1).encode())
