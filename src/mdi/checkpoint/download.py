"""A model from the hub into <folder>/<org>/<name>, with huggingface_hub's own client. Knows nothing of what is in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mdi.checkpoint.convert import is_hf_dir, weight_files
from mdi.checkpoint.folder import CHAT_TEMPLATE, is_lit_dir, is_repo_id
from mdi.disk_space import check_disk
from mdi.errors import DownloadError
from mdi.settings_file import parse_json
from mdi.whole_files import replacing

MARKER = ".mdi_download.json"

_SMALL = (
    "config.json", "generation_config.json", "model_config.yaml", "prompt_style.yaml", "special_tokens_map.json",
    CHAT_TEMPLATE,
)  # fmt: skip
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")


def download(
    repo_id: str,
    ckpt_folder: str | Path,
    token: str | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Path:
    """Fetch a model's configuration, tokenizer and weights; what is there already is not fetched again.

    The hub is the one of the environment variable HF_ENDPOINT, if that is set.

    Args:
        repo_id: "org/name".
        ckpt_folder: the model goes into <ckpt_folder>/<org>/<name>.
        token: for models that ask for one; None takes HF_TOKEN, or the one that `hf auth login` stored.
        revision: a branch, tag or commit; None takes what is there, else the main branch.
        progress: draw bars on stderr.

    Returns:
        The model's directory.

    Raises:
        DownloadError: no such model or revision, no access to it, no connection, no room, or another revision is there.
    """
    if not is_repo_id(repo_id):
        raise DownloadError(f"{repo_id!r} is not the name of a model on the hub: expected org/name")
    directory = Path(ckpt_folder).joinpath(*repo_id.split("/"))
    if _is_complete(directory, repo_id, revision):
        return directory
    endpoint = os.environ.get("HF_ENDPOINT") or None
    token = token or os.environ.get("HF_TOKEN") or None
    with explained(repo_id, revision, endpoint, token):
        from huggingface_hub import HfApi

        info = HfApi(endpoint=endpoint, token=token).model_info(repo_id, revision=revision, files_metadata=True)
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or []}
        wanted = {name: sizes[name] for name in choose_files(list(sizes), repo_id)}
        _check_disk(directory, wanted, repo_id)
        _fetch(repo_id, str(info.sha), directory, list(wanted), token, endpoint, progress)
    cut = [name for name, size in wanted.items() if not _has(directory, name, size)]
    if cut:
        raise DownloadError(f"{repo_id}: {cut[0]} did not come whole: run the command again to go on")
    marker = {"repo_id": repo_id, "revision": revision, "commit": info.sha, "files": wanted}
    with replacing(directory / MARKER) as file:
        file.write(json.dumps(marker, indent=1).encode())
    return directory


def choose_files(names: Sequence[str], repo_id: str = "the model") -> list[str]:
    """Which of a model's files are needed: one set of weights, safetensors if there are some, and the small ones.

    Raises:
        DownloadError: there are no weights among them.
    """
    top = [name for name in names if "/" not in name]
    small = [name for name in top if name in _SMALL or name.startswith("tokenizer") and not name.endswith(".py")]
    lit = [name for name in top if name in ("lit_model.pth", "lit_model.safetensors")]
    if lit and "model_config.yaml" in top:
        return sorted({*small, lit[0]})
    for suffix, single in ((".safetensors", "model"), (".bin", "pytorch_model")):
        index = f"{single}{suffix}.index.json"
        shards = [name for name in top if name.endswith(suffix) and name not in _NOT_WEIGHTS]
        # some hold the same weights twice, for another program, as consolidated.safetensors
        named = [name for name in shards if re.fullmatch(rf"{single}(-\d+-of-\d+)?{re.escape(suffix)}", name)]
        if shards:
            return sorted({*small, *(named or shards), *([index] if index in top else [])})
    raise DownloadError(f"{repo_id} has no weights in safetensors or .bin files that this program could use")


def _fetch(
    repo_id: str,
    commit: str,
    directory: Path,
    names: list[str],
    token: str | None,
    endpoint: str | None,
    progress: bool,
) -> None:
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own class takes it
            super().__init__(*args, **{**kwargs, "disable": not progress})

    bar: Any = Bar
    snapshot_download(
        repo_id,
        revision=commit,
        local_dir=directory,
        allow_patterns=names,
        token=token,
        endpoint=endpoint,
        tqdm_class=bar,
        max_workers=4,
    )


def _is_complete(directory: Path, repo_id: str, revision: str | None) -> bool:
    """Whether nothing need be fetched. Raises DownloadError if another revision than the one wished is there."""
    try:
        marker = parse_json((directory / MARKER).read_text(encoding="utf-8"))
        held = {marker["revision"], marker["commit"]}
        files = dict(marker["files"])
    except (OSError, ValueError, KeyError, TypeError):
        # not downloaded by this program; then only what is there can be judged
        if revision is not None or not directory.is_dir():
            return False
        return is_lit_dir(directory) or is_hf_dir(directory) and all(f.is_file() for f in weight_files(directory))
    is_whole = is_lit_dir(directory) or all(_has(directory, name, size) for name, size in files.items())
    if is_whole and revision is not None and revision not in held:
        raise DownloadError(
            f"{directory} holds revision {marker['revision'] or 'main'} ({marker['commit']}) of {repo_id}, not {revision}: "
            "remove it, or choose another --ckpt-folder"
        )
    return is_whole


def _has(directory: Path, name: str, size: int) -> bool:
    path = directory / name
    return path.is_file() and path.stat().st_size == size


def _check_disk(directory: Path, wanted: dict[str, int], repo_id: str) -> None:
    partial = directory / ".cache" / "huggingface" / "download"
    here = sum(path.stat().st_size for path in partial.rglob("*.incomplete")) if partial.is_dir() else 0
    needed = sum(size for name, size in wanted.items() if not _has(directory, name, size)) - here
    check_disk(directory, needed, repo_id, DownloadError, "free some space, or choose another disk with --ckpt-folder")


@contextlib.contextmanager
def explained(
    repo_id: str, revision: str | None, endpoint: str | None, token: str | None, what: str = "model"
) -> Iterator[None]:
    """Turns what the hub's client raises into a DownloadError, one line that says what to do.

    Args:
        what: "model" or "data set".
    """
    from huggingface_hub import errors

    hub = endpoint or "https://huggingface.co"
    failures: tuple[type[Exception], ...] = (OSError, *_network_errors())
    try:
        yield
    except errors.GatedRepoError:
        advice = "ask for access on its page with the account of your token" if token else (
            "ask for access on its page, then give your token with --hf-token or HF_TOKEN"
        )  # fmt: skip
        raise DownloadError(f"{repo_id} is gated, and you have no access: {advice} ({hub}/{repo_id})") from None
    except errors.RevisionNotFoundError:
        raise DownloadError(f"{repo_id} has no revision {revision!r} (branch, tag or commit) on {hub}") from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"there is no {what} {repo_id} on {hub}, or it is private: check the spelling; a private one needs --hf-token"
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        raise DownloadError(f"{repo_id} is not here yet, and {hub} cannot be reached (offline?)") from None
    except errors.HfHubHTTPError as e:
        status = getattr(getattr(e, "response", None), "status_code", "an error")
        reason = "your token is not accepted" if status in (401, 403) else str(e).splitlines()[0]
        raise DownloadError(f"{hub} answered {status} for {repo_id}: {reason}") from None
    except failures as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise DownloadError(
            f"{repo_id}: the connection to {hub} failed ({reason}); run the command again to go on where it stopped"
        ) from None


def _network_errors() -> tuple[type[Exception], ...]:
    """What the HTTP library under huggingface_hub raises: httpx from 1.0 on, before that requests, with OSErrors."""
    try:
        import httpx
    except ImportError:
        return ()
    return (httpx.HTTPError,)
