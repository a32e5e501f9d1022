"""The targets as a figure: how far each is reached, with the range over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars of measured / target (or its inverse, where less is better), the longer the better; 1 is reached."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    checks = [(r["name"], c) for r in results for c in r["checks"] if c["measured"]]
    figure, axes = plt.subplots(figsize=(11, 0.9 + 0.3 * len(checks)), layout="constrained")
    for row, (_, check) in enumerate(checks):
        middle, low, high = (score(check, check["measured"][key]) for key in ("median", "lowest", "highest"))
        low, high = min(low, high), max(low, high)
        color = {"yes": "#5fae6b", "in the median": "#e3c23b"}.get(check["reached"], "#d65a4c")
        axes.barh(row, middle, color=color, height=0.62)
        axes.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color="#222222", lw=1, capsize=2)
    axes.axvline(1, color="#222222", lw=1, ls="--")
    axes.set_yticks(range(len(checks)), [f"{name}: {check['what']}" for name, check in checks], fontsize=8)
    axes.set(xlabel="measured / target (1: reached)", xlim=(0, None))
    axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def score(check: Mapping[str, Any], value: float) -> float:
    """How far a value reaches the target; 1 and more is reached. What must be small is turned round."""
    ratio = value / check["target"]
    if check["at_least"]:
        return ratio
    return 1 / ratio if ratio > 0.1 else 10.0
