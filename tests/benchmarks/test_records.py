"""Raw results of benchmarks: small, rounded, and with the machine in words; those that are there can be read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from records import LIMIT_BYTES, RESULTS, save

ROOT = Path(__file__).resolve().parents[2]


def test_a_record_says_on_which_machine(tmp_path: Path) -> None:
    save(tmp_path / "new" / "a.json", {"rates": [1 / 3, 12345.678], "n": 7, "pair": (0.1234567, "x")})
    found = json.loads((tmp_path / "new" / "a.json").read_text())
    assert found["rates"] == [0.33333, 12346.0] and found["n"] == 7 and found["pair"] == [0.12346, "x"]
    assert " cores of " in found["machine"] and "GB" in found["machine"] and "torch" in found["machine"]
    assert found["date"].startswith("20")


def test_a_record_is_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.json"):
        save(tmp_path / "a.json", {"text": "x" * LIMIT_BYTES})
    assert not (tmp_path / "a.json").exists()


def test_results_are_committed_with_their_machine() -> None:
    found = sorted(RESULTS.glob("*.json"))
    assert found
    for path in found:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert " cores of " in record["machine"] and record["date"] and path.stat().st_size <= LIMIT_BYTES, path


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_git_does_not_ignore_them() -> None:
    ignored = subprocess.run(["git", "check-ignore", "benchmarks/results/new.json"], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 1
