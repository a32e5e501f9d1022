#!/usr/bin/env python3
"""Writes the tables of benchmarks/RESULTS.md and docs/seeds.md from the files in benchmarks/results; nothing is measured.

The tables of `compare.py` and `thesis.py` are written by these; all others here.

    python benchmarks/write_results.py            # writes
    python benchmarks/write_results.py --check    # exit status 1 if a table is not that of its file
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import on_path  # noqa: F401
import petals as petals_grid
from records import RESULTS, ROOT
from side_by_side.tables import fill, markdown

Result = Mapping[str, Any]

UNMEASURED = "It was not measured yet."

WAYS = {"restart": "begun again", "no cache": "no cache", "replay": "`replay`", "tokens": "`tokens`"}
RATES = (0.0, 1e-4, 1e-3, 1e-2, 5e-2)  # of failures
PETALS_TABLE_1 = {  # of Borzunov et al. 2023: steps/s where p = 0, 1e-4, 1e-3, 1e-2; None: over an hour
    128: {"restart": (17.1, 16.7, 12, 0.18), "no cache": (3.44,) * 4, "replay": (11.4, 11.4, 10.6, 3.38)},
    1024: {"restart": (15.5, 11.8, 0.48, None), "no cache": (0.89,) * 4, "replay": (10.7, 10.7, 7.76, 2.17)},
}
SUMS = ("star", "exchange", "ring", "tree")
SHOWN_DELAYS_MS = (0.2, 1)
SHOWN_LINKS_MS, SHOWN_P = (0, 10), (0.5, 0.8, 0.9)  # of tokens that are guessed

PAGES = (ROOT / "benchmarks" / "RESULTS.md", ROOT / "docs" / "seeds.md")
# Right answers of three tasks in the mean, of BLOOM and OPT, and tokens/s of BLOOM, by bits of weights.
PETALS_TABLES_4_AND_5 = {
    "16": (("70.1%", "75.3%"), (4.18, 31.3, 100.6)), "8": (("70.3%", "74.9%"), (3.95, 29.4, 95.8)),
}  # fmt: skip

# Table 6, tokens/s forward and backward by (batch size, prompt length); what the paper calls prefixes are our deep prompts.
PETALS_TABLE_6: dict[str, dict[tuple[int, int], tuple[float, float]] | None] = {
    "prompt": {(8, 16): (195.6, 57.4), (8, 4): (213.2, 60.8), (32, 16): (272.6, 82.8), (32, 4): (293.1, 84.7)},
    "deep-prompt": {(8, 16): (111.0, 42.0), (8, 4): (178.7, 57.8), (32, 16): (164.1, 64.4), (32, 4): (255.8, 84.8)},
    "prefix": None,
}


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def measured(result: Result, table: str) -> str:
    return f"{table}\n\nMeasured on {result['date'][:10]}: {result['machine']}."


def round_trip() -> str:
    result = load("overheads")
    rows = [
        [way, f"{t['median_us']:.0f}", f"{t['lowest_round_median_us']:.0f} to {t['highest_round_median_us']:,.0f}",
         f"{t['p99_us']:,.0f}"]
        for way, t in result["round_trip"].items()
    ]  # fmt: skip
    return measured(result, markdown(["", "median", "medians of the rounds", "p99"], rows))


def wire_bytes() -> str:
    found = load("overheads")["wire_bytes"]
    names = {
        "1 slice": "one slice (one sequence decodes)",
        "8 slices": "eight slices",
        "ping": "PING, when nothing else was sent for a second",
    }
    return markdown(["frame", "bytes"], [[said, str(found[name])] for name, said in names.items()])


def quality() -> str:
    result = load("quality")
    bits = {"bf16": "16", "fp16": "16", "int8": "8.25", "int4": "4.5"}
    rows = []
    for name, n_bits in bits.items():
        plain, planted = result["model"][f"as it is/{name}"], result["model"][f"planted/{name}"]
        rows.append([
            name, n_bits, f"{plain['perplexity']:.3f}", f"{plain['change']:+.2%}", f"{plain['same_token']:.1%}",
            f"{planted['change']:+.2%}", f"{planted['same_token']:.1%}",
        ])  # fmt: skip
    head = ["format", "bits per weight", "perplexity", "change", "same token"]
    return measured(result, markdown([*head, "planted: change", "planted: same token"], rows))


def recovery_rates() -> str:
    """Steps/s by rates of failures, the paper's and ours, each with its share of those that begin again and never fail."""
    rows = []
    for n_tokens, of_paper in PETALS_TABLE_1.items():
        result = load("recovery_rates" if n_tokens == 128 else "recovery_rates_1020")
        first, of_first = _steps(result, "restart")[0.0][0], of_paper["restart"][0]
        for way, said in WAYS.items():
            own = _steps(result, way)
            theirs = [f"{x:g} ({x / of_first:.2g})" if x else "-" for x in of_paper.get(way, (None,) * 4)]
            ours = [_step(*own[rate], first) for rate in RATES]
            cost_s = next(line["s_per_failure"] for line in result["lines"] if line["way"] == way)
            cells = [f"{a}; {b}" for a, b in zip([*theirs, "-"], ours, strict=True)]
            rows.append([f"{n_tokens:,}", said, *cells, "" if cost_s is None else f"{cost_s * 1e3:.0f} ms"])
    head = ["tokens", "", *(f"p = {rate:g}" for rate in RATES), "a failure costs here"]
    return measured(load("recovery_rates"), markdown(head, rows))


