"""Idle threads of the kernels look for work only where cores are free."""

from __future__ import annotations

import os

import pytest

import mdi.machine.threads as threads


@pytest.mark.parametrize(
    "n_threads, load, cores, spins",
    [(2, 0.0, 4.0, True), (2, 3.0, 4.0, False), (2, 0.0, 1.5, False), (1, 0.0, 4.0, False)],
)
def test_threads_spin_only_on_free_cores(
    n_threads: int, load: float, cores: float, spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "n_threads", lambda: n_threads)
    monkeypatch.setattr(threads, "n_cores", lambda: cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert (threads.n_spins() > 0) == spins
