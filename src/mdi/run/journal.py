"""The progress of a run on disk: if the starter ends, another one can continue every text.

One record a line: its CRC32 in hex, a blank, a JSON object. The first says what was run, with the number of prompts and their
hash; the next ones are the prompts, and then come token ids as they are known. Lines are only ever appended, and synced once a
second. So a process that dies leaves at most a damaged end, which is cut off when the run is resumed; these tokens are drawn
again. Damage anywhere else has another cause, and a journal with it is refused: without a prompt a text would be lost. Drawing
has no state (`engine.sampling`), so ids, prompts and seed are all that a text needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from mdi.errors import UsageError
from mdi.spec.decode import Meta, Whole, decode

VERSION = 3  # 3: seeds give other texts
SYNC_S = 1.0
JOIN_S = 10.0
N_BYTES_LIMIT = 1 << 32  # of a file that is read

JOURNAL = "journal"
LAST = "last"
N_KEPT = 20
KEPT_S = 30 * 86400.0
BEFORE_S = 978307200.0  # 2001: what was written earlier is of a board whose clock had not been set yet

logger = logging.getLogger("mdi")


@dataclass
class JournalText:
    """One text: its prompt, the ids so far, and why it has ended; None if it has not.

    `may_differ_from` is the number of the first id that an undisturbed run may not have had; None if all are the same.
    """

    prompt: str
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    may_differ_from: int | None = None


@dataclass
class RunRecord:
    """The content of a journal.

    Attributes:
        flags: that the run was started with, as JSON.
        identity: hash of the model and of all options that its numbers depend on.
        numbers: hash of what else they depend on, in the ring that the run began with.
        texts: in the order in which they were submitted.
        n_bytes: of the file, up to its damaged end.
    """

    flags: dict[str, Any]
    identity: str
    texts: list[JournalText] = field(default_factory=list)
    n_bytes: int = 0
    numbers: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether all texts have ended; a run without texts was never written whole."""
        return bool(self.texts) and all(text.finish_reason is not None for text in self.texts)


