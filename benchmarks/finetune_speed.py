#!/usr/bin/env python3
"""How fast a model is fine-tuned over a ring of processes on this machine, with random weights.

`passes`: tokens per second forward and backward through all blocks, as table 6 of Borzunov et al. 2023 (Petals): prompts before
texts, or prefixes in each block, of 16 and of 4 rows, 8 and 32 texts; what the head costs at the starter, without a GPU, for
words and for two classes; the most memory of each process, and bytes per token on the links. `epochs`: --method side; its first
pass over the examples and later ones. `adapters`: tokens per second with a LoRA adapter for each text, for none of them, and
of a run without adapters, in turns.

    finetune_speed.py passes tiny-llama-1.1b --folder /somewhere/1b --nodes 1 --nodes 2 --nodes 3
    finetune_speed.py epochs tiny-llama-1.1b --folder /somewhere/1b --head lm --width 64 --keep-logits
    finetune_speed.py adapters small-30m --folder /somewhere/30m
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from random_checkpoint import SHAPES, make_checkpoint
from records import add_json_flag, save

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests")]

Loss = Callable[[], Any]


@contextlib.contextmanager
def opened(args: argparse.Namespace, n_nodes: int, length: int, n_texts: int, **fields: Any) -> Iterator[Any]:
    """A run over processes of this machine, each with its own share of the threads."""
    from mdi.node.local import LocalRing
    from mdi.run.nodes import OwnProcesses
    from mdi.run.run import Run
    from mdi.spec.options import StarterOptions

    source = OwnProcesses(
        lambda: LocalRing(n_nodes, None, args.threads, args.folder, False, False), lambda ring: ring.cluster
    )
    options = StarterOptions(
        ckpt=args.folder, prompt_style="none", device="cpu", dtype="float32", placement="even", quantize=args.quantize,
        quantize_head=args.quantize, threads=args.threads, **fields,
    )  # fmt: skip
    with source, Run(source, options, length, n_texts=n_texts) as run:
        yield run


# Passes through the blocks


def passes(args: argparse.Namespace) -> dict[str, Any]:
    found = []
    for n_nodes in args.nodes:
        longest = max(args.rows) + args.tokens
        with opened(args, n_nodes, longest, 1) as run:
            config = run.model.config
            one_pass(run, "prompt", 1, 1, 1, 1)  # weights and threads are there from now on
            for method in args.method:
                for n_texts in args.texts:
                    for n_rows in args.rows:
                        line = one_pass(run, method, n_texts, n_rows, args.tokens, args.parts or n_nodes)
                        line = {"nodes": n_nodes, "method": method, "texts": n_texts, "rows": n_rows, **line}
                        print(json.dumps(line), flush=True)
                        found.append(line)
            memory = peak_memory()
        print(json.dumps({"nodes": n_nodes, "peak_bytes": memory}), flush=True)
        found.append({"nodes": n_nodes, "peak_bytes": memory})
    return {"lines": found, "head": heads(args, config)}


def one_pass(run: Any, method: str, n_texts: int, n_rows: int, n_tokens: int, n_parts: int) -> dict[str, float]:
    """Forward and backward of some texts, in parts that are under way at the same time."""
    import torch

    from mdi_training.ring_blocks import RingBlocks

    blocks, n_embd = RingBlocks(run), int(run.model.config.n_embd)
    generator = torch.Generator().manual_seed(0)
    given = prefixes(run, n_rows) if method == "prefix" else {}
    length = n_tokens + (n_rows if method == "prompt" else 0)
    parts = [len(part) for part in torch.arange(n_texts).chunk(min(n_parts, n_texts))]
    xs = [0.1 * torch.randn(n, length, n_embd, generator=generator) for n in parts]
    leaves = [(x.requires_grad_(), {name: one.clone().requires_grad_() for name, one in given.items()}) for x in xs]
    before, begin, cpu = traffic(blocks), time.perf_counter(), cpu_seconds()
    with ThreadPoolExecutor(len(parts)) as pool:
        outputs = list(pool.map(lambda leaf: blocks(leaf[0], leaf[1]) if leaf[1] else blocks(leaf[0]), leaves))
        middle, at_middle, cpu_middle = time.perf_counter(), traffic(blocks), cpu_seconds()
        list(pool.map(lambda y: y.backward(torch.ones_like(y)), outputs))
    end, after, cpu_end = time.perf_counter(), traffic(blocks), cpu_seconds()
    n_all = n_texts * length
    return {
        "forward_tokens_s": n_all / (middle - begin), "backward_tokens_s": n_all / (end - middle),
        "forward_tokens_per_core_s": n_all / (cpu_middle - cpu), "backward_tokens_per_core_s": n_all / (cpu_end - cpu_middle),
        "forward_bytes_per_token": (at_middle - before) / n_all, "backward_bytes_per_token": (after - at_middle) / n_all,
    }  # fmt: skip


def cpu_seconds() -> float:
    """Of this process and of the nodes', which other programs disturb less than the clock."""
    import psutil

    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [own, *own.children()])


