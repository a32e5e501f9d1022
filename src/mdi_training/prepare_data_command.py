"""Turn text into the files that mdi train reads: train.bin (the first nine tenths), val.bin (the rest), meta.json, tokenizer.

Give --vocab-size to train a byte-level BPE tokenizer on the text itself, or --tokenizer to use that of a model. DATA is a
file, a folder, or the name of a data set on the hub. In files with rows (.jsonl, .csv, .parquet), each row is a text.

examples:
  mdi prepare-data shakespeare.txt --out data/shakespeare --vocab-size 2048
  mdi prepare-data my-texts/ --out data/mine --tokenizer ~/models/TinyLlama-1.1B-Chat-v1.0
  mdi prepare-data roneneldan/TinyStories --files "*train.txt" --vocab-size 4096
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

from mdi.errors import Code, UsageError
from mdi.spec.parser import Parser

logger = logging.getLogger("mdi")


def add_arguments(parser: Parser) -> None:
    from mdi.spec.options import COMMON

    parser.add_argument("data", metavar="DATA", help="a UTF-8 text, a folder with texts, or org/name on the hub")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: the folder of the text; data/org/name)"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json or tokenizer.model, or a folder with one"
    )
    source.add_argument("--vocab-size", type=int, metavar="N", help="train a BPE tokenizer with at most N tokens")
    parser.add_argument(
        "--val-fraction",
        default="0.1",
        metavar="F",
        help="part of the tokens that is held out for validation (%(default)s)",
    )
    parser.add_argument(
        "--column", default="text", metavar="NAME", help="column of the text in files with rows (%(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="number of encoding processes; it does not change the result (%(default)s)",
    )
    hub = parser.add_argument_group("hub")
    hub.add_argument(
        "--files", metavar="PATTERN", help='which files, e.g. "data/*.parquet" (default: those of --split)'
    )
    hub.add_argument("--split", default="train", help="take the files with this word in their names (%(default)s)")
    hub.add_argument("--hf-token", metavar="TOKEN", help="for gated and private data sets (default: $HF_TOKEN)")
    hub.add_argument("--revision", help="branch, tag or commit (default: main)")
    parser.options(None, *COMMON)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from mdi_training.data import encode_texts, write_data_set
    from mdi_training.texts import has_rows, read_texts
    from mdi_training.vocabulary import load_vocabulary, train_vocabulary

    val_fraction = parse_fraction(args.val_fraction)
    if not 1 <= args.workers <= 1024:
        raise UsageError(f"--workers {args.workers}: expected from 1 to 1024", code=Code.VALUE)
    out, paths = find_data(args)
    logger.info("reading %d files", len(paths))
    if args.tokenizer is None:
        vocabulary = train_vocabulary(read_texts(paths, args.column), args.vocab_size)
    else:
        vocabulary = load_vocabulary(args.tokenizer)
    with_ends = len(paths) > 1 or has_rows(paths[0])
    with (
        unnamed_file_near(out) as file,
        tqdm(unit="char", unit_scale=True, desc="encoding", delay=2) as bar,
    ):
        texts = read_texts(paths, args.column)
        ids = encode_texts(texts, vocabulary, file, with_ends=with_ends, progress=bar.update, n_workers=args.workers)
        meta = write_data_set(out, ids, vocabulary, paths, val_fraction)
        n_chars = bar.n
    print(
        f"{out}: {meta['n_train']} tokens to train on, {meta['n_val']} held out, vocabulary {vocabulary.size}, "
        f"{n_chars / len(ids):.2f} characters per token, {meta['dtype']}"
    )
    return 0


def find_data(args: argparse.Namespace) -> tuple[Path, list[Path]]:
    """The folder for the result, and the files with the texts; downloaded, if DATA is a name on the hub."""
    from mdi.checkpoint.download import is_repo_id
    from mdi_training.hub import download_texts
    from mdi_training.texts import ROW_SUFFIXES, TEXT_SUFFIXES, find_texts

    local = Path(args.data).expanduser()
    looks_local = args.data.startswith((".", "/", "~")) or args.data.lower().endswith((*TEXT_SUFFIXES, *ROW_SUFFIXES))
    if local.exists() or looks_local or not is_repo_id(args.data):
        return args.out or (local if local.is_dir() else local.parent), find_texts(local)
    out = args.out or Path("data", *args.data.split("/"))
    logger.info("there is no %s here: looking for it on the hub", args.data)
    files = download_texts(
        args.data,
        out / "raw",
        pattern=args.files,
        split=args.split,
        token=args.hf_token,
        revision=args.revision,
    )
    return out, files


def unnamed_file_near(folder: Path) -> BinaryIO:
    """A nameless file on the disk of the result, so that nothing of it remains after any failure."""
    from mdi.spec.cluster import nearest_existing

    near = nearest_existing(folder)
    try:
        return tempfile.TemporaryFile(dir=near if near.is_dir() else near.parent)
    except OSError as e:
        raise UsageError(
            f"cannot write in {near}: {e.strerror or e}; choose another folder with --out", code=Code.UNWRITABLE
        ) from e


def parse_fraction(text: str) -> Fraction:
    """An exact fraction, so that a tenth of the tokens is one. Raises UsageError."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value < 1:
        raise UsageError(f"--val-fraction {text}: expected more than 0 and less than 1, e.g. 0.1", code=Code.VALUE)
    return value