def _steps(result: Result, way: str) -> dict[float, tuple[float, bool]]:
    """Steps/s of a way by rates of failures, and whether they were measured."""
    own = [text["seconds"] for text in result["texts"] if text["way"] == way and not text["rate"]]
    plain = own or [text["seconds"] for text in result["texts"] if not text["rate"]]
    base = result["tokens"] / statistics.mean(plain)
    lines = [line for line in result["lines"] if line["way"] == way]
    return {line["rate"]: (base * (line["left"] or line["computed"]), line["left"] is not None) for line in lines}


def _step(rate: float, is_measured: bool, first: float) -> str:
    number = f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
    return f"{number} ({rate / first:.2g})" if is_measured else f"*{number} ({rate / first:.2g})*"


def petals() -> str:
    """The paper's table 3 and ours, each with its share of the first line of the same number of nodes; offloading, of three."""
    result, rows, first = load("petals"), [], {}
    of_grid = [f"steps {n}" for n in petals_grid.CONTEXTS] + [f"forward {n}" for n in petals_grid.BATCHES]
    for case, theirs in petals_grid.PAPER.items():
        found = result["cells"].get(case.name, {})
        ours = [statistics.mean(found[name]) if name in found else None for name in of_grid]
        base = first.setdefault(case.nodes if case.nodes > 1 else 3, (theirs, ours))
        cells = [
            "; ".join(
                "-" if x is None or of is None else f"{x:.{2 if x < 10 else 1 if x < 100 else 0}f} ({x / of:.2f})"
                for x, of in zip(pair, firsts, strict=True)
            )
            for pair, firsts in zip(zip(theirs, ours, strict=True), zip(*base, strict=True), strict=True)
        ]
        rate = "1 Gbit/s" if case.mbit == 1000 else f"{case.mbit} Mbit/s"
        rows.append([
            str(case.nodes), str(case.clients), f"{rate}, {case.rtt_ms} ms" if case.nodes > 1 else "offloading", *cells,
        ])  # fmt: skip
    said = ["steps/s, 128 tokens: Petals; here", "2,048 tokens", "tokens/s, 1 x 128", "64 x 128"]
    return measured(result, markdown(["nodes", "clients", "links", *said], rows))


def petals_bits() -> str:
    """Tables 4 and 5 of the paper, and ours."""
    result, learned, rows = load("petals_bits"), {case["task"]: case for case in load("finetune_quality")["cases"]}, []
    rates = {
        form: [statistics.median(found[n]) for n in ("1", "8", "32")] for form, found in result["tokens_s"].items()
    }
    for form, bits in (("bf16", "16"), ("int8", "8")):
        own = [
            next(line["right"] for line in learned[task]["after"] if (line["format"], line["texts"]) == (form, 1))
            for task in ("tone", "reports")
        ]
        right, theirs = PETALS_TABLES_4_AND_5[bits]
        cells = [f"{share:.1%}" for share in (*own, result["accuracy"][form]["right"])]
        both = (theirs, PETALS_TABLES_4_AND_5["16"][1]), (rates[form], rates["bf16"])
        rows.append([bits, *right, *cells, *(", ".join(map(_of_16_bits, *pair)) for pair in both)])
    head = ["bits", "right: BLOOM-176B", "OPT-175B", "here: tone", "reports", "SmolLM2 135M, next token",
            "tokens/s of 1, 8, 32 texts: BLOOM-176B", "here: SmolLM2"]  # fmt: skip
    return measured(result, markdown(head, rows))


