"""Downloads a model from the hub to <folder>/<org>/<name>, unless it is there. Does not read the files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from mdi.checkpoint.folder import CHAT_TEMPLATE, is_hf_dir, is_lit_dir, is_repo_id, weight_files
from mdi.checkpoint.hub_files import fetch, has_file
from mdi.errors import DownloadError
from mdi.files import replacing
from mdi.spec.settings_file import parse_json

MARKER = ".mdi_download.json"

_SMALL = (
    "config.json", "generation_config.json", "model_config.yaml", "prompt_style.yaml", "special_tokens_map.json",
    CHAT_TEMPLATE,
)  # fmt: skip
_FULL = "free some space, or choose another disk with --ckpt-folder"
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")


def download(
    repo_id: str,
    ckpt_folder: str | Path,
    token: str | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Path:
    """Download a model's configuration, tokenizer and weights. Existing files are not downloaded again.

    Args:
        repo_id: "org/name".
        ckpt_folder: the model goes into <ckpt_folder>/<org>/<name>.
        token, progress: see `hub_files.fetch`.
        revision: a branch, tag or commit; None takes the existing one, else the main branch.

    Returns:
        The model's directory.

    Raises:
        DownloadError: no such model or revision, no access, no connection, no disk space, or another revision is there.
    """
    if not is_repo_id(repo_id):
        raise DownloadError(f"{repo_id!r} is not the name of a model on the hub: expected org/name", code="name")
    directory = Path(ckpt_folder).joinpath(*repo_id.split("/"))
    if _is_complete(directory, repo_id, revision):
        return directory
    commit, sizes = fetch(
        repo_id, directory, lambda names: choose_files(names, repo_id), token=token, revision=revision, advice=_FULL,
        progress=progress,
    )  # fmt: skip
    marker = {"repo_id": repo_id, "revision": revision, "commit": commit, "files": sizes}
    with replacing(directory / MARKER) as file:
        file.write(json.dumps(marker, indent=1).encode())
    return directory


def choose_files(names: Sequence[str], repo_id: str = "the model") -> list[str]:
    """Choose the files of a model that are needed: one set of weights, safetensors if there are some, and the small ones.

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
    raise DownloadError(
        f"{repo_id} has no weights in safetensors or .bin files that this program can use", code="no_files"
    )


def _is_complete(directory: Path, repo_id: str, revision: str | None) -> bool:
    """Whether everything is there. Raises DownloadError if there is another revision."""
    try:
        marker = parse_json((directory / MARKER).read_text(encoding="utf-8"))
        held = {marker["revision"], marker["commit"]}
        files = dict(marker["files"])
    except (OSError, ValueError, KeyError, TypeError):
        # not downloaded by this program, so only the files themselves can be checked
        if revision is not None or not directory.is_dir():
            return False
        return is_lit_dir(directory) or is_hf_dir(directory) and all(f.is_file() for f in weight_files(directory))
    is_whole = is_lit_dir(directory) or all(has_file(directory, name, size) for name, size in files.items())
    if is_whole and revision is not None and revision not in held:
        raise DownloadError(
            f"{directory} holds revision {marker['revision'] or 'main'} ({marker['commit']}) of {repo_id}, not {revision}: "
            "remove it, or choose another --ckpt-folder",
            code="revision",
        )
    return is_whole
