"""A model as one file: a tar archive whose first entry lists all others with their sizes and hashes.

Written and read block by block here, because tarfile's reader believes what an archive says of itself: long names, links,
sparse files. An archive of ours has plain files with short names alone, and anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from mdi.checkpoint.disk_space import check_disk
from mdi.checkpoint.download import MARKER
from mdi.checkpoint.folder import GGUF_NOTE, PARTS_FILE, POOLING_FILES, is_usable
from mdi.checkpoint.model_store import STATE, ModelStore, StoredModel, is_whole, make_state
from mdi.errors import Code, MdiError, StoreError
from mdi.files import replacing
from mdi.spec.decode import Bytes, Meta, Sha256, decode_text

Progress = Callable[[int, int], None]

FORMAT = 1
LIST_NAME = "mdi-model.json"
MADE_HERE = (
    GGUF_NOTE,
    PARTS_FILE,
)  # an archive of ours has none of them, and what another one says of files is not believed
LIST_LIMIT_BYTES = 4 << 20
N_FILES_LIMIT = 10_000
_BLOCK = tarfile.BLOCKSIZE
_PIECE_BYTES = 1 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_.][\w.-]{0,98}", re.ASCII)  # a longer one would need a second header
_MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class ArchivedFile:
    size: Bytes
    sha256: Sha256


@dataclass(frozen=True)
class Contents:
    """The first entry of an archive."""

    format: int
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    files: dict[str, ArchivedFile]

    def check(self, where: Path) -> None:
        """Raises StoreError if this is no model that may be written to a store."""
        if self.format != FORMAT:
            raise StoreError(f"{where} has the format {self.format}, this version reads {FORMAT}", code=Code.ARCHIVE)
        if not _MODEL_NAME.fullmatch(self.name) or ".." in self.name or "--" in self.name:
            raise StoreError(f"{where}: {self.name[:60]!r} is no name of a model", code=Code.ARCHIVE)
        if not 0 < len(self.files) <= N_FILES_LIMIT:
            raise StoreError(f"{where} has {len(self.files)} files, expected 1 to {N_FILES_LIMIT}", code=Code.ARCHIVE)
        for name in self.files:
            if not _is_file_name(name):
                raise StoreError(f"{where}: {name[:60]!r} is no name of a model's file", code=Code.ARCHIVE)

    @property
    def n_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def _is_file_name(name: str) -> bool:
    is_plain = _FILE_NAME.fullmatch(name) is not None and name not in (".", "..", STATE, *MADE_HERE)
    return is_plain or name in POOLING_FILES


def export_model(model: StoredModel, path: Path, progress: Progress = lambda done, total: None) -> None:
    """Write a model's files to one file. Raises StoreError: one cannot be read, or the disk refuses."""
    files = _files_of(model)
    check_disk(path.parent, sum(file.stat().st_size for file in files.values()), "the export", StoreError)
    total, done = 2 * sum(file.stat().st_size for file in files.values()), 0

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(done, total)

    try:
        listed = {name: ArchivedFile(file.stat().st_size, _hash(file, advance)) for name, file in files.items()}
        name = model.name if _MODEL_NAME.fullmatch(model.name) else model.folder.name
        contents = Contents(FORMAT, name, listed)
        contents.check(path)
        with replacing(path, StoreError) as out:
            head = json.dumps(asdict(contents)).encode()
            _write_entry(out, LIST_NAME, len(head))
            _write_padded(out, head)
            for name, file in files.items():
                _write_entry(out, name, listed[name].size)
                with open(file, "rb") as source:
                    while piece := source.read(_PIECE_BYTES):
                        out.write(piece)
                        advance(len(piece))
                out.write(bytes(-listed[name].size % _BLOCK))
                if out.tell() % _BLOCK:
                    raise StoreError(f"{file} changes while it is read")
            out.write(bytes(2 * _BLOCK))
    except OSError as e:
        raise StoreError(f"{model.name} cannot be read: {e}") from None


def import_model(store: ModelStore, path: Path, progress: Progress = lambda done, total: None) -> tuple[str, Path]:
    """Put the model of an archive into a store; it is there as a whole or not at all.

    Returns:
        Its name and its folder.

    Raises:
        StoreError: it is no archive of ours, is damaged or cut short, holds no model, or is there already; or no room.
    """
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is no file: expected one that `mdi export` wrote", code=Code.ARCHIVE)
    try:
        with open(path, "rb") as file:
            contents = _read_contents(file, path)
            target = store.folder / contents.name.replace(":", "--")
            if target.exists():
                raise StoreError(
                    f"{contents.name} is in {store.folder} already: `mdi rm {contents.name}` removes it",
                    code=Code.THERE,
                )
            check_disk(store.folder, contents.n_bytes, "the model", StoreError, "choose another disk with --store")
            state = store.folder / STATE
            make_state(state)
            unfinished = state / f"import-{secrets.token_hex(4)}"
            unfinished.mkdir()
            try:
                _extract(file, contents, unfinished, path, progress)
                _complete(store, unfinished, target, path)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as e:
        raise StoreError(f"{path} cannot be imported to {store.folder}: {e.strerror or e}") from None
    return contents.name, target


