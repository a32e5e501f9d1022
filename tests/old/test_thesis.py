"""The arithmetic of benchmarks/thesis.py: cuts of the tables, rates of curves, tables between markers."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt.shape import GPT2_CUTS, NANO_CUTS
from mdi.kernels.slices import Slice, SliceTable
from mdi.net.wire import PLAIN, Frame, FrameType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import thesis  # noqa: E402
import thesis_report  # noqa: E402
import thesis_train  # noqa: E402
from thesis_numbers import BY_KEY, MODELS  # noqa: E402


def run_of(times_s: list[float], rss: list[int], asked: int = BY_KEY["nano-llama"].n_tokens) -> dict[str, Any]:
    points = [[time_s, n] for n, time_s in enumerate(times_s, 1)]
    told = {"date": "2026-01-02 10:00", "machine": "a machine", "loopback": False}
    return {"points": points, "nodes": [{"peak_rss_bytes": n} for n in rss], "asked": asked, **told}


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
    assert thesis_report.compared_tokens(runs, model) == 4
    assert [thesis_report.rate(runs, model, n) for n in (1, 2, 3)] == [1, None, 2]
    assert thesis_report.slowdown(runs, model) == pytest.approx(1), "a straight line"
    bent = {"gpt2/1": run_of([n * n / 100 for n in range(1, 401)], [1])}
    assert thesis_report.slowdown(bent, model) == pytest.approx(7 / 3)


def test_points_that_were_left_out_are_interpolated() -> None:
    assert thesis_report.time_at([[1.0, 10], [3.0, 20]], 15) == pytest.approx(2.0)
    assert thesis_report.time_at([[1.0, 10], [3.0, 20]], 5) == pytest.approx(0.5)


def test_report_fills_the_page_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "seeds.md"
    page.parent.mkdir()
    page.write_text((BENCHMARKS.parent / "docs" / "seeds.md").read_text(encoding="utf-8"), encoding="utf-8")
    runs = {f"nano-llama/{n}": run_of([0.1 * i for i in range(1, 31)], [2_000_000_000 // n] * n) for n in (1, 2, 3)}
    data = {"runs": runs}
    for _ in range(2):  # what it has written is found again
        thesis_report.write_report(data, tmp_path, tmp_path)
        text = page.read_text(encoding="utf-8")
        assert (
            "| NanoLlama 304M | 30 | 10.0 / 10.0 / 10.0 | 1.00 / 1.00 | 1.00 / 1.00 | 17.9 / 26.0 / 30.5 | 1.45 / 1.70 | 1.00 |"
            in text
        )
        assert (
            "| NanoLlama 304M | 12; 5 + 7; 2 + 5 + 5 | 2.00; 1.00 / 1.00; 0.67 / 0.67 / 0.67 "
            "| 2.60; 1.76 / 1.76; 1.34 / 1.46 / 1.46 |" in text
        )
        monkeypatch.setattr(thesis_report, "save", lambda figure, path: None)  # once is enough, and takes a second
        words = " ".join(text.split())  # without the ends of lines
        assert text.count("2026-01-02") == 1 and "3 of the 25 runs" in words and "Not trained yet." in words
    assert {path.name for path in (tmp_path / "assets").iterdir()} == {"thesis-llama.svg", "thesis-memory.svg"}
    runs["nano-llama/2"] = run_of([0.1], [1, 1], asked=16)
    thesis_report.write_report(data, tmp_path, tmp_path)
    assert "**quick run**" in page.read_text(encoding="utf-8"), "one that is not as long as it should be is enough"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="no place for the results of thesis-speed"):
        thesis_report.write_report(data, tmp_path, tmp_path)


def test_three_texts_count_whole_beside_two() -> None:
    """Three texts of two tokens in three seconds, two in two: a third of the work more, at the same rate."""
    model = BY_KEY["gpt2"]
    runs = {"gpt2/1": run_of([0.5, 1, 1.5, 2], [1]), "gpt2/3": run_of([0.1, 0.2, 0.3, 0.4, 1, 3], [1, 1, 1])}
    assert thesis_report.whole_rate(runs, model, 1) == thesis_report.whole_rate(runs, model, 3) == 2
    assert thesis_report.whole_rate(runs, model, 2) is None
    assert thesis_report.rate(runs, model, 3) == 10, "what the thesis did: their longest part is left out"


def test_how_much_of_the_evaluation_there_is_is_told() -> None:
    runs = {f"{model.key}/{n}": {"asked": model.n_tokens} for model in MODELS for n in (1, 2, 3)}
    assert thesis_report.type_of(runs) == "full run"
    del runs["gpt2-xl/2"]
    assert thesis_report.type_of(runs) == "full run", "the thesis has it on three nodes alone"
    del runs["gpt2-large/2"]
    assert thesis_report.type_of(runs) == "24 of the 25 runs"
    runs["gpt2-xl/3"]["asked"] -= 1
    assert "quick run" in thesis_report.type_of(runs)


def test_a_model_that_ran_on_three_nodes_alone_counts_as_many_tokens_as_others() -> None:
    runs = {"gpt2-xl/3": run_of([0.5, 1, 1.5, 2, 4, 8], [1, 1, 1])}
    assert thesis_report.compared_tokens(runs, BY_KEY["gpt2-xl"]) == 4
    assert thesis_report.rate(runs, BY_KEY["gpt2-xl"], 3) == 2
    assert thesis_report.ratios([None, None, 2.0]) == "-"


def test_training_is_told() -> None:
    training = {"steps": 8, "characters": 8192, "entropy": 0.267, "losses": [[4, 3.125], [8, 2.5]], "greedy_tokens": 150,
                "same": {"1": True, "2": True, "3": True}}  # fmt: skip
    text = thesis_report.training_text({"training": training})
    assert "8,192 characters" in text and "3.12 after 4, 2.50 after 8 steps" in text
    assert "0.27 what" in text and "exactly the ids" in text
    text = thesis_report.training_text({"training": {**training, "same": {"1": True, "2": False}}})
    assert "**The ids differ on 2 nodes.**" in text


def test_the_text_has_the_characters_and_the_chance_that_it_should() -> None:
    text = thesis_train.grammar_text()
    assert len(set(text)) == 65 and text == thesis_train.grammar_text()
    lines = text.splitlines()
    # Five kinds of lines, equally likely; ln 5 + ln 26 + ln 8 + ... each, over the mean length of a line.
    choices = [(26, 8, 8, 15, 6), (8, 15, 6, 26, 8), (8, 15, 26, 26), (26, 15, 8, 8, 6), (26, 8, 15, 6)]
    nats = math.log(5) + sum(math.log(math.prod(numbers)) for numbers in choices) / 5
    assert thesis_train.entropy() == pytest.approx(nats / (len(text) / len(lines)), rel=0.005)


def test_an_evaluation_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is there is not run again, none is begun too late, and each is written at once."""
    model, path = BY_KEY["nano-llama"], tmp_path / "thesis.json"
    results = thesis.Results(path)
    results.add("nano-llama/1", run_of([1.0], [1]))
    begun = []

    def measured(case: thesis.Case) -> dict[str, Any]:
        begun.append(case.n_nodes)
        return {**run_of([1.0, 2.0], [1] * case.n_nodes), "n_tokens": 2}

    monkeypatch.setattr(thesis, "measured_run", measured)
    monkeypatch.setattr(thesis, "checkpoint_of", lambda *_: tmp_path)
    args = argparse.Namespace(tokens=None, quick=False, nodes=[1, 2, 3], again=False, keep=True, loopback=True)
    args.work_dir, args.within = tmp_path, 30.0
    moments = iter([0.0, 29.0, 30.5])
    monkeypatch.setattr(thesis.time, "monotonic", lambda: next(moments))
    assert thesis.measure(args, [model], results) == 0 and begun == [2]
    assert set(thesis.Results(path).runs) == {"nano-llama/1", "nano-llama/2"}


