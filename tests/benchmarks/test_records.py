"""Raw results of benchmarks: small, rounded, and with the machine in words; those that are there can be read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import compare
from records import LIMIT_BYTES, MOST_OTHERS, MOST_STEAL, RESULTS, Usage, disturbed, save

ROOT = Path(__file__).resolve().parents[2]


def test_a_record_says_on_which_machine(tmp_path: Path) -> None:
    save(tmp_path / "new" / "a.json", {"rates": [1 / 3, 12345.678], "n": 7, "pair": (0.1234567, "x")})
    found = json.loads((tmp_path / "new" / "a.json").read_text())
    assert found["rates"] == [0.33333, 12346.0] and found["n"] == 7 and found["pair"] == [0.12346, "x"]
    assert " of " in found["machine"] and "GB" in found["machine"] and "torch" in found["machine"]
    assert found["date"].startswith("20")


def test_a_record_is_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as e:
        save(tmp_path / "a.json", {"text": "x" * LIMIT_BYTES})
    assert "a.json" in str(e.value)
    assert not (tmp_path / "a.json").exists()


def test_results_are_committed_with_their_machine() -> None:
    found = sorted(RESULTS.glob("*.json"))
    assert found
    for path in found:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert " of " in record["machine"] and record["date"] and path.stat().st_size <= LIMIT_BYTES, path


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_git_does_not_ignore_them() -> None:
    ignored = subprocess.run(["git", "check-ignore", "benchmarks/results/new.json"], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 1


def test_shares_are_those_of_all_cores_and_without_the_benchmark_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    begin, end = Usage(10.0, 100.0, 50.0, 1.0), Usage(20.0, 130.0, 70.0, 3.0)
    assert end.since(begin) == {"others_share": 10 / 40, "steal_share": 2 / 40}


def test_what_was_not_idle_was_busy_whatever_the_system_counts_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    read = iter([(10.0, 3.0, 1.0, 0.5), (20.0, 13.0, 2.0, 1.5)])  # seconds: of the clock, idle, waiting and stolen

    def now() -> Usage:
        clock, idle, waiting, stolen = next(read)
        times = namedtuple("times", "user idle iowait steal")(clock * 4, idle, waiting, stolen)
        monkeypatch.setattr("psutil.cpu_times", lambda: times)
        monkeypatch.setattr("time.monotonic", lambda: clock)
        return Usage.now()

    begin, end = now(), now()
    assert end.busy_s - begin.busy_s == 4 * 10.0 - (10.0 + 1.0 + 1.0)
    assert end.since(begin)["steal_share"] == 1.0 / 40


def test_a_record_says_what_others_took(tmp_path: Path) -> None:
    begin = Usage.now()
    save(tmp_path / "a.json", {}, begin)
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["others_share"] >= 0 and found["steal_share"] >= 0


def test_processes_that_the_benchmark_has_started_are_no_others() -> None:
    count = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True); input()"
    before = Usage.now()
    with subprocess.Popen([sys.executable, "-c", count], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert Usage.now().own_s - before.own_s > 0.25
        process.communicate(b"\n")
    assert Usage.now().own_s - before.own_s > 0.25


@pytest.mark.parametrize(
    "record, may_stand",
    [
        ({"others_share": MOST_OTHERS, "steal_share": MOST_STEAL, "load_average": 50.0}, True),
        ({"others_share": MOST_OTHERS * 1.1, "steal_share": 0.0}, False),
        ({"others_share": 0.0, "steal_share": MOST_STEAL * 1.1}, False),
        ({"load_average": 1.0}, False),
        ({}, False),
    ],
)
def test_documents_have_only_numbers_of_a_machine_that_was_left_alone(
    record: dict[str, float], may_stand: bool
) -> None:
    assert (disturbed(record) == "") == may_stand


def test_documents_are_not_written_from_disturbed_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("as it was")
    monkeypatch.setattr(compare, "DOCUMENT", document)
    monkeypatch.setattr(compare, "FIGURE", tmp_path / "speed.svg")
    monkeypatch.setattr("sys.argv", ["compare.py", "--write-docs", "--results", str(tmp_path)])
    (tmp_path / "sixteen.json").write_text(json.dumps({"name": "sixteen", "load_average": 18.8}))
    with pytest.raises(SystemExit):
        compare.main()
    assert document.read_text() == "as it was" and not (tmp_path / "speed.svg").exists()
