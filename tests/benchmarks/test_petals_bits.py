"""16 against 8 bits, and fine-tuning, beside Petals: what is measured becomes a table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import petals_bits
import write_results
from petals_bits import BATCHES, FORMS

ROOT = Path(__file__).resolve().parents[2]
LEARNED = ROOT / "benchmarks" / "results" / "finetune_quality.json"


def test_right_answers_and_rates_are_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.md").write_text((ROOT / "README.md").read_text(encoding="utf-8")[:4000], encoding="utf-8")
    flags = ["--ckpt", str(ROOT / "assets" / "nano-llama"), "--text", str(tmp_path / "text.md"), "--tokens", "3"]
    monkeypatch.setattr(
        "sys.argv", ["petals_bits.py", *flags, "--repeat", "1", "--json", str(tmp_path / "petals_bits.json")]
    )
    monkeypatch.setattr(petals_bits, "WINDOW", 64)
    petals_bits.main()
    found = json.loads((tmp_path / "petals_bits.json").read_text(encoding="utf-8"))
    for form in FORMS:
        assert found["accuracy"][form]["tokens"] > 500 and 0 < found["accuracy"][form]["right"] < 0.5
        assert all(len(found["tokens_s"][form][str(n)]) == 1 for n in BATCHES)
    monkeypatch.setattr(write_results, "RESULTS", tmp_path)
    shutil.copy(LEARNED, tmp_path)
    lines = write_results.petals_bits().splitlines()
    (tone,) = (case for case in json.loads(LEARNED.read_text(encoding="utf-8"))["cases"] if case["task"] == "tone")
    (right,) = (one["right"] for one in tone["after"] if (one["format"], one["texts"]) == ("bf16", 1))
    assert lines[2].startswith(f"| 16 | 70.1% | 75.3% | {right:.1%} |") and "| 4.18, 31.3, 101 |" in lines[2]
    assert "| 3.95 (0.94), 29.4 (0.94), 95.8 (0.95) |" in lines[3]


def test_rates_of_fine_tuning_stand_beside_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"nodes": 3, "method": method, "texts": n_texts, "rows": n_rows,
         "forward_classes_tokens_s": 10.0 * n_texts, "backward_classes_tokens_s": 100.0 / n_rows}
        for method in write_results.PETALS_TABLE_6 for n_texts in (8, 32) for n_rows in (16, 4)
    ]  # fmt: skip
    (tmp_path / "finetune_speed.json").write_text(
        json.dumps({"machine": "a desk", "date": "2026-01-01 10:00", "lines": lines})
    )
    monkeypatch.setattr(write_results, "RESULTS", tmp_path)
    last = write_results.finetuning_beside_petals().split("\n\n")[0].splitlines()[-1]
    ours = "320 (4.00), 25.0 (4.00)"
    assert last == (f"| 32 | 4 | 293 (1.50), 84.7 (1.48); {ours} | 256 (2.30), 84.8 (2.02); {ours} | {ours} |")
