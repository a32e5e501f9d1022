"""The directory of a GGUF file: config, tokenizer, and a note with its path. The weights stay in the file.

It can be used wherever a checkpoint's directory can. Its chunks are in it, too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mdi.checkpoint.folder import CONFIG_FILE, GGUF_NOTE
from mdi.checkpoint.ggufheader import read_gguf
from mdi.checkpoint.ggufsource import GgufSource
from mdi.checkpoint.gguftokenizer import write_tokenizer
from mdi.config import nearest_existing
from mdi.errors import CheckpointError, UsageError
from mdi.whole_files import replacing

_HASHES = "parts.json"


def gguf_directory(path: Path, folder: Path) -> Path:
    """The directory for a GGUF file, made below `folder` at the first call; another one if the file has changed.

    Raises:
        UsageError: there is no such file.
        CheckpointError: it cannot be used; or the disk refuses.
    """
    import yaml

    path = path.absolute()
    try:
        stat = path.stat()
    except OSError as e:
        raise UsageError(
            f"{path} cannot be opened: {e.strerror or e} (the nearest that exists is {nearest_existing(path)})"
        ) from None
    stamp = hashlib.sha256(json.dumps([str(path), stat.st_size, stat.st_mtime_ns]).encode()).hexdigest()[:8]
    directory = folder / "gguf" / f"{path.stem}-{stamp}"
    if (directory / GGUF_NOTE).is_file():
        return directory
    header = read_gguf(path)
    source = GgufSource(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise CheckpointError(f"cannot make {directory}: {e.strerror or e}") from None
    write_tokenizer(header.fields, directory, path)
    with replacing(directory / CONFIG_FILE) as file:
        file.write(yaml.safe_dump(source.config_dict).encode())
    with replacing(directory / GGUF_NOTE) as file:  # last, because it says that the others exist
        file.write(json.dumps({"file": str(path)}).encode())
    return directory


def open_gguf_directory(directory: Path) -> GgufSource | None:
    """The GGUF file of a directory as a source; None if it has none. Raises CheckpointError."""
    note = directory / GGUF_NOTE
    if not note.is_file():
        return None
    try:
        path = Path(json.loads(note.read_text(encoding="utf-8"))["file"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(
            f"{note} cannot be read ({e}): remove {directory}, and give the GGUF file again"
        ) from None
    return GgufSource(path, directory / _HASHES)
