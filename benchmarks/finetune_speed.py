#!/usr/bin/env python3
"""How fast a model is fine-tuned over a ring of processes on this machine, with random weights.

Tokens of texts per second, forward and backward, as table 6 of Borzunov et al. 2023 (Petals): prompts of 16 and of 4 rows
before texts, or in each block (deep prompts, which Petals calls prefixes), 8 and 32 texts, with a head of two classes at the
starter.

    finetune_speed.py tiny-llama-1.1b --folder /somewhere/1b --nodes 1 --nodes 2 --nodes 3
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from mdi.model.plain import spec_of
from random_checkpoint import SHAPES, VOCABULARY, make_checkpoint
from records import add_json_flag, rounded, save
from rings import opened, packed


def passes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each case, after one pass that is not counted."""
    import torch

    from mdi.checkpoint.packing import Packing, plain
    from mdi.spec.options import LORA
    from mdi_training.frozen_head import FrozenHead

    torch.set_num_threads(args.threads or 1)
    found = []
    for n_nodes in args.nodes:
        fields = {"dtype": "float32", "placement": "even", "threads": args.threads, "wait_s": 300.0}
        length = max(args.rows) + args.tokens
        with opened(args.folder, length, 1, n_nodes, **packed(args.quantize), **fields) as run:
            weights = run.model.weights
            head = plain(weights.source_of("head").weights("head", Packing(args.quantize, args.quantize)))
            frozen = FrozenHead(spec_of(weights.config), head)
            for method in args.method:
                one_pass(run, frozen, method, 1, min(args.rows), 2, 1)  # weights and threads are there from now on
                for n_texts in args.texts:
                    for n_rows in [0] if method == LORA else args.rows:
                        line = one_pass(run, frozen, method, n_texts, n_rows, args.tokens, n_nodes)
                        line = {"nodes": n_nodes, "method": method, "texts": n_texts, "rows": n_rows, **line}
                        print(json.dumps(rounded(line)), flush=True)
                        found.append(line)
    return found


def one_pass(
    run: Any, head: Any, method: str, n_texts: int, n_rows: int, n_tokens: int, n_parts: int
) -> dict[str, Any]:
    """Forward and backward of some texts, in parts that are under way at the same time; and of the head of classes."""
    import torch
    from torch.nn import functional

    from mdi_training.examples import Example
    from mdi_training.ring_training import PART_ROWS, TunedModel, embedding_of
    from mdi_training.tuned_tensors import SCORE, TuningKind, n_numbers, new_tensors

    weights = run.model.weights
    kind = TuningKind(method, length=n_rows, labels=("no", "yes"))
    model = TunedModel(run, new_tensors(kind, weights.config, 0, weights.source_of, embedding_of(run)), head)
    ids = torch.randint(0, VOCABULARY, (n_texts, n_tokens + 1), generator=torch.Generator().manual_seed(0)).tolist()
    examples = [Example(tuple(one[:-1]), 0, tuple(one[1:])) for one in ids]
    size = min(-(-n_texts // n_parts), max(1, PART_ROWS // (n_tokens + model.tuned.n_rows)))
    parts = [examples[i : i + size] for i in range(0, n_texts, size)]
    leaves = [[one.detach().requires_grad_(one.requires_grad) for one in model.learned()] for _ in parts]

    with ThreadPoolExecutor(min(n_parts, len(parts))) as pool:
        begin = time.perf_counter()
        outputs = list(pool.map(model, parts, leaves))
        forward_s = time.perf_counter() - begin

        rows = torch.cat([one.detach() for one in outputs])
        last, labels = rows[n_tokens - 1 :: n_tokens], torch.zeros(n_texts, dtype=torch.int64)
        score = model.tuned.named[SCORE].detach().requires_grad_()
        head_s = head_seconds(lambda x: functional.cross_entropy(model.classes(x, score), labels), last)
        begin = time.perf_counter()
        list(pool.map(lambda one: one.backward(torch.ones_like(one)), outputs))
        backward_s = time.perf_counter() - begin
    n_all = n_texts * n_tokens  # of texts: rows of prompts are no tokens, as in Petals' program
    found: dict[str, Any] = {"learned": n_numbers(model.tuned.named.values())}
    for name, blocks_s, own_s in (("forward", forward_s, head_s[0]), ("backward", backward_s, head_s[1])):
        found[f"{name}_classes_tokens_s"] = n_all / (blocks_s + own_s)
        found[f"{name}_blocks_tokens_s"] = n_all / blocks_s
    return found


def head_seconds(loss: Callable[[Any], Any], rows: Any) -> tuple[float, float]:
    """Of a loss at the starter, and of its gradient with respect to the rows."""
    import torch

    begin = time.perf_counter()
    with torch.no_grad():
        loss(rows)
    middle = time.perf_counter()
    loss(rows.detach().requires_grad_()).backward()
    forward = middle - begin
    return forward, max(0.0, time.perf_counter() - middle - forward)  # the loss of a head has its gradient with it


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be made")
    parser.add_argument("--quantize", default="int8", help="(%(default)s)")
    parser.add_argument("--nodes", type=int, action="append", help="processes in the ring; may be repeated (3)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each text (%(default)s)")
    parser.add_argument("--texts", type=int, action="append", help="at the same time; may be repeated (8 and 32)")
    parser.add_argument("--rows", type=int, action="append", help="of prompts and prefixes; may be repeated (16 and 4)")
    methods = ("prompt", "deep-prompt", "prefix", "lora")
    parser.add_argument("--method", action="append", choices=methods, help="may be repeated (prompt and deep-prompt)")
    add_json_flag(parser, "finetune_speed")
    args = parser.parse_args(given)
    args.nodes, args.texts, args.rows = args.nodes or [3], args.texts or [8, 32], args.rows or [16, 4]
    args.method = args.method or ["prompt", "deep-prompt"]
    logging.getLogger("mdi").setLevel(logging.ERROR)
    make_checkpoint(args.folder, args.shape)
    told = {"shape": args.shape, "format": args.quantize, "threads": args.threads, "tokens": args.tokens}
    save(args.json, {**told, "lines": passes(args)})


if __name__ == "__main__":
    main()
