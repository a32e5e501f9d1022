"""Token files: encode texts, split, write, and open what was written.

A data set is a folder with `train.bin` and `val.bin` (raw token ids, little-endian), `meta.json` (type of the ids,
counts, sha256) and the tokenizer that made them. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mdi.errors import Code, UsageError
from mdi.files import replacing
from mdi.spec.settings_file import parse_json
from mdi_training.encoders import encoded
from mdi_training.storage import make_folder, missing, sha256_file
from mdi_training.texts import PIECE_CHARS, pieces
from mdi_training.vocabulary import TOKENIZER_FILES, Vocabulary

# Token ids on disk: uint16 or uint32, little-endian.
TokenIds = npt.NDArray[np.unsignedinteger[Any]]
IdType = np.dtype[np.unsignedinteger[Any]]
ID_TYPES: dict[str, IdType] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

FORMAT_VERSION = 1
# Below this there is nothing to learn from, and the tenth that is held out would be a word or two.
MIN_TOKENS = 100
AGAIN = "make the data set again with mdi prepare-data"


@dataclass(frozen=True)
class DataSet:
    """The two token files of a prepared folder, mapped, not read.

    Attributes:
        train, val: token ids, shapes (n_train,) and (n_val,), uint16 or uint32.
        vocab_size: one more than the largest id that the tokenizer can give.
        tokenizer: name and content of the files to put beside weights that are trained on this.
        sha256: of train.bin, to know the data set again.
    """

    folder: Path
    train: TokenIds
    val: TokenIds
    vocab_size: int
    tokenizer: dict[str, bytes]
    sha256: str


def _pieces_and_ends(texts: Iterable[str]) -> Iterator[str]:
    """Pieces of each text; after each text an empty one."""
    for text in texts:
        yield from pieces(text)
        yield ""


def id_type(vocab_size: int) -> IdType:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`, little-endian."""
    return ID_TYPES["uint16" if vocab_size <= 1 << 16 else "uint32"]


def encode_texts(
    texts: Iterable[str],
    vocabulary: Vocabulary,
    file: BinaryIO,
    *,
    with_ends: bool,
    progress: Callable[[int], object] | None = None,
    n_workers: int = 1,
) -> TokenIds:
    """All texts after one another, encoded into a file bit by bit, so that they may be larger than the memory.

    Args:
        file: to write the ids into; the result is a map of it.
        with_ends: after each text comes the end-of-text token, if the tokenizer has one.
        progress: called with the number of characters just encoded.
        n_workers: processes that encode; the ids do not depend on it.

    Raises:
        UsageError: the disk is full.
    """
    dtype = id_type(vocabulary.size)
    end = np.asarray([] if vocabulary.eos_id is None or not with_ends else [vocabulary.eos_id], dtype=dtype)
    n_bytes = 0
    try:
        for n_chars, content in encoded(_pieces_and_ends(texts), vocabulary, dtype, n_workers):
            n_bytes += file.write(content if n_chars else end.tobytes())
            if progress is not None:
                progress(n_chars)
        file.flush()
    except OSError as err:
        raise UsageError(
            f"cannot write the encoded text: {err.strerror or err}; choose another disk with --out",
            code=Code.UNWRITABLE,
        ) from err
    if n_bytes == 0:
        return np.empty(0, dtype=dtype)
    ids: TokenIds = np.memmap(file, dtype=dtype, mode="r")
    return ids


def write_data_set(
    folder: Path,
    ids: TokenIds,
    vocabulary: Vocabulary,
    sources: Sequence[Path],
    val_fraction: Fraction = Fraction(1, 10),
) -> dict[str, object]:
    """Writes the first part as train.bin, the rest as val.bin, the tokenizer, and meta.json last.

    Each file is replaced whole; a crash in between leaves a meta.json whose sha256 do not fit, which `load_data_set`
    refuses.

    Args:
        val_fraction: of the tokens, held out.

    Returns:
        what meta.json holds.

    Raises:
        UsageError: the text is too short, or the folder cannot be written.
    """
    if len(ids) < MIN_TOKENS:
        raise UsageError(f"the text is too short: {len(ids)} tokens, expected at least {MIN_TOKENS}", code=Code.SHORT)
    n_train = int(len(ids) * (1 - val_fraction))
    if not 0 < n_train < len(ids):
        raise UsageError(
            f"--val-fraction {float(val_fraction)} of {len(ids)} tokens leaves no tokens to train on or to test",
            code=Code.VALUE,
        )
    make_folder(folder)
    hashes = {
        "train.bin": _write_ids(folder / "train.bin", ids[:n_train]),
        "val.bin": _write_ids(folder / "val.bin", ids[n_train:]),
    }
    for name, content in vocabulary.files().items():
        with replacing(folder / name, UsageError) as handle:
            handle.write(content)
        hashes[name] = hashlib.sha256(content).hexdigest()
    meta: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "dtype": "uint16" if ids.dtype.itemsize == 2 else "uint32",
        "vocab_size": vocabulary.size,
        "eos_id": vocabulary.eos_id,
        "n_train": n_train,
        "n_val": len(ids) - n_train,
        "sha256": hashes,
        "sources": [{"name": source.name, "sha256": sha256_file(source)} for source in sources],
    }
    with replacing(folder / "meta.json", UsageError) as handle:
        handle.write(json.dumps(meta, indent=2).encode() + b"\n")
    return meta


