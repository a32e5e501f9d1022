"""The folder of a checkpoint: its path, its files, its number of blocks. Without torch and litgpt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mdi.errors import CheckpointError, UsageError
from mdi.spec.cluster import nearest_existing
from mdi.spec.settings_file import parse_json, read_yaml

WEIGHT_FILES = ("lit_model.pth", "lit_model.safetensors")
CONFIG_FILE = "model_config.yaml"
CHUNKS = "chunks"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    CHAT_TEMPLATE,
)  # fmt: skip
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # a model needs one of them
GGUF_NOTE = "gguf.json"  # has the path of the folder's GGUF file

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_N_LISTED = 8
_DEPTH = 3  # org/model, custom/name/finetuned


def is_repo_id(text: str) -> bool:
    """Whether this could be the name of a model on the hub, "org/name"."""
    return bool(_REPO_ID.fullmatch(text)) and ".." not in text and "--" not in text


def find_folder(name: Path, home: Path) -> Path:
    """The folder that a user means: the path itself, else one below `home`, where prepare_model.py puts checkpoints.

    Raises:
        UsageError: there is none, or it is a file; the message lists the folders in `home`.
    """
    given = name.expanduser()
    if given.is_dir():
        return given
    if given.is_file():
        raise UsageError(f"--ckpt {name} is a file: give the directory that it is in (a chunk is given with --chunk)")
    if not given.is_absolute() and (home / given).is_dir():
        return home / given
    raise UsageError(
        f"--ckpt {name}: no such directory (the nearest that exists is {nearest_existing(given)}); {_listed(home)}"
    )


def check_folder(folder: Path) -> None:
    """Raises UsageError if the folder has neither a LitGPT checkpoint nor its chunks nor the note of a GGUF file."""
    if not is_usable(folder):
        raise UsageError(no_checkpoint(folder))


def is_usable(folder: Path) -> bool:
    """Whether a starter can be given this folder."""
    return is_lit_dir(folder) or (folder / CHUNKS).is_dir() or (folder / GGUF_NOTE).is_file()


def checkpoints_in(home: Path) -> list[str]:
    """Names of the usable checkpoints below a folder, "org/name"."""
    return sorted(name for name in _checkpoints(home, home, _DEPTH) if is_usable(home / name))


def is_lit_dir(folder: Path) -> bool:
    """Whether there is a LitGPT checkpoint, whole or not."""
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in WEIGHT_FILES)


def no_checkpoint(folder: Path) -> str:
    """Say why a folder is not a LitGPT checkpoint, and what to do."""
    if not folder.is_dir():
        return f"no such directory: {folder} (the nearest that exists is {nearest_existing(folder)})"
    if (folder / "config.json").is_file() and not (folder / CONFIG_FILE).is_file():
        return f"{folder} is not a LitGPT checkpoint but a Hugging Face one; convert it with: prepare_model.py {folder}"
    have = sorted(name for name in (*WEIGHT_FILES, CONFIG_FILE) if (folder / name).is_file())
    return (
        f"{folder} is not a LitGPT checkpoint: it needs {CONFIG_FILE} and {' or '.join(WEIGHT_FILES)}, "
        f"and has {' and '.join(have) or 'neither'}"
    )


def stated_blocks(folder: Path) -> int | None:
    """Blocks of the model by its settings, in LitGPT's or Hugging Face's form.

    None if they do not say it; the code that reads all of them reports mistakes.
    """
    settings: dict[str, Any]
    try:
        if (folder / CONFIG_FILE).is_file():
            settings = read_yaml(folder / CONFIG_FILE)
        else:
            settings = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        number = settings.get("n_layer", settings.get("num_hidden_layers"))
    except (CheckpointError, OSError, ValueError, AttributeError):
        return None
    return number if type(number) is int and number > 0 else None


def _listed(home: Path) -> str:
    names = sorted(_checkpoints(home, home, _DEPTH))
    if not names:
        return f"{home} has no checkpoint either: prepare_model.py makes one"
    more = f" and {len(names) - _N_LISTED} more" if len(names) > _N_LISTED else ""
    return f"{home} has {', '.join(names[:_N_LISTED])}{more}"


def _checkpoints(folder: Path, home: Path, depth: int) -> Iterator[str]:
    if (folder / CONFIG_FILE).is_file():
        yield str(folder.relative_to(home))
    if depth:
        try:
            below = [path for path in folder.iterdir() if path.is_dir() and path.name != CHUNKS]
        except OSError:
            return
        for path in below:
            yield from _checkpoints(path, home, depth - 1)
