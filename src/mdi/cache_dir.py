"""The cache folder of this system, for files that can be downloaded or made again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_cache_dir() -> Path:
    """MDI_CACHE_DIR, else our folder in the system's place for cache files."""
    if os.environ.get("MDI_CACHE_DIR"):
        return Path(os.environ["MDI_CACHE_DIR"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "mdi-llm"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mdi-llm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdi-llm"
