#!/usr/bin/env python3
"""What fine-tuning over a ring brings: loss and right answers before and after, in each weight format, and how fast.

Tasks: `tone`, two classes, and `reports`, texts of a form that the model has not seen, are made here (finetune_tasks.py);
A model is fine-tuned in float32 with `mdi finetune`; the result is evaluated with the blocks in
each format, with 1, 8 and 32 texts at the same time (Petals, appendix A). What writes texts, and side, are evaluated by the
kernels; classes of the other methods in torch, over the numbers that the packed weights stand for.

    finetune_quality.py --method side --method lora --method prompt --method deep-prompt --method prefix
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import queue
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import finetune_tasks as tasks
import on_path
from records import add_json_flag, save, told
from rings import opened

FORMATS = ("float32", "bf16", "fp16", "int8", "int4", "mxfp4")
TASKS = ("tone", "reports")
METHODS = ("side", "lora", "prompt", "deep-prompt", "prefix")
MOST_ROWS = 64  # of a prompt or prefix


def rows_of(args: argparse.Namespace, task: str) -> tuple[tasks.Rows, tasks.Rows]:
    """To learn from, and held out."""
    if task == "tone":
        return tasks.tone(args.examples, 1, False), tasks.tone(args.held, 2, True)
    return tasks.reports(args.examples, 1), tasks.reports(args.held, 2)


def learn(args: argparse.Namespace, method: str, task: str, data: Path, out: Path) -> dict[str, Any]:
    """The command itself; what it said of what is held out."""
    from mdi.cli import launch

    said = io.StringIO()
    flags = ["--head", "classes"] if task == "tone" else []
    begin = time.perf_counter()
    with contextlib.redirect_stdout(said):
        status = launch("finetune", [
            "--ckpt", str(args.ckpt), "--data", str(data / "train.jsonl"), "--eval", str(data / "held.jsonl"), "--out",
            str(out), "--nodes", str(args.nodes), "--method", method, "--epochs", str(args.epochs), "--lr", str(args.lr),
            "--device", "cpu", "--dtype", "float32", "--prompt-style", "none", *flags, *args.flags,
        ])  # fmt: skip
    text = said.getvalue()
    if status:
        raise SystemExit(f"{text}\nmdi finetune --method {method} ended with {status}")
    scores = re.findall(r"held out (before|after): loss ([\d.]+), ([\d.]+)% right", text)
    found = {when: {"loss": float(loss), "right": float(right) / 100} for when, loss, right in scores}
    return {"seconds": time.perf_counter() - begin, **found}


def options(form: str) -> dict[str, Any]:
    """Of a run whose blocks have a format."""
    return {"dtype": "float32", **({} if form == "float32" else {"quantize": form, "quantize_head": head_format(form)})}


def head_format(form: str) -> str:
    return "int8" if form == "mxfp4" else form


def rows_through(run: Any, examples: Sequence[Any], n_at_once: int, adapter: str) -> dict[int, np.ndarray]:
    """(parts, rows, n_embd) of each example, so many of them at the same time."""
    from mdi.engine.sequence import Event, wait_for_event

    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting, running, found = list(range(len(examples)))[::-1], dict[int, int](), dict[int, list[np.ndarray]]()
    extra = (adapter,) if adapter else ()
    while waiting or running:
        while waiting and len(running) < n_at_once:
            index = waiting.pop()
            take = partial(lambda index, first, rows: found.setdefault(index, []).append(rows), index)
            running[run.submit_rows(examples[index].ids, examples[index].read_from, take, came, *extra).seq_id] = index
        event = wait_for_event(came)
        if isinstance(event, Event) and event.finish_reason is not None:
            running.pop(event.seq_id)
    return {index: np.concatenate(pieces, axis=1) for index, pieces in found.items()}


def evaluate(
    args: argparse.Namespace, method: str, form: str, examples: Sequence[Any], out: Path | None
) -> list[dict[str, Any]]:
    """Loss, share of right answers, and tokens per second, at each number of texts; without `out` of the model alone."""
    is_texts = all(len(one.targets) > 1 for one in examples)
    has_kernels = out is None or method == "side" or is_texts
    lines = []
    for n_at_once in args.texts:
        begin_logits = (by_kernels if has_kernels else by_torch)(args, method, form, examples, out, n_at_once)
        seconds, loss, right = next(begin_logits), 0.0, 0
        for one, logits in zip(examples, begin_logits, strict=True):
            own, n_right = judged(logits, one.targets)
            loss, right = loss + own, right + n_right
        n_rows, n_tokens = sum(one.n_rows for one in examples), sum(len(one.ids) for one in examples)
        lines.append({"format": form, "texts": n_at_once, "by": "kernels" if has_kernels else "torch",
                      "loss": loss / n_rows, "right": right / n_rows, "tokens_s": n_tokens / seconds})  # fmt: skip
    return lines


def by_kernels(
    args: argparse.Namespace, method: str, form: str, examples: Sequence[Any], out: Path | None, n_at_once: int
) -> Iterator[Any]:
    """The seconds that it takes, and the logits of each example."""
    from mdi.stages.side import read_side

    length = MOST_ROWS + max(len(one.ids) for one in examples)
    network = read_side(out) if out is not None and method == "side" else None
    learned = (f"learned={out}",) if out is not None and network is None else ()
    taps = network.shape.taps if network else ()
    with opened(args.ckpt, length, n_at_once, taps=taps, adapter=learned, **options(form)) as run:
        head = run.ring.stage.at_starter.head

        def logits_of(rows: np.ndarray) -> np.ndarray:
            if network is not None and network.shape.labels:
                return np.asarray(network.classify(*rows))
            return np.asarray(head(np.ascontiguousarray(rows[0] if network is None else network(*rows))))

        begin = time.perf_counter()
        rows = rows_through(run, examples, n_at_once, "learned" if learned else "")
        found = [logits_of(rows[index]) for index in range(len(examples))]
        yield time.perf_counter() - begin
        yield from found


def by_torch(
    args: argparse.Namespace, method: str, form: str, examples: Sequence[Any], out: Path | None, n_at_once: int
) -> Iterator[Any]:
    """The same through RingBlocks, over the numbers that packed weights stand for."""
    import torch

    from mdi.checkpoint.packing import Packing
    from mdi_training.frozen_head import FrozenHead
    from mdi_training.ring_training import TunedModel
    from mdi_training.tuned_tensors import SCORE, read_tensors

    assert out is not None
    length = MOST_ROWS + max(len(one.ids) for one in examples)
    with opened(args.ckpt, length, 1, **options(form)) as run, torch.no_grad():
        weights = run.model.weights
        packing = Packing(head_format(form), head_format(form))
        tuned = read_tensors(out, weights.config, weights.source_of)
        head = FrozenHead.of(weights.source_of("head"), packing, bool(tuned.kind.labels))
        model = TunedModel(run, tuned, head)
        learned, found = model.learned(), []
        begin = time.perf_counter()
        for first in range(0, len(examples), n_at_once):
            part = examples[first : first + n_at_once]
            rows = model(part, learned)
            logits = model.classes(rows, tuned.named[SCORE]) if tuned.kind.labels else head(rows)
            found += logits.split([one.n_rows for one in part])
        yield time.perf_counter() - begin
        yield from (one.numpy() for one in found)


def judged(logits: np.ndarray, targets: Sequence[int]) -> tuple[float, int]:
    """The sum of the losses, and how many are right."""
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    given = values[np.arange(len(targets)), list(targets)]
    return float((np.log(np.exp(values).sum(axis=1)) - given).sum()), int((values.argmax(axis=1) == targets).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=on_path.ROOT / "assets" / "nano-llama", help="(%(default)s)")
    parser.add_argument("--task", action="append", choices=TASKS, help="may be repeated (tone and reports)")
    parser.add_argument("--method", action="append", choices=METHODS, help="may be repeated (side)")
    parser.add_argument("--examples", type=int, default=192, help="to learn from (%(default)s)")
    parser.add_argument("--held", type=int, default=64, help="to evaluate with (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="(%(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="of the ring that it is learned over (%(default)s)")
    parser.add_argument("--texts", type=int, action="append", help="at the same time; may be repeated (1, 8, 32)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of `mdi finetune`, last")
    add_json_flag(parser, "finetune_quality")
    args = parser.parse_args()
    args.texts, args.method = args.texts or [1, 8, 32], args.method or ["side"]
    logging.getLogger("mdi").setLevel(logging.ERROR)
    found = [one_case(args, task, method) for task in args.task or TASKS for method in args.method]
    save(args.json, {"flags": told(args, "json"), "cases": found})


def one_case(args: argparse.Namespace, task: str, method: str) -> dict[str, Any]:
    from mdi.text.texts import TextCodec
    from mdi_training.examples import class_examples, labels_of, lm_examples, read_rows

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for which, rows in zip(("train", "held"), rows_of(args, task), strict=True):
            (folder / f"{which}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        learned = learn(args, method, task, folder, folder / "out")
        codec, held = TextCodec.from_checkpoint(args.ckpt), read_rows(folder / "held.jsonl")
        is_classes = task == "tone"
        examples = class_examples(held, codec, 512, labels_of(held)) if is_classes else lm_examples(held, codec, 512)
        print(f"{task}, {method}: {json.dumps(learned)}", flush=True)
        after = [line for form in FORMATS for line in evaluate(args, method, form, examples, folder / "out")]
        forms = FORMATS if task != "tone" else ()
        before = [line for form in forms for line in evaluate(args, method, form, examples, None)]
    for line in [*before, *after]:
        print(json.dumps(line), flush=True)
    return {"task": task, "method": method, "learned": learned, "before": before, "after": after}


if __name__ == "__main__":
    main()
