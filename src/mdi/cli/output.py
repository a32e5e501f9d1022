"""Output of a run: texts as they are generated, the final ones and tables, one JSON object, and files."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from mdi.columns import wrapped
from mdi.spec.options import Options
from mdi.terminal import note_written, plain, show

if TYPE_CHECKING:
    from mdi.metrics import RunMetrics
    from mdi.run.run import Run

WIDTH = 100
REDRAW_S = 0.05  # drawing is computing that the run would rather do
_COLORS = (36, 33, 35, 32, 94, 91)


class Stream(Protocol):
    """Takes the pieces of several texts."""

    def show(self, index: int, text: str) -> None:
        """A piece of sample `index`; "" when it has ended."""


def open_stream(n_samples: int, out: TextIO | None = None) -> Stream:
    """The display for this output and so many texts."""
    out = out or sys.stdout
    n_rows = shutil.get_terminal_size().lines
    if n_samples > 1 and can_redraw(out) and Panels.ROWS_EACH * n_samples < n_rows:
        return Panels(n_samples, out)
    return Flow(n_samples, out)


def can_redraw(out: TextIO) -> bool:
    """Whether lines that were written can be written over."""
    return out.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, index: int, out: TextIO) -> str:
    """In the colour of number `index`, where `out` shows colours and the user has not asked for none (NO_COLOR)."""
    if not can_redraw(out) or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_COLORS[index % len(_COLORS)]}m{text}\033[0m"


def heading(index: int) -> str:
    return f"--- sample {index}"


class Flow:
    """The first text that has not ended flows, those after it wait: so nothing is mixed up, in a file neither."""

    def __init__(self, n_samples: int, out: TextIO) -> None:
        self._out = out
        self._has_headings = n_samples > 1
        self._waiting: list[list[str]] = [[] for _ in range(n_samples)]
        self._has_ended = [False] * n_samples
        self._flowing = -1
        self._begin_next()

    def show(self, index: int, text: str) -> None:
        if not text:
            self._has_ended[index] = True
            if index == self._flowing:
                self._out.write("\n")
                note_written("\n", self._out)
                self._begin_next()
        elif index == self._flowing:
            self._write(text)
        else:
            self._waiting[index].append(text)
        self._out.flush()

    def _begin_next(self) -> None:
        """Go to the next text that has not ended; those that have are written whole."""
        while self._flowing + 1 < len(self._waiting):
            self._flowing += 1
            if self._has_headings:
                self._out.write(paint(heading(self._flowing), self._flowing, self._out) + "\n")
            self._write("".join(self._waiting[self._flowing]))
            if not self._has_ended[self._flowing]:
                return
            self._out.write("\n")

    def _write(self, text: str) -> None:
        if self._out.isatty():
            text = plain(text)
        self._out.write(paint(text, self._flowing, self._out) if text and self._has_headings else text)
        note_written(text, self._out)


class Panels:
    """All texts below each other, drawn again as they grow: their last lines, and when all have ended the whole of them."""

    ROWS_EACH = 3  # a heading and two lines: with less there is nothing to read

    def __init__(self, n_samples: int, out: TextIO) -> None:
        self._out = out
        self._columns = min(WIDTH, shutil.get_terminal_size().columns - 1)
        self._lines = [[""] for _ in range(n_samples)]
        self._n_growing = n_samples
        self._n_drawn = 0
        self._drawn_s = float("-inf")

    def show(self, index: int, text: str) -> None:
        if text:
            lines = self._lines[index]
            for line in (lines.pop() + plain(text).expandtabs(4)).split("\n"):
                lines += wrapped(line, self._columns)
        else:
            self._n_growing -= 1
        if self._n_growing == 0:
            self._draw(None)
        elif time.monotonic() - self._drawn_s >= REDRAW_S:
            self._draw(max(1, (shutil.get_terminal_size().lines - 1) // len(self._lines) - 1))

    def _draw(self, n_last: int | None) -> None:
        """Overwrite the screen with the last lines of each text; None: all lines."""
        rows: list[str] = []
        for index, lines in enumerate(self._lines):
            shown = lines if n_last is None else lines[-n_last:]
            rows += [paint(line, index, self._out) if line else "" for line in (heading(index), *shown)]
        up = f"\033[{self._n_drawn}A" if self._n_drawn else ""
        self._out.write(up + "".join(f"\r{row}\033[K\n" for row in rows) + "\033[J")
        self._out.flush()
        self._n_drawn, self._drawn_s = len(rows), time.monotonic()


logger = logging.getLogger("mdi")


def write_trace_of(node: Run, path: Path) -> None:
    """The file of --trace, once the run has ended."""
    from mdi.run.trace import write_trace

    trace = node.trace()
    if trace is not None:
        write_trace(path, trace)
        logger.info("wrote %s; `mdi explain %s` says what limited the run", path, path)


def report(options: Options, node: Run, failure: BaseException | None, was_streamed: bool) -> None:
    """All that a run leaves behind: texts, tables, files; of one that failed, what each sample had reached."""
    from mdi.run.report import format_report

    metrics = node.metrics()
    if options.json:
        result = {**metrics.to_json(), "seed": options.seed}
        if failure is not None:
            result = {"error": str(failure) or "interrupted", "samples": result["samples"]}
        print_json(result)
    elif failure is not None or not was_streamed:
        begun = [i for i, sample in enumerate(metrics.samples) if failure is None or sample.token_ids]
        if failure is not None and metrics.samples:
            print("\nwhat each sample had reached:" if begun else "\nno sample had a token yet")
        for i in begun:
            sample = metrics.samples[i]
            show(f"--- sample {i} ({len(sample.token_ids)} tokens)\n{sample.prompt}{sample.text}")
    if failure is None:
        if not options.json:
            show("\n" + format_report(metrics))
        _write_files(options, metrics, min(node.model.context_length, node.model.spec.max_length))
        if options.trace is not None:
            write_trace_of(node, options.trace)


def _write_files(options: Options, metrics: RunMetrics, context_size: int) -> None:
    """Write the files of --time-run and --plots; reports on stderr, because a program may read stdout."""
    from mdi.cli import output_dir
    from mdi.metrics import append_time_run, write_tokens_csv

    if options.time_run is not None:
        append_time_run(
            options.time_run,
            n_samples=len(metrics.samples),
            n_layers=max(node.layers[1] for node in metrics.nodes),
            context_size=context_size,
            gen_time_s=metrics.duration_s,
        )
    if options.plots:
        from mdi_tools.plots import plot_tokens_over_time, sample_series

        csv = write_tokens_csv(output_dir("logs"), metrics)
        logger.info("wrote %s", csv)
        image = output_dir("img") / (csv.stem.replace("samples_", "", 1) + ".png")
        plot_tokens_over_time(image, sample_series(metrics.samples), f"{metrics.model}, {metrics.n_nodes} nodes")
        logger.info("wrote %s", image)


def print_json(result: dict[str, Any]) -> None:
    """One object on stdout, in ASCII where its encoding demands that, and never with a control character."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(result, ensure_ascii=not is_unicode)
    print(text.translate({code: f"\\u{code:04x}" for code in range(127, 160)}), flush=True)
