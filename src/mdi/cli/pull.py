"""Download a model from the Hugging Face hub and make it ready to use. Existing files are not downloaded again.

examples:
  mdi pull TinyLlama/TinyLlama-1.1B-Chat-v1.0
  mdi pull TinyLlama/TinyLlama-1.1B-Chat-v1.0 --n-nodes 3 --quantize int8    and cut it for three nodes

`mdi list` lists the models, `mdi rm` removes one; a server (`mdi serve`) offers all of them by name.
"""

from __future__ import annotations

from mdi.spec.options import Options
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    from mdi.cli import prepare_model

    prepare_model.add_arguments(parser)
    parser.description, parser.epilog = __doc__, None


def run(options: Options) -> int:
    from mdi.cli import prepare_model

    return prepare_model.run(options)
