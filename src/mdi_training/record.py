"""The losses of a run, as lines for a person and as rows of a CSV file."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from mdi.errors import CheckpointError
from mdi.files import replacing
from mdi_training.loop import StepReport

COLUMNS = ("step", "lr", "train_loss", "val_loss", "tokens_per_s", "elapsed_s")
SILENT_S = 10.0


class LossRecord:
    """A CSV file with one row per report, each on disk as soon as it is added.

    Args:
        n_steps: to resume from; rows of later steps are dropped, earlier ones stay. 0 starts a new file.

    Raises:
        CheckpointError: the file cannot be written.
    """

    def __init__(self, path: Path, n_steps: int = 0) -> None:
        self.path = path
        kept = [row for row in read_losses(path) if int(row["step"]) <= n_steps] if n_steps and path.is_file() else []
        content = io.StringIO(newline="")
        writer = csv.DictWriter(content, COLUMNS)
        writer.writeheader()
        writer.writerows(kept)
        with replacing(path) as file:
            file.write(content.getvalue().encode())
        try:
            self._handle = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        except OSError as err:
            raise CheckpointError(f"{path} cannot be written: {err.strerror or err}") from err
        self._writer = csv.writer(self._handle)

    def add(self, report: StepReport) -> None:
        # Nine digits tell any two float32 apart, so that two curves can be compared exactly.
        val_loss = "" if report.val_loss is None else f"{report.val_loss:.9g}"
        row = [
            report.step,
            f"{report.lr:.9g}",
            f"{report.train_loss:.9g}",
            val_loss,
            f"{report.tokens_per_s:.0f}",
            f"{report.elapsed_s:.1f}",
        ]
        try:
            self._writer.writerow(row)
            self._handle.flush()
        except OSError as err:
            raise CheckpointError(f"cannot write {self.path}: {err.strerror or err}") from err

    def __enter__(self) -> LossRecord:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # the rest in the buffer for a full disk
            self._handle.close()


def read_losses(path: Path) -> list[dict[str, str]]:
    """The rows of such a file. Raises CheckpointError if it is not one."""
    try:
        with open(path, newline="", encoding="utf-8") as handle:
            rows = [row for row in csv.DictReader(handle) if None not in row.values()]
        for row in rows:
            int(row["step"]), float(row["train_loss"]), float(row["val_loss"] or "nan")
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path} is not a record of losses: {type(err).__name__}: {err}") from err
    return [{name: row.get(name) or "" for name in COLUMNS} for row in rows]


class ProgressLines:
    """Lines on the screen: those of the record, and others where none came for ten seconds, because steps are slow.

    Args:
        say: shows a line.
        n_steps: of the run.
        clock: seconds, rising.
    """

    def __init__(self, say: Callable[[str], object], n_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._n_steps, self._clock = say, n_steps, clock
        self._said_s = self._step_said_s = clock()  # last line; last line with a loss

    def report(self, news: StepReport) -> None:
        self._said_s = self._step_said_s = self._clock()
        self._say(progress_line(news, self._n_steps))

    def on_step(self, news: StepReport) -> None:
        """A step that the record does not show."""
        if self._clock() - self._step_said_s >= SILENT_S:
            self.report(news)

    def on_pass(self, what: str) -> None:
        if self._clock() - self._said_s >= SILENT_S:
            self._said_s = self._clock()
            self._say(what)


def progress_line(report: StepReport, n_steps: int) -> str:
    hours, seconds = divmod(round(report.left_s), 3600)
    left = f"{hours}:{seconds // 60:02d}:{seconds % 60:02d}" if hours else f"{seconds // 60}:{seconds % 60:02d}"
    held_out = "" if report.val_loss is None else f", held out {report.val_loss:.4f}"
    return (
        f"step {report.step}/{n_steps}: loss {report.train_loss:.4f}{held_out}, lr {report.lr:.2e}, "
        f"{report.tokens_per_s:,.0f} tokens/s, {left} left"
    )
