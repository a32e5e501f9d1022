"""Which models the parts of a node's cache belong to: a record beside them, written where a node reads its parts.

Of several processes that write it at once the last one wins; a part that nobody noted belongs to a model that is not known.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from mdi.checkpoint.records import read_kept, write_kept
from mdi.checkpoint.store import BlockStore

FILE = "users.json"


class PartUser(NamedTuple):
    """A model.

    Attributes:
        name: of the model.
        path: whole name of its checkpoint on this machine; "" if another machine has it.
    """

    name: str
    path: str


def read_users(folder: Path) -> dict[str, set[PartUser]]:
    """The models that have read each part, by its sha256."""

    def take(data: Any) -> dict[str, set[PartUser]]:
        return {str(sha256): {PartUser(str(name), str(path)) for name, path in users} for sha256, users in data.items()}

    return read_kept(folder / FILE, take, {})


def note_user(store: BlockStore, shas: Collection[str], name: str, path: Path | None) -> None:
    """Record that a model has read those of the parts that are in the store; parts that are gone are forgotten."""
    here, user = set(store.parts()), PartUser(name, "" if path is None else str(path.resolve()))
    users = read_users(store.directory)
    if all(user in users.get(sha256, ()) for sha256 in here.intersection(shas)):
        return
    kept = {sha256: of for sha256, of in users.items() if sha256 in here}
    for sha256 in here.intersection(shas):
        kept.setdefault(sha256, set()).add(user)
    write_kept(store.directory / FILE, {sha256: sorted(of) for sha256, of in sorted(kept.items())})
