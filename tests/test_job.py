"""Which process of a job this is, as each engine says it, and what the first one and the others do."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster_keys import key_file
from mdi.cli import discover, launch
from mdi.cli.access import DIAL_PORT, own_address
from mdi.cli.discover import Discovery, reachable
from mdi.cli.job import Place, address_towards, first_host, head_flags, place_of, wait_of
from mdi.errors import ControlError, UsageError
from mdi.node.round_robin import RoundRobin
from mdi.run.local import free_ports
from mdi.spec.cluster import NodeConfig
from mdi.spec.options import Options

SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[03-05,9],b1"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MDI_HEAD": "a:7000",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
BATCH = {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "2"}  # a script of sbatch
INNER = {**TORCHRUN, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SET = {"MDI_HEAD": "mdi-0.mdi", "MDI_SIZE": "3", "HOSTNAME": "mdi-2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (SLURM, Place(2, 4, "gpu03", DIAL_PORT + 711, False)),
        ({**SLURM, "SLURM_JOB_NUM_NODES": "1"}, Place(2, 4, "127.0.0.1", DIAL_PORT + 711, True)),
        (MPI, Place(1, 3, "a", 7000, False)),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "MDI_HEAD": ""}, Place(1, 3, "127.0.0.1", DIAL_PORT, True)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MDI_HEAD": "a"}, Place(1, 2, "a", DIAL_PORT, False)),
        (TORCHRUN, Place(0, 2, "a", DIAL_PORT, False)),
        ({**TORCHRUN, "MASTER_PORT": "29507"}, Place(0, 2, "a", DIAL_PORT + 7, False)),
        ({**BATCH, **MPI}, Place(1, 3, "a", 7000, False)),
        ({**BATCH, **INNER}, Place(3, 4, "a", DIAL_PORT, False)),
        ({**MPI, **INNER, "MDI_HEAD": ""}, Place(3, 4, "a", DIAL_PORT, False)),
        ({**MPI, "MDI_HEAD": "a", "OMPI_MCA_ess_base_jobid": "65001"}, Place(1, 3, "a", DIAL_PORT + 1, False)),
        ({**MPI, "HOSTNAME": "node-2"}, Place(1, 3, "a", 7000, False)),
        (SET, Place(2, 3, "mdi-0.mdi", DIAL_PORT, False)),
        ({"MDI_RANK": "1", "MDI_SIZE": "2", "MDI_HEAD": "[fd00::1]:9"}, Place(1, 2, "fd00::1", 9, False)),
        ({"MDI_RANK": "0", "MDI_SIZE": "1"}, Place(0, 1, "127.0.0.1", DIAL_PORT, False)),
        ({**SLURM, "MDI_RANK": "0", "MDI_SIZE": "2", "MDI_HEAD": "b"}, Place(0, 2, "b", DIAL_PORT + 711, False)),
    ],
    ids=[
        "slurm",
        "slurm here",
        "mpi",
        "mpi here",
        "mpich",
        "torchrun",
        "torchrun's second",
        "mpi in sbatch",
        "torchrun in srun",
        "torchrun in mpi",
        "mpi's second",
        "mpi on a numbered host",
        "statefulset",
        "set",
        "alone",
        "set in slurm",
    ],
)
def test_the_environment_says_which_process_this_is(environment: dict[str, str], expected: Place) -> None:
    assert place_of(Options(), environment) == expected


def test_flags_go_first() -> None:
    assert place_of(Options(rank=0, size=2, head="c"), MPI) == Place(0, 2, "c", DIAL_PORT, False)


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, "--rank"),
        ({"MDI_RANK": "1"}, "--size"),
        ({**SLURM, "MDI_RANK": "1"}, "--size"),
        ({"MDI_RANK": "3", "MDI_SIZE": "3", "MDI_HEAD": "a"}, "3 of 3"),
        ({"MDI_RANK": "-1", "MDI_SIZE": "3", "MDI_HEAD": "a"}, "MDI_RANK"),
        ({"MDI_RANK": "1", "MDI_SIZE": "3"}, "--head"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, "--head"),
    ],
)
def test_what_is_missing_is_named(environment: dict[str, str], names: str) -> None:
    with pytest.raises(UsageError) as e:
        place_of(Options(), environment)
    assert names in str(e.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a,b", "a"), ("n[1-3]", "n1"), ("n[007,9],m", "n007"), ("n[1-2]-ib,x", "n1-ib"), ("r[1-2]n[3-4]", "r1n3")],
)
def test_the_first_host_of_a_list_of_slurm(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_the_first_process_takes_in_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MDI_KEY_FILE", raising=False)
    place = Place(0, 3, "127.0.0.1", 7000, True)
    options = replace(Options(), key="k")
    expected = ["--machines", "3", "--no-invite", "--dial-port", "7000", "--addr", "127.0.0.1", "--key", "k"]
    assert head_flags(options, place, "starter") == [*expected, "--stop-nodes"]
    assert head_flags(options, place, "serve") == expected
    assert head_flags(Options(), replace(place, size=1), "starter") == []
    with pytest.raises(UsageError):
        head_flags(Options(), place, "starter")
    away = head_flags(options, replace(place, is_local=False), "run")
    assert not away[away.index("--addr") + 1].startswith("127."), "other machines could not reach it"


def test_a_process_on_the_first_ones_machine_is_reached_by_those_elsewhere() -> None:
    """There the name of process 0 is a loopback address."""
    assert address_towards("127.0.1.1") == own_address() != "127.0.1.1"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["starter", "m", "--wait", "70"], 70),
        (["run", "m", "--wait", "80", "Who?"], 80),
        (["serve", "m"], Options().wait_s),
    ],
)
def test_the_others_wait_for_the_first_process_as_long_as_it_waits_for_them(
    command: list[str], expected: float
) -> None:
    assert wait_of(command) == expected


class Node:
    """A node without a run."""

    config, process, control_port, ring_port, may_hand_over = NodeConfig("b", "127.0.0.1", 1, 2), "ab" * 8, 1, 2, False

    def __init__(self) -> None:
        self.turns = RoundRobin()

    def run(self) -> None:
        self.turns.run()


@pytest.mark.slow
def test_the_others_end_if_the_first_process_never_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(discover, "HEAD_S", 0.0)
    node: Any = Node()
    options = Options(dial="127.0.0.1:1", wait_s=0.05, job=("starter",))
    with pytest.raises(ControlError) as e, reachable(options, node, key_file(tmp_path / "k")):
        node.run()
    assert "process 0" in str(e.value) and "127.0.0.1:1" in str(e.value)


def test_the_first_process_is_dialled_while_its_model_is_fetched(tmp_path: Path) -> None:
    key, (port,) = key_file(tmp_path / "k").path, free_ports(1)
    with (
        Discovery(Options(key=key, addr="127.0.0.1", dial_port=port)),
        socket.create_connection(("127.0.0.1", port), 30),
    ):
        pass


@pytest.mark.parametrize("command", [[], ["train"], ["--"]])
def test_only_commands_that_generate_are_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("job", ["--rank", "0", "--size", "1", *command]) == 2
    assert "starter, run, serve" in capsys.readouterr().err
