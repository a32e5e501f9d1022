"""Say why a run was not faster, from the file that --trace wrote.

examples:
  starter.py ... --trace run.json
  mdi explain run.json
      prints the reason (slowest stage, slow link, prompts, too few texts, too little memory) and what to do
  mdi explain run.json --json

To see the file as a picture, open it in chrome://tracing or https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mdi.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mdi.cli import add_common_flags

    parser.add_argument("file", type=Path, metavar="FILE", help="file that --trace wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from mdi.errors import UsageError
    from mdi.tracing.explain import explain, format_explanation, summarize
    from mdi.tracing.trace import read_trace

    trace = read_trace(args.file)
    summary = summarize(trace)
    if summary is None:
        raise UsageError(f"{args.file}: no frame in it went round the whole ring, so there is nothing to explain")
    explanation = explain(summary)
    show(json.dumps(explanation.to_json()) if args.json else format_explanation(trace, explanation))
    return 0
