"""Say why a run was not faster, from the file that --trace wrote.

examples:
  mdi starter ... --trace run.json
  mdi explain run.json
      prints the reason (slowest stage, slow link, prompts, too few texts, too little memory) and what to do
  mdi explain run.json --json

To see the file as a picture, open it in chrome://tracing or https://ui.perfetto.dev.
"""

from __future__ import annotations

import json

from mdi.spec.options import COMMON, Options
from mdi.spec.parser import Parser
from mdi.terminal import show


def add_arguments(parser: Parser) -> None:
    file = {"help": "file that --trace wrote"}
    parser.options(None, "file", "json", *COMMON, file=file, json={"help": "print one JSON object"})


def run(options: Options) -> int:
    from mdi.errors import UsageError
    from mdi.run.explain import explain, format_explanation, summarize
    from mdi.run.trace import read_trace

    trace = read_trace(options.file)
    summary = summarize(trace)
    if summary is None:
        raise UsageError(f"{options.file}: no frame in it went round the whole ring, so there is nothing to explain")
    explanation = explain(summary)
    show(json.dumps(explanation.to_json()) if options.json else format_explanation(trace, explanation))
    return 0
