"""The folder of a checkpoint: its path, its files, its number of blocks. Without torch and litgpt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mdi.errors import INSTALL_ALL, CheckpointError, UsageError
from mdi.spec.cluster import what_is_there
from mdi.spec.settings_file import parse_json, read_yaml

WEIGHT_FILES = ("lit_model.pth", "lit_model.safetensors")
PREDICTING_FILE = "lit_mtp.safetensors"  # beside them: blocks that predict further tokens (`mdi.checkpoint.predicting`)
CONFIG_FILE = "model_config.yaml"
CHUNKS = "chunks"
CHAT_TEMPLATE = "chat_template.jinja"
RANKS = "tiktoken.model"  # byte strings and their ranks (`mdi.checkpoint.token_ranks`)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", RANKS, "tokenizer_config.json", "special_tokens_map.json",
    "generation_config.json", CHAT_TEMPLATE,
)  # fmt: skip
POOLING_FILES = ("modules.json", "1_Pooling/config.json")  # of models that embed texts (`mdi.checkpoint.pooling`)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", RANKS)  # a model needs one of them, of several the first
MADE_TOKENIZERS = "tokenizers"  # in the cache folder: what was made of ranks
GGUF_NOTE = "gguf.json"  # has the path of the folder's GGUF file
PARTS_FILE = "parts.json"  # hashes of the weights beside it (`mdi.checkpoint.records`)
GGUF_FOLDERS = "gguf"  # of a store: has the folders of GGUF files that lie elsewhere

_LIT_FILES = (*WEIGHT_FILES, PREDICTING_FILE)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_N_LISTED = 8
_DEPTH = 3  # org/model, custom/name/finetuned


def is_repo_id(text: str) -> bool:
    """Whether this could be the name of a model on the hub, "org/name"."""
    return bool(_REPO_ID.fullmatch(text)) and ".." not in text and "--" not in text


def find_folder(name: Path, home: Path) -> Path:
    """The folder that a user means: the path itself, else one below `home`, where mdi prepare-model puts checkpoints.

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
    raise UsageError(f"--ckpt {name}: no such directory ({what_is_there(given)}); {_listed(home)}")


def check_folder(folder: Path) -> None:
    """Raises UsageError if there is no checkpoint in LitGPT's or Hugging Face's form, no chunk, and no note of a GGUF file."""
    if not is_usable(folder):
        raise UsageError(no_checkpoint(folder))


def is_usable(folder: Path) -> bool:
    """Whether a starter can be given this folder."""
    return is_lit_dir(folder) or (folder / CHUNKS).is_dir() or (folder / GGUF_NOTE).is_file() or is_readable_hf(folder)


def is_readable_hf(folder: Path) -> bool:
    """Whether there is a Hugging Face checkpoint that is read as it is: in safetensors, whole or not."""
    return (folder / "config.json").is_file() and any(
        not path.name.startswith(_LIT_FILES) for path in folder.glob("*.safetensors*")
    )


def model_name(folder: Path) -> str:
    """The name of the model in a folder: the folder's own, or that of the hub's cache (models--org--name/snapshots/abc)."""
    folder = folder.absolute()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.rsplit("--", 1)[-1]
    return folder.name


def checkpoints_in(home: Path) -> list[str]:
    """Names of the usable checkpoints below a folder, "org/name"."""
    return sorted(name for name in _checkpoints(home, home, _DEPTH) if is_usable(home / name))


def is_lit_dir(folder: Path) -> bool:
    """Whether there is a LitGPT checkpoint, whole or not."""
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in WEIGHT_FILES)


def is_hf_dir(path: str | Path) -> bool:
    """Whether there is a Hugging Face checkpoint to convert."""
    return (Path(path) / "config.json").is_file() and bool(weight_files(Path(path)))


def all_weight_files(folder: Path) -> list[Path]:
    """The files that the weights of a checkpoint's folder are read from, in LitGPT's or else Hugging Face's form."""
    return [folder / name for name in WEIGHT_FILES] if is_lit_dir(folder) else weight_files(folder)


def weight_files(path: Path) -> list[Path]:
    """The files with weights: by an index, else by their names; safetensors are preferred. Some may be missing.

    A file called 00002-of-00003 stands for all three: the index may be the last file that a download brings.

    Raises:
        CheckpointError: the index cannot be read.
    """
    found = {
        suffix: sorted(f for f in path.glob(f"*.{suffix}") if f.name not in (*_LIT_FILES, *_NOT_WEIGHTS))
        for suffix in ("safetensors", "bin")
    }
    for index, (suffix, single) in zip(
        _INDEXES, (("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")), strict=True
    ):
        if (path / index).is_file():
            return _indexed(path / index)
        if (path / single).is_file():
            return [path / single]
        if found[suffix]:
            return sorted({piece for file in found[suffix] for piece in _pieces(file)})
    return []


