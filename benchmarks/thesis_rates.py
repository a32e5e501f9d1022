"""What the curves of the thesis' evaluation say: rates, and how much they bend. Results in, numbers out."""

from __future__ import annotations

from typing import Any

from thesis_numbers import Model

Points = list[list[float]]


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


def whole_rate(runs: dict[str, Any], model: Model, n_nodes: int) -> float | None:
    """Tokens/s up to the end of every text, so that all texts are as long."""
    points = curve(runs, model, n_nodes)
    return points[-1][1] / points[-1][0] if points else None


def memory(runs: dict[str, Any], model: Model, n_nodes: int) -> list[float] | None:
    """Peak of the resident memory, GB, node by node."""
    run = runs.get(f"{model.key}/{n_nodes}")
    return None if run is None else [node["peak_rss_bytes"] / 1e9 for node in run["nodes"]]
