"""Show and clean the cache folder: weights from other nodes or packed for the kernels, compiled kernels, and small records.

examples:
  mdi cache
      what is in it: the size, the model and whether that is still there, and when it was used last
  mdi cache rm TinyLlama-1.1B-Chat-v1.0
      remove the weights that only this model has used
  mdi cache rm kernels
      remove a kind: weights (received and packed), received, packed, kernels, runs, hashes, settings, profiles, records,
      window, prefixes (of texts, that nodes have kept), tokenizers, leftovers
  mdi cache rm --unused
      remove the weights of models that are gone, and the kernels of other versions
  mdi cache --limit 20GB
      remove the least recently used weights until the folder has no more than that

What a process uses stays. What is removed is made or sent again when it is needed, but for runs: those cannot be resumed then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mdi.cli.rm import is_confirmed
from mdi.errors import UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser

if TYPE_CHECKING:
    from mdi.run.cache_folder import Entry

HEAD = ("kind", "model", "still there", "size", "last use")


def add_arguments(parser: Parser) -> None:
    parser.options(None, "action", "what", "unused", "limit", "yes", "cache_dir", *COMMON)


def run(options: Options) -> int:
    from mdi.files import default_cache_dir
    from mdi.run.cache_folder import entries_of

    folder = options.cache_dir or default_cache_dir()
    if options.action is not None:
        if options.limit is not None or options.unused == bool(options.what):
            raise UsageError("mdi cache rm: give the name of a model, a kind, or --unused")
        return _remove(options, folder)
    if options.unused:
        raise UsageError("--unused belongs to `mdi cache rm`")
    if options.limit is not None:
        return _shrink(options, folder)
    _show(folder, entries_of(folder))
    return 0


def _show(folder: Path, entries: Sequence[Entry]) -> None:
    from mdi.checkpoint.disk_space import free_bytes
    from mdi.columns import table
    from mdi.terminal import show
    from mdi.units import size

    rows = [HEAD]
    for entry in entries:
        used = time.strftime("%Y-%m-%d", time.localtime(entry.used_s))
        rows.append((entry.kind, entry.model, entry.is_there, size(entry.n_bytes), used))
    for line in table(rows, left=(0, 1, 2, 4)) if entries else ():
        show(line)
    total = sum(entry.n_bytes for entry in entries)
    show(f"the cache folder is {folder}: {size(total)} ({size(free_bytes(folder))} free there)")


def _remove(options: Options, folder: Path) -> int:
    from mdi.run.cache_folder import KINDS, NO, OTHER, entries_of, of_kind, of_model, remove
    from mdi.terminal import show
    from mdi.units import size

    entries = entries_of(folder)
    if options.unused:
        chosen, what = [entry for entry in entries if entry.is_there == NO], "what no model that is still there needs"
    elif options.what == OTHER:
        raise UsageError(f"the other files in {folder} are not MDI-LLM's: remove them yourself")
    elif options.what in KINDS:
        chosen, what = of_kind(entries, options.what), options.what
    else:
        chosen, what = of_model(folder, entries, options.what), f"what only {options.what} used"
        if not chosen:
            names = ", ".join(sorted({entry.model for entry in entries if entry.shas})) or "none"
            raise UsageError(
                f"there is nothing that only {options.what} used: the models are {names}; the kinds are {', '.join(KINDS)}"
            )
    n_bytes = sum(entry.n_bytes for entry in chosen if entry.shas or entry.files)
    if not n_bytes:
        show("there is nothing to remove")
        return 0
    if not is_confirmed(options, f"remove {what}, {size(n_bytes)}, from {folder}?"):
        return 1
    removed = remove(folder, chosen)
    stays = f"; {size(n_bytes - removed)} stays, which a process uses" if removed < n_bytes else ""
    show(f"{size(removed)} is removed{stays}")
    return 0


def _shrink(options: Options, folder: Path) -> int:
    from mdi.run.cache_folder import entries_of, shrink
    from mdi.terminal import show
    from mdi.units import size

    assert options.limit is not None
    total = sum(entry.n_bytes for entry in entries_of(folder))
    if total <= options.limit:
        show(f"{folder} has {size(total)}: nothing is removed")
        return 0
    if not is_confirmed(
        options, f"remove the least recently used weights, {size(total - options.limit)}, from {folder}?"
    ):
        return 1
    removed = shrink(folder, options.limit)
    left = total - removed
    show(
        f"{size(removed)} is removed; {folder} has {size(left)}"
        + (", the rest is in use, or no weights" if left > options.limit else "")
    )
    return 0
