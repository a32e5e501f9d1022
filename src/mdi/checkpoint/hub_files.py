"""Files of a repository on the hub, by huggingface_hub's client. Does not read the files."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdi.cancel import Cancel
from mdi.checkpoint.disk_space import check_disk
from mdi.errors import Code, DownloadError

NOUNS = {"model": "model", "dataset": "data set"}  # by the hub's types of repositories


@dataclass(frozen=True)
class Repository:
    """A repository as the hub describes it.

    Attributes:
        commit: of the asked revision.
        sizes: bytes of each file.
        licence: as its card says it; "" if it does not.
    """

    repo_id: str
    repo_type: str
    revision: str | None
    commit: str
    sizes: dict[str, int]
    licence: str
    token: str | None

    @property
    def names(self) -> list[str]:
        return list(self.sizes)


def look_up(
    repo_id: str, *, token: str | None = None, revision: str | None = None, repo_type: str = "model"
) -> Repository:
    """Ask the hub for the files of a repository. It is the one of the environment variable HF_ENDPOINT, if that is set.

    Args:
        token: None takes HF_TOKEN, or the one that `hf auth login` stored.
        revision: a branch, tag or commit.
        repo_type: one of NOUNS.

    Raises:
        DownloadError: no such repository or revision, no access to it, or no connection.
    """
    token = token or os.environ.get("HF_TOKEN") or None
    with _explained(repo_id, revision, token, NOUNS[repo_type]) as endpoint:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=endpoint, token=token)
        info = api.repo_info(repo_id, repo_type=repo_type, revision=revision, files_metadata=True)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
    return Repository(repo_id, repo_type, revision, str(info.sha), sizes, _licence(info), token)


def fetch(
    found: Repository, folder: Path, names: Sequence[str], *, advice: str, progress: bool = True,
    cancel: Cancel | None = None, on_begin: Callable[[dict[str, int]], None] = lambda sizes: None,
) -> dict[str, int]:  # fmt: skip
    """Download files of a repository. Existing files are not downloaded again, and an unfinished one is continued.

    Args:
        advice: what to do where the disk is full.
        progress: draw bars on stderr.
        cancel: ends it after the present piece, with its error; so does an exception in the thread that waits here.
        on_begin: called with what is returned, when there is room and before the first file.

    Returns:
        How many bytes each file has.

    Raises:
        DownloadError: no access to it, no connection, or no room.
    """
    repo_id = found.repo_id
    wanted = {name: found.sizes[name] for name in names}
    check_disk(folder, _missing_bytes(folder, wanted), repo_id, DownloadError, advice)
    on_begin(wanted)
    with _explained(repo_id, found.revision, found.token, NOUNS[found.repo_type]) as endpoint:
        from huggingface_hub import snapshot_download

        def get(ending: Cancel) -> None:
            snapshot_download(
                repo_id, repo_type=found.repo_type, revision=found.commit, local_dir=folder, token=found.token,
                endpoint=endpoint, allow_patterns=[_literal(name) for name in wanted], tqdm_class=_bar(progress, ending),
                max_workers=4,
            )  # fmt: skip

        _in_a_thread(get, cancel or Cancel())
    cut = [name for name, size in wanted.items() if not has_file(folder, name, size)]
    if cut:
        raise DownloadError(
            f"{repo_id}: {cut[0]} is incomplete: run the command again to continue", code=Code.INCOMPLETE
        )
    return wanted


def _licence(info: Any) -> str:
    card = getattr(info, "card_data", None)
    named = (card.get("license_name") or card.get("license")) if card is not None else None
    tags = [tag.partition(":")[2] for tag in info.tags or [] if tag.startswith("license:")]
    return str(named or next(iter(tags), ""))


def has_file(folder: Path, name: str, n_bytes: int) -> bool:
    path = folder / name
    return path.is_file() and path.stat().st_size == n_bytes


def _in_a_thread(work: Callable[[Cancel], None], cancel: Cancel) -> None:
    """Do the work in a thread of its own, with a child of `cancel` that ends when this wait does, as by Ctrl-C.

    The hub's client waits for its own threads, for whole files, before it lets an interrupt through.
    """
    pool, ended = ThreadPoolExecutor(1, "download"), threading.Event()
    with cancel.child() as ending:
        try:
            done = pool.submit(work, ending)
            done.add_done_callback(lambda _: ended.set())
            with ending.waking(ended.set):
                ended.wait()
            ending.check()
            done.result()
        except BaseException:
            ending.cancel()
            raise
        finally:
            pool.shutdown(wait=False)


def _bar(is_shown: bool, cancel: Cancel) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # its `update` is called for each piece
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own class takes it
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": not is_shown})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts_bytes:  # the bar of files is updated in callbacks, whose errors only fill the log
                cancel.check()
            return super().update(n)

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
def _explained(repo_id: str, revision: str | None, token: str | None, what: str) -> Iterator[str | None]:
    """Gives the hub's address, None for the usual one; turns the client's exceptions into a DownloadError that helps."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when the client is imported
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT") or None
    hub = endpoint or "https://huggingface.co"
    failures: tuple[type[Exception], ...] = (OSError, *_network_errors())
    try:
        yield endpoint
    except errors.GatedRepoError:
        advice = (
            f"accept its licence on {hub}/{repo_id} with the account of your token"
            if token
            else f"accept its licence on {hub}/{repo_id}, make a token on {hub}/settings/tokens, and set HF_TOKEN=hf_... "
            "(or give it with --hf-token)"
        )
        raise DownloadError(f"{repo_id} is gated, and you have no access: {advice}", code=Code.GATED) from None
    except errors.RevisionNotFoundError:
        raise DownloadError(
            f"{repo_id} has no revision {revision!r} (branch, tag or commit) on {hub}", code=Code.REVISION
        ) from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"there is no {what} {repo_id} on {hub}, or it is private and needs HF_TOKEN: check the spelling",
            code=Code.UNKNOWN,
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        raise DownloadError(
            f"{repo_id} is not on this machine, and {hub} may not be asked (HF_HUB_OFFLINE) or cannot be reached: `mdi export` "
            "on a machine with it and `mdi import` here bring it without a network",
            code=Code.OFFLINE,
        ) from None
    except errors.HfHubHTTPError as e:
        status = getattr(getattr(e, "response", None), "status_code", "an error")
        reason = "your token is not accepted" if status in (401, 403) else str(e).splitlines()[0]
        raise DownloadError(f"{hub} answered {status} for {repo_id}: {reason}", code=Code.HUB) from None
    except failures as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        is_model = what == NOUNS["model"]
        elsewhere = "; or bring it from a machine that has it, with `mdi export` and `mdi import`" if is_model else ""
        raise DownloadError(
            f"{repo_id}: the connection to {hub} failed ({reason}): check the network and HF_ENDPOINT, and run the command "
            f"again to continue{elsewhere}",
            code=Code.CONNECTION,
        ) from None


def _network_errors() -> tuple[type[Exception], ...]:
    """Exceptions of the HTTP library under huggingface_hub, which was requests (with OSErrors), then httpx, then httpx2."""
    from huggingface_hub import get_session

    package = sys.modules[type(get_session()).__module__.partition(".")[0]]
    found = getattr(package, "HTTPError", None)
    return (found,) if isinstance(found, type) else ()
