"""Remove a model from the disk, by the name that `mdi list` shows, and what only that model used in the cache folder.

examples:
  mdi rm TinyLlama/TinyLlama-1.1B-Chat-v1.0
"""

from __future__ import annotations

import sys
from pathlib import Path

from mdi.errors import Code, StoreError, UsageError
from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.options(None, "name", "yes", "ckpt_folder", *COMMON)


def run(options: Options) -> int:
    from mdi.checkpoint.model_store import ModelStore
    from mdi.files import default_cache_dir
    from mdi.run.cache_folder import remove_model
    from mdi.units import size

    store = ModelStore(options.ckpt_folder)
    model = next((model for model in store.all() if model.name == options.name), None)
    if model is None:
        raise UsageError(store.describe_missing(options.name))
    if not model.is_own:
        raise StoreError(
            f"{model.name} is in the hub's own cache, {model.home}: `hf cache rm` removes it", code=Code.OTHER
        )
    _check_alone(model.folder, model.home)
    if not is_confirmed(options, f"remove {model.folder} and all that is in it?"):
        return 1
    home = model.folder.resolve()
    store.remove(model)
    n_bytes = remove_model(default_cache_dir(), home)
    print(f"{options.name} is removed" + (f", and {size(n_bytes)} of the cache that only it used" if n_bytes else ""))
    return 0


def is_confirmed(options: Options, question: str) -> bool:
    """Whether the user agrees, with --yes or now. Raises UsageError without a terminal."""
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("without a terminal there is no confirmation: give --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


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
