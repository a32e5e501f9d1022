"""Figures and tables of the thesis' evaluation: results in, files out. See thesis.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

from thesis_numbers import MODELS, Model  # noqa: E402

SYSTEMS = {
    "nanogpt": ("NanoGPT: no caches, context of 128", "thesis-nanogpt.svg"),
    "gpt2": ("GPT-2: no caches, context of 1024", "thesis-gpt2.svg"),
    "llama": ("Llamas: rotating KV caches", "thesis-llama.svg"),
}
COLORS = {1: "#444444", 2: "#1f5fa8", 3: "#c2570c"}
DETAIL_TOKENS = 20

Points = list[list[float]]


def write_report(data: dict[str, Any], root: Path | None, beside: Path) -> None:
    """Figures into assets/ and tables into docs/thesis.md below `root`, or, without a root, into `beside`."""
    runs = data["runs"]
    found = [model for model in MODELS if any(f"{model.key}/{n}" in runs for n in (1, 2, 3))]
    if not found:
        print("no results yet: nothing is drawn")
        return
    matplotlib.rcParams.update({"svg.hashsalt": "mdi", "font.family": "DejaVu Sans"})
    assets = beside if root is None else root / "assets"
    for system, (title, name) in SYSTEMS.items():
        models = [model for model in found if model.system == system]
        if models:
            save(time_figure(models, runs, title), assets / name)
    save(memory_figure(found, runs), assets / "thesis-memory.svg")
    kind = "full run"
    if any(
        runs[f"{model.key}/{n}"]["asked"] != model.n_tokens
        for model in found
        for n in (1, 2, 3)
        if f"{model.key}/{n}" in runs
    ):
        kind = "**quick run**, which shows that the program works and no more: a few tokens, without regard to other programs"
    loads = [run["load_before"] for run in runs.values()]
    caption = (
        f"Measured on {data['date']}: {data['machine']}; {kind}. One thread per node. Load average before the runs, "
        f"the evaluation's own included: {min(loads):.1f} to {max(loads):.1f}.\n\n"
    )
    tables = {"thesis-speed": caption + speed_table(found, runs), "thesis-memory": memory_table(found, runs)}
    for text in tables.values():
        print(f"\n{text}")
    if root is not None:
        fill_in(root / "docs" / "thesis.md", tables)


def fill_in(page: Path, tables: dict[str, str]) -> None:
    """Replace what stands between the markers of each table."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- results:{name} -->\n).*?(<!-- /results:{name} -->)", re.DOTALL)
        text, n_found = pattern.subn(lambda m, table=table: m[1] + table + "\n" + m[2], text)  # type: ignore[misc]
        if n_found != 1:
            raise SystemExit(f"{page} has {n_found} places for the table {name}, expected one")
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")


# Numbers


def curve(runs: dict[str, Any], model: Model, n_nodes: int) -> Points:
    """(time_s, tokens until then); empty if there was no such run."""
    points: Points = runs.get(f"{model.key}/{n_nodes}", {}).get("points", [])
    return points


def time_at(points: Points, n_tokens: float) -> float:
    """When so many tokens were there, between the points that were kept."""
    before_s, before_n = 0.0, 0.0
    for time_s, n in points:
        if n >= n_tokens:
            return before_s + (time_s - before_s) * (n_tokens - before_n) / (n - before_n)
        before_s, before_n = time_s, n
    return before_s


def compared_tokens(runs: dict[str, Any], model: Model) -> int:
    """Tokens that all runs of a model reached: three nodes make three texts, of which the rest is left out."""
    return int(min(points[-1][1] for n in (1, 2, 3) if (points := curve(runs, model, n))))


def rate(runs: dict[str, Any], model: Model, n_nodes: int) -> float | None:
    points = curve(runs, model, n_nodes)
    if not points:
        return None
    n_tokens = compared_tokens(runs, model)
    return n_tokens / time_at(points, n_tokens)


def slowdown(runs: dict[str, Any], model: Model) -> float | None:
    """Time of the last quarter of the tokens over that of the second one, on one node: 1 is a straight line."""
    points = curve(runs, model, 1)
    if not points:
        return None
    n = points[-1][1]
    first, second, third, last = (time_at(points, n * quarter / 4) for quarter in (1, 2, 3, 4))
    return (last - third) / (second - first)


# Tables


