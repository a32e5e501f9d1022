#!/usr/bin/env python3
"""One text with guesses and without, in turns, over rings whose stages wait: the real engine, kernels and sources.

    speculation.py                              all cases, three rounds of each
    speculation.py --short                      does it work? a few cases, short texts
    speculation.py --case oracle --nodes 4 --p 0.8 --links-ms 0

A ring of N nodes is one process: the whole model computes a frame when it leaves, and the frame is back when stages that take
t for one row and t * price(rows) for more would have it, each after the other, with links between them. The real work has to
be a small part of t. So eight nodes can be measured on two cores; nodes that share a memory bus cannot.

cases:
  oracle      guesses that are right with probability p, of a text that was generated before
  simulated   the same in simulated time, for long texts and without the kernels
  draft       nano-llama with its small model, three nodes with stages of 8 ms, temperature 0 and 0.8; and one without the wait
  copy        a text that copies its prompt, but for one token in forty, and repetitions as the only source
  schema      JSON bound by a schema (needs llguidance)
  never       sampled texts that do not repeat themselves, over real nodes with --draft auto: what looking for guesses costs;
              and the small model over three nodes that share these cores, where it cannot pay
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import on_path
from guessing_model import Oracle, best, learned_speed
from mdi.cancel import Cancel
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import stage_parts
from mdi.engine.guesses import DraftModel
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import Constraint, SamplingParams
from mdi.engine.speculation import Speculation, most_frames, tokens_per_s
from mdi.engine.starter import StarterEngine
from mdi.model.plain import spec_of
from mdi.net.ring import LoopbackRing
from mdi.net.wire import Frame
from mdi.run.run import Run
from mdi.spec.options import WeightMemory
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.building import WeightPlacer, kernel_weights
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.stages.model_family import ModelFamily
from records import save, told
from rings import opened

DRAFT = on_path.ROOT / "assets" / "nano-llama-draft"
PROCESSES = 4  # rings of the oracle at the same time; they mostly wait
LONG_TEXT = 8000  # tokens in simulated time: few wrong guesses decide about a short text

SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 12} for name in ("first_name", "family_name", "birthplace", "title")},
    "required": ["first_name", "family_name", "birthplace", "title"],
    "additionalProperties": False,
}  # fmt: skip


class WaitingRing(LoopbackRing):
    """Frames come back when a ring of waiting stages would have them.

    A frame leaves when the one before it was due, which brought the token that it follows. What the engine computes and draws
    meanwhile is a part of the first stage's time.

    Args:
        stage_s, link_s: of each node; price: of so many rows, 1 for one.
    """

    def __init__(self, n_nodes: int, stage_s: float, link_s: float, price: Callable[[int], float]) -> None:
        super().__init__(max(2 * n_nodes, 2) if n_nodes > 1 else 1)
        self.n_ring = n_nodes
        self._stage_s, self._link_s, self._price = stage_s, link_s, price
        self._free = [0.0] * n_nodes
        self._due: deque[float] = deque()
        self._now = time.perf_counter()

    def send(self, frame: Frame) -> None:
        now = self._now
        n_rows = frame.slices.n_rows
        for node in range(self.n_ring):
            work_s = self._stage_s * self._price(n_rows) if n_rows else 0.0
            now = self._free[node] = max(now, self._free[node]) + work_s
            now += self._link_s
        self._due.append(now)
        super().send(frame)

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        frame = super().recv(timeout_s)
        if frame is not None:
            due = self._due.popleft() if self._stage_s else time.perf_counter()
            time.sleep(max(0.0, due - time.perf_counter()))
            self._now = due
        return frame


class Known(Oracle):
    """Guesses of a known text, of which it is known which are right."""

    def __init__(self, truth: Sequence[int], n_prompt: int, is_right: Sequence[bool]) -> None:
        super().__init__(truth, n_prompt, 1.0, 0)
        self._guesses = [token if right else token ^ 1 for token, right in zip(truth, is_right, strict=True)]

    def propose(self, ids: list[int], n: int) -> list[int]:
        begin = len(ids) - self._n_prompt
        return self._guesses[begin : begin + n]


def chances(p: float, n: int) -> list[bool]:
    """Which guesses are right: each with probability p, the same ones for engine and model."""
    chance = random.Random(1)
    return [chance.random() < p for _ in range(n)]


class Copying:
    """Allows the tokens of one text alone, as a text would be that copies another one; guesses do not see it."""

    def __init__(self, tokens: Sequence[int], n_ids: int, at: int = 0) -> None:
        self._tokens, self._n_ids, self._at = tokens, n_ids, at

    def allowed(self) -> np.ndarray:
        return np.arange(self._n_ids) == self._tokens[self._at]

    def take(self, token: int) -> bool:
        self._at += 1
        return self._at == len(self._tokens)

    def copy(self) -> Copying:
        return Copying(self._tokens, self._n_ids, self._at)

    def n_valid(self, tokens: list[int]) -> int:
        return min(len(tokens), len(self._tokens) - self._at)

    def forced(self) -> list[int]:
        return []


class OracleSpeculation(Speculation):
    """Has one source, which knows the text."""

    def __init__(self, truth: Sequence[int], p: float, most_rows: int) -> None:
        super().__init__(most_rows, kinds=frozenset({"lookup"}))
        self._truth, self._is_right = truth, chances(p, len(truth))

    def begin(self, text: Any, constraint: Constraint | None) -> None:
        super().begin(text, constraint)
        self.texts[text.seq_id].sources["lookup"] = Known(self._truth, text.n_prompt, self._is_right)


class Model:
    """A checkpoint in the kernels of this machine."""

    def __init__(self, folder: Path, form: str) -> None:
        family = ModelFamily()
        weights = family.open_weights(folder, None, 1, None, None, False)
        self.weights, packing, placer = weights, Packing(form, form), WeightPlacer(WeightMemory())
        self.config = weights.config
        names = stage_parts(0, weights.n_layer, starter=True)
        held = Resident(names, lambda name: kernel_weights(weights.source_of(name), name, packing, placer, Cancel()))
        self.stage = KernelStage(spec_of(weights.config), 0, weights.n_layer, held, 1, "float32")
        self.length = weights.config.block_size
        self.stage.prepare(self.length)
        self.codec = family.open_codec(folder, "none")


def generate(
    model: Model, params: SamplingParams, ring: LoopbackRing, speculation: Speculation | None, n_ring: int,
    constraint: Constraint | None = None, prompt: Sequence[int] | None = None,
) -> tuple[float, list[int], tuple[int, int]]:  # fmt: skip
    """Tokens per second, the text, and the guesses."""
    engine = StarterEngine(model.stage, Scheduler(), model.length, ArrayRows())
    if speculation is not None:
        begin_ring = speculation.begin_ring
        speculation.begin_ring = lambda *_: begin_ring(n_ring)  # type: ignore[method-assign]
    engine.n_frames = n_ring
    engine.speculation = speculation
    request = engine.submit(prompt or model.codec.encode("ROMEO:"), params, constraint=constraint)
    engine.run(ring)
    events = list(request)
    tokens = [token for event in events for token in event.tokens]
    times = [event.time_s for event in events if event.tokens]
    return (len(tokens) - 1) / (times[-1] - times[0]), tokens, engine.guesses


def compare(
    name: str, model: Model, params: SamplingParams, n_ring: int, make_ring: Callable[[], LoopbackRing], n_rounds: int,
    make: Callable[[Sequence[int]], Speculation], constraint: Callable[[], Constraint | None] = lambda: None,
    prompt: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Both in turns; the median of the rounds' ratios."""
    ratios, plain_s, guesses = [], [], (0, 0)
    for _ in range(n_rounds):
        plain, text, _ = generate(model, params, make_ring(), None, n_ring, constraint(), prompt)
        found, same, guesses = generate(model, params, make_ring(), make(text), n_ring, constraint(), prompt)
        assert same == text, f"{name}: another text"
        ratios.append(found / plain)
        plain_s.append(plain)
    row = {
        "case": name, "plain_tokens_s": statistics.median(plain_s), "ratio": statistics.median(ratios),
        "lowest": min(ratios), "guessed": guesses[0], "confirmed": guesses[1],
    }  # fmt: skip
    return row


