"""Code at the beginning of a program, after which some libraries are not installed for it."""

from __future__ import annotations

from collections.abc import Iterable

_BLOCKER = """
import sys

MISSING = {missing}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Missing())
"""


def without(libraries: Iterable[str]) -> str:
    """Args:
    libraries: by the names that are imported.
    """
    return _BLOCKER.format(missing=sorted(libraries))
