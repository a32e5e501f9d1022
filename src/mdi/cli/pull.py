"""Download a model from the Hugging Face hub to the store. Existing files are not downloaded again, an unfinished one goes on.

examples:
  mdi pull TinyLlama/TinyLlama-1.1B-Chat-v1.0
  mdi pull TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M                      one GGUF file of many
  mdi pull TinyLlama/TinyLlama-1.1B-Chat-v1.0 --n-nodes 3 --quantize int8     and cut it for three nodes

`mdi list` lists the models, `mdi rm` removes one; a server (`mdi serve`) offers all of them by name. Nothing is converted but
where files ask for it: weights in .bin files, or flags of a cut.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mdi.cancel import Cancel
from mdi.spec.options import Options
from mdi.spec.parser import Parser

PREPARING = ("n_nodes", "layers", "dtype", "quantize", "quantize_head", "calibrate", "export", "out", "model_name")

logger = logging.getLogger("mdi")


def add_arguments(parser: Parser) -> None:
    from mdi.cli import prepare_model

    prepare_model.add_arguments(parser)
    parser.description, parser.epilog = __doc__, None


def run(options: Options, cancel: Cancel) -> int:
    from mdi.checkpoint.folder import is_usable
    from mdi.checkpoint.model_store import ModelStore, is_model_name
    from mdi.cli import prepare_model

    store = ModelStore(options.ckpt_folder)
    is_prepared = any(getattr(options, name) not in (None, "") for name in PREPARING)
    if is_prepared or Path(options.model).expanduser().exists() or not is_model_name(options.model):
        return prepare_model.run(options, cancel)
    folder = store.fetch(options.model, options.hf_token, options.revision, say=logger.info, cancel=cancel)
    if not is_usable(folder):
        return prepare_model.run(options, cancel)
    print(f"{options.model} is in {folder}: mdi run {options.model}")
    return 0
