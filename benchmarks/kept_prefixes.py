#!/usr/bin/env python3
"""What prefixes on the nodes' disks (--keep-prefixes) bring: the time to the first token with and without them.

    benchmarks/kept_prefixes.py restart [--shape tiny-llama-1.1b-deep] [--format int8] [--tokens 8000] [--rounds 5]
    benchmarks/kept_prefixes.py turns --ckpt FILE [--turns 20] [--restart-at 11] [--json FILE] [--plot FILE]

restart   a server with two nodes of this machine computes a prompt and ends; another is asked for it and 32 more tokens, and
          for a prompt that nobody has had. The order changes from round to round. Weights are random, which changes no time.
turns     a conversation through /v1/chat/completions, whose server is begun anew before one of its turns; and the same turns
          behind a system message that is another one each time, so that nothing of them was computed before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import on_path  # noqa: F401
from random_checkpoint import DEEP, SHAPES, make_checkpoint
from records import add_json_flag, save
from serve_client import HOST, SRC, answering

STILL_S = 3.0  # without a new file: all is kept
QUESTIONS = (
    "Name a river in Italy and say one thing about it.", "Why is the sky blue?", "Write a short poem about the sea.",
    "How do I cook rice?", "Explain what a hash table is.",
)  # fmt: skip


@contextmanager
def server(ckpt: Path, cache: Path, *flags: str) -> Iterator[int]:
    """A server whose nodes keep prefixes under `cache`, where they find the kernels that this machine has; its port."""
    from mdi.files import default_cache_dir

    if os.environ.get("MDI_CACHE_DIR") != str(cache):
        kernels = default_cache_dir() / "kernels"
        cache.mkdir()
        (cache / "kernels").symlink_to(kernels)
        os.environ["MDI_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(SRC / "serve.py"), "--ckpt", str(ckpt), "--draft", "none", "--keep-prefixes", "8G"]
    with answering([*command, "--kv-dtype", "fp16", *flags]) as (port, _):
        yield port


def streamed(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first text of an answer, its text, and tokens of the prompt that were not computed."""
    body = {"model": "", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, **body}
    request = urllib.request.Request(
        f"http://{HOST}:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin, first_s, text, usage = time.perf_counter(), 0.0, "", {}
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                if not first_s and (piece or "text" in choice):
                    first_s = time.perf_counter() - begin
                text += piece
    details = usage["prompt_tokens_details"]
    return {"first_s": first_s, "text": text, "n": usage["prompt_tokens"], "cached": details["cached_tokens"]}


def wait_until_kept(cache: Path) -> int:
    """Until no more files come; bytes of all of them."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < STILL_S:
        n_bytes = sum(path.stat().st_size for path in cache.rglob("*.kv"))
        if n_bytes != seen:
            seen, since = n_bytes, time.monotonic()
        time.sleep(0.2)
    return seen


def prompt(number: int, n: int) -> list[int]:
    return [3 + (number * 7919 + i * 104729) % 900 for i in range(n)]


def restart(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    ckpt, cache = folder / "model", folder / "cache"
    make_checkpoint(ckpt, args.shape)
    flags = ["--nodes", "2", "--quantize", args.format]

    def ask(port: int, ids: list[int]) -> dict[str, Any]:
        return streamed(
            port, "/v1/completions", {"prompt": ids, "max_tokens": 2, "logprobs": 0}
        )  # an event for each token

    found: dict[str, list[Any]] = {"kept_s": [], "anew_s": [], "kept_bytes": [], "cached": []}
    for i in range(args.rounds):
        with server(ckpt, cache, *flags) as port:
            ask(port, prompt(2 * i, args.tokens))
            found["kept_bytes"].append(wait_until_kept(cache))
        with server(ckpt, cache, *flags) as port:
            ask(port, prompt(1000 + i, 40))  # the first text of all pays for what is made once
            for is_kept in (True, False) if i % 2 else (False, True):
                answer = ask(port, prompt(2 * i if is_kept else 2 * i + 1, args.tokens + 32))
                found["kept_s" if is_kept else "anew_s"].append(answer["first_s"])
                if is_kept:
                    found["cached"].append(answer["cached"])
        print(json.dumps(found), flush=True)
    ratios = [a / b for a, b in zip(found["kept_s"], found["anew_s"], strict=True)]
    return {"shape": args.shape, "tokens": args.tokens, **found, "ratio": statistics.median(ratios)}


def turns(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    def said(system: str, history: list[dict[str, str]]) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": system}, *history], "max_tokens": args.answer}

    def ask(port: int, history: list[dict[str, str]], i: int) -> Iterator[dict[str, Any]]:
        yield streamed(port, "/v1/chat/completions", said("You are a helpful assistant.", history))
        yield streamed(port, "/v1/chat/completions", said(f"{i} is the number of this turn. You help.", history))

    rows: list[dict[str, Any]] = []
    history: list[dict[str, str]] = []
    spans = ((0, args.restart_at - 1), (args.restart_at - 1, args.turns))
    for begin, end in spans:
        with server(args.ckpt, folder / "cache", "--nodes", "2") as port:
            streamed(port, "/v1/completions", {"prompt": "Hello", "max_tokens": 2})
            for i in range(begin, end):
                history.append({"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]})
                kept, anew = ask(port, history, i)
                history.append({"role": "assistant", "content": kept["text"]})
                rows.append({
                    "turn": i + 1, "n_prompt": kept["n"], "cached": kept["cached"], "kept_s": kept["first_s"],
                    "anew_s": anew["first_s"], "anew_cached": anew["cached"],
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
            wait_until_kept(folder / "cache")
    return {"restart_at": args.restart_at, "turns": rows}


def draw(found: dict[str, Any], file: Path) -> None:
    """Time to the first token over turns."""
    import matplotlib

    from draw_figures import FAINT, INK, SAMPLES, plt

    matplotlib.rcParams.update({"svg.hashsalt": "mdi", "font.family": "DejaVu Sans", "text.color": INK})
    figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
    numbers = [row["turn"] for row in found["turns"]]
    for name, color, label in (("anew_s", FAINT, "computed anew"), ("kept_s", SAMPLES[1], "behind what was kept")):
        ax.plot(
            numbers, [row[name] for row in found["turns"]], color=color, marker="o", markersize=3.5, lw=1.5, label=label
        )
    ax.axvline(found["restart_at"] - 0.5, color=INK, ls="--", lw=0.8)
    ax.text(found["restart_at"] - 0.4, ax.get_ylim()[1], "server begun anew", va="top", fontsize=9)
    ax.set(xlabel="turn of a conversation", ylabel="seconds to the first token", ylim=(0, None), xticks=numbers)
    ax.grid(color="#dddddd", lw=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    figure.savefig(file, facecolor="white", dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("restart", "turns"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default=f"tiny-llama-1.1b{DEEP}")
    parser.add_argument("--format", default="int8", metavar="FORMAT")
    parser.add_argument("--tokens", type=int, default=8000, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--ckpt", type=Path, metavar="FILE", help="model of `turns`")
    parser.add_argument("--turns", type=int, default=20, metavar="N")
    parser.add_argument("--answer", type=int, default=48, metavar="N", help="most tokens of an answer (%(default)s)")
    parser.add_argument("--restart-at", type=int, default=11, metavar="TURN")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    add_json_flag(parser, "kept_prefixes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = (restart if args.what == "restart" else turns)(args, Path(folder))
    if args.plot is not None and args.what == "turns":
        draw(found, args.plot)
    other = {"restart": "turns", "turns": "restart"}[args.what]
    before = json.loads(args.json.read_text()) if args.json.exists() else {}
    save(args.json, {args.what: found, **({other: before[other]} if other in before else {})})


if __name__ == "__main__":
    main()
