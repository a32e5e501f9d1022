"""Tokens per second of the ring and of its rivals, as a user would look for them: one stream, and sixteen sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = {"4 bits": "#1f6f54", "8 bits": "#4fa37c", "16 bits": "#a9d5bd"}
Bars = dict[str, tuple[str, str]]  # weights -> (scenario, label of the run)


def _bars(name: str, of_16: str, label: str, kinds: tuple[str, str, str]) -> Bars:
    scenarios = (name, name, of_16)
    return {bits: (s, label.format(kind)) for bits, s, kind in zip(COLORS, scenarios, kinds, strict=True)}


OURS, LLAMA = ("int4", "int8", "bf16"), ("q4_0", "q8_0", "bf16")
PANELS: dict[str, dict[str, Bars]] = {  # panel -> program
    "One stream, one thread": {
        "MDI-LLM\none node": _bars("one-stream", "one-stream-16", "ring {} x1", OURS),
        "llama.cpp": _bars("one-stream", "one-stream-16", "llama.cpp {} x1", LLAMA),
        "litgpt": {"16 bits": ("frameworks", "litgpt bfloat16 x1, 1 seq")},
        "transformers": {"16 bits": ("frameworks", "transformers bfloat16 x1, 1 seq")},
    },
    "Sixteen sequences, two threads": {
        "MDI-LLM\ntwo nodes": _bars("sixteen", "sixteen", "ring {} x2", OURS),
        "llama.cpp": _bars("sixteen", "sixteen", "llama.cpp {} x2", LLAMA),
        "litgpt\n(one after another)": {"16 bits": ("frameworks", "litgpt bfloat16 x2, 1 seq")},
        "transformers": {"16 bits": ("frameworks", "transformers bfloat16 x2, 16 seq")},
    },
}


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One panel beside the other; what was not measured, or on another machine than "sixteen", has no bar."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    machine = next((one.get("machine", "") for one in results if one["name"] == "sixteen"), "")
    by_name = {one["name"]: one for one in results if one.get("machine", "") == machine}  # bars of one machine alone
    with plt.rc_context({"svg.hashsalt": "mdi", "font.size": 10}):
        figure, panels = plt.subplots(1, len(PANELS), figsize=(10, 4.2), layout="constrained")
        for axes, (title, programs) in zip(panels, PANELS.items(), strict=True):
            _panel(axes, title, rates(programs, by_name))
        handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
        figure.legend(handles, [f"{bits} per weight" for bits in COLORS], loc="outside lower center", ncols=len(COLORS),
                      frameon=False)  # fmt: skip
        where = [one["shape"] for one in results if one["name"] == "sixteen"] + [machine.split(",")[0]]
        figure.suptitle(f"Tokens per second, {', '.join(filter(None, where))}: more is better", fontsize=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def rates(
    programs: Mapping[str, Mapping[str, tuple[str, str]]], by_name: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Program -> weights -> tokens per second, where they were measured."""
    found: dict[str, dict[str, float]] = {}
    for program, bars in programs.items():
        for bits, (scenario, label) in bars.items():
            median = by_name.get(scenario, {}).get("medians", {}).get(label, {}).get("decode_tokens_per_s")
            if median is not None:
                found.setdefault(program, {})[bits] = median
    return found


def _panel(axes: Any, title: str, found: Mapping[str, Mapping[str, float]]) -> None:
    y, ticks = 0.0, []
    for bars in found.values():
        ticks.append(y + (len(bars) - 1) / 2)
        for bits, rate in bars.items():
            axes.barh(y, rate, color=COLORS[bits], height=0.86)
            axes.annotate(f"{rate:.0f}" if rate >= 20 else f"{rate:.1f}", (rate, y), (4, 0), textcoords="offset points",
                          va="center", fontsize=9)  # fmt: skip
            y += 1
        y += 0.7
    axes.set_yticks(ticks, list(found))
    axes.invert_yaxis()
    axes.set_title(title, fontsize=11)
    axes.margins(x=0.12)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