def prefixes(run: Any, n_rows: int) -> dict[str, Any]:
    import torch

    config = run.model.config
    width = config.n_query_groups * config.head_size
    names = [f"transformer.h.{i}.prefix_{which}" for i in range(config.n_layer) for which in ("key", "value")]
    return {name: 0.02 * torch.randn(n_rows, width) for name in names}


def traffic(blocks: Any) -> int:
    """Bytes to nodes and back so far."""
    told = blocks.traffic
    return int(told.sent_bytes + told.received_bytes)


def peak_memory() -> list[int]:
    """The most resident memory of this process and of each node's, in bytes; Linux only."""
    import psutil

    own = psutil.Process()
    found = []
    for process in [own, *own.children()]:
        with contextlib.suppress(OSError):
            told = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            found.append(1024 * int(re.search(r"VmHWM:\s+(\d+)", told)[1]))  # type: ignore[index]
    return found


def heads(args: argparse.Namespace, config: Any) -> dict[str, float]:
    """Tokens per second of loss and gradient at the starter, of rows that have come back."""
    import numpy as np
    import torch
    from torch.nn import functional

    from mdi_training.frozen_head import FrozenHead

    torch.set_num_threads(args.threads or 1)
    n_words, n_embd = config.padded_vocab_size, config.n_embd
    random = np.random.default_rng(0)
    weights = {
        "lm_head.weight": 0.02 * random.standard_normal((n_words, n_embd), dtype=np.float32),
        "transformer.ln_f.weight": np.ones(n_embd, dtype=np.float32),
    }
    head = FrozenHead({**vars(config), "norm_class_name": "RMSNorm", "final_logit_softcapping": None}, weights)
    score = torch.randn(2, n_embd).requires_grad_()
    found = {}
    for name, n_rows in (("lm", 8 * args.tokens), ("classes", 64)):
        x, right = torch.randn(n_rows, n_embd), torch.zeros(n_rows, dtype=torch.int64)

        def lm(x: Any = x, right: Any = right) -> Any:
            return head.loss(x.requires_grad_(), right).loss

        def classes(x: Any = x, right: Any = right) -> Any:
            return functional.cross_entropy(x.requires_grad_() @ score.T, right, reduction="sum")

        loss: Loss = lm if name == "lm" else classes
        loss()
        begin = time.perf_counter()
        loss().backward()
        found[name] = n_rows / (time.perf_counter() - begin)
        print(f"head {name}: {found[name]:,.0f} rows/s at the starter", flush=True)
    return found


# Passes over examples of a side training


