#!/usr/bin/env python3
"""Tables 4 and 5 of Petals (Borzunov et al. 2023) as one: right answers, and tokens/s of 1, 8 and 32 texts, 16 bits against 8.

Right are the most probable next tokens of a text that the model has not learned; `make real` fetches model and text.

    petals_bits.py --ckpt ~/.cache/mdi-llm/real/models/SmolLM2-135M-Instruct.Q4_1.gguf --text ~/.cache/mdi-llm/real/text.md
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import on_path  # noqa: F401
from quality import judge, stage_of
from records import add_json_flag, save

FORMS = ("bf16", "int8")
BATCHES = (1, 8, 32)
WINDOW = 512  # tokens that a text has before it, at most


def accuracy(args: argparse.Namespace, form: str) -> dict[str, float]:
    """Of the next token, in windows of a text."""
    from mdi.checkpoint.source import open_source
    from mdi.text.texts import TextCodec

    ids = TextCodec.from_checkpoint(args.ckpt).encode(args.text.read_text(encoding="utf-8"))
    source = open_source(args.ckpt)
    try:
        stage = stage_of(source, form, WINDOW)
        loss, best = judge(stage, ids)
    finally:
        source.close()
    n_right = sum(int(a == b) for a, b in zip(best.tolist(), ids[1:], strict=False))
    return {"tokens": len(best), "right": n_right / len(best), "perplexity": math.exp(loss)}


def rates(args: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Tokens/s of texts that decode at the same time, by format and number of texts; formats take turns."""
    from mdi.engine.sequence import SamplingParams
    from mdi.run.nodes import GivenNodes
    from mdi.run.run import Run
    from mdi.spec.cluster import standalone
    from mdi.spec.options import StarterOptions

    found: dict[str, dict[int, list[float]]] = {form: {n: [] for n in BATCHES} for form in FORMS}
    with ExitStack() as stack:
        runs = {}
        for form in FORMS:
            options = StarterOptions(
                ckpt=args.ckpt, prompt_style="none", device="cpu", dtype="float32", quantize=form, quantize_head=form,
                draft="none",
            )  # fmt: skip
            run = Run(GivenNodes(standalone()), options, args.tokens + 8, n_texts=max(BATCHES))
            runs[form] = stack.enter_context(run)
        for _ in range(args.repeat + 1):
            for n_texts in BATCHES:
                for form, run in runs.items():
                    begin = time.perf_counter()
                    for k in range(n_texts):
                        ids = [1 + (7 * k + 3 * i) % 200 for i in range(8)]
                        run.submit("", ids, SamplingParams(args.tokens, temperature=0.0))
                    run.read()
                    found[form][n_texts].append(n_texts * args.tokens / (time.perf_counter() - begin))
    return {form: {n: each[1:] for n, each in by_n.items()} for form, by_n in found.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32, help="of each text (%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of the rates (%(default)s)")
    add_json_flag(parser, "petals_bits")
    args = parser.parse_args()
    logging.getLogger("mdi").setLevel(logging.ERROR)
    model = args.ckpt.stem
    with tempfile.TemporaryDirectory() as folder:
        if args.ckpt.suffix == ".gguf":
            from mdi.checkpoint.ggufsource import gguf_directory

            args.ckpt = gguf_directory(args.ckpt, Path(folder))
        found = {"model": model, "accuracy": {form: accuracy(args, form) for form in FORMS}, "tokens_s": rates(args)}
    print(found)
    save(args.json, found)


if __name__ == "__main__":
    main()
