"""Where a secondary's weights come from, and what happens when they cannot come, or do not fit."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from mdi.checkpoint.chunks import find_chunk, write_chunks
from mdi.checkpoint.source import open_source
from mdi.run.local import free_ports
from processes import SOON_S, Cluster, Spawn, Starter, meanwhile
from tiny_checkpoint import reference, write_checkpoint

ONE = ("--n-tokens", 6, "--n-samples", 1)


def expected() -> list[list[int]]:
    return [list(reference("Who are you?", 6))]


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its chunks for three nodes beside it."""
    folder = write_checkpoint(tmp_path_factory.mktemp("chunked") / "tiny")
    source = open_source(folder)
    write_chunks(source, folder, (1, 2, 2))
    source.close()
    return folder


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks take a moment to be sent: some 200 MB."""
    return write_checkpoint(
        tmp_path_factory.mktemp("ckpt") / "heavy",
        n_layer=3,
        n_embd=768,
        n_head=12,
        head_size=64,
        intermediate_size=8192,
    )


@pytest.mark.slow
def test_chunks_and_checkpoints_of_their_own(
    make_cluster: Callable[[int], Cluster], chunked: Path, starter: Starter, tmp_path: Path
) -> None:
    """Nothing is sent to a secondary that was started with its chunk (by its old name, too), or with the checkpoint."""
    copied = tmp_path / "copied"
    copied.mkdir()
    shutil.copy(find_chunk(chunked, 3, "secondary0"), copied)
    cluster = make_cluster(3)
    cluster.start(0, "--chunk", copied / "model_secondary0.pth")
    cluster.start(1, "--ckpt", chunked)
    result = starter(chunked, cluster.path, *ONE, "--wait", 100)
    assert result.token_ids == expected() and "sending" not in result.err
    kept = [path for i in range(2) for path in cluster.cache_dir(i).glob("**/*")]
    assert not [path for path in kept if path.suffix in (".safetensors", ".part")]
    # only the starter's chunk is named: the others' lie beside it, and so does the rest of the checkpoint
    result = starter(None, cluster.path, *ONE, "--chunk", find_chunk(chunked, 3, "starter"))
    assert result.token_ids == expected() and "sending" not in result.err

    # another range is refused by the node whose chunk was promised
    result = starter(chunked, cluster.path, *ONE, "--layers", "2,2,1")
    assert result.status == 1
    assert all(word in result.json["error"] for word in ("secondary0", "blocks 1-2", "blocks 2-3"))
    # another model, and other weights of the same shape, are sent to it as to any node
    other = write_checkpoint(tmp_path / "other", n_layer=4)
    result = starter(other, cluster.path, *ONE)
    assert result.token_ids == [list(reference("Who are you?", 6, n_layer=4))] and "sending" in result.err
    twin = write_checkpoint(tmp_path / "twin", seed=9)
    result = starter(twin, cluster.path, *ONE, "--layers", "1,3,1")
    assert result.token_ids == [list(reference("Who are you?", 6, seed=9))] and "sending" in result.err

    result = starter(chunked, cluster.path, *ONE, "--stop-nodes")
    assert result.token_ids == expected()
    assert [cluster[i].wait(SOON_S) for i in range(2)] == [0, 0]
    assert not any("Traceback" in cluster[i].err for i in range(2))


def test_damaged_chunk(make_cluster: Callable[[int], Cluster], chunked: Path, starter: Starter, tmp_path: Path) -> None:
    """Weights that are not those of the manifest must not go unnoticed."""
    path = tmp_path / "model_secondary0.safetensors"
    shutil.copy(find_chunk(chunked, 3, "secondary0"), path)
    with open(path, "r+b") as file:
        file.seek(-100, 2)
        file.write(b"\x3f" * 8)
    cluster = make_cluster(3)
    cluster.start(0, "--chunk", path)
    cluster.start(1)
    result = starter(chunked, cluster.path, *ONE, "--wait", 100)
    assert result.status == 1 and "sha256" in result.json["error"], result


@pytest.mark.parametrize("limit_bytes", [30_000])
def test_full_disk_while_weights_arrive(
    make_cluster: Callable[[int], Cluster], checkpoint: Path, starter: Starter, limit_bytes: int
) -> None:
    """A real limit on the size of files; what had come is gone, and the node waits for the next run."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    cluster = make_cluster(2)
    cluster.start(0, preexec_fn=limit)
    result = starter(checkpoint, cluster.path, *ONE, "--wait", 100, "--fixed")
    assert result.status == 1 and "Traceback" not in result.err
    assert "secondary0" in result.json["error"] and "disk is full" in result.json["error"], result.json["error"]
    found = cluster.wait_states("IDLE")
    assert "disk is full" in found[0]["error"] and "Traceback" not in cluster[0].err
    assert not list(cluster.cache_dir(0).iterdir()), "nothing half-written is left"
    result = starter(checkpoint, cluster.path, *ONE)
    assert result.token_ids == expected(), "the starter can hold the blocks itself"
    assert [(one["node"], one["replaced_by"]) for one in result.json["recoveries"]] == [("secondary0", "starter")]


