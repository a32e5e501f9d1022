"""Idle threads of the kernels look for work only where the cores are their process' own."""

from __future__ import annotations

from pathlib import Path

import pytest

import mdi.kernels.blocks as context
from mdi.kernels.blocks import FreeCores, busy_core_s


class Machine:
    """Two cores, on which this process and others compute as long as they are told."""

    def __init__(self) -> None:
        self.now = self.own = self.others = 0.0

    def go_on(self, seconds: float, own: float, others: float) -> None:
        self.now += seconds
        self.own += own * seconds
        self.others += others * seconds

    def cores(self, n_threads: int) -> FreeCores:
        return FreeCores(n_threads, lambda: self.now, lambda: self.own, lambda: self.own + self.others)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(context, "n_cores", lambda: 2.0)
    return Machine()


def test_threads_spin_while_nobody_else_computes(machine: Machine) -> None:
    cores = machine.cores(2)
    found = []
    for others in (0.0, 0.05, 1.0, 0.0):
        machine.go_on(1.5, own=1.9, others=others)
        found.append(cores.spins() > 0)
    assert found == [True, True, False, True]


def test_what_is_known_holds_for_a_second(machine: Machine) -> None:
    cores = machine.cores(2)
    machine.go_on(0.5, own=1, others=0)
    assert cores.spins() == 0, "nothing is known yet"
    machine.go_on(0.6, own=1, others=0)
    assert cores.spins() > 0
    machine.go_on(0.5, own=1, others=1)
    assert cores.spins() > 0, "it has been measured half a second ago"


def test_a_quota_below_the_threads_lets_nobody_spin(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "n_cores", lambda: 1.5)
    cores = machine.cores(2)
    machine.go_on(2, own=1.5, others=0)
    assert cores.spins() == 0


def test_one_thread_has_nobody_to_wait_for(machine: Machine) -> None:
    cores = machine.cores(1)
    machine.go_on(2, own=1, others=0)
    assert cores.spins() == 0


def test_only_this_process_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 5000 7 1 2 3 0 0\ncpu1 900 0 0 0 0 0 0 0 0 0\nintr 5\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    assert busy_core_s(stat) == 1.56
    assert busy_core_s(tmp_path / "none") is None
    stat.write_text("cpu  9 9 9 9 9 9 9 9 0 0\n")
    assert busy_core_s(stat) is None, "as where a sandbox hides the cores"
