"""List the models that are ready to use: where they are, their size and form, and who has them loaded.

examples:
  mdi list
      those of the store, of the folders of earlier versions, and of the hub's own cache, which are used without a copy
  mdi list --store /data/models
      those of another store
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from mdi.checkpoint.model_store import StoredModel

HEAD = ("name", "size", "form", "blocks", "licence", "changed", "loaded by")


def add_arguments(parser: Parser) -> None:
    parser.options(None, "ckpt_folder", *COMMON)


def run(options: Options) -> int:
    from mdi.checkpoint.disk_space import free_bytes
    from mdi.checkpoint.model_store import ModelStore
    from mdi.columns import table
    from mdi.files import default_cache_dir
    from mdi.run.cache_folder import entries_of
    from mdi.terminal import show
    from mdi.units import size

    store = ModelStore(options.ckpt_folder)
    models = store.all()
    show(f"the store is {store.folder} ({size(free_bytes(store.folder))} free there)")
    if not models:
        show("no model is ready: mdi pull org/name fetches one")
        return 0
    rows, homes = [HEAD], [store.folder]
    for model in models:
        if model.home not in homes:
            homes.append(model.home)
        note = "" if model.home == store.folder else f" [{homes.index(model.home)}]"
        rows.append((model.name + note, *_facts(model), "; ".join(map(str, store.marks(model)))))
    for line in table(rows, left=(0, 2, 4, 5, 6)):
        show(line)
    for number, home in enumerate(homes[1:], 1):
        show(f"[{number}] in {home}")
    total = sum(stat.st_size for model in models for stat in _stats(model))
    cached = sum(entry.n_bytes for entry in entries_of(default_cache_dir()))
    show(f"the models take {size(total)}, and the cache folder {size(cached)} (`mdi cache` shows and cleans it)")
    return 0


def _stats(model: StoredModel) -> list[os.stat_result]:
    """Of its files."""
    stats = []
    for path in model.files:
        with contextlib.suppress(OSError):  # removed meanwhile
            stats.append(path.stat())
    return stats


def _facts(model: StoredModel) -> tuple[str, str, str, str, str]:
    from mdi.checkpoint.folder import stated_blocks
    from mdi.units import size

    stats = _stats(model)
    changed = time.strftime("%Y-%m-%d", time.localtime(max((stat.st_mtime for stat in stats), default=0)))
    n_blocks = stated_blocks(Path(model.folder))
    total = sum(stat.st_size for stat in stats)
    return size(total), model.format, "" if n_blocks is None else str(n_blocks), model.licence, changed