def _files_of(model: StoredModel) -> dict[str, Path]:
    """The files that make a model, by name: its weights, settings, tokenizer and the note about its licence."""
    if model.gguf is not None:
        found = [path for path in model.files if path.suffix == ".gguf"]
        found += [path for path in [model.folder / MARKER] if path.is_file()]
    else:
        found = [path for path in model.folder.iterdir() if path.is_file() and path.name not in MADE_HERE]
    below = {
        name: model.folder / name for name in POOLING_FILES if model.gguf is None and (model.folder / name).is_file()
    }
    return {path.name: path for path in sorted(found)} | below


def _complete(store: ModelStore, unfinished: Path, target: Path, path: Path) -> None:
    """Make the note of a GGUF file, and give the folder its name. Raises StoreError."""
    from mdi.checkpoint.ggufsource import gguf_directory

    try:
        if files := sorted(unfinished.glob("*.gguf")):
            gguf_directory(files[0], store.folder, unfinished)
    except MdiError as e:
        raise StoreError(f"{path}: {e}", code=Code.ARCHIVE) from None
    if not (is_usable(unfinished) and is_whole(unfinished)):
        raise StoreError(f"{path} holds no whole model", code=Code.ARCHIVE)
    with store.changing():
        if target.exists():
            raise StoreError(f"{target} is there already", code=Code.THERE)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(unfinished, target)


# The form of an archive


def _write_entry(out: BinaryIO, name: str, size: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    out.write(entry.tobuf(tarfile.GNU_FORMAT))


def _write_padded(out: BinaryIO, data: bytes) -> None:
    out.write(data + bytes(-len(data) % _BLOCK))


def _read_contents(file: BinaryIO, path: Path) -> Contents:
    name, size = _read_entry(file, path)
    if name != LIST_NAME or size > LIST_LIMIT_BYTES:
        raise StoreError(f"{path} is no file that `mdi export` wrote", code=Code.ARCHIVE)
    head = file.read(size + -size % _BLOCK)[:size]
    contents = decode_text(Contents, head, f"{path}:", lambda text: StoreError(text, code=Code.ARCHIVE))
    contents.check(path)
    return contents


def _read_entry(file: BinaryIO, path: Path) -> tuple[str, int]:
    """Name and size of the next entry, a plain file. Raises StoreError."""
    try:
        entry = tarfile.TarInfo.frombuf(file.read(_BLOCK), "utf-8", "strict")
    except (tarfile.HeaderError, ValueError):
        raise StoreError(
            f"{path} is damaged, cut short, or no file that `mdi export` wrote", code=Code.ARCHIVE
        ) from None
    if entry.type != tarfile.REGTYPE or entry.size < 0:
        raise StoreError(f"{path}: {entry.name[:60]!r} is no plain file", code=Code.ARCHIVE)
    return entry.name, entry.size


def _extract(file: BinaryIO, contents: Contents, folder: Path, path: Path, progress: Progress) -> None:
    """Write all files, each checked by its hash. Raises StoreError, OSError."""
    done = 0
    for name, listed in contents.files.items():
        found, size = _read_entry(file, path)
        if (found, size) != (name, listed.size):
            raise StoreError(
                f"{path}: expected {name} of {listed.size} bytes, found {found[:60]!r} of {size}", code=Code.ARCHIVE
            )
        digest, left = hashlib.sha256(), size
        (folder / name).parent.mkdir(exist_ok=True)
        with open(folder / name, "xb") as out:
            while left:
                piece = file.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise StoreError(f"{path} is cut short", code=Code.ARCHIVE)
                digest.update(piece)
                out.write(piece)
                left -= len(piece)
                done += len(piece)
                progress(done, contents.n_bytes)
            out.flush()
            os.fsync(out.fileno())
        file.read(-size % _BLOCK)
        if digest.hexdigest() != listed.sha256:
            raise StoreError(f"{path}: {name} is damaged: copy the file again", code=Code.ARCHIVE)


def _hash(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()
