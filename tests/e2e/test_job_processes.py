"""Processes as an engine of a cluster starts them: they meet, write, and end together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.run.local import free_ports
from processes import SOON_S, SRC, Spawn
from tiny_checkpoint import TEXT, reference

JOB = [sys.executable, "-m", "mdi.cli", "job"]


@pytest.mark.slow
def test_three_processes_of_a_job(spawn: Spawn, checkpoint: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    flags = (
        "--head",
        f"127.0.0.1:{port}",
        "--key",
        key_file(tmp_path / "cluster.key").path,
        "--cache-dir",
        tmp_path / "cache",
    )
    command = (
        "starter", "--ckpt", checkpoint, "--prompt", "The ring", "--prompt", TEXT, "--n-tokens", 10, "--temperature", 0,
        "--prompt-style", "none", "--placement", "even", "--json", "--no-journal",
    )  # fmt: skip
    named = [{"OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(3)]
    numbers = {"PYTHONPATH": str(SRC), "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    others = [spawn("", *flags, *command, command=JOB, env={**numbers, **name}) for name in named[1:]]
    head = spawn("", *flags, *command, command=JOB, env={**numbers, **named[0]})
    assert head.wait() == 0, head.story()
    found = json.loads(head.out)
    assert [s["token_ids"] for s in found["samples"]] == [list(reference(p, 10)) for p in ("The ring", TEXT)]
    assert [n["name"] for n in found["nodes"]] == ["starter", "secondary0", "secondary1"]
    for process in others:
        assert process.wait(SOON_S) == 0, process.story()