def speed_of(run: Run, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens per second of texts together, from the first token to the last; and the texts."""
    requests = [run.engine.submit(ids, replace(params, seed=i)) for i, ids in enumerate(prompts)]
    found = [[event for event in request if event.tokens] for request in requests]
    times = [event.time_s for events in found for event in events]
    texts = [[token for event in events for token in event.tokens] for events in found]
    return (sum(map(len, texts)) - len(texts)) / (max(times) - min(times)), texts


def measure_never(
    name: str, args: argparse.Namespace, n_rounds: int, n_texts: int, n_nodes: int, **options: Any
) -> Any:
    """Texts that do not repeat themselves, over real nodes, with `--draft auto` and without in turns. The median of some texts'
    ratios is that of a round, since neighbours of a machine slow down both of a pair.

    Both over the same ring: of two rings with the same flags one can be a fifth slower throughout, by where its memory lies.
    The median is below the bound with a probability of 1 %: of ten ratios that is the second-lowest.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        temperature = options.pop("temperature", 1.0)
        fields = {"dtype": "float32", "draft": "auto", "cache_dir": Path(folder), **options}
        run = stack.enter_context(opened(args.ckpt, args.n_tokens, n_texts, n_nodes, **fields))
        guessing = run.engine.speculation
        ratios, plain_s = [], []
        for round_ in range(-1, n_rounds):
            params = SamplingParams(args.n_tokens, temperature=temperature, top_k=None)
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for piece in range(args.never_texts):
                prompts = [[5 + (7 * (round_ * args.never_texts + piece) + i) % 200, 9, 11] for i in range(n_texts)]
                texts = []
                for is_guessed in (False, True) if piece % 2 else (True, False):
                    run.engine.speculation = guessing if is_guessed else None
                    speed, found = speed_of(run, prompts, params)
                    speeds[is_guessed].append(speed)
                    texts.append(found)
                assert texts[0] == texts[1], f"{name}: another text"
            if round_ >= 0:  # the first one warms up
                pairs = zip(speeds[True], speeds[False], strict=True)
                ratios.append(statistics.median(guessed / plain for guessed, plain in pairs))
                plain_s.append(statistics.median(speeds[False]))
        n_guessed, n_confirmed = run.engine.guesses
    ratios.sort()
    below = itertools.accumulate(math.comb(n_rounds, i) / 2**n_rounds for i in range(n_rounds))
    bound = sum(1 for p in below if p <= 0.011) - 1
    return {
        "case": f"never, {name}", "plain_tokens_s": statistics.median(plain_s), "ratio": statistics.median(ratios),
        "lowest": ratios[max(0, bound)], "guessed": n_guessed, "confirmed": n_confirmed, "rounds": n_rounds,
    }  # fmt: skip


NEVER: dict[str, tuple[int, int, dict[str, Any]]] = {  # texts, nodes and options
    "one text": (1, 1, {}),
    "one text, int4": (1, 1, {"quantize": "int4", "quantize_head": "int4"}),
    "sixteen texts": (16, 1, {}),
    "a window": (1, 1, {"weight_memory": WindowMemory(window=WindowOptions(2))}),
    "two local nodes": (1, 2, {}),
    "four texts, two local nodes": (4, 2, {}),
    "three local nodes, a draft at 0": (1, 3, {"draft": str(DRAFT), "temperature": 0.0}),
    "three local nodes, a draft at .8": (1, 3, {"draft": str(DRAFT), "temperature": 0.8}),
}


def show(row: dict[str, Any]) -> None:
    formula = f", model {row['simulated']:.2f}, formula {row['formula']:.2f}" if "formula" in row else ""
    print(
        f"{row['case']}: {row['plain_tokens_s']:.1f} tokens/s without, {row['ratio']:.2f} times with (lowest "
        f"{row['lowest']:.2f}{formula}); {row['confirmed']} of {row['guessed']} right",
        flush=True,
    )


def oracle(args: argparse.Namespace, ring: tuple[int, float]) -> list[dict[str, Any]]:
    """Plain and with guesses of each probability, in turns, over a ring of so many nodes with links of so many ms."""
    n_nodes, link_ms = ring
    model = Model(args.ckpt, args.format)
    stage_s, link_s, price = args.stage_ms / 1000, link_ms / 1000, price_of(args)
    params = SamplingParams(args.n_tokens, temperature=0.8, top_k=200, seed=3)

    def run(speculation: Speculation | None) -> tuple[float, list[int], tuple[int, int]]:
        return generate(model, params, WaitingRing(n_nodes, stage_s, link_s, price), speculation, n_nodes)

    plain: list[float] = []
    found: dict[float, list[float]] = {p: [] for p in args.p}
    guesses = {}
    for _ in range(args.rounds):
        speed, text, _ = run(None)
        plain.append(speed)
        for p in args.p:
            speed, same, guesses[p] = run(OracleSpeculation(text, p, args.rows))
            assert same == text, "another text"
            found[p].append(speed / plain[-1])
    rows = []
    for p, ratios in found.items():
        is_right = chances(p, args.n_tokens)[1:]
        share = sum(is_right) / len(is_right)
        ideal = 1 / (n_nodes * (stage_s + link_s))
        known, n_rows, n_frames = best(is_right, n_nodes, stage_s, link_s, price, args.rows)
        rows.append({
            "case": f"oracle, {n_nodes} nodes, links {link_ms:g} ms, p {p:g}", "nodes": n_nodes, "links_ms": link_ms, "p": p,
            "plain_tokens_s": statistics.median(plain), "ratio": statistics.median(ratios), "lowest": min(ratios),
            "guessed": guesses[p][0], "confirmed": guesses[p][1], "simulated": known / ideal,
            "simulated_rows": n_rows, "simulated_frames": n_frames,
            "formula": max(formulas(args, share, n_nodes, link_s)) / ideal,
        })  # fmt: skip
    return rows


def simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The oracle in simulated time: an ideal starter, and scheduler and speculation, which learn times and rates."""
    price, stage_s, rows = price_of(args), args.stage_ms / 1000, []
    for n_nodes in args.nodes:
        for link_ms in args.links_ms if n_nodes > 1 else [0.0]:
            for p in args.p:
                is_right = chances(p, LONG_TEXT)
                link_s = link_ms / 1000
                plain = 1 / (n_nodes * (stage_s + link_s))
                ideal, n_rows, n_frames = best(is_right, n_nodes, stage_s, link_s, price, args.rows)
                found, scheduler = learned_speed([stage_s] * n_nodes, link_s, p, LONG_TEXT, args.rows, price)
                rows.append({
                    "case": f"simulated, {n_nodes} nodes, links {link_ms:g} ms, p {p:g}",
                    "nodes": n_nodes, "links_ms": link_ms, "p": p, "plain_tokens_s": plain,
                    "ratio": found / plain, "lowest": found / plain,
                    "simulated": ideal / plain, "simulated_rows": n_rows, "simulated_frames": n_frames,
                    "formula": max(formulas(args, p, n_nodes, link_s)) / plain, "guessed": scheduler.n_guessed,
                    "confirmed": scheduler.n_confirmed,
                })  # fmt: skip
    return rows


def formulas(args: argparse.Namespace, p: float, n_nodes: int, link_s: float) -> list[float]:
    """Tokens per second by the formula, with one row a frame and more."""
    found, price = [], price_of(args)
    for n_rows in range(1, args.rows + 1):
        stage_s = args.stage_ms / 1000 * price(n_rows)
        round_s = n_nodes * (stage_s + link_s)
        n_frames = most_frames(round_s, stage_s) if n_nodes > 1 else 1
        found.append(tokens_per_s(p, n_rows, n_frames, round_s, stage_s))
    return found


def price_of(args: argparse.Namespace) -> Callable[[int], float]:
    """Of so many rows, as a part of one."""
    prices = args.prices

    def price(n: int) -> float:
        return float(prices[n - 1]) if n <= len(prices) else prices[-1] * n / len(prices)

    return price


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=on_path.ROOT / "assets" / "nano-llama")
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--format", default="float32")
    parser.add_argument("--case", nargs="+", default=["simulated", "oracle", "draft", "copy", "schema", "never"])
    parser.add_argument("--never", nargs="+", choices=list(NEVER), help="of its cases, these (all)")
    parser.add_argument("--never-rounds", type=int, default=10)
    parser.add_argument("--never-texts", type=int, default=7, help="of each way, in a round (%(default)s)")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--links-ms", type=float, nargs="+", default=[0, 2, 10])
    parser.add_argument("--p", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--rows", type=int, default=4, help="rows of a frame, at most")
    parser.add_argument("--stage-ms", type=float, default=16.0)
    parser.add_argument("--row-price", type=float, default=0.1, help="of each further row, as a part of one")
    parser.add_argument("--n-tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    if args.short:
        args.nodes, args.links_ms, args.p, args.n_tokens, args.rounds = [1, 4], [0], [0.8], 150, 1
    model = Model(args.ckpt, args.format)
    rows: list[dict[str, Any]] = []
    args.prices = [1 + args.row_price * n for n in range(args.rows)]
    price = price_of(args)
    print("price of rows: " + ", ".join(f"{n:.2f}" for n in args.prices), flush=True)

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        show(row)

    sampled = SamplingParams(args.n_tokens, temperature=0.8, top_k=200, seed=3)
    if "simulated" in args.case:
        for row in simulated(args):
            add(row)
    if "oracle" in args.case:
        rings = [(n, link_ms) for n in args.nodes for link_ms in (args.links_ms if n > 1 else [0.0])]
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            for found in pool.map(partial(oracle, args), rings):
                for row in found:
                    add(row)

    def both(name: str, params: SamplingParams, n: int, t: float, make: Callable[[], Speculation], **more: Any) -> None:
        add(
            compare(
                name, model, params, n, lambda: WaitingRing(n, t, 0.0, price), args.rounds, lambda _: make(), **more
            )
        )

    if "draft" in args.case:
        draft = Model(args.draft, args.format)
        for temperature in (0.0, 0.8):
            params = replace(sampled, temperature=temperature)
            for name, n, t in (("3 nodes, stages of 8 ms", 3, 0.008), ("1 node, no wait", 1, 0.0)):
                both(f"draft, {name}, temperature {temperature:g}", params, n, t,
                     lambda: Speculation(args.rows, DraftModel(draft.stage, ArrayRows(), draft.length)))  # fmt: skip
    if "copy" in args.case:
        text = model.codec.encode((args.ckpt / "README.md").read_text(encoding="utf-8"))[: args.n_tokens]
        edited = [
            token if i % 40 else (token + 7) % 1000 for i, token in enumerate(text)
        ]  # a word in thirty is another one
        for n in (1, 4):
            both(f"copy, {n} nodes", SamplingParams(len(text), temperature=0), n, args.stage_ms / 1000,
                 lambda: Speculation(args.rows, kinds=frozenset({"lookup"})), prompt=text,
                 constraint=lambda: Copying(edited, model.config.padded_vocab_size))  # fmt: skip
    if "schema" in args.case:
        from mdi.serve.grammar import GrammarSource

        source = GrammarSource(args.ckpt, model.codec.eos_ids, model.config.padded_vocab_size)
        for n in (1, 4):
            both(f"schema, {n} nodes", sampled, n, args.stage_ms / 1000, lambda: Speculation(args.rows),
                 constraint=lambda: source.constraint({"schema": SCHEMA}))  # fmt: skip
    if "never" in args.case:
        for name, (n_texts, n_nodes, options) in NEVER.items():
            if name in (args.never or NEVER):
                add(measure_never(name, args, 1 if args.short else args.never_rounds, n_texts, n_nodes, **options))
    if args.json is not None:
        save(args.json, {"rows": rows, "prices": args.prices, "arguments": told(args, "json")})


if __name__ == "__main__":
    main()
