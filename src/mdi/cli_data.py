"""Turn text into what train.py reads: train.bin (the first nine tenths), val.bin (the rest), meta.json, the tokenizer.

Give --vocab-size to train a byte-level BPE tokenizer on the text itself, or --tokenizer to use that of a model.

examples:
  prepare_data.py shakespeare.txt --out data/shakespeare --vocab-size 2048
  prepare_data.py my-texts/ --out data/mine --tokenizer checkpoints/TinyLlama/TinyLlama-1.1B-Chat-v1.0
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags

    parser.add_argument("data", metavar="DATA", type=Path, help="a UTF-8 text, or a folder with .txt and .md files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: the folder of the text)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json or tokenizer.model, or a folder with one"
    )
    source.add_argument("--vocab-size", type=int, metavar="N", help="train a BPE tokenizer with at most N tokens")
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from mdi.training.data import encode_texts, find_texts, read_text, write_data_set
    from mdi.training.vocabulary import load_vocabulary, train_vocabulary

    log = logging.getLogger("mdi")
    paths = find_texts(args.data)
    texts = [read_text(path) for path in paths]
    n_chars = sum(map(len, texts))
    log.info("read %d characters from %d files", n_chars, len(paths))
    given = args.tokenizer
    vocabulary = train_vocabulary(texts, args.vocab_size) if given is None else load_vocabulary(given)
    with tqdm(total=n_chars, unit="char", unit_scale=True, desc="encoding", delay=2) as bar:
        ids = encode_texts(texts, vocabulary, bar.update)
    out = args.out or (args.data if args.data.is_dir() else args.data.parent)
    meta = write_data_set(out, ids, vocabulary, paths)
    print(
        f"{out}: {meta['n_train']} tokens to train on, {meta['n_val']} held out, vocabulary {vocabulary.size}, "
        f"{n_chars / len(ids):.2f} characters per token, {meta['dtype']}"
    )
    return 0