@pytest.mark.slow  # a program of measurements, which starts three more
def test_the_program_runs_a_model_and_forgets_its_weights(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = ["--only", "nanogpt-9", "--nodes", "2", "--tokens", "3", "--no-docs", "--loopback"]
    command += ["--work-dir", tmp_path / "work"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "thesis.py", *command, "--results", results],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = json.loads(results.read_text())["runs"]
    assert {name: (run["asked"], run["n_tokens"], len(run["points"])) for name, run in runs.items()} == {
        "nanogpt-9/2": (3, 6, 6),
    }
    assert [node["layers"] for node in runs["nanogpt-9/2"]["nodes"]] == [[0, 4], [4, 9]]
    assert "[1/1] NanoGPT, 9 blocks on 2" in done.stdout
    assert not (tmp_path / "work" / "nanogpt-9").exists()
    assert (tmp_path / "work" / "thesis-nanogpt.svg").stat().st_size > 1000


# Rows and columns of equations 4.1 to 4.7, and their bytes: whole texts of NanoGPT and GPT-2, a token of the Llamas.
MESSAGES = [
    ("NanoGPT", 128, 384, 196_608),
    ("GPT-2", 1024, 768, 3_145_728),
    ("GPT-2 Medium", 1024, 1024, 4_194_304),
    ("GPT-2 Large", 1024, 1280, 5_242_880),
    ("GPT-2 XL", 1024, 1600, 6_553_600),
    ("NanoLlama", 1, 1024, 4_096),
    ("TinyLlama", 1, 2048, 8_192),
]


@pytest.mark.parametrize(("model", "n_rows", "n_cols", "theirs"), MESSAGES)
def test_bytes_of_a_message(model: str, n_rows: int, n_cols: int, theirs: int) -> None:
    """Those of equations 4.1 to 4.7, and what a frame adds; docs/seeds.md says so."""

    def sent(n_rows: int) -> int:
        slices = SliceTable((Slice(1, 0, n_rows, 1),))
        payload = bytes(4 * n_rows * n_cols)
        head, data = PLAIN.parts(Frame(FrameType.BATCH, 1, 0, "float32", n_rows, n_cols, slices, payload=payload))
        assert len(data) == 4 * n_rows * n_cols
        return len(head) + len(data)

    assert 4 * n_rows * n_cols == theirs
    line = f"| {model} | {n_rows:,} x {n_cols:,} | {theirs:,} | {sent(n_rows):,} | {sent(1):,} |"
    assert line in (BENCHMARKS.parent / "docs" / "seeds.md").read_text(encoding="utf-8"), line
