"""Models by name: those of the store, and the one that the server was started with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mdi.checkpoint.folder import is_usable
from mdi.checkpoint.model_store import ModelStore
from mdi.errors import UsageError

LOOK_S = 2.0  # a list of that age is still good


class Catalog:
    """Args:
    home: the store.
    first: the folder that the server was started with; it may be elsewhere.
    adapters: names of the first model with an adapter; they may become others.
    aliases: for patterns of names that requests may have (claude-*), the names here that are meant.

    Raises:
        UsageError: an adapter has the name of a model, or an alias means none.
    """

    def __init__(self, home: Path, first: Path, adapters: Sequence[str] = (), aliases: Mapping[str, str] = {}) -> None:
        self.home = home
        self._first = first
        self._found: dict[str, Path] = {}
        self._looked = -LOOK_S
        self.adapters = tuple(adapters)
        self._aliases = dict(aliases)
        self.first_name = next((n for n, path in self._look().items() if _is_same(path, first)), first.absolute().name)

        if taken := sorted({*self._look(), self.first_name}.intersection(self.adapters)):
            raise UsageError(f"--adapter {taken[0]}: there is a model of that name")
        for pattern, name in self._aliases.items():
            if name not in self.names():
                raise UsageError(
                    f"--alias {pattern}={name}: there is no model {name}; there are {', '.join(self.names())}"
                )

    def meant(self, asked: str) -> str:
        """The name here for one that a request has; itself if there is none."""
        found = next((name for pattern, name in self._aliases.items() if fnmatchcase(asked[:200], pattern)), "")
        return found if found and asked and asked not in self.names() else asked

    def model_of(self, name: str) -> str:
        """The model that is loaded for a name: an adapter's is the first."""
        return self.first_name if name in self.adapters else name

    def folders(self) -> dict[str, Path]:
        """Folders by model name; the server's first model comes first, the others in order."""
        if time.monotonic() - self._looked > LOOK_S:
            found = self._look()
            found.pop(self.first_name, None)
            self._found = {self.first_name: self._first, **found}
            self._looked = time.monotonic()
        return self._found

    def names(self) -> list[str]:
        """Of models, and of adapters, which stand for the model with them."""
        first, *others = self.folders()
        return [first, *self.adapters, *others]

    def _look(self) -> dict[str, Path]:
        models = [model for model in ModelStore(self.home).models() if is_usable(model.folder)]
        return {model.name: model.folder for model in sorted(models, key=lambda model: model.name)}


def _is_same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False