def _pieces(file: Path) -> list[Path]:
    """The file and those that its name says belong to it."""
    match = re.fullmatch(r"(.+-)\d{5}-of-(\d{5})(\.\w+)", file.name)
    if match is None:
        return [file]
    stem, total, suffix = match.groups()
    return [file.with_name(f"{stem}{number:05}-of-{total}{suffix}") for number in range(1, int(total) + 1)]


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        is_plain = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"cannot read the index {index}: {type(e).__name__}: {e}") from None
    if not is_plain:
        raise CheckpointError(f"{index} names files outside of its directory")
    return [index.parent / name for name in names]


def describe_pickles(folder: Path) -> str:
    """Why a Hugging Face folder with weights in .bin files alone is not read as it is, and what to do."""
    return (
        f"{folder} has its weights in .bin files, which are pickles and are not read as they are: convert it once with "
        f"mdi prepare-model {folder} (which needs torch: {INSTALL_ALL}), or take the model's safetensors files"
    )


def no_checkpoint(folder: Path) -> str:
    """Say why a folder is not a LitGPT checkpoint, and what to do."""
    if not folder.is_dir():
        return f"no such directory: {folder} ({what_is_there(folder)})"
    if ggufs := sorted(path for path in folder.glob("*.gguf") if not is_later_piece(path)):
        more = f" and {len(ggufs) - _N_LISTED} more" if len(ggufs) > _N_LISTED else ""
        return f"{folder} has GGUF files, and one of them is the model: give {', or '.join(map(str, ggufs[:_N_LISTED]))}{more}"
    if (folder / "config.json").is_file() and not (folder / CONFIG_FILE).is_file():
        return (
            describe_pickles(folder)
            if is_hf_dir(folder)
            else f"{folder} has config.json, but no weights: *.safetensors"
        )
    have = sorted(name for name in (*WEIGHT_FILES, CONFIG_FILE) if (folder / name).is_file())
    return (
        f"{folder} has no model: neither config.json with *.safetensors nor a GGUF file; and as a LitGPT checkpoint it needs "
        f"{CONFIG_FILE} and {' or '.join(WEIGHT_FILES)}, and has {' and '.join(have) or 'neither'}"
    )


def gguf_name(path: Path) -> str:
    """What the model in a GGUF file is called: as the file, or as the several that it is in."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def is_later_piece(path: Path) -> bool:
    """Of a GGUF file in several: it is given by its first."""
    return re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", path.name) is not None


def gguf_file(directory: Path) -> Path | None:
    """The GGUF file of a directory; None if it has none, or its note cannot be read. It may have been removed since.

    Only the folders that were made for files elsewhere may name one outside: a copied folder could name any file of this user.
    """
    try:
        path = Path(str(parse_json((directory / GGUF_NOTE).read_text(encoding="utf-8"))["file"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_allowed = directory.parent.name == GGUF_FOLDERS if path.is_absolute() else ".." not in path.parts
    return directory / path if is_allowed else None


def tokenizer_file(folder: Path) -> Path | None:
    """The one of a folder's tokenizers that is used; None if it has none."""
    return next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)


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
            settings = {**settings, **(settings.get("text_config") or {})}
        number = settings.get("n_layer", settings.get("num_hidden_layers"))
    except (CheckpointError, OSError, ValueError, AttributeError, TypeError):
        return None
    return number if type(number) is int and number > 0 else None


def _listed(home: Path) -> str:
    names = sorted(_checkpoints(home, home, _DEPTH))
    if not names:
        return f"{home} has no checkpoint either: mdi prepare-model makes one"
    more = f" and {len(names) - _N_LISTED} more" if len(names) > _N_LISTED else ""
    return f"{home} has {', '.join(names[:_N_LISTED])}{more}"


def _checkpoints(folder: Path, home: Path, depth: int) -> Iterator[str]:
    if (folder / CONFIG_FILE).is_file() or is_readable_hf(folder):
        yield str(folder.relative_to(home))
    if depth:
        try:
            below = [path for path in folder.iterdir() if path.is_dir() and path.name != CHUNKS]
        except OSError:
            return
        for path in below:
            yield from _checkpoints(path, home, depth - 1)
