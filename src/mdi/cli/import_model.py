"""Make a model ready from a file that `mdi export` wrote. Every part is checked by its hash before the model is there.

examples:
  mdi import /media/usb/tinyllama.mdi
"""

from __future__ import annotations

import shlex

from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.options(None, "file", "ckpt_folder", *COMMON, file={"help": "file that `mdi export` wrote"})


def run(options: Options) -> int:
    from mdi.checkpoint.model_archive import import_model
    from mdi.checkpoint.model_store import ModelStore
    from mdi.cli.prepare_model import progress_bar

    with progress_bar("importing") as progress:
        name, folder = import_model(ModelStore(options.ckpt_folder), options.file.expanduser(), progress)
    store = "" if options.ckpt_folder is None else f" --store {shlex.quote(str(options.ckpt_folder))}"
    print(f"{name} is in {folder}: mdi run{store} {name}")
    return 0
