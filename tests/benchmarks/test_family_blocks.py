"""What rounds of two blocks say of them, counted by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import write_results
from family_blocks import ROWS, all_cases, summary
from records import save

OWN = SimpleNamespace(row_bytes=20e6, macs=40e6, expert_share=0.75)
LLAMA = SimpleNamespace(row_bytes=30e6, macs=50e6, expert_share=0.0)


def of_round(read_gb_s: float, slower: float = 1.0) -> dict[str, float]:
    times = {"own 1": 2.0, "llama 1": 2.0, f"own {ROWS}": 25.6, f"llama {ROWS}": 16.0, "llama 4": 4.0}
    return {"read_gb_s": read_gb_s, **{f"{case}, ms": slower * ms for case, ms in times.items()}}


def test_a_round_has_shares_of_its_read_test_and_a_bound() -> None:
    found = summary([of_round(20.0)], 4, OWN, LLAMA)
    assert found["own_share"] == pytest.approx(0.5) and found["llama_share"] == pytest.approx(0.75)
    assert found["read_ratio"] == pytest.approx(2 / 3)
    assert found["own_products"] == pytest.approx(100) and found["llama_products"] == pytest.approx(200)
    assert found["few_rows_products"] == pytest.approx(50) and found["products_ratio"] == pytest.approx(0.5)
    assert found["bound_products"] == pytest.approx(1 / (0.25 / 200 + 0.75 / 50))
    assert found["of_bound"] == pytest.approx(100 / found["bound_products"])


def test_a_round_with_slow_memory_is_compared_with_its_own_read_test() -> None:
    rounds = [of_round(20.0), of_round(10.0, slower=2), of_round(5.0, slower=4)]
    found = summary(rounds, 4, OWN, LLAMA)
    assert found["own_share"] == pytest.approx(0.5) and found["read_gb_s"] == 10
    assert found["own_products"] == pytest.approx(50)


def test_gpt_oss_is_measured_in_mxfp4_alone() -> None:
    cases = [(family, form) for family, form, _ in all_cases(["gpt-oss-20b", "opt-6.7b"], ["int4", "bf16"])]
    assert cases == [("gpt-oss-20b", "mxfp4"), ("opt-6.7b", "int4"), ("opt-6.7b", "bf16")]


def test_the_table_has_a_bound_only_of_blocks_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"format": "int4", "rounds": [], **summary([of_round(20.0)], 4, OWN, LLAMA)}
    blocks = [{"family": "a", "few_rows": 4, **found}, {"family": "b", "few_rows": ROWS, **found}]
    save(tmp_path / "benchmarks" / "results" / "family_blocks.json", {"rows": ROWS, "blocks": blocks})
    monkeypatch.setattr(write_results, "RESULTS", tmp_path / "benchmarks" / "results")
    lines = write_results.table("family-blocks").splitlines()
    assert "| a | int4 | 50%, 75% | 0.67 | 100, 200 | 0.50 | 4 | 1.62 |" in lines
    assert "| b | int4 | 50%, 75% | 0.67 | 100, 200 | 0.50 |  |  |" in lines
