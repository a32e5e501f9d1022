"""Nodes that share a machine: how many threads each takes, and how threads wait for their next piece of work."""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from mdi.cli import WAIT_POLICY, launch
from mdi.control_groups import n_cores
from mdi.host import threads
from mdi.host import threads as machine
from mdi.host.threads import THREAD_VARIABLES, choose_threads, fair_threads, share_cores, threads_of_others
from mdi.spec.cluster import NodeConfig, load_nodes


def node(name: str, addr: str = "127.0.0.1", **more: object) -> NodeConfig:
    return NodeConfig(name, addr, 0, 0, **more)  # type: ignore[arg-type]


@pytest.fixture
def seen_by_the_command(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that a command's own code finds where torch was not imported before."""
    seen: dict[str, str] = {}
    command = types.ModuleType("command_of_this_test", doc="does nothing")
    command.add_arguments = lambda parser: None  # type: ignore[attr-defined]

    def run(args: argparse.Namespace) -> int:
        seen.update(os.environ)
        return 0

    command.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, command.__name__, command)
    monkeypatch.delitem(sys.modules, "torch")
    for name in (*WAIT_POLICY, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "to be put back at the end")
        monkeypatch.delenv(name)
    return seen


def test_idle_threads_sleep_in_every_command(seen_by_the_command: dict[str, str]) -> None:
    assert launch("test", [], module_name="command_of_this_test") == 0
    assert WAIT_POLICY.items() <= seen_by_the_command.items()


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_way_of_waiting_that_a_user_chose_stays(
    seen_by_the_command: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "ACTIVE")
    assert launch("test", [], module_name="command_of_this_test") == 0
    assert {key: seen_by_the_command.get(key) for key in (*WAIT_POLICY, name)} == {
        **dict.fromkeys(WAIT_POLICY),
        name: "ACTIVE",
    }


def test_a_share_of_the_cores() -> None:
    assert [fair_threads([], cores) for cores in (0.3, 1, 1.9, 4)] == [1, 1, 1, 4]
    assert [fair_threads([None, None], cores) for cores in (2, 3, 8)] == [1, 1, 2]
    assert fair_threads([2, None], 8) == 3, "what the nodes file gives the others is theirs"
    assert fair_threads([8, 8], 4) == 1


def test_nodes_of_one_machine_with_more_threads_than_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4.0)
    there = [node(f"there{i}", "192.168.1.11") for i in range(9)]
    for nodes, expected in (
        ([node("starter")], False),
        ([node(f"n{i}") for i in range(4)], False),
        ([node(f"n{i}") for i in range(5)], True),
        ([node(f"n{i}") for i in range(4)] + [node("gpu", device="cuda:0")], False),
        ([node("starter"), *there], False),
        ([node("starter", threads=2), node("n1", threads=2)], False),
        ([node("starter", threads=2), node("n1", threads=3)], True),
        ([node("starter", cores=(0, 1)), node("n1", cores=(2, 3))], False),
        ([node("starter", cores=(0, 1)), node("n1", cores=(1,))], True),
    ):
        assert share_cores(nodes) is expected, nodes


def test_a_quota_limits_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, files, line in (
        ("v2", {"box/cpu.max": "250000 100000\n"}, "0::/box\n"),
        ("v1", {"cpu/box/cpu.cfs_quota_us": "250000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, "1:cpu:/box\n"),
    ):
        root = tmp_path / version
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        membership = tmp_path / f"membership-{version}"
        membership.write_text(line)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
        monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 64)
        monkeypatch.setattr(machine, "n_cores", lambda root=root, own=membership: n_cores(root, own))
        assert fair_threads([]) == 2, version


def test_a_node_without_a_number_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(machine, "usable_cores", lambda: 8.0)
    monkeypatch.setattr(threads.sys, "setswitchinterval", lambda s: None)
    monkeypatch.setattr(threads, "of_process", None)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    choose_threads(None)
    choose_threads(None, others=[None, None])
    choose_threads(5, others=[None])
    assert chosen == [8, 2, 5]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    choose_threads(None)
    assert chosen == [8, 2, 5, 3], "what a user set for all programs holds"
    assert threads.n_threads() == 3


def test_who_else_computes_on_a_machine() -> None:
    nodes = [
        node("starter", threads=2),
        node("secondary0", "localhost"),
        node("secondary1", "127.0.0.1", device="cuda:0"),
        node("secondary2", "192.168.1.11"),
        node("secondary3", cores=(4, 5, 6)),
    ]
    assert threads_of_others(nodes[0], nodes) == [None, 3]
    assert threads_of_others(nodes[1], nodes) == [2, 3]
    assert threads_of_others(nodes[3], nodes) == threads_of_others(nodes[0], ()) == []


def test_the_nodes_of_a_file() -> None:
    folder = Path(__file__).resolve().parents[1] / "src" / "settings_distr"
    assert [n.name for n in load_nodes(folder / "configuration.json")] == ["starter", "secondary0", "secondary1"]
    assert load_nodes(folder / "secondary" / "node0.json") == ()