def speed_table(models: Sequence[Model], runs: dict[str, Any]) -> str:
    lines = [
        "| model | tokens | tokens/s here, 1 / 2 / 3 nodes | 2 and 3 nodes over 1 | tokens/s in the thesis | 2 and 3 over 1 "
        "| last quarter over second |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in models:
        ours = [rate(runs, model, n) for n in (1, 2, 3)]
        theirs = [model.rates[n] for n in (1, 2, 3)]
        cells = [
            model.title,
            str(compared_tokens(runs, model)),
            shown(ours),
            ratios(ours),
            shown(theirs),
            ratios(theirs),
        ]
        bend = slowdown(runs, model)
        lines.append("| " + " | ".join([*cells, "-" if bend is None else f"{bend:.2f}"]) + " |")
    return "\n".join(lines)


def memory_table(models: Sequence[Model], runs: dict[str, Any]) -> str:
    lines = [
        "| model | nodes | blocks | GB per node here | GB per node in the thesis |",
        "|---|---|---|---|---|",
    ]
    for model in models:
        for n_nodes in (1, 2, 3):
            held = memory(runs, model, n_nodes)
            if held is None:
                continue
            cut = " + ".join(map(str, model.cuts[n_nodes]))
            theirs = model.memory_gb[n_nodes]
            cells = [model.title, str(n_nodes), cut, shown(held), "did not fit" if theirs is None else shown(theirs)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory(runs: dict[str, Any], model: Model, n_nodes: int) -> list[float] | None:
    """Peak of the resident memory, GB, node by node."""
    run = runs.get(f"{model.key}/{n_nodes}")
    return None if run is None else [node["peak_rss_bytes"] / 1e9 for node in run["nodes"]]


def shown(values: Sequence[float | None]) -> str:
    return " / ".join("-" if v is None else f"{v:.2f}" if v < 10 else f"{v:.1f}" for v in values)


def ratios(values: Sequence[float | None]) -> str:
    first, *others = values
    if first is None:
        return "-"
    return " / ".join("-" if v is None else f"{v / first:.2f}" for v in others)


# Figures


def time_figure(models: Sequence[Model], runs: dict[str, Any], title: str) -> Any:
    """Time over tokens, a panel for each model, each with the detail at the origin."""
    columns = 2 if len(models) in (2, 4) else len(models)
    rows = -(-len(models) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for axes, model in zip(grid.flat, models, strict=False):
        draw_curves(axes, model, runs, compared_tokens(runs, model))
        axes.set_title(model.title, loc="left", fontsize=10)
        axes.set(xlabel="tokens", ylabel="time (s)")
        axes.legend(loc="lower right", fontsize=8, frameon=False)
        inset = axes.inset_axes((0.12, 0.58, 0.36, 0.36))
        draw_curves(inset, model, runs, DETAIL_TOKENS)
        inset.tick_params(labelsize=6)
        inset.set_title("at the origin", fontsize=7, pad=2)
    for axes in list(grid.flat)[len(models) :]:
        axes.axis("off")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def draw_curves(axes: Any, model: Model, runs: dict[str, Any], n_tokens: int) -> None:
    highest = 0.0
    for n_nodes, color in COLORS.items():
        points = [(time_s, n) for time_s, n in curve(runs, model, n_nodes) if n <= n_tokens]
        if not points:
            continue
        times_s, counts = zip((0.0, 0), *points, strict=True)
        axes.plot(counts, times_s, color=color, lw=1.4, label=f"{n_nodes} node{'s' if n_nodes > 1 else ''}")
        highest = max(highest, times_s[-1])
    axes.set(xlim=(0, n_tokens), ylim=(0, highest * 1.05))
    axes.grid(True, color="0.9", lw=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def memory_figure(models: Sequence[Model], runs: dict[str, Any]) -> Any:
    """The fullest node of each run, and the thesis' beside it."""
    figure, axes = plt.subplots(figsize=(max(5, 1.35 * len(models) + 1.5), 3.8), layout="constrained")
    for i, model in enumerate(models):
        for n_nodes, color in COLORS.items():
            held = memory(runs, model, n_nodes)
            x = i + 0.27 * (n_nodes - 2)
            if held is not None:
                axes.bar(
                    x, max(held), 0.22, color=color, label=f"{n_nodes} node{'s' if n_nodes > 1 else ''}" * (i == 0)
                )
            if (theirs := model.memory_gb[n_nodes]) is not None:
                axes.plot([x - 0.12, x + 0.12], [max(theirs)] * 2, color="black", lw=1.6,
                          label="thesis (RAM and VRAM)" * (i == 0 and n_nodes == 3))  # fmt: skip
    axes.set_xticks(range(len(models)), [m.title.replace(", " if "," in m.title else " ", "\n", 1) for m in models])
    axes.tick_params(axis="x", labelsize=8, length=0)
    axes.set_ylabel("memory of the fullest node (GB)")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white", metadata={"Date": None})  # the same picture is the same file
    plt.close(figure)
    print(f"wrote {path}")