def epochs(args: argparse.Namespace) -> dict[str, Any]:
    """The command itself, over texts of random bytes."""
    import random

    from mdi.cli import launch

    chance = random.Random(1)
    found = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        data, n_tokens = Path(folder) / "data.jsonl", args.tokens + 1
        texts = ["".join(chance.choice("abcdefghij klmnop") for _ in range(n_tokens)) for _ in range(args.examples)]
        rows = [{"text": text, "label": str(i % 2)} for i, text in enumerate(texts)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        told = io.StringIO()
        flags = ["--threads", str(args.threads)] if args.threads else []
        flags += ["--keep-logits"] if args.keep_logits else []
        flags += ["--width", str(args.width)] if args.width else []
        begin = time.perf_counter()
        with contextlib.redirect_stdout(told):
            status = launch("finetune", [
                "--ckpt", str(args.folder), "--data", str(data), "--out", f"{folder}/out", "--nodes", str(args.nodes[0]),
                "--quantize", args.quantize, "--device", "cpu", "--dtype", "float32", "--head", args.head, "--epochs", "4",
                "--batch-size", str(args.batch), "--prompt-style", "none", *flags,
            ])  # fmt: skip
        text = told.getvalue()
        print(text, f"{time.perf_counter() - begin:.1f} s in all, status {status}", flush=True)
        ring = re.search(r"ring: ([\d,]+) tokens in ([\d.]+) s", text)
        head = re.search(r"head: [\d,]+ tokens in ([\d.]+) s", text)
        each = [float(one) for one in re.findall(r"epoch \d+: loss [\d.]+, ([\d.]+) s", text)]
        assert ring is not None
        before = float(ring[2]) + (float(head[1]) if head else 0.0)
        later = statistics.median(each[1:])
        found.append({
            "nodes": args.nodes[0], "tokens": int(ring[1].replace(",", "")), "ring_s": float(ring[2]),
            "kept_logits_s": float(head[1]) if head else None, "epochs_s": each, "times_faster": (before + each[0]) / later,
        })  # fmt: skip
        print(
            f"first pass {before + each[0]:.1f} s, later ones {later:.2f} s: {(before + each[0]) / later:.1f} times faster"
        )
    return {"lines": found, "settings": [args.head, args.width, args.keep_logits, args.batch, args.examples]}


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
        print(f"{n_texts} texts, {case}: {lines[-1]['tokens_s']:.1f} tokens/s, {lines[-1]['share']:.3f}", flush=True)
    return {"lines": lines, "rank": args.rank}


def adapter_in(folder: Path, args: argparse.Namespace, seed: int) -> Path:
    """A random adapter of all linear layers of a Llama, in PEFT's form."""
    import torch
    from safetensors.torch import save_file

    from mdi.checkpoint.source import open_source

    config = open_source(args.folder).config_dict
    n_embd, inner = config["n_embd"], config["intermediate_size"]
    groups = config["n_query_groups"] * config["head_size"]
    shapes = {
        "self_attn.q_proj": (n_embd, n_embd), "self_attn.k_proj": (groups, n_embd), "self_attn.v_proj": (groups, n_embd),
        "self_attn.o_proj": (n_embd, n_embd), "mlp.gate_proj": (inner, n_embd), "mlp.up_proj": (inner, n_embd),
        "mlp.down_proj": (n_embd, inner),
    }  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for i in range(config["n_layer"]):
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


WAYS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "passes": passes,
    "epochs": epochs,
    "adapters": adapters,
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
    parser.add_argument("--method", action="append", choices=("prompt", "prefix"), help="may be repeated (prompt)")
    parser.add_argument("--parts", type=int, default=0, help="of the texts under way at the same time (default: nodes)")
    parser.add_argument("--head", choices=("lm", "classes"), default="lm", help="of `epochs` (%(default)s)")
    parser.add_argument("--width", type=int, help="of the side network (default: an eighth of the model's)")
    parser.add_argument("--keep-logits", action="store_true")
    parser.add_argument("--batch", type=int, default=8, help="examples per step (%(default)s)")
    parser.add_argument("--examples", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of an adapter (%(default)s)")
    parser.add_argument(
        "--adapters", type=int, action="append", help="used at the same time; may be repeated (1 and 8)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="rounds of `adapters` (%(default)s)")
    add_json_flag(parser, "finetune_speed")
    args = parser.parse_args(given)
    for name, values in (
        ("nodes", [3]),
        ("texts", [8, 32]),
        ("rows", [16, 4]),
        ("method", ["prompt"]),
        ("adapters", [1, 8]),
    ):
        setattr(args, name, getattr(args, name) or values)
    return args


def main() -> None:
    args = parsed()
    logging.getLogger("mdi").setLevel(logging.ERROR)
    make_checkpoint(args.folder, args.shape)
    found = WAYS[args.what](args)
    told = {"shape": args.shape, "format": args.quantize, "threads": args.threads, "tokens": args.tokens}
    save(args.json, {"what": args.what, **told, **found})


if __name__ == "__main__":
    main()