class Journal:
    """The journal of one run, locked while it is open. `add` never waits for the disk.

    Raises:
        UsageError: the file cannot be made, or another process has it.
    """

    def __init__(self, path: Path, file: int, n_bytes: int, records: Sequence[dict[str, Any]] = ()) -> None:
        """Use `new` or `reopen`."""
        self.path = path
        self._file = file
        self._n_bytes = n_bytes  # of whole lines in the file
        self._lines: list[bytes] = []
        self._tokens: dict[int, list[int]] = {}
        self._ended: dict[int, str] = {}
        self._differs: dict[int, int] = {}
        self._anew: set[int] = set()
        self._lock = threading.Lock()
        self._is_reported = False
        self._closing = threading.Event()
        for record in records:
            self._append(record)
        self._sync()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @classmethod
    def new(cls, path: Path, record: RunRecord) -> Journal:
        """Make the file, with everything that is known before the first token."""
        first = {
            "version": VERSION, "flags": record.flags, "identity": record.identity, "numbers": record.numbers,
            "n_prompts": len(record.texts), "prompts": _hash_of(record.texts),
        }  # fmt: skip
        texts = [{"prompt": text.prompt, "ids": text.prompt_ids} for text in record.texts]
        return cls(path, _opened(path, os.O_CREAT | os.O_EXCL), 0, [first, *texts])

    @classmethod
    def reopen(cls, path: Path) -> tuple[Journal, RunRecord]:
        """The journal of a resumed run, and its records; a damaged end is cut off. UsageError as `read_record`."""
        file = _opened(path, 0)
        try:
            record = read_record(path)
            os.ftruncate(file, record.n_bytes)
        except BaseException:
            os.close(file)
            raise
        return cls(path, file, record.n_bytes), record

    def add(
        self, index: int, tokens: list[int], finish_reason: str | None, may_differ_from: int | None = None,
        is_anew: bool = False,
    ) -> None:  # fmt: skip
        """Text number `index` has grown by these tokens, has ended, or both; if it is `anew`, these are all that it has."""
        with self._lock:
            if is_anew:
                self._anew.add(index)
                self._tokens[index] = []
            self._tokens.setdefault(index, []).extend(tokens)
            if finish_reason is not None:
                self._ended[index] = finish_reason
            if may_differ_from is not None:
                self._differs[index] = may_differ_from

    def close(self) -> None:
        """Write the rest; harmless if repeated."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            return  # the disk hangs; the file is closed with the process
        self._sync()
        os.close(self._file)

    def _run(self) -> None:
        while not self._closing.wait(SYNC_S):
            self._sync()

    def _append(self, record: dict[str, Any]) -> None:
        data = json.dumps(record, separators=(",", ":")).encode()
        self._lines.append(b"%08x %s\n" % (zlib.crc32(data), data))

    def _sync(self) -> None:
        """Write the new tokens. A full disk is reported once; the run goes on, and writing is tried again."""
        with self._lock:
            tokens, self._tokens = self._tokens, {}
            ended, self._ended = self._ended, {}
            differs, self._differs = self._differs, {}
            anew, self._anew = self._anew, set()
        for index in sorted(tokens):
            end: dict[str, Any] = {"end": ended[index]} if index in ended else {}
            if index in anew:
                end["anew"] = True
            if index in differs:
                end["may_differ_from"] = differs[index]
            self._append({"text": index, "ids": tokens[index], **end})
        if not self._lines:
            return
        data = b"".join(self._lines)
        try:
            _write(self._file, data, self._n_bytes)
            _sync_to_disk(self._file)
        except OSError as e:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._n_bytes)
            if not self._is_reported:
                logger.warning("the journal cannot be written to %s: %s; the run goes on", self.path, e)
                self._is_reported = True
            return
        self._n_bytes += len(data)
        self._lines.clear()


def read_record(path: Path) -> RunRecord:
    """The records of a journal, up to its damaged end.

    Raises:
        UsageError: it is no journal of this version, a prompt is missing or damaged, or there are records behind a damaged one.
    """
    try:
        if path.stat().st_size > N_BYTES_LIMIT:
            raise UsageError(f"{path} is too large for a journal")
        data = path.read_bytes()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror or e}") from None
    lines = data.splitlines(keepends=True)
    found = [_fields_of(line) for line in lines]
    record, n_prompts, prompts_hash = _begun(found[0] if found else None, path)
    n_taken = 1
    for fields in found[1:]:
        if fields is None or not _add(record, fields, n_prompts):
            break
        n_taken += 1
    record.n_bytes = sum(map(len, lines[:n_taken]))
    if len(record.texts) != n_prompts or _hash_of(record.texts) != prompts_hash:
        raise UsageError(
            f"{path} is damaged: not all of its {n_prompts} prompts are whole, so the run cannot be resumed"
        )
    if any(fields is not None for fields in found[n_taken:]):
        raise UsageError(
            f"{path} is damaged in line {n_taken + 1}, and more records follow; to give these up and draw their tokens again: "
            f"truncate -s {record.n_bytes} {path}"
        )
    return record


@dataclass(frozen=True)
class _Begin:
    """The first line."""

    version: int
    flags: dict[str, Any]
    n_prompts: Annotated[int, Meta(ge=1)]
    identity: str
    prompts: str
    numbers: str = ""


@dataclass(frozen=True)
class _Prompt:
    """A line for each text, before all tokens."""

    prompt: str
    ids: tuple[Whole, ...]


@dataclass(frozen=True)
class _Tokens:
    """More tokens of a text, or `anew` all of them; `end` is the reason if these are its last."""

    text: Whole
    ids: tuple[Whole, ...]
    end: str | None = None
    may_differ_from: Whole | None = None
    anew: bool = False


def _begun(fields: dict[str, Any] | None, path: Path) -> tuple[RunRecord, int, str]:
    """Read the first line: a record without texts, the number of its prompts, and their hash. Raises UsageError."""
    if fields is None:
        raise UsageError(f"{path} is no journal, or its first line is damaged")
    try:
        begin = decode(_Begin, fields, "the first line", UsageError)
    except UsageError:
        begin = None
    if begin is None or begin.version != VERSION:
        raise UsageError(f"{path} is not a journal of this version")
    return RunRecord(begin.flags, begin.identity, numbers=begin.numbers), begin.n_prompts, begin.prompts


def _hash_of(texts: Sequence[JournalText]) -> str:
    """SHA-256 of all prompts and their ids."""
    return hashlib.sha256(json.dumps([[text.prompt, text.prompt_ids] for text in texts]).encode()).hexdigest()


def _fields_of(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if it is not whole."""
    check, blank, data = line[:8], line[8:9], line[9:-1]
    if blank != b" " or not line.endswith(b"\n") or check != b"%08x" % zlib.crc32(data):
        return None
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _add(record: RunRecord, fields: dict[str, Any], n_prompts: int) -> bool:
    """Whether the line made sense: first come the prompts, then ids of their texts."""
    try:
        if len(record.texts) < n_prompts:
            text = decode(_Prompt, fields, "a prompt", UsageError)
            record.texts.append(JournalText(text.prompt, list(text.ids)))
            return True
        more = decode(_Tokens, fields, "tokens", UsageError)
    except UsageError:
        return False
    if more.text >= len(record.texts):
        return False
    begun = record.texts[more.text]
    if more.anew:
        begun.ids.clear()
    begun.ids += more.ids
    if more.end is not None:
        begun.finish_reason = more.end
    if more.may_differ_from is not None:
        begun.may_differ_from = more.may_differ_from
    return True


