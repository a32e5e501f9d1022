#!/usr/bin/env python3
"""Guesses by look-up in texts that people want: a summary, a correction of code, a translation, by published models.

    benchmarks/real_texts.py                  the models that `make real` has fetched
    benchmarks/real_texts.py --models FOLDER  GGUF files that lie elsewhere
    benchmarks/real_texts.py --short          does it work? one node, one round

Each text is written greedily, with guesses and without in turns over the same ring, and must be the same. A guess is right if
its token was drawn. The base model, which answers nothing, continues the prompts of BASE; a summary it ends after some words.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from mdi.checkpoint.ggufsource import gguf_directory  # noqa: E402
from mdi.engine.sequence import SamplingParams  # noqa: E402
from mdi.files import default_cache_dir  # noqa: E402
from mdi.run.local import LocalRing  # noqa: E402
from mdi.run.nodes import GivenNodes, OwnProcesses  # noqa: E402
from mdi.run.run import Run  # noqa: E402
from mdi.spec.cluster import standalone  # noqa: E402
from mdi.spec.options import StarterOptions  # noqa: E402
from records import add_json_flag, save, told  # noqa: E402
from speculation import speed_of  # noqa: E402

CHAT, BASE_MODEL = "SmolLM2-135M-Instruct", "gemma-3-270m"

ARTICLE = """\
The town library of Hartwell will stay open until ten in the evening from the first of March. The council
decided this on Tuesday, after a survey in which more than two thousand people took part. Most of them said
that they work during the day and cannot come before six. The library has had the same opening hours since
1987, and its director, Maria Lindqvist, said that the change was overdue. "People want to read, to learn and
to meet each other, and they want to do it after work," she said. Four new librarians will be hired, and
volunteers will help at the desk on two evenings of each week. The longer hours cost the town about ninety
thousand euros a year. Half of this comes from the state, which supports libraries that stay open in the
evening. A trial in the town of Elmstead, twenty miles to the north, had shown that the number of visitors
grew by a third within six months. In Hartwell the reading room on the second floor will also be renovated. It
gets new lamps, forty desks with sockets, and a small room in which groups can talk. During the work, which
takes three weeks, readers can use the hall on the ground floor."""

CODE = '''\
def moving_average(values, width):
    """The mean of each window of `width` neighbouring values."""
    if width < 1:
        raise ValueError("the width must be at least 1")
    averages = []
    for start in range(len(values) - width):
        window = values[start : start + width]
        averages.append(sum(window) / len(values))
    return averages


def largest_average(values, width):
    """The largest mean of a window, and where the window starts."""
    averages = moving_average(values, width)
    best = 0
    for place, average in enumerate(averages):
        if average < averages[best]:
            best = place
    return averages[best], best'''

SPEECH = """\
Good morning, and welcome to the station. The train to Lyon leaves at nine from platform four. The train to
Geneva is twenty minutes late. Please keep your luggage with you at all times. The waiting room is on the
first floor, and the ticket office opens at eight. We wish you a pleasant journey."""

CASES = {
    "summary": f"Summarize the following text in three sentences.\n\n{ARTICLE}",
    "correction": f"Correct the mistakes in this Python code, and write the whole code again.\n\n```python\n{CODE}\n```",
    "translation": f"Translate the following text into French.\n\n{SPEECH}",
}
BASE = {
    "correction": f"Code with two mistakes:\n\n```python\n{CODE}\n```\n\nThe same, corrected:\n\n```python\ndef moving",
    "translation": f"English: {SPEECH}\n\nFrench: Bonjour",
}


@contextlib.contextmanager
def opened(model: Path, form: str | None, n_nodes: int, n_tokens: int, prompt: list[str]) -> Iterator[Run]:
    """A run over this process, or over processes with a thread each."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = gguf_directory(model, folder / "models")
        made = StarterOptions(
            ckpt=checkpoint,
            cache_dir=folder,
            device="cpu",
            quantize=form,
            quantize_head=form,
            placement="even",
            draft="auto",
        )
        nodes = GivenNodes(standalone()) if n_nodes == 1 else OwnProcesses(
            lambda: LocalRing(n_nodes, None, 1, checkpoint, False, False), lambda ring: ring.cluster
        )  # fmt: skip
        stack.enter_context(nodes)
        yield stack.enter_context(Run(nodes, made, n_tokens, prompt, n_texts=1))


def measured(model: Path, form: str | None, n_nodes: int, n_tokens: int, n_rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    cases = BASE if BASE_MODEL in model.name else CASES
    with opened(model, form, n_nodes, n_tokens, list(cases.values())) as run:
        guessing = run.engine.speculation
        params = SamplingParams(n_tokens, temperature=0, eos_ids=run.model.codec.eos_ids)
        speed_of(run, run.prompt_ids[:1], SamplingParams(20, temperature=0))  # warms up
        for case, ids in zip(cases, run.prompt_ids, strict=True):
            ratios, plain_s, texts, guesses = [], [], [], (0, 0)
            for round_ in range(n_rounds):
                speeds = {}
                for is_guessed in (False, True) if round_ % 2 else (True, False):
                    run.engine.speculation = guessing if is_guessed else None
                    before = run.engine.guesses
                    speeds[is_guessed], (text,) = speed_of(run, [ids], params)
                    texts.append(text)
                    if is_guessed:
                        guesses = tuple(now - then for now, then in zip(run.engine.guesses, before, strict=True))
                ratios.append(speeds[True] / speeds[False])
                plain_s.append(speeds[False])
            assert all(text == texts[0] for text in texts), f"{case}: another text"
            yield {
                "model": model.name.split(".")[0], "case": case, "nodes": n_nodes,
                "n_prompt": len(ids), "n_tokens": len(texts[0]),
                "plain_tokens_s": statistics.median(plain_s), "ratio": statistics.median(ratios), "lowest": min(ratios),
                "guessed": guesses[0], "confirmed": guesses[1], "text": run.model.codec.decode(texts[0]),
            }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    rate = f"{row['confirmed'] / row['guessed']:.0%}" if row["guessed"] else "-"
    print(
        f"{row['model']}, {row['case']}, {row['nodes']} nodes: {row['n_tokens']} tokens behind {row['n_prompt']}; without "
        f"guesses {row['plain_tokens_s']:.1f} tokens/s, with them {row['ratio']:.2f} times (lowest {row['lowest']:.2f}); right "
        f"{row['confirmed']} of {row['guessed']} ({rate})\n    {row['text'][:400]!r}",
        flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, default=default_cache_dir() / "real" / "models", help="a folder of GGUF files"
    )
    parser.add_argument("--format", help="of the weights (default: the file's own numbers, unpacked)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--n-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true")
    add_json_flag(parser, "real_texts")
    args = parser.parse_args()
    if args.short:
        args.nodes, args.rounds = [1], 1
    models = [path for path in sorted(args.models.glob("*.gguf")) if path.name.startswith((CHAT, BASE_MODEL))]
    if not models:
        parser.error(f"no model in {args.models}: run `make real`, or give --models")
    rows = []
    for model in models:
        for n_nodes in args.nodes:
            for row in measured(model, args.format, n_nodes, args.n_tokens, args.rounds):
                rows.append(row)
                show(row)
    save(args.json, {"rows": rows, "arguments": told(args, "json", "models")})


if __name__ == "__main__":
    main()
