#!/usr/bin/env python3
"""A server for an hour, with clients that come, go, cancel and misbehave, and a node killed every few minutes.

    benchmarks/soak.py --minutes 60 --kill-every 300 [--ckpt DIR] [--nodes N] [--seed S] [--log FILE] [-- FLAGS OF serve.py]

All APIs are asked, streamed and not. Every completion that is finished is compared with what one node alone gives, in this
process, before the server starts; answers of the other APIs with the first one to the same question. Twice a minute the
clients pause; when nothing runs any more, memory, threads, sockets and files of the server's processes are counted. Nothing is
asserted: the summary says what was lost, wrong, or grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from records import add_json_flag, parsed, save, told
from rings import opened
from serve_client import HOST, SRC, Held, complete, request, serving

PROMPTS = (
    "ROMEO:", "JULIET:", "First Citizen:", "KING RICHARD:", "Enter the DUKE", "What say you, my lord?", "O,", "And then",
)  # fmt: skip
FORMAT = "float32"  # in which one node alone gives the same tokens
PAUSE_S = 30.0  # between two counts
QUIET_S = 20.0  # that texts may take to leave when nobody asks any more
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "min_p": 0.0},
)


class Asked(NamedTuple):
    """A greedy request of an API, and what is compared of its answers.

    Attributes:
        whole: of the answer in one piece; piece: of an event of the streamed one, None: it is not streamed.
        is_ollama: whether it goes to the port of Ollama's API.
    """

    path: str
    body: dict[str, Any]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str] | None = None
    is_ollama: bool = False


def requests_of_all(n_tokens: int) -> list[Asked]:
    """Of all APIs but streamed completions."""
    found = []
    for prompt in PROMPTS[:4]:
        messages = [{"role": "user", "content": prompt}]
        limit = {"max_tokens": n_tokens, "temperature": 0}
        ollama = {"model": "nano-llama", "options": {"num_predict": n_tokens, "temperature": 0}}
        found += [
            Asked(
                "/v1/chat/completions", {"messages": messages, **limit}, lambda a: a["choices"][0]["message"]["content"],
                lambda e: e["choices"][0]["delta"].get("content", "") if e["choices"] else "",
            ),
            Asked(
                "/v1/responses", {"input": prompt, "max_output_tokens": n_tokens, "temperature": 0},
                lambda a: a["output"][0]["content"][0]["text"],
                lambda e: e["delta"] if e["type"] == "response.output_text.delta" else "",
            ),
            Asked(
                "/v1/messages", {"messages": messages, **limit}, lambda a: a["content"][0]["text"],
                lambda e: e["delta"].get("text", "") if e["type"] == "content_block_delta" else "",
            ),
            Asked("/v1/messages/count_tokens", {"messages": messages}, str),
            Asked("/v1/embeddings", {"input": [prompt] * 3}, lambda a: str([one["embedding"][:4] for one in a["data"]])),
            Asked(
                "/v1/completions", {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0},
                lambda a: str(a["choices"][0]["logprobs"]["token_logprobs"]),
            ),
            Asked(
                "/api/chat", {**ollama, "messages": messages}, lambda a: a["message"]["content"],
                lambda e: e["message"]["content"], True,
            ),
            Asked(
                "/api/generate", {**ollama, "prompt": prompt, "raw": True}, lambda a: a["response"],
                lambda e: e["response"], True,
            ),
        ]  # fmt: skip
    return found


@dataclass
class Tally:
    """What became of the requests.

    Attributes:
        what: how often each was done, and how it ended.
        wrong, lost: prompts of texts that came out differently, and of those that did not come to their end.
        counts: of each process at each count: what it had.
    """

    what: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    counts: list[dict[str, Any]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    slowest_s: float = 0.0


def pool(ckpt: Path, n_tokens: int) -> list[tuple[dict[str, Any], str]]:
    """Requests with the texts that one node alone gives; second turns and a long prompt among them."""
    from mdi.engine.sequence import SamplingParams, seed_of

    found: list[tuple[dict[str, Any], str]] = []
    with opened(ckpt, 1000, quantize=FORMAT) as node:

        def add(prompt: str, settings: dict[str, Any], seed: int) -> str:
            params = SamplingParams(n_tokens, seed=seed_of(seed, 0), eos_ids=node.model.codec.eos_ids, **settings)
            events = node.engine.submit(node.model.codec.encode(prompt), params)
            text = node.model.codec.decode([token for event in events for token in event.tokens], continues=True)
            found.append(({"prompt": prompt, "max_tokens": n_tokens, "seed": seed, **settings}, text))
            return text

        for seed, prompt in enumerate(PROMPTS):
            for settings in SETTINGS:
                add(prompt + add(prompt, settings, seed) + "\n", settings, seed)
        add(" ".join(f"{i}. {PROMPTS[i % len(PROMPTS)]}" for i in range(60)), SETTINGS[0], 0)
        node.close()
    return found


class Client:
    """Asks for one thing after the other until `over`, but not while `open` is not set."""

    def __init__(
        self, port: int, asked: list[tuple[dict[str, Any], str]], tally: Tally, chance: random.Random, ollama_port: int,
        of_all: dict[int, str],
    ) -> None:  # fmt: skip
        self._port, self._ollama_port = port, ollama_port
        self._others, self._of_all = requests_of_all(asked[0][0]["max_tokens"]), of_all
        self._asked = asked
        self._tally = tally
        self._chance = chance

    async def run(self, may_ask: asyncio.Event, rest_s: float) -> None:
        ways = {
            self.whole: 30, self.at_once: 10, self.other: 40, self.goes_away: 10, self.goes_away_unseen: 6, self.nonsense: 5,
            self.half: 4, self.slow: 4, self.huge: 1,
        }  # fmt: skip
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / rest_s))
            await may_ask.wait()
            (way,) = self._chance.choices(list(ways), list(ways.values()))
            self._tally.what[way.__name__] += 1
            begin = time.monotonic()
            try:
                await way()
            except (OSError, asyncio.IncompleteReadError, ValueError) as e:
                self._tally.what[f"{way.__name__}: {type(e).__name__}"] += 1
            self._tally.slowest_s = max(self._tally.slowest_s, time.monotonic() - begin)

    async def whole(self) -> None:
        body, text = self._chance.choice(self._asked)
        answer = await complete(self._port, body)
        self._compare(body, answer.text, text, answer.error)

    async def at_once(self) -> None:
        body, text = self._chance.choice(self._asked)
        status, told = await self._ask(request({**body, "stream": False, "stream_options": None}))
        ok = status == 200
        self._compare(body, told["choices"][0]["text"] if ok else "", text, "" if ok else f"{status} {told}")

    async def other(self) -> None:
        """Another API; the first answer to each question is the one that all later ones are compared with."""
        number = self._chance.randrange(len(self._others))
        asked = self._others[number]
        is_streamed = asked.piece is not None and self._chance.random() < 0.5
        data = json.dumps({"model": "", **asked.body, "stream": is_streamed}).encode()
        head = f"POST {asked.path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        reader, writer = await self._connect(head.encode() + data, self._ollama_port if asked.is_ollama else self._port)
        first, *lines = (await reader.read()).split(b"\n")
        await self._close(writer)
        error = "" if b" 200 " in first else f"{asked.path}: {first!r} {lines[-1:]!r}"
        text = ""
        events = [line.removeprefix(b"data: ") for line in lines if line.startswith((b"{", b"data: {"))]
        for event in map(json.loads, [] if error else events):
            if "error" in event and event["error"] or event.get("type") == "response.failed":
                error = f"{asked.path}: {event}"
            elif is_streamed and asked.piece is not None:
                text += asked.piece(event)
            else:
                text = asked.whole(event)
        if not error and not text:
            error = f"{asked.path}: no whole answer"
        wanted = text if error else self._of_all.setdefault(number, text)
        self._tally.what[asked.path] += 1
        self._compare({"prompt": asked.path}, text, wanted, error)

    def _compare(self, body: dict[str, Any], found: str, wanted: str, error: str) -> None:
        if error:
            self._tally.lost.append(f"{time.strftime('%H:%M:%S')} {body['prompt'][:20]!r}: {error[:200]}")
        elif found != wanted:
            self._tally.wrong.append(f"{time.strftime('%H:%M:%S')} {body['prompt'][:20]!r} {found!r}")
        else:
            self._tally.what["right"] += 1

    async def goes_away(self) -> None:
        body, _ = self._chance.choice(self._asked)
        reader, writer = await self._connect(request({**body, "n": self._chance.randint(1, 3)}))
        for _ in range(self._chance.randint(1, 20)):
            await reader.readline()
        await self._close(writer, abrupt=self._chance.random() < 0.5)

    async def goes_away_unseen(self) -> None:
        body, _ = self._chance.choice(self._asked)
        _, writer = await self._connect(request({**body, "stream": False, "stream_options": None, "max_tokens": 900}))
        await asyncio.sleep(self._chance.random())
        await self._close(writer, abrupt=True)

    async def nonsense(self) -> None:
        bodies = (
            {"prompt": {}},
            {"prompt": [-1]},
            {"temperature": "hot"},
            {"n": 10**9},
            {"stop": [[]]},
            {"model": "gpt-4"},
        )
        others = (b"\x16\x03\x01\r\n\r\n", b"GET /" + b"x" * 9000 + b"\r\n\r\n")
        data = self._chance.choice([*map(request, bodies), *others])
        status, _ = await self._ask(data)
        if not 400 <= status < 500:
            self._tally.lost.append(f"nonsense was answered with {status}")

    async def half(self) -> None:
        data = request(self._asked[0][0])
        _, writer = await self._connect(data[: self._chance.randrange(len(data))])
        await asyncio.sleep(5 * self._chance.random())
        await self._close(writer)

    async def slow(self) -> None:
        body, text = self._chance.choice(self._asked)
        reader, writer = await self._connect(request(body))
        found = ""
        while line := await reader.readline():
            if line.startswith(b"data: {") and (choices := json.loads(line[6:]).get("choices")):
                found += choices[0]["text"]
                await asyncio.sleep(0.05)
        await self._close(writer)
        self._compare(body, found, text, "")

    async def huge(self) -> None:
        status, _ = await self._ask(request({"prompt": "x" * (17 << 20)}))
        if status not in (0, 413):
            self._tally.lost.append(f"a huge body was answered with {status}")

    async def _ask(self, data: bytes) -> tuple[int, Any]:
        """Status and JSON; 0 if the server has closed the connection before it had read everything."""
        reader, writer = await self._connect(data)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            content = await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            return 0, None
        finally:
            await self._close(writer)
        return int(head.split()[1]), json.loads(content) if content.startswith(b"{") else None

    async def _connect(self, data: bytes, port: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(HOST, port or self._port)
        writer.write(data)
        return reader, writer

    @staticmethod
    async def _close(writer: asyncio.StreamWriter, abrupt: bool = False) -> None:
        if abrupt:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def soak(args: argparse.Namespace, port: int, server: int, asked: list[tuple[dict[str, Any], str]]) -> Tally:
    tally, may_ask = Tally(), asyncio.Event()
    may_ask.set()
    chance = random.Random(args.seed)
    of_all: dict[int, str] = {}
    clients = [
        Client(port, asked, tally, random.Random(chance.random()), args.ollama_port, of_all)
        for _ in range(args.clients)
    ]
    tasks = [asyncio.create_task(client.run(may_ask, args.rest)) for client in clients]
    if args.kill_every:
        tasks.append(asyncio.create_task(kill(server, args.kill_every, chance, tally)))
    end = time.monotonic() + 60 * args.minutes
    try:
        while time.monotonic() < end:
            await asyncio.sleep(min(PAUSE_S, max(1.0, end - time.monotonic())))
            may_ask.clear()
            await count(port, server, tally)
            may_ask.set()
            told = {**tally.counts[-1], "what": tally.what, "lost": tally.lost[-5:], "wrong": tally.wrong[-2:]}
            with open(args.log, "a") as log:
                log.write(json.dumps(told) + "\n")
            if any(task.done() for task in tasks):
                break
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                tally.lost.append(f"a client failed: {outcome!r}")
    return tally


async def kill(server: int, every_s: float, chance: random.Random, tally: Tally) -> None:
    """SIGKILL for one of the server's secondaries, again and again."""
    while True:
        await asyncio.sleep(every_s)
        pids = [pid for name, pid in processes(server) if name.startswith("secondary")]
        if pids:
            os.kill(chance.choice(pids), signal.SIGKILL)
            tally.kills.append(time.time())