def _of_16_bits(rate: float, of_16: float) -> str:
    number = f"{rate:,.{0 if rate >= 100 else 1 if rate >= 10 else 2}f}"
    return number if rate == of_16 else f"{number} ({rate / of_16:.2f})"


def tensor_sums() -> str:
    result = load("tensor_sums")
    found: dict[tuple[int, float], dict[str, float]] = {}
    for one in result["sums"]:
        if one["bytes"] == 8192 and one["algorithm"] in SUMS and one["delay_ms"] in SHOWN_DELAYS_MS:
            found.setdefault((one["nodes"], one["delay_ms"]), {})[one["algorithm"]] = one["mean_us"] / 1e3
    rows = []
    for nodes in sorted({nodes for nodes, _ in found}):
        times = [found[nodes, delay] for delay in SHOWN_DELAYS_MS]
        shown = [
            [f"**{t[name]:.2f}**" if t[name] == min(t.values()) else f"{t[name]:.2f}" for t in times] for name in SUMS
        ]
        rows.append([str(nodes), *("; ".join(cells) for cells in shown)])
    return measured(result, markdown(["nodes", *SUMS], rows))


def tensor_speed() -> str:
    result = load("tensor_speed")
    head = ["weights", "", "ms a token: median (least to most)", "times one node with one thread", "a sum, median",
            "GB/s of weights", "GB/s that all processes read at that time"]  # fmt: skip
    rows = []
    for one in result["tokens"]:
        rates = sorted(sum(map(statistics.mean, of_round["read_gb_s"])) for of_round in one["rounds"])
        rows.append([
            one["packing"], one["way"], f"{one['token_ms']:.1f} ({one['least_ms']:.1f} to {one['most_ms']:.1f})",
            f"{one['gain']:.2f}", f"{one['sum_us']:.0f} us" if one["sum_us"] else "", f"{one['weights_gb_s']:.1f}",
            f"{one['read_gb_s']:.1f} ({rates[0]:.1f} to {rates[-1]:.1f})",
        ])  # fmt: skip
    return measured(result, markdown(head, rows))


def tensor_links() -> str:
    """Milliseconds a token by the time of all blocks on one node, by nodes, and by rates of their links."""
    result = load("tensor_links")
    found = {(one["wait_ms"], one["nodes"], one["mbit"]): one["median_ms"] for one in result["tokens"]}
    waits, counts, rates = (sorted({key[i] for key in found}) for i in range(3))
    rows = []
    for wait in waits:
        one = found[wait, 1, rates[0]]
        cells = [[found[wait, n, rate] for rate in rates] for n in counts[1:]]
        shown = (f"{'; '.join(f'{ms:,.0f}' for ms in times)} ({one / times[1]:.1f})" for times in cells)
        rows.append([f"{one:,.0f}", *shown])
    said = "; ".join(f"{rate:,.0f}" for rate in rates)
    head = ["one node, ms a token", *(f"{n} nodes at {said} Mbit/s" for n in counts[1:])]
    return measured(result, markdown(head, rows))


def tensor_laptops() -> str:
    result = load("tensor_laptops")
    found: dict[float, list[Result]] = {}
    for one in result["tokens"]:
        found.setdefault(one["wait_ms"], []).append(one)
    rows = []
    for one, *more in found.values():
        cells = [f"{each['median_ms']:,.0f} ({one['median_ms'] / each['median_ms']:.2f}), "
                 f"{each['prompt_s']:.1f} s ({one['prompt_s'] / each['prompt_s']:.2f})" for each in more]  # fmt: skip
        rows.append([f"{one['median_ms']:,.0f}, {one['prompt_s']:.1f} s", *cells])
    counts = sorted({one["nodes"] for one in result["tokens"]})[1:]
    return measured(
        result, markdown(["one node: ms a token, 16 of a prompt", *(f"{n} nodes (times one)" for n in counts)], rows)
    )


