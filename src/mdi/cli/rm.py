"""Remove a model from the disk, by the name that `mdi list` shows.

examples:
  mdi rm TinyLlama/TinyLlama-1.1B-Chat-v1.0
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from pathlib import Path

from mdi.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags, default_ckpt_folder

    parser.add_argument("name", metavar="NAME", help="name as `mdi list` shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask first")
    parser.add_argument(
        "--ckpt-folder",
        type=Path,
        default=default_ckpt_folder(),
        metavar="DIR",
        help="folder of the models (%(default)s)",
    )
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from mdi.checkpoint.folder import checkpoints_in

    names = checkpoints_in(args.ckpt_folder)
    if args.name not in names:
        raise UsageError(f"there is no model {args.name!r}: {args.ckpt_folder} has {', '.join(names) or 'none'}")
    folder = args.ckpt_folder / args.name
    _check_alone(folder, args.ckpt_folder)
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError("without a terminal there is no confirmation: give --yes")
        if input(f"remove {folder} and all that is in it? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # there are other models of the same organisation
        folder.parent.rmdir()
    print(f"{args.name} is removed")
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
