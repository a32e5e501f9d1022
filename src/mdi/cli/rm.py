"""Remove a model from the disk, by the name that `mdi list` shows.

examples:
  mdi rm TinyLlama/TinyLlama-1.1B-Chat-v1.0
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

from mdi.errors import UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.options(None, "name", "yes", "ckpt_folder", *COMMON)


def run(options: Options) -> int:
    from mdi.checkpoint.folder import checkpoints_in
    from mdi.cli import default_ckpt_folder

    home = options.ckpt_folder or default_ckpt_folder()
    names = checkpoints_in(home)
    if options.name not in names:
        raise UsageError(f"there is no model {options.name!r}: {home} has {', '.join(names) or 'none'}")
    folder = home / options.name
    _check_alone(folder, home)
    if not options.yes:
        if not sys.stdin.isatty():
            raise UsageError("without a terminal there is no confirmation: give --yes")
        if input(f"remove {folder} and all that is in it? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # there are other models of the same organisation
        folder.parent.rmdir()
    print(f"{options.name} is removed")
    return 0


def _check_alone(folder: Path, home: Path) -> None:
    """Raises UsageError if the folder of a model has other models in it, or is not really in the folder of the models."""
    from mdi.checkpoint.folder import checkpoints_in

    if folder.resolve() == home.resolve():
        raise UsageError(f"{folder} is the folder of all models: remove the model's files in it yourself")
    for path in (folder, *folder.parents[: len(folder.relative_to(home).parts) - 1]):
        if path.is_symlink():
            raise UsageError(f"{path} is a link to {path.resolve()}: remove the link yourself, the model stays there")
    inside = [name for name in checkpoints_in(folder) if name != "."]
    if inside:
        raise UsageError(f"{folder} has other models in it: remove or move {', '.join(inside)} first")
