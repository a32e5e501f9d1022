"""The losses of a run, as lines for a person and as rows of a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from types import TracebackType

from mdi.errors import CheckpointError
from mdi.training.loop import Report

COLUMNS = ("step", "lr", "train_loss", "val_loss", "tokens_per_s", "elapsed_s")


class LossRecord:
    """A CSV file with one row per report, each on disk as soon as it is added. A new run starts a new file.

    Raises:
        CheckpointError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._handle = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        except OSError as err:
            raise CheckpointError(f"{path} cannot be written: {err.strerror or err}") from err
        self._writer = csv.writer(self._handle)
        self._writer.writerow(COLUMNS)

    def add(self, report: Report) -> None:
        val_loss = "" if report.val_loss is None else f"{report.val_loss:.4f}"
        self._writer.writerow(
            [
                report.step,
                f"{report.lr:.3g}",
                f"{report.train_loss:.4f}",
                val_loss,
                f"{report.tokens_per_s:.0f}",
                f"{report.elapsed_s:.1f}",
            ]
        )
        self._handle.flush()

    def __enter__(self) -> LossRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()


def progress_line(report: Report, n_steps: int) -> str:
    minutes, seconds = divmod(round(report.left_s), 60)
    held_out = "" if report.val_loss is None else f", held out {report.val_loss:.4f}"
    return (
        f"step {report.step}/{n_steps}: loss {report.train_loss:.4f}{held_out}, lr {report.lr:.2e}, "
        f"{report.tokens_per_s:,.0f} tokens/s, {minutes}:{seconds:02d} left"
    )
