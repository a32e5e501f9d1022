"""What `make real` has fetched, and what transformers makes of it; tests without it say that they are skipped."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from real.published import EXPECTED, fetched, path_of

_fetched = functools.cache(fetched)


def published(name: str) -> Path:
    """A file that was fetched."""
    if name not in _fetched():
        pytest.skip(f"{name} is not there: make real")
    return path_of(name)


@functools.cache
def _expected(kind: str) -> Any:
    path = EXPECTED / f"{kind}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def expected(kind: str) -> Any:
    """What transformers computes, by write_expected.py as it is now."""
    from real.write_expected import version

    found = _expected(kind)
    if found.get("version") != version():
        pytest.skip(f"no {kind} of transformers: make real")
    return found["found"]
