"""The folders of runs that can be resumed. A finished run leaves none."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from mdi.errors import UsageError
from mdi.recovery.journal import RunRecord, is_locked, read_record

JOURNAL = "journal"
LAST = "last"
N_KEPT = 20
KEPT_S = 30 * 86400.0


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
        if time.time() - run.changed_s > KEPT_S:
            remove_run(run.path)
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}" / JOURNAL


def runs_in(folder: Path) -> list[RunFolder]:
    """Those that no process works on, the oldest first."""
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


def told_runs(folder: Path) -> list[str]:
    """A line for each interrupted run: how far it came, or why it cannot be resumed."""
    lines = []
    for run in runs_in(folder):
        try:
            told = _told(read_record(run.path))
        except UsageError as e:
            told = str(e)
        lines.append(f"{run.name}  {told}")
    return lines


def _told(record: RunRecord) -> str:
    n_over = sum(text.finish_reason is not None for text in record.texts)
    n_tokens = sum(len(text.ids) for text in record.texts)
    ckpt = record.flags.get("ckpt") or record.flags.get("chunk") or {}
    model = Path(str(ckpt.get("path", ""))).name if isinstance(ckpt, dict) else ""
    return f"{model}: {n_over} of {len(record.texts)} texts ended, {n_tokens} tokens"


def remove_run(path: Path) -> None:
    """Removes a run that will not be resumed; `path` is its journal."""
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
