#!/usr/bin/env python3
"""How fast a model is fine-tuned over a ring of processes on this machine, with random weights.

`passes`: tokens of texts per second, forward and backward, as table 6 of Borzunov et al. 2023 (Petals): prompts of 16 and of 4
rows before texts, or in each block (deep prompts, which Petals calls prefixes), 8 and 32 texts; with a head of two classes and
with that of words, both at the starter, without a GPU; the most memory of each process, and bytes per token on the links.
`epochs`: --method side; its first pass over the examples and later ones. `adapters`: tokens per second with a LoRA adapter for
each text, for none of them, and of a run without adapters, in turns.

    finetune_speed.py passes tiny-llama-1.1b --folder /somewhere/1b --nodes 1 --nodes 2 --nodes 3
    finetune_speed.py epochs tiny-llama-1.1b --folder /somewhere/1b --width 64 --keep-logits
    finetune_speed.py adapters small-30m --folder /somewhere/30m

Each of the three has a file of results of its own, and a table in RESULTS.md (write_results.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import on_path  # noqa: F401
from mdi.model.plain import spec_of
from random_checkpoint import SHAPES, VOCABULARY, make_checkpoint
from records import RESULTS, rounded, save
from side_by_side.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
SHOWN_S = 0.05  # a shorter pass is told of as one of 0.0 s


@contextlib.contextmanager
def opened(args: argparse.Namespace, n_nodes: int, length: int, n_texts: int, **fields: Any) -> Iterator[Any]:
    """A run over processes of this machine, each with its own share of the threads."""
    from mdi.run.local import LocalRing
    from mdi.run.nodes import OwnProcesses
    from mdi.run.run import Run
    from mdi.spec.options import StarterOptions

    source = OwnProcesses(
        lambda: LocalRing(n_nodes, None, args.threads, args.folder, False, False), lambda ring: ring.cluster
    )
    options = StarterOptions(
        ckpt=args.folder, prompt_style="none", device="cpu", dtype="float32", placement="even", quantize=args.quantize,
        quantize_head=args.quantize, threads=args.threads, wait_s=300.0, **fields,
    )  # fmt: skip
    with source, Run(source, options, length, n_texts=n_texts) as run:
        yield run


# Passes through the blocks


def passes(args: argparse.Namespace) -> dict[str, Any]:
    """Lines, each after one pass that is not counted; the table comes last."""
    import torch

    from mdi.checkpoint.packing import Packing, plain
    from mdi.spec.options import LORA
    from mdi_training.frozen_head import FrozenHead

    torch.set_num_threads(args.threads or 1)
    found = []
    for n_nodes in args.nodes:
        with opened(args, n_nodes, max(args.rows) + args.tokens, 1) as run:
            weights = run.model.weights
            head = plain(weights.source_of("head").weights("head", Packing(args.quantize, args.quantize)))
            frozen = FrozenHead(spec_of(weights.config), head)
            for method in args.method:
                one_pass(run, frozen, method, 1, min(args.rows), 2, 1)  # weights and threads are there from now on
                for n_texts in args.texts:
                    for n_rows in [0] if method == LORA else args.rows:
                        line = one_pass(run, frozen, method, n_texts, n_rows, args.tokens, args.parts or n_nodes)
                        line = {"nodes": n_nodes, "method": method, "texts": n_texts, "rows": n_rows, **line}
                        print(json.dumps(rounded(line)), flush=True)
                        found.append(line)
    print(table(found))
    return {"lines": found}


def one_pass(
    run: Any, head: Any, method: str, n_texts: int, n_rows: int, n_tokens: int, n_parts: int
) -> dict[str, Any]:
    """Forward and backward of some texts, in parts that are under way at the same time, and of both heads after all parts."""
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
        reset_peaks()
        forward = Spent(model.blocks)
        outputs = list(pool.map(model, parts, leaves))
        forward.end()

        rows, targets = torch.cat([one.detach() for one in outputs]), torch.tensor(ids)[:, 1:].reshape(-1)
        last, labels = rows[n_tokens - 1 :: n_tokens], torch.zeros(n_texts, dtype=torch.int64)
        score = model.tuned.named[SCORE].detach().requires_grad_()

        def lm(x: Any) -> Any:
            return head.loss(x, targets).loss

        def classes(x: Any) -> Any:
            return functional.cross_entropy(model.classes(x, score), labels)

        heads = {"lm": head_seconds(lm, rows), "classes": head_seconds(classes, last)}
        backward = Spent(model.blocks)
        list(pool.map(lambda one: one.backward(torch.ones_like(one)), outputs))
        backward.end()
    n_all = n_texts * n_tokens  # of texts: rows of prompts are no tokens, as in Petals' program
    found: dict[str, Any] = {"learned": n_numbers(model.tuned.named.values())}
    for i, (name, spent) in enumerate((("forward", forward), ("backward", backward))):
        for which, seconds in heads.items():
            found[f"{name}_{which}_tokens_s"] = n_all / (spent.seconds + seconds[i])
        found[f"{name}_blocks_tokens_s"] = n_all / spent.seconds
        found[f"{name}_tokens_per_core_s"] = n_all / max(spent.core_seconds, 1e-3)
        found[f"{name}_bytes_per_token"] = spent.n_bytes / n_all
    return {**found, "peak_bytes": peak_memory()}


class Spent:
    """Seconds of the clock and of cores, and bytes to nodes and back, from here to `end`."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self._begin = time.perf_counter(), cpu_seconds(), self._traffic()

    def end(self) -> None:
        now = time.perf_counter(), cpu_seconds(), self._traffic()
        self.seconds, self.core_seconds, self.n_bytes = (a - b for a, b in zip(now, self._begin, strict=True))

    def _traffic(self) -> int:
        return sum(self._blocks.traffic.total)


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


