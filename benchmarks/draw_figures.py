#!/usr/bin/env python3
"""Draw the figures of the documents into assets/.

    benchmarks/draw_figures.py [--out DIR] [--format svg|png]

The two timelines are simulated, not measured: every stage takes one unit of time, a hop a fraction of one. The cut in the
layer figure is the one that the program makes for a model of TinyLlama's shape. Other figures are drawn from files in
benchmarks/results; values of papers' tables are points beside our lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

import on_path
from mdi.model.plain import spec_of
from write_results import PETALS_TABLE_1, RATES, load

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, FAINT, WIRE, CONTROL = "#222222", "#8a8a8a", "#1f5fa8", "#c2570c"
STARTER, SECONDARY, QUEUE, STAGE = "#fdf0dd", "#e4eefa", "#ffffff", "#d9ead3"
SAMPLES = ("#4c8dd6", "#e39a3b", "#5fae6b")
TINY_LLAMA: dict[str, Any] = {"n_layer": 22, "n_embd": 2048, "n_head": 32, "n_query_groups": 4, "intermediate_size": 5632,
              "padded_vocab_size": 32000, "mlp_class_name": "LLaMAMLP"}  # fmt: skip


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure whose coordinates are inches."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(ax: Any, x: float, y: float, w: float, h: float, text: str = "", fill: str = "white", **style: Any) -> None:
    """A rounded box with its text in the middle."""
    size = style.pop("size", 9)
    weight = style.pop("weight", "normal")
    patch = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.06", fc=fill, ec=INK, lw=1, **style)
    ax.add_patch(patch)
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", size=size, color=INK, weight=weight, linespacing=1.35)


def arrow(ax: Any, start: tuple[float, float], stop: tuple[float, float], color: str, **style: Any) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 13, "lw": 1.6, "shrinkA": 0, "shrinkB": 0, **style}
    ax.add_patch(FancyArrowPatch(start, stop, color=color, **style))


def path(ax: Any, points: list[tuple[float, float]], color: str, **style: Any) -> None:
    """Straight lines with an arrow head at the end."""
    for a, b in zip(points, points[1:-1], strict=False):
        ax.plot(*zip(a, b, strict=True), color=color, lw=1.6, solid_capstyle="round", **style)
    arrow(ax, points[-2], points[-1], color, **style)


def plain(ax: Any) -> None:
    """The look of measured curves."""
    ax.grid(which="major", color="#dddddd", lw=0.6)
    ax.spines[["top", "right"]].set_visible(False)


# Architecture


def architecture() -> Any:
    figure, ax = canvas(11.4, 4.75)
    width, left = 3.3, 0.35
    names = ("starter", "secondary 0", "secondary 1")
    for i, name in enumerate(names):
        x = left + i * (width + 0.4)
        _node(ax, x, width, name, is_starter=i == 0)
        if i:
            arrow(ax, (x - 0.53, 1.72), (x + 0.13, 1.72), WIRE)
    x_last = left + 2 * (width + 0.4) + width
    path(ax, [(x_last - 0.13, 1.72), (x_last + 0.22, 1.72), (x_last + 0.22, 0.5), (left - 0.2, 0.5), (left - 0.2, 1.72),
              (left + 0.13, 1.72)], WIRE)  # fmt: skip
    ax.text(5.7, 0.6, "TCP ring: frames of rows, the last link brings back only the rows that want logits", ha="center",
            va="bottom", color=WIRE, size=9.5)  # fmt: skip
    top = 4.2
    x_client = left + 0.75
    for i in (1, 2):
        x = left + i * (width + 0.4) + width / 2
        path(ax, [(x_client, 3.3), (x_client, top), (x, top), (x, 3.3)], CONTROL, linestyle=(0, (4, 2)))
    ax.text(5.7, top + 0.08, "HTTP: GET / (status), POST /init (the run), PUT /parts (weights that are missing), PUT /stop",
            ha="center", va="bottom", color=CONTROL, size=9.5)  # fmt: skip
    return figure


def _node(ax: Any, x: float, width: float, name: str, is_starter: bool) -> None:
    box(ax, x, 0.85, width, 2.85, fill=STARTER if is_starter else SECONDARY)
    ax.text(x + width - 0.12, 3.5, name, ha="right", va="center", size=12, weight="bold", color=INK)
    if is_starter:
        box(ax, x + 0.15, 2.95, 1.2, 0.35, "control client", CONTROL_FILL, size=8.5)
        box(ax, x + 1.45, 2.95, 1.7, 0.35, "scheduler, sampler, text", QUEUE, size=8.5)
    else:
        box(ax, x + 0.85, 2.95, 1.6, 0.35, "control (HTTP)", CONTROL_FILL, size=8.5)
    stage = "embedding\nfirst blocks\nnorm, head" if is_starter else "a run\nof blocks"
    box(ax, x + 1.1, 1.3, 1.1, 0.85, stage, STAGE, size=8.5)
    box(ax, x + 1.1, 2.3, 1.1, 0.4, "KV caches,\none per sample", QUEUE, size=7.5)
    box(ax, x + 0.13, 1.37, 0.42, 0.7, "recv", QUEUE, size=8)
    box(ax, x + width - 0.55, 1.37, 0.42, 0.7, "send", QUEUE, size=8)
    for at in (x + 0.63, x + width - 1.02):
        for k in range(3):
            ax.add_patch(Rectangle((at + k * 0.13, 1.55), 0.11, 0.34, fc="white", ec=INK, lw=0.8))
    ax.text(x + 0.82, 1.12, "in-queue", ha="center", size=7.5, color=FAINT)
    ax.text(x + width - 0.83, 1.12, "out-queue", ha="center", size=7.5, color=FAINT)


CONTROL_FILL = "#fbe3d0"

# Layers


def layers() -> Any:
    from mdi.block_ranges import block_span, default_split, ranges
    from mdi.model.plain import ModelConfig

    figure, ax = canvas(9.2, 5.6)
    ax.text(4.6, 5.3, "TinyLlama (1.1 B parameters, 22 blocks) on three nodes", ha="center", size=12, color=INK)
    cut = ranges(default_split(spec_of(ModelConfig(**TINY_LLAMA)), 3))
    names = ("starter", "secondary 0", "secondary 1")
    for i, ((start, stop), name) in enumerate(zip(cut, names, strict=True)):
        x = 0.4 + i * 3.0
        box(ax, x, 0.75, 2.4, 4.2, fill=STARTER if i == 0 else SECONDARY)
        ax.text(x + 1.2, 4.68, name, ha="center", va="center", size=12, weight="bold", color=INK)
        ax.text(x + 1.2, 4.4, block_span(start, stop), ha="center", va="center", size=9.5, color=INK)
        top = 4.15
        if i == 0:
            box(ax, x + 0.3, top - 0.33, 1.8, 0.3, "token embedding", "#f6d9a8", size=9)
            top -= 0.42
        for block in range(start, stop):
            box(ax, x + 0.3, top - 0.3, 1.8, 0.26, f"block {block}", STAGE, size=8.5)
            top -= 0.32
        if i == 0:
            box(ax, x + 0.3, 0.95, 1.8, 0.42, "final norm, head", "#f6d9a8", size=9)
            ax.text(x + 1.2, 1.5, "(for what comes back)", ha="center", size=8, color=FAINT)
        if i:
            arrow(ax, (x - 0.6, 2.75), (x, 2.75), WIRE)
            ax.text(x - 0.3, 2.84, "rows", ha="center", size=8.5, color=WIRE)
    path(ax, [(8.8, 1.9), (9.0, 1.9), (9.0, 0.5), (0.2, 0.5), (0.2, 1.16), (0.7, 1.16)], WIRE)
    ax.text(4.6, 0.22, "rows that want logits, one per sample", ha="center", size=8.5, color=WIRE)
    return figure


# Timelines


def ring_bars(n_nodes: int, n_samples: int, end: float, hop: float = 0.08) -> Iterator[tuple[int, float, int, int]]:
    """(node, begin, sample, token) of stages that take 1 each, first come, first served; those that are over by `end`."""
    free = [0.0] * n_nodes
    arrivals = [(0.0, 0, sample, 0) for sample in range(n_samples)]  # time, node, sample, token
    while arrivals:
        arrivals.sort()
        time, node, sample, token = arrivals.pop(0)
        begin = max(time, free[node])
        if begin + 1 > end:
            continue
        free[node] = begin + 1
        yield node, begin, sample, token
        following = (node + 1) % n_nodes
        arrivals.append((begin + 1 + hop, following, sample, token + (following == 0)))


def lanes(ax: Any, names: list[str], end: float, title: str) -> None:
    ax.set(xlim=(-0.05, end), ylim=(len(names) - 0.4, -0.6), yticks=range(len(names)), xticks=[])
    ax.set_yticklabels(names, size=10)
    ax.set_title(title, loc="left", size=11, color=INK)
    ax.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)


def bar(ax: Any, lane: float, begin: float, length: float, color: str, text: str = "", height: float = 0.62) -> None:
    ax.add_patch(Rectangle((begin, lane - height / 2), length, height, fc=color, ec="white", lw=1.2))
    ax.text(begin + length / 2, lane, text, ha="center", va="center", size=7.5, color="white", clip_on=True)


def pipelining() -> Any:
    figure, axes = plt.subplots(2, 1, figsize=(10, 4.8), layout="constrained", gridspec_kw={"hspace": 0.08})
    end, names = 12.95, ["starter", "secondary 0", "secondary 1"]
    titles = (
        "One sample: two of three nodes wait at any time",
        "Three samples in flight: a node waits for a hop, never for another node",
    )
    for ax, n_samples, title in zip(axes, (1, 3), titles, strict=True):
        lanes(ax, names, end, title)
        for node, begin, sample, token in ring_bars(3, n_samples, end):
            bar(ax, node, begin, 1, SAMPLES[sample], f"s{sample} t{token}")
    axes[1].set_xlabel("time  (s1 t2: token 2 of sample 1; the starter draws a token and computes the next one's first blocks)",
                       size=9)  # fmt: skip
    return figure


def queues() -> Any:
    figure, axes = plt.subplots(
        2, 1, figsize=(10, 4.8), layout="constrained", height_ratios=(1, 3), gridspec_kw={"hspace": 0.08}
    )
    came = (0.0, 0.5, 1.0, 2.5, 3.4, 3.9, 5.3, 6.1)  # when a frame begins to come in
    take, compute, give = 0.45, 0.8, (0.4, 0.4, 0.4, 2.0, 0.4, 0.4, 0.4, 0.4)  # frame 3 meets a busy network
    end, colors = 14.9, {"r": "#7d8fb3", "c": "#5fae6b", "s": "#e39a3b"}
    lanes(
        axes[0],
        ["one thread"],
        end,
        "Receive, compute and send take turns: what the network takes is lost for computing",
    )
    now = 0.0
    for i, begin in enumerate(came):
        now = max(now, begin)
        for kind, length in (("r", take), ("c", compute), ("s", give[i])):
            bar(axes[0], 0, now, length, colors[kind], str(i))
            now += length
    names = ["ring-recv", "(in-queue)", "stage", "(out-queue)", "ring-send"]
    lanes(axes[1], names, end, "A thread for each, with queues between them: computing goes on while bytes come and go")
    received = computed = sent = 0.0
    for i, begin in enumerate(came):
        received = max(received, begin) + take
        start = max(received, computed)
        computed = start + compute
        leave = max(computed, sent)
        sent = leave + give[i]
        bar(axes[1], 0, received - take, take, colors["r"], str(i))
        bar(axes[1], 1, received, start - received, "#c9c9c9", height=0.25)
        bar(axes[1], 2, start, compute, colors["c"], str(i))
        bar(axes[1], 3, computed, leave - computed, "#c9c9c9", height=0.25)
        bar(axes[1], 4, leave, give[i], colors["s"], str(i))
    axes[1].set_xlabel(
        "time  (the numbers are frames; grey: waiting in a queue; frame 3 is slow to leave, and the stage computes on)",
        size=9,
    )
    return figure


# Sums


def sums_by_delay() -> Any:
    """A line for each way to sum, an axis for each number of nodes."""
    measured = load("tensor_sums")["sums"]
    counts = sorted({one["nodes"] for one in measured})
    colors = dict(zip(("star", "exchange", "ring", "tree"), (INK, *SAMPLES[1:], WIRE), strict=True))
    figure, axes = plt.subplots(1, len(counts), figsize=(11, 3.4), layout="constrained", sharey=True)
    for ax, n_nodes in zip(axes, counts, strict=True):
        for algorithm, color in colors.items():
            points = sorted((one["delay_ms"], one["mean_us"] / 1000) for one in measured
                            if (one["nodes"], one["algorithm"]) == (n_nodes, algorithm))  # fmt: skip
            ax.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3.5, lw=1.5, label=algorithm)
        ax.set(xscale="log", yscale="log", xlabel="delay of a link, ms", title=f"{n_nodes} nodes")
        plain(ax)
    axes[0].set_ylabel("a sum of 8 KB, ms")
    axes[0].legend(frameon=False, fontsize=9)
    return figure


# A swarm


def swarm_day() -> Any:
    """Tokens per second over a day, a line for each rule."""
    curves = load("swarm")["curves"]
    shown = {"bound": (INK, "--"), "full, p = 1%": (WIRE, "-"), "full, p = 20%": (SAMPLES[2], "-"),
             "new servers only": (SAMPLES[1], "-"), "random": (FAINT, "-")}  # fmt: skip
    figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for name, (color, style) in shown.items():
        hours = [24 * i / len(curves[name]) for i in range(len(curves[name]))]
        ax.plot(hours, curves[name], color=color, ls=style, lw=1.3, label=name, clip_on=False)  # a line at zero, too
    ax.set(xlabel="hour", ylabel="tokens/s of the slowest block", xlim=(0, 24), ylim=(0, None), xticks=range(0, 25, 4))
    plain(ax)
    ax.legend(frameon=False, fontsize=9, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


# Kept prefixes


def kept_prefixes() -> Any:
    """Time to the first token over the turns of conversations."""
    found = load("kept_prefixes")
    figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
    lines = [
        ("turns", "anew_s", FAINT, "computed anew"),
        ("llama.cpp", "kept_s", SAMPLES[0], "llama.cpp"),
        ("messages", "kept_s", SAMPLES[2], "--keep-prefixes, Messages"),
        ("turns", "kept_s", SAMPLES[1], "--keep-prefixes, chat"),
    ]
    for name, key, color, label in (line for line in lines if line[0] in found):
        rows = found[name]["turns"]
        seconds, numbers = [row[key] for row in rows], [row["turn"] for row in rows]
        ax.plot(numbers, seconds, color=color, marker="o", markersize=3.5, lw=1.5, label=label)
    restart_at = found["turns"]["restart_at"]
    ax.axvline(restart_at - 0.5, color=INK, ls="--", lw=0.8)
    ax.text(restart_at - 0.4, ax.get_ylim()[1], "server begun anew", va="top", fontsize=9)
    ax.set(xlabel="turn of a conversation", ylabel="seconds to the first token", ylim=(0, None), xticks=numbers)
    plain(ax)
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


# Papers' tables

TOKENS = {128: "128", 1024: "1,020"}  # of our runs beside these


def beside_papers() -> Any:
    """Tables of three papers: memory by nodes, speed by failures, what a placement gains by clients."""
    figure, (memory, failures, clients) = plt.subplots(1, 3, figsize=(12.4, 4.6), layout="constrained")
    _memory_by_nodes(memory)
    _speed_by_failures(failures)
    _gain_by_clients(clients)
    for ax in (memory, failures, clients):
        plain(ax)
        ax.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    return figure


def _memory_by_nodes(ax: Any) -> None:
    result = load("window_memory")
    ways = {
        "without": ("no window", INK, "o"),
        "window_4": ("W = 4", SAMPLES[0], "s"),
        "window_2": ("W = 2", CONTROL, "x"),
    }
    for way, (label, color, marker) in ways.items():
        both = result["models"]["Llama 2-70B"][way]
        ax.plot(result["nodes"], both["ours"], color=color, lw=1.5, label=label)
        ax.plot(result["nodes"], both["paper"], color=color, ls="", marker=marker, markersize=6, label="theirs")
    ax.set(yscale="log", xlabel="nodes", ylabel="GiB of the fullest node", xticks=result["nodes"])
    ax.set_title("Llama 2-70B in float32; points: TPI-LLM,\ntables 2 and 6 (the process; ours: weights)", fontsize=10)


def _speed_by_failures(ax: Any) -> None:
    files = {128: "recovery_rates", 1024: "recovery_rates_1020"}
    of_ways = [
        (way, n_tokens, steps[way]) for n_tokens, steps in PETALS_TABLE_1.items() for way in ("replay", "restart")
    ]
    for way, n_tokens, steps in sorted(of_ways, key=lambda one: (one[1], one[0])):
        color, style = {"replay": WIRE, "restart": CONTROL}[way], "-" if n_tokens == 128 else "--"
        lines = [one for one in load(files[n_tokens])["lines"] if one["way"] == way and one["rate"] > 0]
        ours = sorted((one["rate"], one["computed"]) for one in lines)
        said = {"replay": "replayed", "restart": "begun again"}[way]
        ax.plot(*zip(*ours, strict=True), color=color, ls=style, lw=1.5, label=f"{said}, {TOKENS[n_tokens]} tokens")
        shares = [step and step / steps[0] for step in steps[1:]]
        theirs = [(rate, share) for rate, share in zip(RATES[1:], shares, strict=False) if share is not None]
        face = color if n_tokens == 128 else "white"
        ax.plot(*zip(*theirs, strict=True), color=color, ls="", marker="o", markersize=5, markerfacecolor=face)
    ax.set(xscale="log", ylim=(0, 1.04), xlabel="failures of a message", ylabel="of the speed without failures")
    ax.set_title("Nodes that fail; points: Petals, table 1\n(hollow: 1,024 tokens)", fontsize=10)


def _gain_by_clients(ax: Any) -> None:
    from llamps import TABLE

    counts = (1, 2, 4)
    measured = {(one["method"], one["clients"]): one["tokens_s"] for one in load("placement_clients")["against"]}
    for method, name, color in (("opa", "OPA", SAMPLES[0]), ("throughput", "ours", INK)):
        gains = [measured[method, n] / measured["gma", n] for n in counts]
        ax.plot(counts, gains, color=color, lw=1.5, label=f"{name}, measured")
    for i, n_servers in enumerate((1, 2, 3)):
        rows = [row for row in TABLE if len(row.counts) == n_servers]
        points = [
            (n * (0.96, 1, 1.04)[i], a / b)
            for row in rows
            for n, a, b in zip(counts, row.gma_s, row.opa_s, strict=True)
        ]
        label = f"paper, {n_servers} server{'s' * (n_servers > 1)}"
        ax.plot(*zip(*points, strict=True), color=SAMPLES[i], ls="", marker="o", markersize=4, label=label)
    ax.set(xscale="log", xlim=(0.85, 4.7), xlabel="clients of 16 texts", ylabel="times as fast as GMA", ylim=(0, None))
    ax.set_xticks(counts, map(str, counts))
    ax.minorticks_off()
    ax.set_title("Placement; points: OPA over GMA\nin LLaMPS' table 3, twelve clusters", fontsize=10)


FIGURES = {
    "architecture": architecture,
    "layers": layers,
    "recurrent-pipelining-idea": pipelining,
    "recurrent-pipelining-out-q": queues,
    "tensor-sums": sums_by_delay,
    "swarm-day": swarm_day,
    "kept-prefixes": kept_prefixes,
    "beside-papers": beside_papers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=on_path.ROOT / "assets", metavar="DIR")
    args = parser.parse_args()
    matplotlib.rcParams.update({"svg.hashsalt": "mdi", "font.family": "DejaVu Sans", "text.color": INK})
    for name, draw in FIGURES.items():
        figure = draw()
        file = args.out / f"{name}.svg"
        figure.savefig(file, facecolor="white", metadata={"Date": None})  # the same picture is the same file
        plt.close(figure)
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