def three_machines() -> str:
    result = load("three_machines")
    rows = []
    for case in result["cases"]:
        one, many = (statistics.median(case[f"tokens_s_{n}"]) for n in (1, 16))
        peaks = ", ".join(f"{n / 1e9:.1f}" for n in case["peak_bytes"])
        limit = f"{result['memory']:g} GB" if case["machines"] > 1 else "none"
        rows.append([str(case["machines"]), limit, f"{one:.2f}", f"{many:.2f}", peaks, f"{case['ready_s']:.0f} s"])
    head = ["machines", "limit of memory", "one text, tokens/s", "16 texts", "most memory, GB", "ready after"]
    return measured(result, markdown(head, rows))


def window_memory() -> str:
    result = load("window_memory")
    rows = []
    for model, found in result["models"].items():
        pairs = {key: list(zip(*both.values(), strict=True)) for key, both in found.items()}
        ends = [f"{theirs:g}, {ours:.1f}" for theirs, ours in pairs["without"]]
        two, four = ([f"{theirs:g}, {ours:.2f}" for theirs, ours in pairs[f"window_{n}"]] for n in (2, 4))
        times = [f"{theirs:g} s; {ours:.1f} s predicted" for theirs, ours in pairs["times"]]
        rows.append([model, f"{ends[0]}; {ends[-1]}", *(f"{a}; {b}" for a, b in zip(two, four, strict=True)), *times])
    n_nodes = result["nodes"]
    head = ["model", f"without a window: theirs, ours (N = {n_nodes[0]}; {n_nodes[-1]})"]
    times = [f"{what}: theirs; ours (N = {n_nodes[-1]})" for what in ("first token", "a token")]
    return markdown([*head, *(f"W = 2: theirs, ours; W = 4 (N = {n})" for n in n_nodes), *times], rows)


def serving() -> str:
    result = load("serving")
    turns, prompt, clients, texts, peer = (result[name] for name in ("turns", "prompt", "clients", "texts", "peer"))
    rounds = clients["rounds"]
    speeds = [one["tokens_s"] for one in rounds]
    spread = sorted(one["fastest_over_slowest"] for one in rounds)
    memory = [rounds[0]["rss_before_mb"], *(one["rss_after_mb"] for one in rounds)]

    def times(values: Any) -> str:
        return ", ".join(f"{value:.0f}" for value in values)

    n_texts = clients["flags"]["n"] * len(rounds)
    rows = [
        ["clients", "256 streaming clients beside 1,500 silent connections, the embedded model: errors; texts that "
         "differ from those of the same request alone",
         f"{sum(one['n_errors'] for one in rounds)} of {n_texts:,}; "
         f"{clients['texts_other_than_alone']} of {clients['texts_compared']}"],
        ["", "most tokens/s of a text over least", f"median {spread[len(spread) // 2]:.2f}, "
         f"{spread[0]:.2f} to {spread[-1]:.2f}"],
        ["", "first token of a lone request, without and beside the silent connections",
         f"{clients['first_token_alone_s'] * 1e3:.0f} ms; {clients['first_token_beside_silent_s'] * 1e3:.0f} ms, at "
         f"most {clients['first_token_beside_silent_most_s'] * 1e3:.0f} ms"],
        ["", "tokens/s of all", f"{min(speeds):,.0f} to {max(speeds):,.0f}"],
        ["", "memory of all processes before the first and after each round", f"{times(memory)} MB"],
        ["turns", "first token of a second turn of 1,032 tokens; without the first turn's caches",
         f"{sorted(turns['second_turn_s'])[1]:.2f} s; {sorted(turns['without_s'])[1]:.2f} s: {turns['ratio']:.3f}x"],
        ["prompt", "95th percentile of the time between tokens of 8 texts, alone and while a prompt comes",
         f"{prompt['gap_p95_s']:.2f} s; {prompt['gap_p95_during_s']:.2f} s: {prompt['ratio']:.2f}x"],
        ["texts", "tokens/s of 16 texts: the command; the API",
         f"{times(texts['tokens_s']['command'])}; {times(texts['tokens_s']['api'])}: {texts['ratio']:.2f}x"],
        ["peer", "tokens/s of 16 texts, SmolLM2 from its Q4_1 file; of `llama-server -np 16` from the same, two threads",
         f"{times(peer['tokens_s']['ours'])}; {times(peer['tokens_s']['theirs'])}: {peer['ratio']:.2f}x"],
        ["", "first token, median and 95th percentile; of llama-server",
         f"{peer['first_token_p50_s']['ours']:.1f} and {peer['first_token_p95_s']['ours']:.1f} s; "
         f"{peer['first_token_p50_s']['theirs']:.1f} and {peer['first_token_p95_s']['theirs']:.1f} s"],
    ]  # fmt: skip
    return measured(result, markdown(["command", "what", "measured"], rows))


