"""Output of a run: the final texts and tables, one JSON object, and files."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi.spec.options import Options
from mdi.terminal import show

if TYPE_CHECKING:
    from mdi.metrics import RunMetrics
    from mdi.run.run import Run

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
        _write_files(options, metrics, min(node.model.context_length, int(node.model.config.block_size)))
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
