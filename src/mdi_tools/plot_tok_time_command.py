"""Draw time over tokens for a model's runs on several node counts in one figure, with an enlargement of the first tokens.

It reads the files that --plots writes to the logs folder. (Files of --time-run have neither tokens nor node counts.)

examples:
  mdi plot-tok-time org/model --n-samples 3
  mdi plot-tok-time NanoLlama --csv one-node.csv --csv two-nodes.csv --label "1 node" --label "2 nodes" --out figure.png
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from mdi.errors import UsageError
from mdi.spec.parser import Parser


def add_arguments(parser: Parser) -> None:
    from mdi.spec.options import COMMON

    parser.add_argument("model", metavar="MODEL_DIR", help="the model's folder, or its name as in the file names")
    parser.add_argument("-nt", "--no-title", action="store_true", help="no title above the figure")
    parser.add_argument(
        "--n-samples", type=int, default=3, metavar="N", help="number of samples of the runs to compare (%(default)s)"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder of the runs' files (logs/; in a checkout src/logs/)"
    )
    parser.add_argument("--csv", type=Path, action="append", metavar="FILE", help="use this file instead; repeatable")
    parser.add_argument("--label", action="append", metavar="TEXT", help="label of each --csv, in the same order")
    parser.add_argument(
        "--detail", type=int, metavar="N", help="first tokens to enlarge; 0: none (a tenth of the shortest run)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file of the figure (img/time_vs_tokens_<model>.png; in a checkout in src/)",
    )
    parser.options(None, *COMMON)


def run(args: argparse.Namespace) -> int:
    from mdi.cli import output_dir
    from mdi_tools.plots import plot_time_over_tokens
    from mdi_tools.token_times import find_runs, parse_name, read_token_times

    names = model_names(args.model)
    if args.detail is not None and args.detail < 0:
        raise UsageError(f"--detail {args.detail}: expected 0 or more tokens")
    if args.label and len(args.label) != len(args.csv or ()):
        raise UsageError(
            f"--label is given {len(args.label)} times, --csv {len(args.csv or ())} times: expected as often"
        )
    if args.csv:
        counts = [found.n_nodes if (found := parse_name(path)) else None for path in args.csv]
        labels = args.label or [path.stem if n is None else _nodes(n) for path, n in zip(args.csv, counts, strict=True)]
        files = list(zip(labels, args.csv, strict=True))
    else:
        runs = find_runs(args.logs or output_dir("logs"), names, args.n_samples)
        files = [(_nodes(run.n_nodes), run.path) for run in runs]
    series = {label: read_token_times(path) for label, path in files}
    if len(series) < len(files):
        raise UsageError("two of the files have the same label: tell them apart with --label")
    plain = re.sub(r"[^\w.+-]+", "-", names[0])
    title = "" if args.no_title else f"Time over generated tokens, {names[0]}"
    path = plot_time_over_tokens(
        args.out or output_dir("img") / f"time_vs_tokens_{plain}.png", series, title, n_detail=args.detail
    )
    for label, points in series.items():
        time_s, n_tokens = points[-1]
        rate = f", {n_tokens / time_s:.2f} tokens/s" if time_s > 0 else ""
        print(f"{label}: {n_tokens} tokens in {time_s:.2f} s{rate}")
    print(f"figure: {path}")
    return 0


def model_names(model: str) -> list[str]:
    """What the runs of this model may be called: the folder's name, or the one in its model_config.yaml."""
    names = [Path(model).resolve().name if Path(model).is_dir() else Path(model).name]
    config = Path(model) / "model_config.yaml"
    if config.is_file():
        match = re.search(r"^name:\s*['\"]?([^'\"\n]+?)['\"]?\s*$", config.read_text(encoding="utf-8"), re.MULTILINE)
        names += [match[1]] if match and match[1] not in names else []
    if not names[0]:
        raise UsageError(f"MODEL_DIR {model!r}: expected a folder or a name")
    return names


def _nodes(count: int) -> str:
    return f"{count} node" + ("" if count == 1 else "s")