def finetuning_beside_petals() -> str:
    """The paper's table 6 and ours: forward and backward, each with its share of the first of the paper's column or ours."""
    result = load("finetune_speed")
    own = {
        (one["method"], one["texts"], one["rows"]): (one["forward_classes_tokens_s"], one["backward_classes_tokens_s"])
        for one in result["lines"]
        if one["nodes"] == 3
    }
    rows = []
    for case in ((8, 16), (8, 4), (32, 16), (32, 4)):
        cells = []
        for method, of_paper in PETALS_TABLE_6.items():
            ours = {one: own.get((method, *one)) for one in ((8, 16), case)}
            pairs = [(rates[case], rates[8, 16]) for rates in (of_paper, ours) if rates is not None]
            cells.append("; ".join("-" if None in pair else _of_first(*pair) for pair in pairs))
        rows.append([*map(str, case), *cells])
    heads = [f"`{name}`: " + ("here" if theirs is None else "Petals; here") for name, theirs in PETALS_TABLE_6.items()]
    return measured(result, markdown(["batch size", "prompt length", *heads], rows))


def _of_first(rates: Sequence[float], first: Sequence[float]) -> str:
    return ", ".join(f"{x:.{0 if x >= 100 else 1}f} ({x / of:.2f})" for x, of in zip(rates, first, strict=True))


def speculation() -> str:
    simulated, measured_ = load("speculation"), load("speculation_measured")
    real = {(one["nodes"], one["links_ms"], one["p"]): one for one in measured_["rows"]}
    rows = []
    for one in simulated["rows"]:
        if one["links_ms"] not in SHOWN_LINKS_MS or one["p"] not in SHOWN_P:
            continue
        key = one["nodes"], one["links_ms"], one["p"]
        rows.append([
            str(key[0]), f"{key[1]:g} ms" if key[0] > 1 else "", f"{key[2]:g}", f"{one['simulated']:.2f}",
            f"{one['formula']:.2f}", f"**{one['ratio']:.2f}**", f"{one['ratio'] / one['simulated']:.0%}",
            f"{real[key]['ratio']:.2f}", f"{real[key]['ratio'] / real[key]['simulated']:.0%}",
        ])  # fmt: skip
    head = [
        "nodes",
        "links",
        "p",
        "ideal",
        "formula",
        "ours, simulated time",
        "of ideal",
        "real engine",
        "of its ideal",
    ]
    note = (
        f"The last columns are of 400 tokens; other programs took {measured_['others_share']:.0%} of the cores' time."
    )
    return measured(measured_, f"{markdown(head, rows)}\n\n{note}")


def family_blocks() -> str:
    result = load("family_blocks")
    rows = [
        [one["family"], one["format"], f"{one['own_share']:.0%}, {one['llama_share']:.0%}", f"{one['read_ratio']:.2f}",
         f"{one['own_products']:.0f}, {one['llama_products']:.0f}", f"{one['products_ratio']:.2f}",
         *((str(one["few_rows"]), f"{one['of_bound']:.2f}") if one["few_rows"] < result["rows"] else ("", ""))]
        for one in result["blocks"]
    ]  # fmt: skip
    head = [
        "block", "weights", "one row: its share of the read test, Llama's", "ratio",
        "64 rows: its billion products/s, Llama's", "ratio", "rows of an expert", "of the bound",
    ]  # fmt: skip
    return measured(result, markdown(head, rows))


