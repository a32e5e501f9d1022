"""List the models that are ready to use, with their size. `mdi serve` offers them by name.

examples:
  mdi list
      the models below checkpoints/, with their size and when they were made
  mdi list --ckpt-folder /data/models
      those in another folder
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags, default_ckpt_folder

    parser.add_argument(
        "--ckpt-folder",
        type=Path,
        default=default_ckpt_folder(),
        metavar="DIR",
        help="folder of the models (%(default)s)",
    )
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from mdi.checkpoint.folder import checkpoints_in, stated_blocks
    from mdi.columns import table
    from mdi.terminal import show
    from mdi.units import counted, size

    names = checkpoints_in(args.ckpt_folder)
    if not names:
        print(f"no model is ready in {args.ckpt_folder}: mdi pull org/name fetches one")
        return 0
    rows = []
    for name in names:
        folder = args.ckpt_folder / name
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        changed = time.strftime("%Y-%m-%d", time.localtime(max((f.st_mtime for f in files), default=0)))
        n_blocks = stated_blocks(folder)
        blocks = "" if n_blocks is None else counted(n_blocks, "block")
        rows.append((name, size(sum(f.st_size for f in files)), blocks, changed))
    for line in table(rows, left=(0,)):
        show(line)
    return 0