def processes(server: int) -> list[tuple[str, int]]:
    """Those of the server, by what they do: the engine first."""
    import psutil

    found = [("engine", server)]
    for child in psutil.Process(server).children():
        with contextlib.suppress(psutil.Error):
            command = child.cmdline()
            if "mdi.serve.api" in command:
                found.append(("api", child.pid))
            elif "secondary" in command:
                found.append((f"secondary{command[command.index('--nodes-config') + 2]}", child.pid))
    return found


async def count(port: int, server: int, tally: Tally) -> None:
    """When nothing runs any more: what each process has; texts that do not leave are lost ones, too."""
    deadline, left = time.monotonic() + QUIET_S, {}
    while time.monotonic() < deadline:
        left = await asyncio.to_thread(health, port)
        if left.get("texts") and not left["texts"]["running"] and not left["waiting"]:
            break
        await asyncio.sleep(0.5)
    else:
        tally.lost.append(f"{time.strftime('%H:%M:%S')} texts did not leave: {left}")
    await asyncio.sleep(1.5)  # sockets of clients that have just gone
    held = {}
    for name, pid in processes(server):
        with contextlib.suppress(OSError):  # it was killed at this moment
            held[name] = {"pid": pid, **asdict(Held.of(pid))}
    tally.counts.append({"at": time.strftime("%H:%M:%S"), "s": time.monotonic(), "processes": held, "health": left})


