"""Turn text into what train.py reads, with a token for each character, or byte pairs with --vocab-size.

examples:
  prepare_data.py shakespeare.txt --out data/shakespeare-char
  prepare_data.py shakespeare.txt --out data/shakespeare-bpe --vocab-size 1000
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    from mdi.spec.options import COMMON

    parser.add_argument("data", metavar="DATA", type=Path, help="a UTF-8 text, or a folder with .txt and .md files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the folder of the text)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="byte pairs, at most N (default: characters)")
    parser.options(None, *COMMON)


def run(args: argparse.Namespace) -> int:
    from gpt.tokens import character_vocabulary
    from mdi_training.data import encode_texts, write_data_set
    from mdi_training.prepare_data_command import unnamed_file_near
    from mdi_training.texts import find_texts, read_text
    from mdi_training.vocabulary import train_vocabulary

    paths = find_texts(args.data)
    texts = [read_text(path) for path in paths]
    vocabulary = character_vocabulary(texts) if args.vocab_size is None else train_vocabulary(texts, args.vocab_size)
    out = args.out or (args.data if args.data.is_dir() else args.data.parent)
    with unnamed_file_near(out) as file:
        ids = encode_texts(texts, vocabulary, file, with_ends=len(texts) > 1)
        meta = write_data_set(out, ids, vocabulary, paths, Fraction(1, 10))
    print(f"{out}: {meta['n_train']} tokens to train on, {meta['n_val']} held out, vocabulary {vocabulary.size}")
    return 0
