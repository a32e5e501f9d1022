"""The texts of a data set on the hub, with huggingface_hub's own client. Knows nothing of what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from mdi.checkpoint.download import explained
from mdi.disk_space import check_disk
from mdi.errors import DownloadError
from mdi.training.texts import ROW_SUFFIXES, TEXT_SUFFIXES

# What lies in every repository and is no data.
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
    """Fetches a data set's files into a folder; those that are there already are not fetched again.

    The hub is the one of the environment variable HF_ENDPOINT, if that is set.

    Args:
        repo_id: "org/name".
        pattern, split: which files; see `choose_texts`.
        token: for data sets that ask for one; None takes HF_TOKEN, or the one that `hf auth login` stored.
        revision: a branch, tag or commit.

    Raises:
        DownloadError: no such data set or file, no access, no connection, or no room.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or None
    token = token or os.environ.get("HF_TOKEN") or None
    with explained(repo_id, revision, endpoint, token, "data set"):
        from huggingface_hub import HfApi, snapshot_download

        api = HfApi(endpoint=endpoint, token=token)
        info = api.dataset_info(repo_id, revision=revision, files_metadata=True)
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
        wanted = choose_texts(list(sizes), pattern, split, repo_id)
        _check_disk(folder, sum(sizes[name] for name in wanted if not _has(folder, name, sizes[name])), repo_id)
        snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=str(info.sha),
            local_dir=folder,
            allow_patterns=[_literal(name) for name in wanted],
            token=token,
            endpoint=endpoint,
            max_workers=4,
        )
    cut = [name for name in wanted if not _has(folder, name, sizes[name])]
    if cut:
        raise DownloadError(f"{repo_id}: {cut[0]} did not come whole: run the command again to go on")
    return [folder / name for name in wanted]


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
        raise DownloadError(f"{repo_id} has no file that {what}; it has {have or 'none at all'}")
    return found


def _same_type(names: Sequence[str]) -> list[str]:
    for suffix in (*TEXT_SUFFIXES, *ROW_SUFFIXES):
        found = sorted(name for name in names if name.lower().endswith(suffix))
        if found:
            return found
    return []


def _literal(name: str) -> str:
    """The name as a pattern that matches nothing else."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _has(folder: Path, name: str, size: int) -> bool:
    path = folder / name
    return path.is_file() and path.stat().st_size == size


def _check_disk(folder: Path, n_bytes: int, repo_id: str) -> None:
    advice = "free some space, choose another disk with --out, or fewer files with --files"
    check_disk(folder, n_bytes, repo_id, DownloadError, advice)
