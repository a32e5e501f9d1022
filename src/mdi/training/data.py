"""Text to token files: read, train or load a tokenizer, encode, split, write.

A data set is a folder with `train.bin` and `val.bin` (raw token ids, little-endian), `meta.json` (type of the ids,
counts, sha256) and the tokenizer that made them. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mdi.checkpoint.files import replacing
from mdi.errors import UsageError
from mdi.training.storage import make_folder, missing, sha256_file
from mdi.training.vocabulary import TOKENIZER_FILES, Vocabulary

# Token ids on disk: uint16 or uint32, little-endian.
TokenIds = npt.NDArray[np.unsignedinteger[Any]]
IdType = np.dtype[np.unsignedinteger[Any]]
ID_TYPES: dict[str, IdType] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

FORMAT_VERSION = 1
TEXT_SUFFIXES = (".txt", ".md")
# Below this there is nothing to learn from, and the tenth that is held out would be a word or two.
MIN_TOKENS = 100
PIECE_CHARS = 1 << 20
AGAIN = "make the data set again with prepare_data.py"


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


def find_texts(path: Path) -> list[Path]:
    """The file itself, or every .txt and .md file below the folder, sorted by name.

    Raises:
        UsageError: nothing is there, or the folder holds no text.
    """
    if not path.exists():
        raise UsageError(missing(path, "the text"))
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES and p.is_file())
    if not found:
        raise UsageError(f"{path} holds no {' or '.join(TEXT_SUFFIXES)} file; expected at least one")
    return found


def read_text(path: Path) -> str:
    """The text as it is on disk, line ends included, less a byte order mark.

    Raises:
        UsageError: not UTF-8 (says at which byte), empty, or unreadable.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise UsageError(
            f"{path} is not UTF-8: byte 0x{raw[err.start]:02x} at offset {err.start}; "
            "convert it, e.g. with iconv -t UTF-8"
        ) from err
    except OSError as err:
        raise UsageError(f"{path} cannot be read: {err.strerror or err}") from err
    if not text.strip():
        raise UsageError(f"{path} is empty ({len(raw)} bytes); expected text")
    return text


def pieces(text: str, n_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cuts a long text at ends of lines, so that it can be encoded bit by bit with progress and little memory.

    A cut comes before the white space between two words: byte-level BPE never merges over that, so the pieces give the
    same ids as the whole. Tokenizers that put a space before a text give one more at each cut.
    """
    start = 0
    while start < len(text):
        stop = min(start + n_chars, len(text))
        while stop < len(text) and not (text[stop] == "\n" and not text[stop - 1].isspace()):
            stop += 1
        yield text[start:stop]
        start = stop


def id_type(vocab_size: int) -> IdType:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`, little-endian."""
    return ID_TYPES["uint16" if vocab_size <= 1 << 16 else "uint32"]


def encode_texts(
    texts: Sequence[str], vocabulary: Vocabulary, progress: Callable[[int], object] | None = None
) -> TokenIds:
    """All texts after one another; where there are several, each ends with the end-of-text token if there is one.

    Args:
        progress: called with the number of characters just encoded.
    """
    dtype = id_type(vocabulary.size)
    parts: list[TokenIds] = []
    for text in texts:
        for piece in pieces(text):
            parts.append(np.asarray(vocabulary.encode(piece), dtype=dtype))
            if progress is not None:
                progress(len(piece))
        if len(texts) > 1 and vocabulary.eos_id is not None:
            parts.append(np.asarray([vocabulary.eos_id], dtype=dtype))
    return np.concatenate(parts)


def write_data_set(folder: Path, ids: TokenIds, vocabulary: Vocabulary, sources: Sequence[Path]) -> dict[str, object]:
    """Writes the first nine tenths as train.bin, the rest as val.bin, the tokenizer, and meta.json last.

    Each file is replaced whole; a crash in between leaves a meta.json whose sha256 do not fit, which `load_data_set`
    refuses.

    Returns:
        what meta.json holds.

    Raises:
        UsageError: the text is too short, or the folder cannot be written.
    """
    if len(ids) < MIN_TOKENS:
        raise UsageError(f"the text is too short: {len(ids)} tokens, expected at least {MIN_TOKENS}")
    make_folder(folder)
    n_train = len(ids) * 9 // 10
    hashes = {}
    for name, part in (("train.bin", ids[:n_train]), ("val.bin", ids[n_train:])):
        raw = part.tobytes()
        with replacing(folder / name, UsageError) as handle:
            handle.write(raw)
        hashes[name] = hashlib.sha256(raw).hexdigest()
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


def load_data_set(folder: Path) -> DataSet:
    """Opens a prepared folder, checking sizes and sha256 against meta.json.

    Raises:
        UsageError: something is missing, damaged, or of another format; says which file and what to do.
    """
    if not folder.is_dir():
        raise UsageError(missing(folder, "the data set"))
    path = folder / "meta.json"
    if not path.is_file():
        raise UsageError(f"{folder} holds no meta.json, so it is no prepared data set; {AGAIN}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        dtype = ID_TYPES[meta["dtype"]]
        version, vocab_size, hashes = int(meta["format_version"]), int(meta["vocab_size"]), dict(meta["sha256"])
        n_train, n_val = int(meta["n_train"]), int(meta["n_val"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise UsageError(f"{path} cannot be used: {type(err).__name__}: {err}; {AGAIN}") from err
    if version != FORMAT_VERSION:
        raise UsageError(f"{path} has format_version {version}, expected {FORMAT_VERSION}; {AGAIN}")
    train = _open_ids(folder / "train.bin", dtype, n_train, vocab_size, hashes.get("train.bin"))
    val = _open_ids(folder / "val.bin", dtype, n_val, vocab_size, hashes.get("val.bin"))
    return DataSet(folder, train, val, vocab_size, _read_tokenizer(folder, hashes), hashes["train.bin"])


def _open_ids(path: Path, dtype: IdType, count: int, vocab_size: int, sha256: str | None) -> TokenIds:
    expected = count * dtype.itemsize
    found = path.stat().st_size if path.is_file() else None
    if found != expected or count < 1:
        state = "is missing" if found is None else f"has {found} bytes"
        raise UsageError(f"{path} {state}, expected {expected} bytes ({count} ids of {dtype.name}); {AGAIN}")
    if sha256_file(path) != sha256:
        raise UsageError(f"{path} is not the one that meta.json describes (sha256 differs); {AGAIN}")
    ids: TokenIds = np.memmap(path, dtype=dtype, mode="r")
    if int(ids.max()) >= vocab_size:
        raise UsageError(f"{path} holds id {ids.max()}, expected less than {vocab_size}; {AGAIN}")
    return ids


def _read_tokenizer(folder: Path, hashes: dict[str, str]) -> dict[str, bytes]:
    files = {}
    for name in TOKENIZER_FILES:
        if name in hashes:
            path = folder / name
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != hashes[name]:
                raise UsageError(f"{path} is missing or not the one that meta.json describes (sha256 differs); {AGAIN}")
            files[name] = content
    if not files.keys() & {"tokenizer.json", "tokenizer.model"}:
        raise UsageError(f"{folder / 'meta.json'} names no tokenizer; {AGAIN}")
    return files
