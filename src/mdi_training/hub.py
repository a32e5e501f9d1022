"""Finds the texts of a data set on the hub. Does not read the files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from mdi.checkpoint.hub_files import fetch, look_up
from mdi.errors import Code, DownloadError
from mdi_training.texts import ROW_SUFFIXES, TEXT_SUFFIXES

_FULL = "free some space, choose another disk with --out, or fewer files with --files"
# Files of every repository that are not data.
_NOT_DATA = re.compile(r"(^|/)(readme|license|licence|requirements|\.git.*|dataset_infos?)[^/]*$", re.IGNORECASE)


def download_texts(
    repo_id: str,
    folder: Path,
    *,
    pattern: str | None = None,
    split: str = "train",
    token: str | None = None,
    revision: str | None = None,
) -> list[Path]:
    """Downloads a data set's files to a folder. Existing files are not downloaded again.

    Args:
        repo_id: "org/name".
        pattern, split: which files; see `choose_texts`.
        token, revision: see `checkpoint.hub_files.look_up`.

    Raises:
        DownloadError: no such data set or file, no access, no connection, or no room.
    """
    found = look_up(repo_id, token=token, revision=revision, repo_type="dataset")
    names = choose_texts(found.names, pattern, split, repo_id)
    return [folder / name for name in fetch(found, folder, names, advice=_FULL)]


def choose_texts(names: Sequence[str], pattern: str | None, split: str, repo_id: str = "the data set") -> list[str]:
    """Which files to take: those that match the pattern; else all of one kind, plain texts before rows.

    Where some of them name the split (as train-00000-of-00002.parquet does), only those.

    Raises:
        DownloadError: there is none; says which files there are.
    """
    known = [name for name in names if name.lower().endswith((*TEXT_SUFFIXES, *ROW_SUFFIXES))]
    if pattern is not None:
        found = sorted(name for name in known if fnmatch(name, pattern))
    else:
        found = _same_type([name for name in known if not _NOT_DATA.search(name)])
        word = re.compile(rf"(^|[^a-z]){re.escape(split.lower())}([^a-z]|$)")
        found = [name for name in found if word.search(name.lower())] or found
    if not found:
        what = (
            f"matches {pattern!r}" if pattern is not None else f"is one of {', '.join((*TEXT_SUFFIXES, *ROW_SUFFIXES))}"
        )
        have = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
        raise DownloadError(f"{repo_id} has no file that {what}; it has {have or 'none at all'}", code=Code.NO_FILES)
    return found


def _same_type(names: Sequence[str]) -> list[str]:
    for suffix in (*TEXT_SUFFIXES, *ROW_SUFFIXES):
        found = sorted(name for name in names if name.lower().endswith(suffix))
        if found:
            return found
    return []