def guesses(name: str) -> str:
    """Cases of speculation.py, other than those of its main table."""
    result = load(name)
    rows = [
        [one["case"], f"{one['plain_tokens_s']:.1f}", f"**{one['ratio']:.2f}**", f"{one['lowest']:.2f}",
         f"{one['confirmed']:,} of {one['guessed']:,}"]
        for one in result["rows"]
    ]  # fmt: skip
    return measured(result, markdown(["case", "without, tokens/s", "times", "lowest", "right guesses"], rows))


def swarm() -> str:
    rows = [
        [name, f"{one['near']:.0%}", f"{one['zero']:.0%}", f"{one['median']:.2f}", f"{one['moves_per_hour']:.0f}",
         f"{one['blocks_per_hour']:.0f}", f"{one['loading']:.2f}"]
        for name, one in load("swarm")["figure"].items()
    ]  # fmt: skip
    head = ["", "within 15 % of the bound", "at zero", "median share", "moves per hour", "blocks per hour"]
    return markdown([*head, "mean share, if a block takes 10 s to load"], rows)


def compression() -> str:
    result, rows = load("seed_numbers"), []
    for one, many in zip(*[iter(result["compression"])] * 2, strict=True):  # a row, and 64
        us = [f"{one[what] * 1e6:.0f}; {many[what] / many['rows'] * 1e6:.1f}" for what in ("encode_s", "decode_s")]
        shares = [f"{case['bytes'] / result['width'] / 4:.1%}" for case in (one, many)]
        rows.append([one["way"], "; ".join(shares), *us, f"{many['error']:.2%}"])
    head = ["", "bytes, of float32: 1 row; 64", "us a row, to encode: 1; 64", "to decode: 1; 64", "error"]
    return measured(result, markdown(head, rows))


def nf4() -> str:
    forms = ("nf4", "int4", "q4_k")
    rows = [[one["weights"], *(f"{one[form]:.2%}" for form in forms)] for one in load("seed_numbers")["errors"]]
    return markdown(["weights", *forms], rows)


def placement_clients() -> str:
    result, rows = load("placement_clients"), {"gma": ["GMA"], "opa": ["OPA"], "throughput": ["here"]}
    for one in result["against"]:
        n_tokens = one["clients"] * result["batch"] * 10
        blocks = " ".join(
            f"S{1 + int(name[9:] or -1) + 1}:{k}" for name, k in zip(one["nodes"], one["counts"], strict=True)
        )
        rows[one["method"]].append(f"{n_tokens / one['tokens_s']:.2f} ({blocks})")
    head = ["", *(f"{n}" for n in dict.fromkeys(one["clients"] for one in result["against"]))]
    return measured(result, markdown(head, list(rows.values())))


TABLES: dict[str, Callable[[], str]] = {
    **{make.__name__.replace("_", "-"): make for make in (
        round_trip, wire_bytes, family_blocks, serving, quality, recovery_rates, petals, petals_bits, speculation,
        swarm, compression, nf4, placement_clients, tensor_speed, tensor_links, tensor_laptops, tensor_sums,
        window_memory, three_machines,
    )},
    "finetune-speed": finetuning_beside_petals,
    "speculation-sources": lambda: guesses("speculation_sources"),
    "speculation-never": lambda: guesses("speculation_never"),
}  # fmt: skip


def names_in(page: str) -> list[str]:
    """Those of TABLES that have a place on a page."""
    return [name for name in TABLES if f"<!-- results:{name} -->" in page]


def table(name: str) -> str:
    """One of TABLES, or that its file is not there."""
    try:
        return TABLES[name]()
    except FileNotFoundError:
        return UNMEASURED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    n_other = 0
    for path in PAGES:
        before = text = path.read_text(encoding="utf-8")
        for name in names_in(text):
            text = fill(text, name, table(name))
        if args.check:
            print(f"{path.name} has {'the tables of its files' if text == before else 'other tables'}")
            n_other += text != before
        else:
            path.write_text(text, encoding="utf-8")
    return int(n_other > 0)


if __name__ == "__main__":
    sys.exit(main())
