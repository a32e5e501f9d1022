"""The arithmetic of benchmarks/thesis.py: cuts of the tables, rates of curves, tables between markers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gpt.shape import GPT2_CUTS, NANO_CUTS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import thesis_rates  # noqa: E402
import thesis_report  # noqa: E402
from thesis_numbers import BY_KEY, MODELS  # noqa: E402


def run_of(times_s: list[float], rss: list[int], asked: int = BY_KEY["nano-llama"].n_tokens) -> dict[str, Any]:
    points = [[time_s, n] for n, time_s in enumerate(times_s, 1)]
    return {"points": points, "nodes": [{"peak_rss_bytes": n} for n in rss], "load_before": 0.5, "asked": asked}


def test_cuts_are_those_that_the_systems_take() -> None:
    for model in MODELS:
        n_layer = sum(model.cuts[1])
        for n_nodes, cut in model.cuts.items():
            assert sum(cut) == n_layer and len(cut) == n_nodes
            table = {"nanogpt": NANO_CUTS, "gpt2": GPT2_CUTS}.get(model.system)
            assert table is None or n_nodes == 1 or table[n_layer, n_nodes] == cut
            held = model.memory_gb[n_nodes]
            assert held is None or len(held) == n_nodes


def test_rates_count_what_all_runs_have() -> None:
    """Four tokens in four seconds, and six in three: of these, four took two seconds."""
    model = BY_KEY["gpt2"]
    runs = {"gpt2/1": run_of([1, 2, 3, 4], [1]), "gpt2/3": run_of([0.5, 1, 1.5, 2, 2.5, 3], [1, 1, 1])}
    assert thesis_rates.compared_tokens(runs, model) == 4
    assert [thesis_rates.rate(runs, model, n) for n in (1, 2, 3)] == [1, None, 2]
    assert thesis_rates.slowdown(runs, model) == pytest.approx(1), "a straight line"
    bent = {"gpt2/1": run_of([n * n / 100 for n in range(1, 401)], [1])}
    assert thesis_rates.slowdown(bent, model) == pytest.approx(7 / 3)


def test_points_that_were_left_out_are_interpolated() -> None:
    assert thesis_rates.time_at([[1.0, 10], [3.0, 20]], 15) == pytest.approx(2.0)
    assert thesis_rates.time_at([[1.0, 10], [3.0, 20]], 5) == pytest.approx(0.5)


def test_report_fills_the_page_in(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "thesis.md"
    page.parent.mkdir()
    page.write_text((BENCHMARKS.parent / "docs" / "thesis.md").read_text(encoding="utf-8"), encoding="utf-8")
    runs = {f"nano-llama/{n}": run_of([0.1 * i for i in range(1, 31)], [2_000_000_000 // n] * n) for n in (1, 2, 3)}
    data = {"date": "2026-01-02", "machine": "a machine", "runs": runs}
    for _ in range(2):  # what it has written is found again
        thesis_report.write_report(data, tmp_path, tmp_path)
        text = page.read_text(encoding="utf-8")
        assert (
            "| NanoLlama 304M | 30 | 10.0 / 10.0 / 10.0 | 1.00 / 1.00 | 1.00 / 1.00 | 17.9 / 26.0 / 30.5 | 1.45 / 1.70 | 1.00 |"
            in text
        )
        assert "| NanoLlama 304M | 3 | 2 + 5 + 5 | 0.67 / 0.67 / 0.67 | 1.34 / 1.46 / 1.46 |" in text
        assert text.count("2026-01-02") == 1 and "3 of the 27 runs" in text and "Not trained yet." in text
    assert {path.name for path in (tmp_path / "assets").iterdir()} == {"thesis-llama.svg", "thesis-memory.svg"}
    runs["nano-llama/2"] = run_of([0.1], [1, 1], asked=16)
    thesis_report.write_report(data, tmp_path, tmp_path)
    assert "**quick run**" in page.read_text(encoding="utf-8"), "one that is not as long as it should be is enough"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="0 places for the table"):
        thesis_report.write_report(data, tmp_path, tmp_path)
