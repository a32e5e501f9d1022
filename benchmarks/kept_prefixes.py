#!/usr/bin/env python3
"""What prefixes on the nodes' disks (--keep-prefixes) bring: the time to the first token with and without them.

    benchmarks/kept_prefixes.py restart [--shape tiny-llama-1.1b-deep] [--format int8] [--tokens 8000] [--rounds 5]
    benchmarks/kept_prefixes.py restart --shape qwen-3.5-small --tokens 30000 --more 200 --name delta
    benchmarks/kept_prefixes.py new --shape nano-llama-304m --tokens 1000 --rounds 2
    benchmarks/kept_prefixes.py turns --ckpt FILE [--api messages] [--turns 20] [--restart-at 11]
    benchmarks/kept_prefixes.py turns --ckpt FILE --name llama.cpp --peer PYTHON

restart   a server with two nodes of this machine computes a prompt, then one with the same beginning and --more other tokens
          behind it, and ends; another is asked for it with again others. Weights are random, which changes no time.
new       texts that never come back, for servers that keep prefixes and for others in turns.
turns     a conversation whose server is begun anew before one of its turns; and the same turns behind a system message that is
          another one each time, so that nothing of them was computed before. With --peer, llama.cpp's server (xllamacpp) in a
          Python that has it. draw_figures.py shows all conversations in the file.
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
from random_checkpoint import DEEP, HF_SHAPES, SHAPES, make_checkpoint
from records import add_json_flag, save
from serve_client import HOST, SRC, answering

STILL_S = 3.0  # without a new file: all is kept
QUESTIONS = (
    "Name a river in Italy and say one thing about it.", "Why is the sky blue?", "Write a short poem about the sea.",
    "How do I cook rice?", "Explain what a hash table is.",
)  # fmt: skip


PEER = """
import argparse, signal, sys, time, xllamacpp
parser = argparse.ArgumentParser()
for name in ("port", "threads"): parser.add_argument("--" + name, type=int)
args, params = parser.parse_args(sys.argv[2:]), xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel, params.n_gpu_layers = sys.argv[1], args.port, 4096, 1, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
server = xllamacpp.Server(params)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True: time.sleep(1)
"""


@contextmanager
def server(ckpt: Path, cache: Path, *flags: str, keeps: bool = True) -> Iterator[tuple[int, Any]]:
    """A server whose nodes keep prefixes under `cache`, where they find the kernels that this machine has; its port."""
    from mdi.files import default_cache_dir

    if os.environ.get("MDI_CACHE_DIR") != str(cache):
        kernels = default_cache_dir() / "kernels"
        cache.mkdir()
        (cache / "kernels").symlink_to(kernels)
        os.environ["MDI_CACHE_DIR"] = str(cache)
    command = [sys.executable, str(SRC / "serve.py"), "--ckpt", str(ckpt), "--draft", "none", "--kv-dtype", "fp16"]
    with answering([*command, *flags, *(("--keep-prefixes", "8G") if keeps else ())]) as found:
        yield found


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
            if event.get("delta", {}).get("text"):  # Messages
                event["choices"] = [{"text": event["delta"]["text"]}]
            for choice in event.get("choices", ()):
                piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                if not first_s and (piece or "text" in choice):
                    first_s = time.perf_counter() - begin
                text += piece
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", usage.get("cache_read_input_tokens"))
    n_prompt = usage.get("prompt_tokens") or usage["input_tokens"] + cached
    return {"first_s": first_s, "all_s": time.perf_counter() - begin, "text": text, "n": n_prompt, "cached": cached}


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


def ask(port: int, ids: list[int], n: int = 2) -> dict[str, Any]:
    body = {"prompt": ids, "max_tokens": n, "logprobs": 0}  # an event for each token
    return streamed(port, "/v1/completions", body)


def restart(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    n_most = str(args.tokens + args.more + 8)
    flags = ["--nodes", "2", "--quantize", args.format, "--sequence-length", n_most]
    found: dict[str, list[Any]] = {key: [] for key in ("anew_s", "again_s", "kept_s", "kept_bytes", "cached")}
    for i in range(args.rounds):
        ids = prompt(3 * i, args.tokens)
        for key in ("again_s", "kept_s"):
            with server(args.made, folder / "cache", *flags) as (port, _):
                ask(port, prompt(1000 + i, 40))  # the first text of all pays for what is made once
                if key == "again_s":
                    found["anew_s"].append(ask(port, ids)["first_s"])
                answer = ask(port, [*ids, *prompt(3 * i + len(key), args.more)])
                found[key].append(answer["first_s"])
                found["cached"].append(answer["cached"])
                if key == "again_s":
                    found["kept_bytes"].append(wait_until_kept(folder / "cache"))
        print(json.dumps(found), flush=True)
    ratios = {key: [a / b for a, b in zip(found[key], found["anew_s"], strict=True)] for key in ("again_s", "kept_s")}
    medians = {f"{key[:-2]}_over_anew": statistics.median(of) for key, of in ratios.items()}
    return {"shape": args.shape, "tokens": args.tokens, "more": args.more, **found, **medians}


def new(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[str, list[float]] = {"on_s": [], "off_s": []}
    for i in range(2 * args.rounds):
        key = "on_s" if i % 4 in (0, 3) else "off_s"
        with server(args.made, folder / "cache", "--nodes", "2", "--quantize", args.format, keeps=key == "on_s") as (
            port,
            _,
        ):
            ask(port, prompt(1000 + i, 40))
            found[key].append(sum(ask(port, prompt(9 * i + k, args.tokens), 32)["all_s"] for k in range(1, 9)))
        print(json.dumps(found), flush=True)
    ratio = sum(found["on_s"]) / sum(found["off_s"])
    return {"shape": args.shape, "tokens": args.tokens, "texts": 8, **found, "on_over_off": ratio}


def turns(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    def said(port: int, system: str, history: list[dict[str, str]]) -> dict[str, Any]:
        if args.api == "messages":
            return streamed(port, "/v1/messages", {"system": system, "messages": history, "max_tokens": args.answer})
        body = {"messages": [{"role": "system", "content": system}, *history], "max_tokens": args.answer}
        return streamed(port, "/v1/chat/completions", body)

    def started() -> Any:
        if args.peer is None:
            return server(args.ckpt, folder / "cache", "--nodes", "2")
        return answering([str(args.peer), "-c", PEER, str(args.ckpt), "--threads", str(os.cpu_count())])

    rows: list[dict[str, Any]] = []
    history: list[dict[str, str]] = []
    spans = ((0, args.restart_at - 1), (args.restart_at - 1, args.turns))
    for begin, end in spans:
        with started() as (port, _):
            said(port, "Hello", [{"role": "user", "content": "Hello"}])
            for i in range(begin, end):
                history.append({"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]})
                kept = said(port, "You are a helpful assistant.", history)
                anew = said(port, f"{i} is the number of this turn. You help.", history) if args.peer is None else kept
                history.append({"role": "assistant", "content": kept["text"]})
                rows.append({
                    "turn": i + 1, "n_prompt": kept["n"], "cached": kept["cached"], "kept_s": kept["first_s"],
                    "anew_s": anew["first_s"], "anew_cached": anew["cached"],
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
            wait_until_kept(folder / "cache")
    return {"restart_at": args.restart_at, "turns": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("restart", "new", "turns"))
    parser.add_argument("--name", help="of the result in the file; usually the first word, or the API")
    parser.add_argument("--shape", choices=sorted([*SHAPES, *HF_SHAPES]), default=f"tiny-llama-1.1b{DEEP}")
    parser.add_argument("--made", type=Path, metavar="FOLDER", help="made before by random_checkpoint, of the shape")
    parser.add_argument("--format", default="int8", metavar="FORMAT")
    parser.add_argument("--tokens", type=int, default=8000, metavar="N")
    parser.add_argument(
        "--more", type=int, default=32, metavar="N", help="new tokens behind what was kept (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--ckpt", type=Path, metavar="FILE", help="model of `turns`")
    parser.add_argument("--api", choices=("chat", "messages"), default="chat")
    parser.add_argument("--peer", type=Path, metavar="PYTHON")
    parser.add_argument("--turns", type=int, default=20, metavar="N")
    parser.add_argument("--answer", type=int, default=48, metavar="N", help="most tokens of an answer (%(default)s)")
    parser.add_argument("--restart-at", type=int, default=11, metavar="TURN")
    add_json_flag(parser, "kept_prefixes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.made is None and args.what != "turns":
            args.made = folder / "model"
            make_checkpoint(args.made, args.shape)
        found = {"restart": restart, "new": new, "turns": turns}[args.what](args, folder)
    before = json.loads(args.json.read_text()) if args.json.exists() else {}
    own = args.name or ("messages" if args.api == "messages" else args.what)
    known = {**{key: value for key, value in before.items() if isinstance(value, dict)}, own: found}
    save(args.json, known)


if __name__ == "__main__":
    main()
