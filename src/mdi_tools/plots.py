"""Figures of measurements. The only module that imports matplotlib, and only when a figure is drawn.

It draws the series that it is given, into files; it opens no window and knows nothing of runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mdi.errors import Code, UsageError
from mdi.files import replacing
from mdi.metrics import SampleMetrics, tokens_over_time

TOTAL = "total"
_LEGEND_LINES = 12  # more would cover the picture
_GRID: dict[str, Any] = {"color": "0.88", "linewidth": 0.8}
_LINE_STYLES = ("-", "--", ":", "-.")  # there are ten colours


def sample_series(samples: Sequence[SampleMetrics]) -> dict[str, list[tuple[float, int]]]:
    """What to plot for the samples of a run: the total, and each sample if there are several."""
    series = {TOTAL: tokens_over_time(samples)}
    if len(samples) > 1:
        series |= {f"sample {i}": tokens_over_time([sample]) for i, sample in enumerate(samples)}
    return series


def plot_tokens_over_time(path: str | Path, series: Mapping[str, Sequence[tuple[float, int]]], title: str = "") -> Path:
    """Draw tokens (upwards) over time (to the right) as a PNG file; missing folders are made.

    Args:
        path: of the picture; an existing one is replaced.
        series: name -> (time_s, tokens until then), rising. Where there is a "total", the others are drawn as bands below
            it, one upon the other: as lines, samples that keep pace would hide each other.
        title: above the picture; none if empty.

    Returns:
        The path written.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(path)
    axes = figure.add_subplot()
    bands = {name: points for name, points in series.items() if name != TOTAL} if TOTAL in series else {}
    for i, (name, points) in enumerate(series.items()):
        if name in bands:
            continue
        times_s, counts = _from_origin(points)
        main = name == TOTAL or len(series) == 1
        axes.step(
            times_s,
            counts,
            where="post",
            label=_label(i, name, counts[-1]),
            color="black" if main else f"C{i % 10}",
            linestyle="-" if main else _LINE_STYLES[i // 10 % len(_LINE_STYLES)],
            linewidth=2.2 if main else 1.2,
            zorder=3 if main else 2,
        )
    _draw_bands(axes, bands)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_axisbelow(True)
    if len(series) > _LEGEND_LINES:
        axes.plot([], [], " ", label=f"and {len(series) - _LEGEND_LINES} more")
    _dress(axes, title, "time since the run was ready (s)", "generated tokens", "upper left" if series else None)
    return save_figure(figure, Path(path))


def plot_losses(path: str | Path, series: Mapping[str, Sequence[tuple[int, float]]], title: str = "") -> Path:
    """Draw losses (upwards) over training steps (to the right) as a PNG file.

    Args:
        series: name -> (step, nats per token), rising in the step; the last point is what the legend tells.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(path)
    axes = figure.add_subplot()
    for i, (name, points) in enumerate((name, points) for name, points in series.items() if points):
        steps, losses = zip(*points, strict=True)
        label = _plain(f"{name}: {losses[-1]:.3f}, lowest {min(losses):.3f}")
        axes.plot(steps, losses, label=label, color=f"C{i}", marker="o" if len(steps) < 50 else "", markersize=3)
    _dress(axes, title, "optimizer steps", "loss (nats per token)", "upper right" if any(series.values()) else None)
    return save_figure(figure, Path(path))


def plot_time_over_tokens(
    path: str | Path,
    series: Mapping[str, Sequence[tuple[float, int]]],
    title: str = "",
    n_detail: int | None = None,
) -> Path:
    """Draw time (upwards) over tokens (to the right) of several runs, with an enlarged view of the origin.

    Args:
        series: name -> (time_s, tokens until then), rising.
        n_detail: tokens in the enlarged view; None: a tenth of the fewest, 0: no such view.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(path)
    axes = figure.add_subplot()
    lines = {name: list(zip(*((0.0, 0), *points), strict=True)) for name, points in series.items()}
    if n_detail is None:
        n_detail = min(points[-1][1] for points in series.values()) // 10
    views = [axes]
    if n_detail > 0:
        views.append(axes.inset_axes((0.08, 0.62, 0.40, 0.30)))
    for view in views:
        for i, (name, (times_s, counts)) in enumerate(lines.items()):
            view.plot(counts, times_s, label=_plain(name), color=f"C{i % 10}", linestyle=_LINE_STYLES[i // 10 % 4])
        view.set_ylim(bottom=0)
        view.set_xlim(left=0)
    if n_detail > 0:  # room above the lines, so that the enlarged view covers none of them
        axes.set_ylim(0, 1.85 * max(points[-1][0] for points in series.values()) or 1.0)
    for view in views[1:]:
        ends_s = [time_s for points in series.values() for time_s, count in points if count <= n_detail]
        view.set_xlim(0, n_detail)
        view.set_ylim(0, max(ends_s, default=0.0) * 1.05 or 1.0)
        view.set_title(f"the first {n_detail} tokens", fontsize=8)
        view.tick_params(labelsize=7)
        view.grid(True, **_GRID)
        axes.indicate_inset_zoom(view, edgecolor="0.4")
    _dress(axes, title, "generated tokens", "time since the run was ready (s)", "upper right")
    return save_figure(figure, Path(path))


def plot_memory(path: str | Path, series: Mapping[str, Sequence[tuple[float, float]]], title: str = "") -> Path:
    """Draw memory (upwards, in MB) over time (to the right).

    Args:
        series: name -> (time_s, bytes).

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(path)
    axes = figure.add_subplot()
    for i, (name, points) in enumerate(series.items()):
        times_s, sizes = zip(*points, strict=True)
        label = _plain(f"{name}: at most {max(sizes) / 1e6:,.0f} MB")
        mb = [size / 1e6 for size in sizes]
        axes.plot(times_s, mb, label=label, color=f"C{i}", marker="." if len(mb) < 50 else "")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _dress(axes, title, "time (s)", "memory of all processes (MB)", None)
    if series:
        figure.legend(loc="outside lower center", ncols=len(series), fontsize=9, edgecolor="none")  # covers no line
    return save_figure(figure, Path(path))


def _from_origin(points: Sequence[tuple[float, int]]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Times and counts: nothing has been generated when the run becomes ready."""
    times_s, counts = zip((0.0, 0), *points, strict=True)
    return times_s, counts


def _label(index: int, name: str, n_tokens: int) -> str | None:
    return _plain(f"{name}: {n_tokens} tokens") if index < _LEGEND_LINES else None


def _draw_bands(axes: Any, series: Mapping[str, Sequence[tuple[float, int]]]) -> None:
    """Each series as high as its count, on top of those before it."""
    import numpy as np

    times_s = np.unique([0.0, *(time_s for points in series.values() for time_s, _ in points)])
    below = np.zeros(len(times_s))
    for i, (name, points) in enumerate(series.items(), 1):
        own_s, counts = _from_origin(points)
        above = below + np.asarray(counts)[np.searchsorted(own_s, times_s, side="right") - 1]
        label = _label(i, name, counts[-1])
        axes.fill_between(times_s, below, above, step="post", color=f"C{i % 10}", alpha=0.6, linewidth=0, label=label)
        below = above


def _figure(path: str | Path) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise UsageError(
            f"the figure {path} cannot be drawn: matplotlib is not installed ({e}); run `pip install matplotlib`",
            code=Code.LIBRARY,
        ) from None
    # Without pyplot: no global state, and no window system even where one is set up.
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _dress(axes: Any, title: str, x_label: str, y_label: str, legend: str | None) -> None:
    """What all figures have; `legend` says where theirs is."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, **_GRID)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(_plain(title), loc="left", fontsize=11, wrap=True)
    if legend is not None:
        axes.legend(loc=legend, fontsize=9, framealpha=0.9, edgecolor="none")


def _plain(text: str) -> str:
    """Escapes dollars, because matplotlib reads text between dollars as a formula."""
    return text.replace("$", r"\$")


def save_figure(figure: Any, path: Path) -> Path:
    with replacing(path, UsageError, makes_folder=True) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # a title in another script
        figure.savefig(file, format="png", dpi=150)
    return path
