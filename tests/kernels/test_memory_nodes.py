"""On which memory nodes memory for the kernels lies. No machine with several of them was at hand: that the system deals pages
out is believed, that it is asked to is tried."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from pathlib import Path

import numpy as np
import pytest

from mdi.kernels import layout, memory_nodes
from mdi.kernels.memory_nodes import interleave, nodes_of, spread
from mdi.kernels.pages import Pool

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS, INTERLEAVED = 2, 3


def machine(folder: Path, *cpulists: str) -> Path:
    for i, cpulist in enumerate(cpulists):
        (folder / f"node{i}").mkdir()
        (folder / f"node{i}" / "cpulist").write_text(cpulist + "\n")
    (folder / "possible").write_text("0-1\n")
    return folder


@pytest.mark.parametrize(
    ("cores", "expected"),
    [({0, 1}, (0,)), ({3, 9}, (0, 1)), ({8}, (1,)), ({4, 12}, (1, 2)), ({40}, ()), (set(range(16)), (0, 1, 2))],
)
def test_memory_nodes_are_those_of_the_cores(tmp_path: Path, cores: set[int], expected: tuple[int, ...]) -> None:
    """The last one has memory and no cores."""
    assert nodes_of(frozenset(cores), machine(tmp_path, "0-3", "4-7,8-11", "12-15", "")) == expected


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert nodes_of(frozenset({0}), tmp_path / "none") == ()
    assert nodes_of(frozenset({0}), machine(tmp_path, "0-3", "many")) == ()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """What the system is asked for, on a machine with two memory nodes."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    monkeypatch.setattr(memory_nodes, "memory_nodes", lambda: (0, 1))
    monkeypatch.setattr(memory_nodes, "interleave", lambda *what: found.append(what) or True)
    return found


def test_weights_and_caches_are_dealt_out_where_threads_are_on_several_nodes(
    asked: list[tuple[int, int, tuple[int, ...]]],
) -> None:
    weights, pool = layout.aligned_bytes(5 << 20), Pool(1 << 16, 64)
    assert isinstance(weights.base, np.ndarray), "the memory asked for is a little larger, to begin on a boundary"
    for memory, (start, n_bytes, nodes) in zip((weights.base, pool.memory), asked, strict=True):
        first = memory.ctypes.data
        assert start % mmap.PAGESIZE == n_bytes % mmap.PAGESIZE == 0 and nodes == (0, 1)
        assert first <= start < first + mmap.PAGESIZE and start + n_bytes <= first + memory.nbytes
        assert n_bytes > memory.nbytes - 2 * mmap.PAGESIZE
    layout.aligned_bytes(1000)
    assert len(asked) == 2, "small ones stay in caches"


def test_on_one_memory_node_nothing_is_asked_for(
    asked: list[tuple[int, int, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_nodes, "memory_nodes", lambda: (1,))
    assert not spread(np.empty(5 << 20, dtype=np.uint8)) and asked == []


@pytest.mark.skipif(memory_nodes.MBIND is None, reason="Linux on x86-64 or ARM64 alone has memory nodes")
def test_the_system_takes_it() -> None:
    """Over the one memory node that there is: the policy of the pages is then what was asked for."""
    with mmap.mmap(-1, 1 << 20) as memory:
        array = np.frombuffer(memory, dtype=np.uint8)
        address = array.ctypes.data
        del array
        if not interleave(address, 1 << 20, (0,)):
            assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS), os.strerror(ctypes.get_errno())
            pytest.skip("containers without the right to it, and emulators, refuse")
        mode = ctypes.c_int(-1)
        call = memory_nodes.system_call()
        done = call(
            ctypes.c_long(GET_MEMPOLICY[platform.machine()]), ctypes.byref(mode), None, ctypes.c_ulong(0),
            ctypes.c_void_p(address), ctypes.c_ulong(OF_ADDRESS),
        )  # fmt: skip
        assert (done, mode.value) == (0, INTERLEAVED)
