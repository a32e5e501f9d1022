"""Files of a repository on the hub, by huggingface_hub's client. Does not read the files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mdi.checkpoint.disk_space import check_disk
from mdi.errors import DownloadError

NOUNS = {"model": "model", "dataset": "data set"}  # by the hub's types of repositories


def fetch(
    repo_id: str, folder: Path, choose: Callable[[list[str]], Sequence[str]], *, token: str | None, revision: str | None,
    advice: str, repo_type: str = "model", progress: bool = True,
) -> tuple[str, dict[str, int]]:  # fmt: skip
    """Download the files that `choose` picks by their names. Existing files are not downloaded again.

    The hub is the one of the environment variable HF_ENDPOINT, if that is set.

    Args:
        token: None takes HF_TOKEN, or the one that `hf auth login` stored.
        revision: a branch, tag or commit.
        advice: what to do where the disk is full.
        repo_type: one of NOUNS.
        progress: draw bars on stderr.

    Returns:
        The commit, and how many bytes each file has.

    Raises:
        DownloadError: no such repository or revision, no access to it, no connection, or no room.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or None
    token = token or os.environ.get("HF_TOKEN") or None
    with _explained(repo_id, revision, endpoint, token, NOUNS[repo_type]):
        from huggingface_hub import HfApi, snapshot_download

        api = HfApi(endpoint=endpoint, token=token)
        info = api.repo_info(repo_id, repo_type=repo_type, revision=revision, files_metadata=True)
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
        wanted = {name: sizes[name] for name in choose(list(sizes))}
        check_disk(folder, _missing_bytes(folder, wanted), repo_id, DownloadError, advice)
        snapshot_download(
            repo_id, repo_type=repo_type, revision=str(info.sha), local_dir=folder, token=token, endpoint=endpoint,
            allow_patterns=[_literal(name) for name in wanted], tqdm_class=_bar(progress), max_workers=4,
        )  # fmt: skip
    cut = [name for name, size in wanted.items() if not has_file(folder, name, size)]
    if cut:
        raise DownloadError(f"{repo_id}: {cut[0]} is incomplete: run the command again to continue", code="incomplete")
    return str(info.sha), wanted


def has_file(folder: Path, name: str, n_bytes: int) -> bool:
    path = folder / name
    return path.is_file() and path.stat().st_size == n_bytes


def _bar(is_shown: bool) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own class takes it
            super().__init__(*args, **{**kwargs, "disable": not is_shown})

    return Bar


def _missing_bytes(folder: Path, wanted: dict[str, int]) -> int:
    """Bytes that are still missing; beginnings of files are kept from one call to the next."""
    partial = folder / ".cache" / "huggingface" / "download"
    here = sum(path.stat().st_size for path in partial.rglob("*.incomplete")) if partial.is_dir() else 0
    return sum(size for name, size in wanted.items() if not has_file(folder, name, size)) - here


def _literal(name: str) -> str:
    """The name as a pattern that matches only this name."""
    return re.sub(r"([*?\[])", r"[\1]", name)


@contextlib.contextmanager
def _explained(
    repo_id: str, revision: str | None, endpoint: str | None, token: str | None, what: str
) -> Iterator[None]:
    """Turns exceptions of the hub's client into a DownloadError that says what to do."""
    from huggingface_hub import errors

    hub = endpoint or "https://huggingface.co"
    failures: tuple[type[Exception], ...] = (OSError, *_network_errors())
    try:
        yield
    except errors.GatedRepoError:
        advice = "ask for access on its page with the account of your token" if token else (
            "ask for access on its page, then give your token with --hf-token or HF_TOKEN"
        )  # fmt: skip
        raise DownloadError(
            f"{repo_id} is gated, and you have no access: {advice} ({hub}/{repo_id})", code="gated"
        ) from None
    except errors.RevisionNotFoundError:
        raise DownloadError(
            f"{repo_id} has no revision {revision!r} (branch, tag or commit) on {hub}", code="revision"
        ) from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"there is no {what} {repo_id} on {hub}, or it is private: check the spelling; a private one needs --hf-token",
            code="unknown",
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        raise DownloadError(
            f"{repo_id} is not on this machine, and {hub} cannot be reached (offline?)", code="offline"
        ) from None
    except errors.HfHubHTTPError as e:
        status = getattr(getattr(e, "response", None), "status_code", "an error")
        reason = "your token is not accepted" if status in (401, 403) else str(e).splitlines()[0]
        raise DownloadError(f"{hub} answered {status} for {repo_id}: {reason}", code="hub") from None
    except failures as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise DownloadError(
            f"{repo_id}: the connection to {hub} failed ({reason}); run the command again to continue",
            code="connection",
        ) from None


def _network_errors() -> tuple[type[Exception], ...]:
    """Exceptions of the HTTP library under huggingface_hub: httpx from 1.0 on, before that requests, with OSErrors."""
    try:
        import httpx
    except ImportError:
        return ()
    return (httpx.HTTPError,)