def health(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (OSError, ValueError) as e:
        return {"error": str(e)}


def grown(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """For each process, as long as it was the same: what it had at the first, the middle and the last count."""
    lives: dict[str, list[dict[str, int]]] = {}
    for one in counts:
        for name, held in one["processes"].items():
            lives.setdefault(f"{name} ({held['pid']})", []).append({k: v for k, v in held.items() if k != "pid"})
    return {name: [seen[0], seen[len(seen) // 2], seen[-1]] for name, seen in lives.items() if len(seen) > 2}


def memory_over_time(counts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each process that lived through six counts: MB resident in the first and in the last third (means), MB an hour.

    The hourly rate is the slope of the least squares over all its counts, and over the last two thirds of them: a process
    that was just started takes memory that it keeps.
    """
    lives: dict[str, list[tuple[float, float]]] = {}
    for one in counts:
        for name, held in one["processes"].items():
            lives.setdefault(f"{name} ({held['pid']})", []).append((one["s"] / 3600, held["rss_bytes"] / 1e6))
    found = {}
    for name, seen in lives.items():
        third = len(seen) // 3
        if third >= 2:
            hours, sizes = zip(*seen, strict=True)
            found[name] = {
                "counts": len(seen), "first_third_mb": statistics.mean(sizes[:third]),
                "last_third_mb": statistics.mean(sizes[-third:]),
                "mb_an_hour": statistics.linear_regression(hours, sizes).slope,
                "mb_an_hour_later": statistics.linear_regression(hours[third:], sizes[third:]).slope,
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=SRC.parent / "assets" / "nano-llama")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=12, help="at once (%(default)s)")
    parser.add_argument("--rest", type=float, default=1.5, metavar="S", help="a client's mean rest (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="per text (%(default)s)")
    parser.add_argument("--kill-every", type=float, default=300, metavar="S", help="0 kills nobody (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="a line for each count (%(default)s)")
    add_json_flag(parser, "soak")
    args = parsed(parser)
    sys.path.insert(0, str(SRC))
    from mdi.run.local import free_ports

    asked = pool(args.ckpt, args.tokens)
    (args.ollama_port,) = free_ports(1)
    args.flags = ["--ollama-port", str(args.ollama_port), "--pooling", "mean", "--quantize", FORMAT, *args.flags]
    begin = time.monotonic()
    with serving(args) as (port, process):
        tally = asyncio.run(soak(args, port, process.pid, asked))
    found = {
        "flags": told(args, "json", "log"),
        "minutes": (time.monotonic() - begin) / 60, "exit_status": process.returncode, "requests": tally.what,
        "kills": len(tally.kills), "n_lost": len(tally.lost), "lost": tally.lost[:20], "n_wrong": len(tally.wrong),
        "wrong": tally.wrong[:5], "slowest_request_s": tally.slowest_s, "first_middle_last": grown(tally.counts),
        "memory": memory_over_time(tally.counts),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    save(args.json, found)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
