"""Imports single modules of litgpt without the package, which loads torch and lightning (seconds, 300 MB)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from typing import Any


@functools.cache
def litgpt_module(name: str) -> Any:
    """litgpt.<name>, a module that needs no torch. If litgpt is not loaded, it is a copy with its own classes."""
    found = None if "litgpt" in sys.modules else importlib.util.find_spec("litgpt")
    if found is None:
        return importlib.import_module(f"litgpt.{name}")
    package = types.ModuleType("litgpt")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules["litgpt"] = package
    try:
        return importlib.import_module(f"litgpt.{name}")
    finally:  # so that the whole package can still be loaded
        for loaded in [one for one in sys.modules if one == "litgpt" or one.startswith("litgpt.")]:
            del sys.modules[loaded]
