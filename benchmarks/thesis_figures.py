"""The figures of the thesis' evaluation: time over tokens with the detail at the origin, memory of the fullest node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

from thesis_numbers import Model  # noqa: E402
from thesis_rates import compared_tokens, curve, memory  # noqa: E402

COLORS = {1: "#444444", 2: "#1f5fa8", 3: "#c2570c"}
DETAIL_TOKENS = 20


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