def is_locked(path: Path) -> bool:
    """Whether a process has the journal open."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _opened(path: Path, flags: int) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | flags, 0o600)
    except OSError as e:
        raise UsageError(f"cannot write the journal {path}: {e.strerror or e} (--run-dir, or --no-journal)") from None
    if not _lock(file):
        os.close(file)
        raise UsageError(f"another process has resumed {path.parent.name}")
    return file


def _lock(file: int) -> bool:
    """Take the lock, which ends with the process; False if another process has it."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write(file: int, data: bytes, offset: int) -> None:
    os.lseek(file, offset, os.SEEK_SET)
    view = memoryview(data)
    while len(view):
        view = view[os.write(file, view) :]


def _sync_to_disk(file: int) -> None:
    getattr(os, "fdatasync", os.fsync)(file)


# Folders of runs that can be resumed; a finished run leaves none


@dataclass(frozen=True)
class RunFolder:
    """An interrupted run; `changed_s` is the time of its last write, in seconds since 1970."""

    name: str
    path: Path
    changed_s: float


def new_run(folder: Path) -> Path:
    """The journal of a new run, which is not there yet; old ones are removed."""
    for run in sorted(runs_in(folder), key=lambda run: -run.changed_s)[N_KEPT - 1 :]:
        remove_run(run.path)
    for run in runs_in(folder):
        if BEFORE_S <= run.changed_s < time.time() - KEPT_S:
            remove_run(run.path)
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}" / JOURNAL


def runs_in(folder: Path) -> list[RunFolder]:
    """Interrupted runs that no process works on, the oldest first."""
    runs = []
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*/{JOURNAL}"):
            with contextlib.suppress(OSError):
                if not is_locked(path):
                    runs.append(RunFolder(path.parent.name, path, path.stat().st_mtime))
    return sorted(runs, key=lambda run: run.changed_s)


def find_run(folder: Path, name: str) -> Path:
    """The journal of a run, by its name, its folder, or "last". UsageError if there is none."""
    if name == LAST:
        runs = runs_in(folder)
        if not runs:
            raise UsageError(f"no run in {folder} was interrupted")
        return runs[-1].path
    for path in (folder / name / JOURNAL, Path(name).expanduser() / JOURNAL):
        if path.is_file():
            return path
    known = ", ".join(run.name for run in runs_in(folder)) or "none"
    raise UsageError(f"there is no run {name!r} in {folder}; those that can be resumed: {known}")


def describe_runs(folder: Path) -> list[str]:
    """A line for each interrupted run: how far it came, or why it cannot be resumed."""
    lines = []
    for run in runs_in(folder):
        try:
            line = _describe(read_record(run.path))
        except UsageError as e:
            line = str(e)
        lines.append(f"{run.name}  {line}")
    return lines


def _describe(record: RunRecord) -> str:
    n_ended = sum(text.finish_reason is not None for text in record.texts)
    n_tokens = sum(len(text.ids) for text in record.texts)
    ckpt = record.flags.get("ckpt") or record.flags.get("chunk") or {}
    model = Path(str(ckpt.get("path", ""))).name if isinstance(ckpt, dict) else ""
    return f"{model}: {n_ended} of {len(record.texts)} texts ended, {n_tokens} tokens"


def remove_run(path: Path) -> None:
    """Removes a run that will not be resumed; `path` is its journal."""
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
