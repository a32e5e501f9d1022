"""The grid of Petals' section 4.2: the devices' times are the paper's, and rates are those while all clients decode."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import petals
import write_results
from mdi.stages import window
from mdi.stages.kernel_stage import KernelStage
from petals import LOCAL, N_BLOCKS, PAPER, SHARES, Case, answers, device_s, offloading, together_s

ROOT = Path(__file__).resolve().parents[2]


def test_devices_take_what_the_papers_local_pipeline_takes() -> None:
    assert 1 / device_s(1, 128) == pytest.approx(LOCAL["128"]) and 1 / device_s(1, 2048) == pytest.approx(LOCAL["2048"])
    assert 128 / device_s(128, 0) == pytest.approx(LOCAL["1x128"])
    assert all(len(shares) == n and sum(shares) == N_BLOCKS for n, shares in SHARES.items())


def test_the_rate_is_that_while_all_clients_decode() -> None:
    alone, beside = [0.0, 1.0, 2.0, 4.0, 6.0], [2.0, 4.0, 6.0, 7.0, 8.0]  # a step takes 1 s, and 2 s beside another
    assert together_s([alone, beside]) == pytest.approx([0.5, 0.5])
    assert together_s([alone[:3]]) == pytest.approx([1.0])


FLAGS = ("--models", "nowhere")


class Counted:
    """In the place of nodes and clients."""

    measured: list[str] = []

    def __init__(self, models: Path, n_nodes: int, n_clients: int, stack: object) -> None:
        left = [case for case in PAPER if case.nodes == n_nodes and case.name not in self.measured]
        assert n_clients == max(case.clients for case in left)

    def measure(self, case: Case, paper: object) -> dict[str, list[float]]:
        self.measured.append(case.name)
        return {"steps 128": [2.0] * case.clients, "steps 2048": [1.0], "forward 1": [50.0], "forward 64": [200.0]}


def test_cells_that_are_there_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Counted.measured = []
    monkeypatch.setattr(petals, "Setup", Counted)
    for n in (3, 12, 3):
        monkeypatch.setattr(
            "sys.argv", ["petals.py", *FLAGS, "--nodes", str(n), "--json", str(tmp_path / "petals.json")]
        )
        petals.main()
    assert Counted.measured == [case.name for n in (3, 12) for case in PAPER if case.nodes == n]
    assert set(json.loads((tmp_path / "petals.json").read_text())["cells"]) == set(Counted.measured)
    monkeypatch.setattr(write_results, "RESULTS", tmp_path)
    lines = write_results.petals().splitlines()
    assert lines[2] == (
        "| 3 | 1 | 1 Gbit/s, 5 ms | 1.71 (1.00); 2.00 (1.00) | 1.54 (1.00); 1.00 (1.00) | 70.0 (1.00); 50.0 (1.00) "
        "| 254 (1.00); 200 (1.00) |"
    )
    assert lines[5].startswith("| 3 | 3 | 1 Gbit/s, 5 ms | 1.65 (0.96); 2.00 (1.00) |")
    assert lines[5].endswith("| -; 200 (1.00) |")
    assert lines[-3] == (
        "| 1 | 1 | offloading | 0.18 (0.11); - | 0.18 (0.12); - | 2.70 (0.04); - | 170 (0.67); - |"  # of three nodes
    )
    assert len(lines) == 2 + len(PAPER) + 2


def test_no_cell_begins_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(petals, "Setup", None)  # it would be called
    monkeypatch.setattr("sys.argv", ["petals.py", *FLAGS, "--until-s", "0", "--json", str(tmp_path / "petals.json")])
    petals.main()
    assert not (tmp_path / "petals.json").exists()


def test_cells_of_another_machine_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Counted.measured = []
    monkeypatch.setattr(petals, "Setup", Counted)
    other = {"machine": "another", "cells": {case.name: {} for case in PAPER}}
    (tmp_path / "petals.json").write_text(json.dumps(other))
    monkeypatch.setattr("sys.argv", ["petals.py", *FLAGS, "--nodes", "3", "--json", str(tmp_path / "petals.json")])
    petals.main()
    assert Counted.measured == [case.name for case in PAPER if case.nodes == 3]


def test_a_client_that_has_ended_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\nno standing node of this key came\n")
    (first, its), (second, its_too) = multiprocessing.Pipe(), multiprocessing.Pipe()
    with first, second:
        its.send([1.0])
        its_too.send([2.0])
        assert answers([first, second], tmp_path / "log") == [[1.0], [2.0]]
        its.send([1.0])
        its.close()
        its_too.close()
        with pytest.raises(SystemExit, match="(?s)has ended.*no standing node of this key came"):
            answers([first, second], tmp_path / "log")


class Asks:
    """In the place of a pipe: what is asked, until it is closed."""

    def __init__(self, *asked: tuple[str, int]) -> None:
        self._asked, self.answers = list(asked), list[list[float]]()

    def recv(self) -> tuple[str, int]:
        if not self._asked:
            raise EOFError
        return self._asked.pop(0)

    def send(self, answer: list[float]) -> None:
        self.answers.append(answer)


@pytest.mark.slow
def test_a_pass_over_a_window_takes_as_long_as_the_papers_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in ((KernelStage, "__call__"), (window.Window, "unit"), (window, "read_unit")):
        monkeypatch.setattr(where, name, getattr(where, name))  # as it is, and will be again
    for name, value in (("PASS_S", 0.4), ("LENGTH", 32), ("BATCHES", (1, 2)), ("N_STEPS", 3)):
        monkeypatch.setattr(petals, name, value)
    monkeypatch.setattr(petals, "device_s", lambda n_rows, position: 0.1)
    asks: Any = Asks(("steps", 16))
    with pytest.raises(EOFError):
        offloading(ROOT / "assets" / "nano-llama", 8, tmp_path / "waits", asks)
    ready, (first, *_, last) = asks.answers
    assert ready == [] and last - first > 3 * 0.4 - 2 * 0.4 / 16  # two halves of blocks may have been read before