def _write_ids(path: Path, ids: TokenIds) -> str:
    """The sha256 of the file."""
    digest = hashlib.sha256()
    with replacing(path, UsageError) as handle:
        for start in range(0, len(ids), PIECE_CHARS):
            raw = ids[start : start + PIECE_CHARS].tobytes()
            digest.update(raw)
            handle.write(raw)
    return digest.hexdigest()


def load_data_set(folder: Path) -> DataSet:
    """Opens a prepared folder, checking sizes and sha256 against meta.json.

    Raises:
        UsageError: something is missing, damaged, or of another format; says which file and what to do.
    """
    if not folder.is_dir():
        raise UsageError(missing(folder, "the data set"), code=Code.MISSING)
    path = folder / "meta.json"
    if not path.is_file():
        raise UsageError(f"{folder} holds no meta.json, so it is no prepared data set; {AGAIN}", code=Code.MISSING)
    try:
        meta = parse_json(path.read_text(encoding="utf-8"))
        dtype = ID_TYPES[meta["dtype"]]
        version, vocab_size, hashes = int(meta["format_version"]), int(meta["vocab_size"]), dict(meta["sha256"])
        n_train, n_val = int(meta["n_train"]), int(meta["n_val"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise UsageError(f"{path} cannot be used: {type(err).__name__}: {err}; {AGAIN}", code=Code.UNREADABLE) from err
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format_version {version}, expected {FORMAT_VERSION}; {AGAIN}", code=Code.UNREADABLE
        )
    train = _open_ids(folder / "train.bin", dtype, n_train, vocab_size, hashes.get("train.bin"))
    val = _open_ids(folder / "val.bin", dtype, n_val, vocab_size, hashes.get("val.bin"))
    return DataSet(folder, train, val, vocab_size, _read_tokenizer(folder, hashes), hashes["train.bin"])


def _open_ids(path: Path, dtype: IdType, count: int, vocab_size: int, sha256: str | None) -> TokenIds:
    expected = count * dtype.itemsize
    found = path.stat().st_size if path.is_file() else None
    if found != expected or count < 1:
        state = "is missing" if found is None else f"has {found} bytes"
        raise UsageError(
            f"{path} {state}, expected {expected} bytes ({count} ids of {dtype.name}); {AGAIN}", code=Code.DAMAGED
        )
    if sha256_file(path) != sha256:
        raise UsageError(f"{path} is not the one that meta.json describes (sha256 differs); {AGAIN}", code=Code.DAMAGED)
    ids: TokenIds = np.memmap(path, dtype=dtype, mode="r")
    if int(ids.max()) >= vocab_size:
        raise UsageError(f"{path} holds id {ids.max()}, expected less than {vocab_size}; {AGAIN}", code=Code.DAMAGED)
    return ids


def _read_tokenizer(folder: Path, hashes: dict[str, str]) -> dict[str, bytes]:
    files = {}
    for name in TOKENIZER_FILES:
        if name in hashes:
            path = folder / name
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != hashes[name]:
                raise UsageError(
                    f"{path} is missing or not the one that meta.json describes (sha256 differs); {AGAIN}",
                    code=Code.DAMAGED,
                )
            files[name] = content
    if not files.keys() & {"tokenizer.json", "tokenizer.model"}:
        raise UsageError(f"{folder / 'meta.json'} names no tokenizer; {AGAIN}", code=Code.DAMAGED)
    return files
