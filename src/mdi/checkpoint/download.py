"""Downloads a model from the hub to <folder>/<org>/<name>, unless it is there. Does not read the files."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mdi.cancel import Cancel
from mdi.checkpoint.folder import (
    CHAT_TEMPLATE,
    CONFIG_FILE,
    POOLING_FILES,
    RANKS,
    is_hf_dir,
    is_lit_dir,
    is_repo_id,
    weight_files,
)
from mdi.checkpoint.hub_files import fetch, has_file, look_up
from mdi.errors import Code, DownloadError
from mdi.files import replacing
from mdi.spec.settings_file import parse_json

MARKER = ".mdi_download.json"

_SMALL = (
    "config.json", "generation_config.json", "model_config.yaml", "prompt_style.yaml", "special_tokens_map.json",
    CHAT_TEMPLATE, RANKS,
)  # fmt: skip
_FULL = "free some space (`mdi list`, `mdi rm`), or choose another disk with --store"
_USUAL = ("Q4_K_M", "Q4_0", "Q5_K_M", "Q8_0")  # of several GGUF files: small, with little loss
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")


def download(
    repo_id: str,
    ckpt_folder: str | Path,
    token: str | None = None,
    revision: str | None = None,
    progress: bool = True,
    tag: str | None = None,
    cancel: Cancel | None = None,
) -> Path:
    """Download a model's configuration, tokenizer and weights. Existing files are not downloaded again.

    Args:
        repo_id: "org/name".
        ckpt_folder: the model goes into <ckpt_folder>/<org>/<name>, a GGUF file into <name>--<its tag>.
        token, progress, cancel: see `hub_files`.
        revision: a branch, tag or commit; None takes the existing one, else the main branch.
        tag: of the GGUF file that is wanted, like "Q4_K_M"; None takes safetensors, or if there are none, the usual GGUF file.

    Returns:
        The model's directory.

    Raises:
        DownloadError: no such model, file or revision, no access, no connection, no disk space, or another revision is there.
    """
    if not is_repo_id(repo_id):
        raise DownloadError(f"{repo_id!r} is not the name of a model on the hub: expected org/name", code=Code.NAME)
    directory = _directory(ckpt_folder, repo_id, tag)
    if _is_complete(directory, repo_id, revision):
        return directory
    found = look_up(repo_id, token=token, revision=revision)
    names = choose_gguf(found.names, repo_id, tag) if tag else choose_files(found.names, repo_id)
    if own := gguf_tag(names[0]):  # as the files have it, not as it was typed
        directory = _directory(ckpt_folder, repo_id, own)
    marker = {"repo_id": repo_id, "revision": revision, "commit": found.commit, "licence": found.licence}

    def note(sizes: dict[str, int]) -> None:  # before the files, so that it tells later which are missing
        with replacing(directory / MARKER, DownloadError, makes_folder=True) as file:
            file.write(json.dumps({**marker, "files": sizes}, indent=1).encode())

    fetch(found, directory, names, advice=_FULL, progress=progress, cancel=cancel, on_begin=note)
    return directory


def fetch_settings(
    name: str, folder: Path, token: str | None = None, revision: str | None = None, cancel: Cancel | None = None
) -> Path:
    """The folder, below another, of a model's config.json, which is all that is downloaded. Raises DownloadError."""
    repo_id, _, tag = name.partition(":")
    found = look_up(repo_id, token=token, revision=revision)
    if tag or "config.json" not in found.names:
        raise DownloadError(
            f"{name} has no config.json, and its GGUF file says what it is: fetch that with `mdi pull {name}` first",
            code=Code.NO_FILES,
        )
    directory = _directory(folder, repo_id, None)
    fetch(found, directory, ["config.json"], advice=_FULL, progress=False, cancel=cancel)
    return directory


def _directory(folder: str | Path, repo_id: str, tag: str | None) -> Path:
    organisation, name = repo_id.split("/")
    return Path(folder, organisation, name if tag is None else f"{name}--{tag}")


def read_marker(directory: Path) -> dict[str, Any]:
    """Notes about a model, written when its download begins: where it is from, its licence, its files; {} of others."""
    try:
        found = parse_json((directory / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_unfinished(directory: Path) -> bool:
    """Whether files of the download are missing. Those of a model that was converted since may have been removed."""
    files = read_marker(directory).get("files")
    if not isinstance(files, dict) or _is_converted(directory, files):
        return False
    return not all((directory / name).is_file() for name in files)


def _is_converted(directory: Path, files: Collection[str]) -> bool:
    """Whether the model is there in LitGPT's form, while these files, its download, are in another."""
    return is_lit_dir(directory) and CONFIG_FILE not in files


def gguf_tag(name: str) -> str | None:
    """The type of a GGUF file by its name, as "Q4_K_M", else its stem; None of other files."""
    if not name.endswith(".gguf"):
        return None
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", name.rpartition("/")[2].removesuffix(".gguf"))
    match = re.search(r"(?:^|[-._])(I?Q\d[A-Z0-9_]*|BF16|F16|F32|MXFP4[A-Z0-9_]*)$", stem, re.IGNORECASE)
    return match[1].upper() if match else stem


def choose_gguf(names: Sequence[str], repo_id: str, tag: str | None) -> list[str]:
    """Choose one GGUF file, or all of a model that is split; None takes the usual type. Raises DownloadError: there is none."""
    tags: dict[str, list[str]] = {}
    for name in sorted(names):
        if (own := gguf_tag(name)) is not None and "mmproj" not in name.lower():
            tags.setdefault(own, []).append(name)
    if not tags:
        raise DownloadError(f"{repo_id} has no GGUF files: leave the part after the colon out", code=Code.NO_FILES)
    wanted = [tag] if tag is not None else [*_USUAL, *tags]
    chosen = next((own for one in wanted for own in tags if own.casefold() == one.casefold()), None)
    if chosen is None:
        near = difflib.get_close_matches(str(tag).upper(), tags, 1)
        meant = f": is {repo_id}:{near[0]} meant?" if near else ""
        raise DownloadError(
            f"{repo_id} has no GGUF file {tag}{meant} (there are {', '.join(tags)})", code=Code.NO_FILES
        )
    return tags[chosen]


def choose_files(names: Sequence[str], repo_id: str = "the model") -> list[str]:
    """Choose the files of a model that are needed: one set of weights, safetensors if there are some, and the small ones.

    Raises:
        DownloadError: there are no weights among them.
    """
    top = [name for name in names if "/" not in name]
    small = [name for name in top if name in _SMALL or name.startswith("tokenizer") and not name.endswith(".py")]
    small += [name for name in names if name in POOLING_FILES]
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
    if any(name.endswith(".gguf") for name in names):
        return choose_gguf(names, repo_id, None)
    raise DownloadError(
        f"{repo_id} has no weights in safetensors, GGUF or .bin files that this program can use", code=Code.NO_FILES
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
    is_whole = _is_converted(directory, files) or all(has_file(directory, name, size) for name, size in files.items())
    if is_whole and revision is not None and revision not in held:
        raise DownloadError(
            f"{directory} holds revision {marker['revision'] or 'main'} ({marker['commit']}) of {repo_id}, not {revision}: "
            "remove it, or choose another --store",
            code=Code.REVISION,
        )
    return is_whole
