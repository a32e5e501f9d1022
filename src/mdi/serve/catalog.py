"""Models by name: those of the store, and the one that the server was started with."""

from __future__ import annotations

import time
from pathlib import Path

from mdi.checkpoint.folder import is_usable
from mdi.checkpoint.model_store import ModelStore

LOOK_S = 2.0  # a list of that age is still good


class Catalog:
    """Args:
    home: the store.
    first: the folder that the server was started with; it may be elsewhere.
    """

    def __init__(self, home: Path, first: Path) -> None:
        self.home = home
        self._first = first
        self._found: dict[str, Path] = {}
        self._looked = -LOOK_S
        self.first_name = next((n for n, path in self._look().items() if _is_same(path, first)), first.absolute().name)

    def folders(self) -> dict[str, Path]:
        """Folders by model name; the server's first model comes first, the others in order."""
        if time.monotonic() - self._looked > LOOK_S:
            found = self._look()
            found.pop(self.first_name, None)
            self._found = {self.first_name: self._first, **found}
            self._looked = time.monotonic()
        return self._found

    def names(self) -> list[str]:
        return list(self.folders())

    def _look(self) -> dict[str, Path]:
        models = [model for model in ModelStore(self.home).models() if is_usable(model.folder)]
        return {model.name: model.folder for model in sorted(models, key=lambda model: model.name)}


def _is_same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False