def cpu_seconds() -> float:
    """Of this process and of the nodes', which other programs disturb less than the clock."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes()))


def processes() -> list[Any]:
    """This one, the starter's, and the nodes'."""
    import psutil

    own = psutil.Process()
    return [own, *own.children()]


def reset_peaks() -> None:
    """Have the processes' most memory counted from now on; Linux only."""
    for process in processes():
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> list[int]:
    """The most resident memory of each process since then, in bytes, the starter first; Linux only."""
    found = []
    for process in processes():
        with contextlib.suppress(OSError):
            told = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            found.append(1024 * int(re.search(r"VmHWM:\s+(\d+)", told)[1]))  # type: ignore[index]
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """In the terms of Petals' table 6, whose prefix tuning is our deep-prompt."""
    found = [
        "| nodes | mode | batch size | prompt length | classes: forward, tokens/s | backward | lm: forward | backward "
        "| kB per token, forward + backward | most memory of each process, MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in lines:
        rates = " | ".join(
            f"{one[f'{way}_{head}_tokens_s']:.1f}" for head in ("classes", "lm") for way in ("forward", "backward")
        )
        n_bytes = f"{one['forward_bytes_per_token'] / 1e3:.1f} + {one['backward_bytes_per_token'] / 1e3:.1f}"
        memory = ", ".join(f"{n / 1e6:,.0f}" for n in one["peak_bytes"])
        found.append(
            f"| {one['nodes']} | {one['method']} | {one['texts']} | {one['rows']} | {rates} | {n_bytes} | {memory} |"
        )
    return "\n".join(found)


# Passes over examples of a side training


def epochs(args: argparse.Namespace) -> dict[str, Any]:
    """The command itself, over texts of random bytes, with each head."""
    lines = [epochs_with(args, head) for head in args.head]
    print(epochs_table(lines))
    return {"lines": lines}


def epochs_with(args: argparse.Namespace, head: str) -> dict[str, Any]:
    import random

    from mdi.cli import launch

    chance = random.Random(1)
    keeps_logits = args.keep_logits and head == "lm"
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        data, n_tokens = Path(folder) / "data.jsonl", args.tokens + 1
        texts = ["".join(chance.choice("abcdefghij klmnop") for _ in range(n_tokens)) for _ in range(args.examples)]
        rows = [{"text": text, "label": str(i % 2)} for i, text in enumerate(texts)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        told = io.StringIO()
        flags = ["--threads", str(args.threads)] if args.threads else []
        flags += ["--keep-logits"] if keeps_logits else []
        flags += ["--width", str(args.width)] if args.width else []
        begin = time.perf_counter()
        with contextlib.redirect_stdout(told):
            status = launch("finetune", [
                "--ckpt", str(args.folder), "--data", str(data), "--out", f"{folder}/out", "--nodes", str(args.nodes[0]),
                "--quantize", args.quantize, "--device", "cpu", "--dtype", "float32", "--head", head, "--epochs", "4",
                "--batch-size", str(args.batch), "--prompt-style", "none", *flags,
            ])  # fmt: skip
        text = told.getvalue()
        print(text, f"{time.perf_counter() - begin:.1f} s in all, status {status}", flush=True)
        ring = re.search(r"ring: ([\d,]+) tokens in ([\d.]+) s", text)
        logits = re.search(r"head: [\d,]+ tokens in ([\d.]+) s", text)
        each = [float(one) for one in re.findall(r"epoch \d+: loss [\d.]+, ([\d.]+) s", text)]
        assert ring is not None and status == 0
        first, later = float(ring[2]) + (float(logits[1]) if logits else 0.0) + each[0], statistics.median(each[1:])
        return {
            "nodes": args.nodes[0], "head": head, "width": args.width, "keeps_logits": keeps_logits, "batch": args.batch,
            "examples": args.examples, "ring_tokens": int(ring[1].replace(",", "")), "ring_s": float(ring[2]),
            "kept_logits_s": float(logits[1]) if logits else None, "epochs_s": each, "first_s": first, "later_s": later,
            "times_faster": first / later if later else None,
        }  # fmt: skip


def epochs_table(lines: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [str(one["nodes"]), one["head"] + (", kept logits" if one["keeps_logits"] else ""), str(one["width"] or ""),
         str(one["batch"]), f"{one['ring_tokens']:,}", f"{one['ring_s']:.1f}", f"{one['first_s']:.1f}",
         *([f"{one['later_s']:.2f}", f"{one['times_faster']:.1f}"] if one["times_faster"] else
           [f"< {SHOWN_S}", f"> {one['first_s'] / SHOWN_S:.0f}"])]
        for one in lines
    ]  # fmt: skip
    return markdown(
        ["nodes", "head", "width", "texts per step", "tokens", "ring, s", "first pass, s", "later ones, s",
         "times faster"], rows,
    )  # fmt: skip


# Texts with adapters


def adapters(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds in turns, so that other programs disturb all alike."""
    from mdi.engine.sequence import SamplingParams

    n_names = max(args.adapters)
    cases = {"no adapters": (0, 0), **{f"{n} of {n_names}": (n_names, n) for n in (0, *args.adapters)}}
    rates: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory(dir=args.folder) as folder:
        names = [f"a{i}={adapter_in(Path(folder) / str(i), args, i)}" for i in range(n_names)]
        length = args.tokens + 8
        runs = {
            n: stack.enter_context(opened(args, args.nodes[0], length, max(args.texts), adapter=tuple(names[:n])))
            for n in (0, n_names)
        }
        for _ in range(args.repeat + 1):
            for n_texts in args.texts:
                for case, (n_held, n_used) in cases.items():
                    run = runs[n_held]
                    begin = time.perf_counter()
                    for k in range(n_texts):
                        prompt = [1 + (7 * k + 3 * i) % 200 for i in range(8)]
                        adapter = f"a{k % n_used}" if n_used else ""
                        run.submit("", prompt, SamplingParams(args.tokens, temperature=0), adapter=adapter)
                    run.read()
                    rates.setdefault((case, n_texts), []).append(n_texts * args.tokens / (time.perf_counter() - begin))
    lines = []
    for (case, n_texts), found in rates.items():
        plain = rates["no adapters", n_texts]
        shares = [one / other for one, other in zip(found[1:], plain[1:], strict=True)]  # the first round warms up
        lines.append({"case": case, "texts": n_texts, "tokens_s": statistics.median(found[1:]),
                      "share": statistics.median(shares), "all": found[1:]})  # fmt: skip
    print(adapters_table(lines))
    return {"lines": lines, "rank": args.rank, "nodes": args.nodes[0]}


def adapters_table(lines: Sequence[Mapping[str, Any]]) -> str:
    rows = [[str(one["texts"]), one["case"], f"{one['tokens_s']:.1f}", f"{one['share']:.3f}"] for one in lines]
    return markdown(["texts", "adapters in use, of those that the run has", "tokens/s", "of a run without"], rows)


def adapter_in(folder: Path, args: argparse.Namespace, seed: int) -> Path:
    """A random adapter of all linear layers of a Llama, in PEFT's form."""
    import torch
    from safetensors.torch import save_file

    from mdi.checkpoint.source import open_source

    config = open_source(args.folder).config
    n_embd, inner = config.n_embd, config.intermediate_size
    groups = config.n_query_groups * config.head_size
    shapes = {
        "self_attn.q_proj": (n_embd, n_embd), "self_attn.k_proj": (groups, n_embd), "self_attn.v_proj": (groups, n_embd),
        "self_attn.o_proj": (n_embd, n_embd), "mlp.gate_proj": (inner, n_embd), "mlp.up_proj": (inner, n_embd),
        "mlp.down_proj": (n_embd, inner),
    }  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for i in range(config.n_layer):
        for module, (n_out, n_in) in shapes.items():
            name = f"base_model.model.model.layers.{i}.{module}"
            tensors[f"{name}.lora_A.weight"] = 0.02 * torch.randn(args.rank, n_in, generator=generator)
            tensors[f"{name}.lora_B.weight"] = 0.02 * torch.randn(n_out, args.rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": args.rank,
        "lora_alpha": args.rank,
        "target_modules": "all-linear",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


class Way(NamedTuple):
    """What is measured, the table of its lines, and the name of its file of results."""

    measure: Callable[[argparse.Namespace], dict[str, Any]]
    table: Callable[[Sequence[Mapping[str, Any]]], str]
    file: str


WAYS = {
    "passes": Way(passes, table, "finetune_speed"),
    "epochs": Way(epochs, epochs_table, "finetune_epochs"),
    "adapters": Way(adapters, adapters_table, "finetune_adapters"),
}


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(WAYS))
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be made")
    parser.add_argument("--quantize", default="int8", help="(%(default)s)")
    parser.add_argument(
        "--nodes", type=int, action="append", help="processes in the ring; `passes`: may be repeated (3)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each process (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each text (%(default)s)")
    parser.add_argument("--texts", type=int, action="append", help="at the same time; may be repeated (8 and 32)")
    parser.add_argument("--rows", type=int, action="append", help="of prompts and prefixes; may be repeated (16 and 4)")
    parser.add_argument(
        "--method",
        action="append",
        choices=("prompt", "deep-prompt", "prefix", "lora"),
        help="of `passes`; may be repeated (prompt and deep-prompt)",
    )
    parser.add_argument("--parts", type=int, default=0, help="of the texts under way at the same time (default: nodes)")
    parser.add_argument(
        "--head", action="append", choices=("classes", "lm"), help="of `epochs`; may be repeated (classes and lm)"
    )
    parser.add_argument("--width", type=int, help="of the side network (default: an eighth of the model's)")
    parser.add_argument("--keep-logits", action="store_true", help="with the head of words")
    parser.add_argument("--batch", type=int, default=8, help="examples per step (%(default)s)")
    parser.add_argument("--examples", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of an adapter (%(default)s)")
    parser.add_argument(
        "--adapters", type=int, action="append", help="used at the same time; may be repeated (1 and 8)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="rounds of `adapters` (%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="where the numbers are written (default: in benchmarks/results, a file for each of the three)",
    )  # fmt: skip
    args = parser.parse_args(given)
    args.json = args.json or RESULTS / f"{WAYS[args.what].file}.json"
    for name, values in (
        ("nodes", [3]),
        ("texts", [8, 32]),
        ("rows", [16, 4]),
        ("method", ["prompt", "deep-prompt"]),
        ("head", ["classes", "lm"]),
        ("adapters", [1, 8]),
    ):
        setattr(args, name, getattr(args, name) or values)
    return args


def main(given: Sequence[str] | None = None) -> None:
    args = parsed(given)
    logging.getLogger("mdi").setLevel(logging.ERROR)
    make_checkpoint(args.folder, args.shape)
    found = WAYS[args.what].measure(args)
    told = {"shape": args.shape, "format": args.quantize, "threads": args.threads, "tokens": args.tokens}
    save(args.json, {"what": args.what, **told, **found})


if __name__ == "__main__":
    main()
