#!/usr/bin/env python3
"""What serving costs and brings: the numbers of benchmarks/RESULTS.md, "Serving".

    benchmarks/serving.py clients | texts | turns | prompt | peer  --ckpt DIR --nodes N [--json FILE] [-- FLAGS OF serve.py]

clients   --n streaming clients beside --silent connections that say nothing: tokens/s, first token, how even, whether
          each text is the one that the server gives to the same request alone.
texts     --n texts at once through the API, and the same by local_ring.py: tokens/s of each, taking turns --rounds times.
turns     a chat of --length tokens, then its next turn of 32 more: first token with and without the caches of the first.
prompt    time between tokens of --n clients, alone, and while a prompt of --length tokens comes.
peer      --n streaming clients of this server and of llama.cpp's (--llama-server, with --gguf, a thread for each core), taking
          turns --rounds times: tokens/s of all, first token. Prompts are --length random ids, others in each round.

The client is asyncio on plain sockets, in this process; that of `texts` takes bytes alone. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from records import add_json_flag, parsed, save, told
from rings import asked
from serve_client import HOST, SRC, Answer, answering, complete, complete_cheaply, p95, rss_bytes, serving


def clients(args: argparse.Namespace) -> dict[str, Any]:
    async def run(port: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        def body(i: int) -> dict[str, Any]:
            prompt = f"{['ROMEO', 'JULIET', 'First Citizen', 'KING'][i % 4]}: number {i}"
            return {"prompt": prompt, "max_tokens": args.tokens, "seed": i, "temperature": 0.9, "top_k": 50}

        await complete(port, body(0))
        alone = [await complete(port, {**body(i), "max_tokens": 8}) for i in range(5)]
        silent = [await asyncio.open_connection(HOST, port) for _ in range(args.silent)]
        beside = [await complete(port, {**body(i), "max_tokens": 8}) for i in range(5)]
        rounds = []
        for _ in range(args.rounds):
            before = rss_bytes(process)
            begin = time.perf_counter()
            answers = await asyncio.gather(*(complete(port, body(i)) for i in range(args.n)))
            taken = time.perf_counter() - begin
            whole = [a for a in answers if a.n_tokens == args.tokens]  # one that ended early says little of its rate
            rates = [a.n_tokens / (a.times[-1] - a.begin) for a in whole]
            firsts = [a.first_s for a in answers if not a.error]
            rounds.append({
                "errors": [a.error for a in answers if a.error][:3], "n_errors": sum(bool(a.error) for a in answers),
                "tokens_s": sum(a.n_tokens for a in answers) / taken, "fastest_over_slowest": max(rates) / min(rates),
                "first_token_p50_s": statistics.median(firsts), "first_token_most_s": max(firsts),
                "gap_p95_s": p95([gap for a in answers for gap in a.gaps]),
                "rss_before_mb": before / 1e6, "rss_after_mb": rss_bytes(process) / 1e6,
            })  # fmt: skip
            print(json.dumps(rounds[-1]), flush=True)
        again = [await complete(port, body(i)) for i in range(args.n)]
        n_other = sum(a.text != b.text for a, b in zip(again, answers, strict=True))
        for _, writer in silent:
            writer.close()
        return {
            "rounds": rounds, "texts_other_than_alone": n_other, "texts_compared": len(again),
            "first_token_alone_s": statistics.median(a.first_s for a in alone),
            "first_token_beside_silent_s": statistics.median(a.first_s for a in beside),
            "first_token_beside_silent_most_s": max(a.first_s for a in beside),
        }  # fmt: skip

    with serving(args) as (port, process):
        return asyncio.run(run(port, process))


def texts(args: argparse.Namespace) -> dict[str, Any]:
    """Prompts of the same length, with texts that do not end early, so that both sides compute the same."""
    prompts = [
        f"Text {i:02}. A list of all the numbers from one to a thousand: one, two, three," for i in range(args.n)
    ]
    body = {"max_tokens": args.tokens, "temperature": 0}

    def command() -> float:
        asked_for = [word for prompt in prompts for word in ("--prompt", prompt)]
        found, _ = asked(
            "local-ring", "--ckpt", args.ckpt, "--nodes", args.nodes, *asked_for, "--n-samples", args.n, "--n-tokens",
            args.tokens, "--temperature", 0, "--prompt-style", "none", "--draft", "none", *args.flags,
        )  # fmt: skip
        return float(found["tokens_per_s"])

    def ask(port: int) -> float:
        begin = time.perf_counter()
        counts, client_s = complete_cheaply(port, [{**body, "prompt": prompt} for prompt in prompts])
        client_us.append(1e6 * client_s / sum(counts))
        return sum(counts) / (time.perf_counter() - begin)

    rates: dict[str, list[float]] = {"command": [], "api": []}
    client_us: list[float] = []  # of processor time, for each token
    for _ in range(args.rounds):
        rates["command"].append(command())
        with serving(args) as (port, _):
            asyncio.run(complete(port, {**body, "prompt": "Hello", "max_tokens": 2}))
            rates["api"].append(ask(port))
        print(json.dumps(rates), flush=True)
    ratio = statistics.median(rates["api"]) / statistics.median(rates["command"])
    return {"tokens_s": rates, "ratio": ratio, "client_us_per_token": client_us}


def turns(args: argparse.Namespace) -> dict[str, Any]:
    """Different chats, so that only the second turn has anything to go on from."""

    def ids(chat: int, n: int) -> list[int]:
        return [3 + (chat * 7919 + i * 104729) % 900 for i in range(n)]

    async def run(port: int) -> dict[str, Any]:
        found: dict[str, list[float]] = {"first_turn_s": [], "second_turn_s": [], "without_s": []}
        await complete(port, {"prompt": ids(99, 8), "max_tokens": 2, "temperature": 0})
        for chat in range(args.rounds):
            asked = {"max_tokens": 2, "temperature": 0}
            first = await complete(port, {**asked, "prompt": ids(chat, args.length)})
            second = await complete(port, {**asked, "prompt": ids(chat, args.length + 32)})
            other = await complete(port, {**asked, "prompt": ids(chat + 50, args.length + 32)})
            for name, answer in zip(found, (first, second, other), strict=True):
                found[name].append(answer.first_s)
            print(json.dumps(found), flush=True)
        return {**found, "ratio": statistics.median(found["second_turn_s"]) / statistics.median(found["without_s"])}

    with serving(args) as (port, _):
        return asyncio.run(run(port))


def prompt(args: argparse.Namespace) -> dict[str, Any]:
    async def run(port: int) -> dict[str, Any]:
        def body(i: int) -> dict[str, Any]:
            # An event for each token, also for one that is no text.
            return {"prompt": [5 + i, 6, 7], "max_tokens": args.tokens, "temperature": 0, "logprobs": 0}

        rest = asyncio.gather(*(complete(port, body(i)) for i in range(args.n)))
        alone = await rest
        long = [3 + (i * 104729) % 900 for i in range(args.length)]
        rest = asyncio.gather(*(complete(port, body(i + 100)) for i in range(args.n)))
        await asyncio.sleep(statistics.median(a.times[-1] - a.begin for a in alone) / 4)
        disturbing = await complete(port, {"prompt": long, "max_tokens": 1, "temperature": 0})
        beside = await rest
        during = [
            b - a
            for answer in beside
            for a, b in zip(answer.times, answer.times[1:], strict=False)
            if disturbing.begin < b and a < disturbing.times[0]
        ]
        gaps = [gap for a in alone for gap in a.gaps]
        return {
            "gap_p50_s": statistics.median(gaps), "gap_p95_s": p95(gaps), "gap_p95_during_s": p95(during),
            "gap_p95_whole_s": p95([gap for a in beside for gap in a.gaps]), "prompt_first_token_s": disturbing.first_s,
            "ratio": p95(during) / p95(gaps),
        }  # fmt: skip

    with serving(args) as (port, _):
        return asyncio.run(run(port))


def peer(args: argparse.Namespace) -> dict[str, Any]:
    n_cores = len(os.sched_getaffinity(0))
    theirs = [str(args.llama_server), "--model", str(args.gguf), "--parallel", str(args.n), "--threads", str(n_cores)]
    theirs += ["--ctx-size", str(args.n * (args.length + args.tokens + 64)), "--host", HOST, "--log-disable"]

    async def ask(port: int, number: int, more: dict[str, Any]) -> list[Answer]:
        def body(i: int) -> dict[str, Any]:
            ids = [5 + (number * 7919 + i * 104729 + k * 1299709) % 900 for k in range(args.length)]
            # An event for each token, also for one that is no text; llama.cpp's server sends one anyway.
            return {"prompt": ids, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True, **more}

        return await asyncio.gather(*(complete(port, body(i)) for i in range(args.n)))

    found: dict[str, dict[str, list[float]]] = {name: {"tokens_s": [], "first_s": []} for name in ("ours", "theirs")}
    errors: list[str] = []
    with serving(args) as (own_port, _), answering(theirs) as (their_port, _):
        for number in range(args.rounds + 1):
            for name, port, more in (("ours", own_port, {"logprobs": 0}), ("theirs", their_port, {})):
                begin = time.perf_counter()
                answers = asyncio.run(ask(port, number, more))
                taken = time.perf_counter() - begin
                errors += [a.error for a in answers if a.error]
                if not number:
                    continue  # to warm up
                found[name]["tokens_s"].append(sum(a.n_tokens for a in answers) / taken)
                found[name]["first_s"] += [a.first_s for a in answers if a.times]
            print(json.dumps({name: one["tokens_s"] for name, one in found.items()}), flush=True)
    rates = {name: statistics.median(one["tokens_s"]) for name, one in found.items()}
    return {
        "tokens_s": {name: one["tokens_s"] for name, one in found.items()}, "ratio": rates["ours"] / rates["theirs"],
        "first_token_p95_s": {name: p95(one["first_s"]) for name, one in found.items()},
        "first_token_p50_s": {name: statistics.median(one["first_s"]) for name, one in found.items()}, "errors": errors[:5],
    }  # fmt: skip


WHAT = {"clients": clients, "texts": texts, "turns": turns, "prompt": prompt, "peer": peer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(WHAT))
    parser.add_argument("--ckpt", type=Path, default=SRC.parent / "assets" / "nano-llama")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--n", type=int, default=256, help="texts at once (%(default)s)")
    parser.add_argument("--silent", type=int, default=1500, help="connections that say nothing (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="per text (%(default)s)")
    parser.add_argument("--length", type=int, default=1000, help="of the long prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--llama-server", type=Path, metavar="FILE", help="peer: llama.cpp's server, built for this machine"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="peer: the same model for it")
    add_json_flag(parser, "serving")
    args = parsed(parser)
    sys.path.insert(0, str(SRC))
    with contextlib.suppress(ImportError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = WHAT[args.what](args)
    print(json.dumps(found, indent=1))
    old = json.loads(args.json.read_text()) if args.json.is_file() else {}
    kept = {name: value for name, value in old.items() if name in WHAT}
    save(args.json, {**kept, args.what: {"flags": told(args, "json"), **found}})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
