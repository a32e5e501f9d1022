"""Write a model to one file, with a hash of each part, for a machine without a network: `mdi import FILE` makes it ready there.

examples:
  mdi export TinyLlama/TinyLlama-1.1B-Chat-v1.0 /media/usb/tinyllama.mdi
"""

from __future__ import annotations

from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.options(None, "name", "file", "ckpt_folder", *COMMON,
                   file={"help": "file to write; an existing one is replaced"})  # fmt: skip


def run(options: Options) -> int:
    from mdi.checkpoint.model_archive import export_model
    from mdi.checkpoint.model_store import ModelStore
    from mdi.cli.prepare_model import progress_bar
    from mdi.errors import UsageError
    from mdi.units import size

    store = ModelStore(options.ckpt_folder)
    model = store.find(options.name)
    if model is None:
        raise UsageError(store.describe_missing(options.name))
    file = options.file.expanduser()
    with progress_bar("exporting") as progress:
        export_model(model, file, progress)
    print(f"{model.name} is in {file}, {size(file.stat().st_size)}: on the other machine, mdi import {file.name}")
    return 0
