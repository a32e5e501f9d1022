"""Tables and figures of the thesis' evaluation, and where they go: results in, files out. See thesis.py."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

from side_by_side.tables import fill, markdown  # noqa: E402
from thesis_numbers import MODELS, Model  # noqa: E402

Points = list[list[float]]
COLORS = {1: "#444444", 2: "#1f5fa8", 3: "#c2570c"}
DETAIL_TOKENS = 20
SYSTEMS = {
    "nanogpt": ("NanoGPT: no caches, context of 128", "thesis-nanogpt.svg"),
    "gpt2": ("GPT-2: no caches, context of 1024", "thesis-gpt2.svg"),
    "llama": ("Llamas: rotating KV caches", "thesis-llama.svg"),
}
GUESSING_NATS = 4.17  # ln 65
WIDTH = 150  # of lines of the document


def write_report(data: dict[str, Any], root: Path | None, beside: Path) -> None:
    """Figures into assets/ and tables into docs/seeds.md below `root`, or, without a root, into `beside`."""
    runs = data["runs"]
    found = [model for model in MODELS if any(f"{model.key}/{n}" in runs for n in (1, 2, 3))]
    if not found:
        print("no results yet: nothing is drawn")
        return
    assets = beside if root is None else root / "assets"
    for system, (title, name) in SYSTEMS.items():
        models = [model for model in found if model.system == system]
        if models:
            save(time_figure(models, runs, title), assets / name)
    save(memory_figure(found, runs), assets / "thesis-memory.svg")
    tables = {
        "thesis-speed": f"{textwrap.fill(caption(data), WIDTH)}\n\n{speed_table(found, runs)}",
        "thesis-memory": memory_table(found, runs),
        "thesis-training": textwrap.fill(training_text(data), WIDTH),
    }
    for text in tables.values():
        print(f"\n{text}")
    if root is not None:
        page = root / "docs" / "seeds.md"
        text = page.read_text(encoding="utf-8")
        for name, table in tables.items():
            text = fill(text, name, table)
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page}")


def caption(data: dict[str, Any]) -> str:
    """When, on what, and how much of the evaluation the tables below show."""
    runs = data["runs"]
    days = sorted({run["date"][:10] for run in runs.values()})
    machines = "; ".join(sorted({run["machine"] for run in runs.values()}))
    links = (
        "one host" if any(run["loopback"] for run in runs.values()) else "Gigabit Ethernet between network namespaces"
    )
    others = [100 * run.get("others_share", 0) for run in runs.values()]
    return (
        f"Measured on {' and '.join(days)}: {machines}; {links}; {type_of(runs)}. One thread per node; other programs took "
        f"{min(others):.0f} to {max(others):.0f} % of the cores."
    )


def type_of(runs: dict[str, Any]) -> str:
    wanted = {f"{model.key}/{n}": model.n_tokens for model in MODELS for n, rate in model.rates.items() if rate}
    asked = {name: runs[name]["asked"] for name in wanted if name in runs}
    if not asked.items() <= wanted.items():
        return "**quick run**, which shows that the program works and no more: a few tokens, without regard to other programs"
    return "full run" if asked == wanted else f"{len(asked)} of the {len(wanted)} runs"


def speed_table(models: Sequence[Model], runs: dict[str, Any]) -> str:
    head = ["model", "tokens", "tokens/s here, 1 / 2 / 3 nodes", "2 and 3 nodes over 1", "the same, whole texts",
            "tokens/s in the thesis", "2 and 3 over 1", "last quarter over second"]  # fmt: skip
    rows = []
    for model in models:
        ours = [rate(runs, model, n) for n in (1, 2, 3)]
        theirs = [model.rates[n] for n in (1, 2, 3)]
        bend = slowdown(runs, model)
        whole = [whole_rate(runs, model, n) for n in (1, 2, 3)]
        rows.append([
            model.title, str(compared_tokens(runs, model)), shown(ours), ratios(ours), ratios(whole), shown(theirs),
            ratios(theirs), "-" if bend is None else f"{bend:.2f}",
        ])  # fmt: skip
    return markdown(head, rows)


def memory_table(models: Sequence[Model], runs: dict[str, Any]) -> str:
    """A row for each model; what belongs to one, two and three nodes stands between semicolons."""
    rows = []
    for model in models:
        held = {n: memory(runs, model, n) for n in (1, 2, 3)}
        found = {n: values for n, values in held.items() if values is not None}
        if not found:
            continue
        theirs = [model.memory_gb[n] for n in found]
        rows.append([
            model.title, "; ".join(" + ".join(map(str, model.cuts[n])) for n in found), "; ".join(map(shown, found.values())),
            "; ".join("did not fit" if values is None else shown(values) for values in theirs),
        ])  # fmt: skip
    return markdown(["model", "blocks of 1; 2; 3 nodes", "GB per node here", "GB per node in the thesis"], rows)


def training_text(data: dict[str, Any]) -> str:
    """What training the small model gave, and whether rings agree on it."""
    training = data.get("training")
    if training is None:
        return "Not trained yet."
    losses = ", ".join(f"{loss:.2f} after {step}" for step, loss in training["losses"])
    differing = [n for n, is_same in training["same"].items() if not is_same]
    verdict = (
        f"**The ids differ on {' and '.join(differing)} nodes.**"
        if differing
        else "one, two and three nodes gave exactly the ids of the whole model on one device"
    )
    return (
        f"{training['steps']} steps, {training['characters']:,} characters; held-out loss in nats per character "
        f"({GUESSING_NATS} is guessing, {training['entropy']:.2f} what the grammar leaves to chance): {losses} steps. "
        f"Greedy, {training['greedy_tokens']} tokens: {verdict}."
    )


def shown(values: Sequence[float | None]) -> str:
    return " / ".join("-" if v is None else f"{v:.2f}" if v < 10 else f"{v:.1f}" for v in values)


def ratios(values: Sequence[float | None]) -> str:
    first, *others = values
    if first is None:
        return "-"
    return " / ".join("-" if v is None else f"{v / first:.2f}" for v in others)


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
    """As many tokens as one node makes: three nodes make three texts, of which the rest is left out."""
    ends = {n: points[-1][1] for n in (1, 2, 3) if (points := curve(runs, model, n))}
    return int(min(end * model.n_samples(1) / model.n_samples(n) for n, end in ends.items()))


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


def whole_rate(runs: dict[str, Any], model: Model, n_nodes: int) -> float | None:
    """Tokens/s up to the end of every text, so that all texts are as long."""
    points = curve(runs, model, n_nodes)
    return points[-1][1] / points[-1][0] if points else None


def memory(runs: dict[str, Any], model: Model, n_nodes: int) -> list[float] | None:
    """Peak of the resident memory, GB, node by node."""
    run = runs.get(f"{model.key}/{n_nodes}")
    return None if run is None else [node["peak_rss_bytes"] / 1e9 for node in run["nodes"]]


def time_figure(models: Sequence[Model], runs: dict[str, Any], title: str) -> Any:
    """Time over tokens, a panel for each model, each with the detail at the origin."""
    columns = 2 if len(models) in (2, 4) else len(models)
    rows = -(-len(models) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for axes, model in zip(grid.flat, models, strict=False):
        draw_curves(axes, model, runs, compared_tokens(runs, model))
        draw_thesis(axes, model, compared_tokens(runs, model))
        axes.set_title(model.title, loc="left", fontsize=10)
        axes.set(xlabel="tokens", ylabel="time (s)")
        inset = axes.inset_axes((0.12, 0.58, 0.36, 0.36))
        draw_curves(inset, model, runs, DETAIL_TOKENS)
        inset.tick_params(labelsize=6)
        inset.set_title("at the origin", fontsize=7, pad=2)
    for axes in list(grid.flat)[len(models) :]:
        axes.axis("off")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
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


def draw_thesis(axes: Any, model: Model, n_tokens: int) -> None:
    """Where the curves of the thesis end, by the rates in its text."""
    for n_nodes, color in COLORS.items():
        if (theirs := model.rates[n_nodes]) is not None:
            axes.plot(n_tokens, n_tokens / theirs, color=color, marker="D", markersize=6, ls="", clip_on=False,
                      label="thesis, same colors" if n_nodes == 3 else "", zorder=3)  # fmt: skip
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * n_tokens / theirs))


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
    matplotlib.rcParams.update({"svg.hashsalt": "mdi", "font.family": "DejaVu Sans"})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white", metadata={"Date": None})  # the same picture is the same file
    plt.close(figure)
    print(f"wrote {path}")
