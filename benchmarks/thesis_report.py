"""Tables of the thesis' evaluation, and where they and the figures go: results in, files out. See thesis.py."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from side_by_side.tables import fill, markdown
from thesis_figures import memory_figure, save, time_figure
from thesis_numbers import MODELS, Model
from thesis_rates import compared_tokens, memory, rate, slowdown, whole_rate

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
    wanted = {f"{model.key}/{n}": model.n_tokens for model in MODELS for n in (1, 2, 3)}
    if any(run["asked"] != wanted[name] for name, run in runs.items()):
        return "**quick run**, which shows that the program works and no more: a few tokens, without regard to other programs"
    return "full run" if len(runs) == len(wanted) else f"{len(runs)} of the {len(wanted)} runs"


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
