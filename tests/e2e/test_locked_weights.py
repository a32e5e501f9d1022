"""--mlock of a starter: every node of the ring locks its weights, also blocks that come later; one that may not says so."""

from __future__ import annotations

import ctypes
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from processes import SOON_S, Cluster, Spawn, Starter, wait_for_tokens
from tiny_checkpoint import reference
from waiting import until

RUN = ("--n-tokens", 8, "--n-samples", 1, "--layers", "3,2", "--wait", 60)
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14


def locked_bytes(pid: int) -> int:
    found = re.search(r"VmLck:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def block_bytes(checkpoint: Path, start: int, stop: int) -> int:
    """Of these blocks' weights in float32."""
    tensors = torch.load(checkpoint / "lit_model.pth")
    names = tuple(f"transformer.h.{i}." for i in range(start, stop))
    return sum(4 * tensor.numel() for name, tensor in tensors.items() if name.startswith(names))


def may_lock_nothing() -> None:
    """Of a process that is about to be started, also by root."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)


def test_a_secondary_locks_its_weights_if_the_starter_says_so(
    make_cluster: Callable[[int], Cluster], checkpoint: Path, starter: Starter
) -> None:
    """In a run after another one, whose stage has the same weights in memory."""
    cluster = make_cluster(2)
    node = cluster.start(0)
    expected = [list(reference("Who are you?", 8))]
    assert starter(checkpoint, cluster.path, *RUN).token_ids == expected and locked_bytes(node.pid) == 0
    assert starter(checkpoint, cluster.path, *RUN, "--mlock").token_ids == expected
    assert locked_bytes(node.pid) >= block_bytes(checkpoint, 3, 5) and "--mlock" not in node.err


def test_a_secondary_may_lock_its_own_weights_alone(
    make_cluster: Callable[[int], Cluster], checkpoint: Path, starter: Starter
) -> None:
    cluster = make_cluster(2)
    node = cluster.start(0, "--mlock")
    assert starter(checkpoint, cluster.path, *RUN).status == 0
    assert locked_bytes(node.pid) >= block_bytes(checkpoint, 3, 5)


def test_a_node_that_may_not_lock_says_so_and_computes(
    make_cluster: Callable[[int], Cluster], checkpoint: Path, starter: Starter
) -> None:
    cluster = make_cluster(2)
    node = cluster.start(0, preexec_fn=may_lock_nothing)
    assert starter(checkpoint, cluster.path, *RUN, "--mlock").token_ids == [list(reference("Who are you?", 8))]
    assert locked_bytes(node.pid) == 0
    (line,) = [line for line in node.err.splitlines() if "--mlock" in line]
    assert "secondary0" in line and "ulimit -l" in line and "may be swapped out" in line


@pytest.mark.slow
def test_blocks_that_a_node_takes_over_are_locked_as_well(
    make_cluster: Callable[[int], Cluster], endless: Path, spawn: Spawn
) -> None:
    cluster = make_cluster(3)
    nodes = [cluster.start(0), cluster.start(1)]
    process = spawn(
        "starter", "--ckpt", endless, "--nodes-config", cluster.path, "--prompt-style", "none", "--n-tokens", 60000,
        "--n-samples", 3, "--temperature", 0, "--layers", "1,2,2", "--mlock", "--wait", 60,
    )  # fmt: skip
    wait_for_tokens(cluster, 5, lambda: process.child.poll() is not None)
    before = locked_bytes(nodes[1].pid)
    assert before >= block_bytes(endless, 3, 5) and locked_bytes(process.pid) > 0
    nodes[0].signal(signal.SIGKILL)
    until(lambda: locked_bytes(nodes[1].pid) > before, SOON_S)
    process.signal(signal.SIGINT)
    process.wait(SOON_S)
