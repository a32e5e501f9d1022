"""Chooses the folder for a converted checkpoint: never the user's own Hugging Face directory, unless asked for."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from mdi.checkpoint.convert import convert, needs_conversion
from mdi.checkpoint.folder import CONFIG_FILE, TOKENIZER_FILES, is_lit_dir
from mdi.checkpoint.kept_json import read_kept
from mdi.errors import CheckpointError, UsageError
from mdi.whole_files import replacing

logger = logging.getLogger("mdi")

NOTE = "converted_from.json"  # in a folder that was made here: of which directory

_KEPT = (*TOKENIZER_FILES, "prompt_style.yaml")


def ready(
    directory: Path, home: Path, out: Path | None = None, model_name: str | None = None, dtype: str | None = None,
    clips: bool = False,
) -> tuple[Path, Path]:  # fmt: skip
    """A directory in Hugging Face's or LitGPT's form, converted if need be; arguments as of `destination` and `convert`.

    Returns:
        The folder of the LitGPT checkpoint, and the folder for its chunks.

    Raises:
        CheckpointError, UsageError: as `destination` and `convert`.
    """
    target = destination(directory, home, out)
    with _nothing_left(target):
        make_ready(target, directory)
        if needs_conversion(directory, target):
            logger.info("converting %s%s", directory, "" if target == directory else f", into {target}")
            convert(directory, model_name, dtype, progress=True, target=target, clips=clips)
            return target, target
    return (target if is_lit_dir(target) else directory), target


def destination(directory: Path, home: Path, out: Path | None = None) -> Path:
    """The folder for the converted model and for its chunks.

    Args:
        directory: the user's directory, in Hugging Face's or LitGPT's form.
        home: where checkpoints are kept.
        out: what the user chose; None is the directory itself if it has LitGPT's form or lies in `home`, else a folder of its
            name in `home`.

    Raises:
        UsageError: there is such a folder already, of another model.
    """
    if out is None and (not needs_conversion(directory) or directory.resolve().is_relative_to(home.resolve())):
        return directory
    target = out or home / directory.resolve().name
    is_used = target.is_dir() and target.resolve() != directory.resolve() and any(target.iterdir())
    if is_used and _origin(target) != str(directory.resolve()):
        raise UsageError(f"{target} is there already, and was not made from {directory}: choose another with --out DIR")
    return target


def make_ready(target: Path, directory: Path) -> None:
    """Copy the files that a model needs besides its weights to `target`; harmless if it is `directory` itself.

    Raises:
        CheckpointError: the disk refuses.
    """
    if target.resolve() == directory.resolve():
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        with replacing(target / NOTE) as file:
            file.write(json.dumps({"directory": str(directory.resolve())}).encode())
        for name in (*_KEPT, CONFIG_FILE):
            if (directory / name).is_file():
                shutil.copyfile(directory / name, target / name)
    except OSError as e:
        raise CheckpointError(f"cannot write to {target}: {e.strerror or e}") from None


@contextlib.contextmanager
def _nothing_left(folder: Path) -> Iterator[None]:
    """If the block fails, what has come into the folder meanwhile is removed: it would be in the way of another try."""
    before = set(folder.iterdir()) if folder.is_dir() else None
    try:
        yield
    except BaseException:
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                for path in set(folder.iterdir()) - before:
                    path.unlink()
        raise


def _origin(target: Path) -> str | None:
    return read_kept(target / NOTE, lambda data: str(data["directory"]), None)
