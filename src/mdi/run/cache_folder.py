"""What the user's cache folder has, whose it is, and removing it. All of it can be made or sent again, but the runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from mdi.checkpoint import kept_packed, part_users
from mdi.checkpoint.folder import GGUF_NOTE, MADE_TOKENIZERS, gguf_file
from mdi.checkpoint.hffolder import folder_record
from mdi.checkpoint.kept_packed import read_packed
from mdi.checkpoint.part_users import PartUser, read_users
from mdi.checkpoint.store import BlockStore
from mdi.engine import kept_prefixes
from mdi.errors import KernelError
from mdi.kernels import library
from mdi.placement import profiler
from mdi.run.journal import runs_in

# Kinds, as `mdi cache rm` takes them
RECEIVED, PACKED, KERNELS, RUNS, LEFTOVERS, OTHER = "received", "packed", "kernels", "runs", "leftovers", "other"
WEIGHTS = "weights"  # both of the first two
# Those that are files and folders under fixed names
PLACES = {
    "hashes": ("folders", "checked.json"),
    "settings": ("settings",),
    "profiles": (profiler.FILE,),
    "records": (kept_packed.FILE, part_users.FILE),
    "window": ("window",),
    "prefixes": (kept_prefixes.FOLDER,),
    "tokenizers": (MADE_TOKENIZERS,),
}
KINDS = (WEIGHTS, RECEIVED, PACKED, KERNELS, RUNS, *PLACES, LEFTOVERS)

YES, NO, ELSEWHERE, UNKNOWN = "yes", "no", "another machine", "unknown"  # whether a model is still there
_LEFT = re.compile(r".+\.(\d{1,9})\.part")  # what a process was writing, see files.replacing


@dataclass(frozen=True)
class Entry:
    """A row of the list.

    Attributes:
        model: whose it is; "" where it is no model's.
        is_there: whether that model is still there; "" where it is no model's.
        n_bytes: of all its files.
        used_s: when one of them was used last, in seconds since 1970.
        shas: parts of weights. They are removed by their store, which spares what is in use.
        files: others that may be removed.
    """

    kind: str
    model: str
    is_there: str
    n_bytes: int
    used_s: float
    shas: frozenset[str] = frozenset()
    files: tuple[Path, ...] = ()


def entries_of(folder: Path) -> list[Entry]:
    """What the folder has: of weights a row for each model and kind. The largest of a kind come first."""
    found = [*_weights(folder), *_kernels(folder / "kernels"), *_runs(folder / "runs")]
    for kind, names in PLACES.items():
        files = [file for name in names for file in _files_in(folder / name)]
        found += _entry(kind, "", "", files, files)
    left, others = _rest(folder)
    found += _entry(LEFTOVERS, "", NO, left, left)
    found += _entry(OTHER, "", "", others, ())
    order = (RECEIVED, PACKED, KERNELS, RUNS, *PLACES, LEFTOVERS, OTHER)
    return sorted(found, key=lambda entry: (order.index(entry.kind), -entry.n_bytes, entry.model))


def of_kind(entries: Iterable[Entry], kind: str) -> list[Entry]:
    return [entry for entry in entries if entry.kind == kind or (kind == WEIGHTS and entry.kind in (RECEIVED, PACKED))]


def of_model(folder: Path, entries: Iterable[Entry], name: str) -> list[Entry]:
    """The weights that a model alone has read, by its name or the end of its path; "unknown" are those of no known model."""
    if name == UNKNOWN:
        return [entry for entry in entries if entry.is_there == UNKNOWN]
    wanted, end = name.casefold(), "/" + name.casefold().replace(":", "--")

    def is_meant(user: PartUser) -> bool:
        return user.name.casefold() == wanted or Path(user.path).as_posix().casefold().endswith(end)

    return [entry for entry in entries if entry.shas and entry.shas <= _only_of(folder, is_meant)]


def remove(folder: Path, entries: Iterable[Entry]) -> int:
    """Remove what no process uses of some rows; returns how many bytes that were."""
    removed = 0
    store = BlockStore(folder)
    for entry in entries:
        removed += store.remove(entry.shas) if entry.shas else 0
        for path in entry.files:
            with contextlib.suppress(OSError):
                n_bytes = path.stat().st_size
                path.unlink()
                removed += n_bytes
                if path.parent.parent != folder and path.parent != folder:  # of a run
                    path.parent.rmdir()
    return removed


def remove_model(folder: Path, home: Path) -> int:
    """Remove what only the model of one folder, which may be gone already, has used; returns how many bytes that were.

    Args:
        folder: the cache's.
        home: whole name of the model's folder.
    """
    users = {user for of in read_users(folder).values() for user in of}
    own = {user for user in users if user.path and Path(user.path).is_relative_to(home)}
    names = {user.name for user in own} - {user.name for user in users - own if _is_there(user)}
    shas = _only_of(folder, lambda user: user in own or (not user.path and user.name in names))
    record = folder_record(folder, home)
    return remove(folder, [Entry(WEIGHTS, "", "", 0, 0, frozenset(shas), (record,))])


def shrink(folder: Path, limit_bytes: int) -> int:
    """Remove the least recently used weights that no process uses, until the folder has no more; returns bytes removed."""
    excess = sum(entry.n_bytes for entry in entries_of(folder)) - limit_bytes
    return BlockStore(folder).remove(n_bytes=excess) if excess > 0 else 0


def _only_of(folder: Path, is_meant: Callable[[PartUser], bool]) -> set[str]:
    """The parts that only these models have read."""
    return {sha256 for sha256, users in read_users(folder).items() if users and all(map(is_meant, users))}


def _is_there(user: PartUser) -> bool:
    path = Path(user.path)
    if not user.path or not path.exists():
        return False
    if (path / GGUF_NOTE).is_file():
        return (file := gguf_file(path)) is not None and file.is_file()
    return True


def _weights(folder: Path) -> Iterator[Entry]:
    noted, packed = read_users(folder), {sha256 for sha256, _ in read_packed(folder).values()}
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[str, int, float]]] = defaultdict(list)
    for path, n_bytes, used_s in BlockStore(folder).files():
        names = tuple(sorted({user.name for user in noted.get(path.stem, ())}))
        groups[PACKED if path.stem in packed else RECEIVED, names].append((path.stem, n_bytes, used_s))
    paths: dict[str, set[PartUser]] = defaultdict(set)  # by name, so that what one process only received counts as well
    for user in {user for of in noted.values() for user in of if user.path}:
        paths[user.name].add(user)
    for (kind, names), files in groups.items():
        known = [user for name in names for user in paths[name]]
        is_elsewhere = any(not paths[name] for name in names)
        is_there = (
            UNKNOWN if not names
            else YES if any(map(_is_there, known))
            else ELSEWHERE if is_elsewhere
            else NO
        )  # fmt: skip
        shas = frozenset(sha256 for sha256, _, _ in files)
        n_bytes, used_s = sum(n for _, n, _ in files), max(used_s for _, _, used_s in files)
        yield Entry(kind, ", ".join(names) or UNKNOWN, is_there, n_bytes, used_s, shas)


def _kernels(folder: Path) -> Iterator[Entry]:
    try:
        own = library.packaged_name().removesuffix(".so")
    except KernelError:  # there are no sources, so these libraries are of another installation
        own = "none"
    files = list(folder.glob(library.ANY_NAME))
    of_this = [path for path in files if path.name.startswith(own)]
    others = [path for path in files if not path.name.startswith(own)]
    yield from _entry(KERNELS, "this version", YES, of_this, of_this)
    yield from _entry(KERNELS, "other versions", NO, others, others)


def _runs(folder: Path) -> Iterator[Entry]:
    idle = [run.path for run in runs_in(folder)]
    running = [path for path in _files_in(folder) if path not in idle]
    yield from _entry(RUNS, "interrupted", "", idle, idle)
    yield from _entry(RUNS, "in use", "", running, ())


def _rest(folder: Path) -> tuple[list[Path], list[Path]]:
    """What processes that have ended were writing, and what is not ours."""
    known = {name for names in PLACES.values() for name in names} | {"kernels", "runs"}
    weights = {path for path, _, _ in BlockStore(folder).files()}
    left, others = [], []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name in known or path in weights:
                continue
            writer = _LEFT.fullmatch(path.name)
            if writer is not None and path.is_file() and not psutil.pid_exists(int(writer[1])):
                left.append(path)
            else:
                others += _files_in(path)
    return left, others


def _entry(
    kind: str, model: str, is_there: str, files: Collection[Path], removable: Collection[Path]
) -> Iterator[Entry]:
    """The row of some files; none if there are none."""
    stats = []
    for path in files:
        with contextlib.suppress(OSError):  # removed meanwhile
            stats.append(path.lstat())
    if stats:
        n_bytes, used_s = sum(stat.st_size for stat in stats), max(max(stat.st_atime, stat.st_mtime) for stat in stats)
        yield Entry(kind, model, is_there, n_bytes, used_s, files=tuple(removable))


def _files_in(path: Path) -> list[Path]:
    """The files of a folder, or the file itself. Links are not followed."""
    if path.is_symlink() or path.is_file():
        return [path]
    return [Path(where) / name for where, _, names in os.walk(path) for name in names]
