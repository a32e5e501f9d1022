"""What the end-to-end tests share: tiny checkpoints, one ring of real secondaries, and a starter in this process or its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mdi.cli import launch
from processes import Cluster, Process, Reader, Result, Spawn, Starter
from tiny_checkpoint import write_checkpoint

if not sys.platform.startswith("linux"):  # SIGSTOP, resource limits and /proc are used freely
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("ckpt") / "tiny")


@pytest.fixture(scope="session")
def shared_ring(reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(reader, tmp_path_factory.mktemp("ring"), 3)
    yield cluster
    cluster.end()


@pytest.fixture
def ring(shared_ring: Cluster) -> Iterator[Cluster]:
    """Two secondaries that wait for a starter, the same ones for all tests; what a test kills is started again."""
    shared_ring.revive()
    yield shared_ring
    shared_ring.revive()


def unjournaled(command: str, args: Sequence[object]) -> list[str]:
    """What keeps a starter from leaving a journal in the user's cache folder when its run is broken off."""
    is_decided = command != "starter" or {"--run-dir", "--no-journal"} & {*map(str, args)}
    return [] if is_decided else ["--no-journal"]


@pytest.fixture
def spawn(reader: Reader) -> Iterator[Spawn]:
    """Start a launcher as a process; it is gone when the test is over."""
    started: list[Process] = []

    def start(launcher: str, *args: object, **options: Any) -> Process:
        started.append(Process(reader, launcher, *args, *unjournaled(launcher, args), **options))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.fixture
def make_cluster(reader: Reader, tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """A cluster of one's own, with its secondaries yet to be started."""
    made: list[Cluster] = []

    def make(n_nodes: int) -> Cluster:
        made.append(Cluster(reader, tmp_path / f"cluster{len(made)}", n_nodes))
        return made[-1]

    yield make
    for cluster in made:
        cluster.end()


@pytest.fixture
def starter(capsys: pytest.CaptureFixture[str]) -> Starter:
    """Run a starter in this process (which saves the seconds that importing torch takes); the raw prompt, greedy."""

    def run(ckpt: Path | None, nodes: Path, *args: object, command: str = "starter") -> Result:
        capsys.readouterr()
        argv = ["--nodes-config", str(nodes), "--prompt-style", "none", "--json", *map(str, args)]
        if "--temperature" not in argv:
            argv += ["--temperature", "0"]
        argv += unjournaled(command, argv)
        status = launch(command, argv if ckpt is None else ["--ckpt", str(ckpt), *argv])
        printed = capsys.readouterr()
        return Result(status, printed.out, printed.err)

    return run
