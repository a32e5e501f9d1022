"""List the models that are ready to use, with their size. `mdi serve` offers them by name.

examples:
  mdi list
      the models below checkpoints/, with their size and when they were made
  mdi list --ckpt-folder /data/models
      those in another folder
"""

from __future__ import annotations

import time

from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.options(None, "ckpt_folder", *COMMON)


def run(options: Options) -> int:
    from mdi.checkpoint.folder import checkpoints_in, stated_blocks
    from mdi.cli import default_ckpt_folder
    from mdi.columns import table
    from mdi.terminal import show
    from mdi.units import counted, size

    home = options.ckpt_folder or default_ckpt_folder()
    names = checkpoints_in(home)
    if not names:
        print(f"no model is ready in {home}: mdi pull org/name fetches one")
        return 0
    rows = []
    for name in names:
        folder = home / name
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        changed = time.strftime("%Y-%m-%d", time.localtime(max((f.st_mtime for f in files), default=0)))
        n_blocks = stated_blocks(folder)
        blocks = "" if n_blocks is None else counted(n_blocks, "block")
        rows.append((name, size(sum(f.st_size for f in files)), blocks, changed))
    for line in table(rows, left=(0,)):
        show(line)
    return 0