def in_mid_transfer(ring: Cluster, index: int, action: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Do something as soon as some of the weights have arrived at secondary `index`, before all have."""

    def act(is_over: Callable[[], bool]) -> None:
        while not is_over():
            progress = ring.status(index + 1)["progress"]
            if progress and 0 < progress["bytes"] < progress["total_bytes"]:
                return action()
        raise AssertionError("no transfer was seen under way")

    return meanwhile(act)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "is_fixed"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)])
def test_secondary_lost_while_weights_are_sent_to_it(
    ring: Cluster, heavy: Path, checkpoint: Path, starter: Starter, number: int, is_fixed: bool
) -> None:
    clear(ring)
    with in_mid_transfer(ring, 1, lambda: ring[1].signal(number)):
        result = starter(heavy, ring.path, *ONE, *(["--fixed"] if is_fixed else ["--silence-s", 1]))
    assert "Traceback" not in result.err
    if is_fixed:
        assert result.status == 1 and "secondary1 was lost" in result.json["error"] and result.json["samples"] == []
    else:
        alone = starter(heavy, ring.nodes_file(1), *ONE)
        assert result.token_ids == alone.token_ids and result.json["recoveries"][0]["node"] == "secondary1"
    ring.revive()
    ring.wait_states("IDLE", "READY")
    assert starter(checkpoint, ring.path, *ONE, "--wait", 60).token_ids == expected()
    assert "Traceback" not in ring[0].err + ring[1].err


@pytest.mark.slow
def test_starter_killed_while_it_sends(
    ring: Cluster, heavy: Path, spawn: Spawn, checkpoint: Path, starter: Starter
) -> None:
    """What had come is gone on with the next time."""
    clear(ring)
    process = spawn("starter", "--ckpt", heavy, "--nodes-config", ring.path, "--wait", 60)
    with in_mid_transfer(ring, 1, lambda: process.signal(signal.SIGKILL)):
        process.wait()
    ring.wait_states("IDLE", "READY")
    assert starter(checkpoint, ring.path, *ONE, "--wait", 60).token_ids == expected()
    parts = [path for i in range(2) for path in ring.cache_dir(i).glob("*.part")]
    result = starter(heavy, ring.path, *ONE)
    assert result.status == 0, result.err
    assert not any(path.exists() for path in parts), "what was begun is whole now"
    assert "Traceback" not in ring[0].err + ring[1].err


def clear(ring: Cluster) -> None:
    """Let the secondaries forget what they were sent."""
    for index in range(ring.n_nodes - 1):
        shutil.rmtree(ring.cache_dir(index), ignore_errors=True)


@pytest.mark.slow
def test_beside_another_run(ring: Cluster, endless: Path, spawn: Spawn, starter: Starter, checkpoint: Path) -> None:
    """A second starter has the same nodes at the same time; the first one's run goes on."""
    process = spawn("starter", "--ckpt", endless, "--nodes-config", ring.path, "--n-tokens", 60000, "--n-samples", 1)
    process.wait_bytes(100)
    nodes = json.loads(ring.path.read_text(encoding="utf-8"))
    ports = free_ports(2)
    nodes["nodes"]["starter"].update(communication={"port": ports[0]}, inference={"port_in": ports[1]})
    second = ring.folder / "second.json"
    second.write_text(json.dumps(nodes), encoding="utf-8")
    result = starter(checkpoint, second, *ONE)
    assert result.token_ids == expected(), result
    process.wait_bytes(len(process.out) + 100)
    assert ring.status(1)["state"] == "RUNNING"
    process.signal(signal.SIGTERM)
    process.wait()
    ring.wait_states("IDLE", "READY")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"control_version": 7}', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_run(ring: Cluster, body: bytes) -> None:
    with requests.post(f"http://127.0.0.1:{ring.port(1)}/init", data=body, timeout=60) as answer:
        assert answer.status_code in (400, 409, 411) and isinstance(answer.json()["error"], str)
    assert ring.status(1)["state"] in ("IDLE", "READY")
