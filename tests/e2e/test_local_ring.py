"""local_ring.py: a whole ring from one command, and nothing left of it, however it ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from cluster_keys import key_file
from mdi.engine.recorder import Activity
from mdi.run.explain import explain, summarize
from mdi.run.trace import Trace, read_trace
from processes import SOON_S, Process, Spawn, children_of, wait_gone
from tiny_checkpoint import TEXT, reference

ENDLESS = ("--nodes", 3, "--prompt-style", "none", "--n-tokens", 60000, "--n-samples", 2, "--temperature", 0)


def started(spawn: Spawn, endless: Path, folder: Path, *flags: str) -> tuple[Process, list[int]]:
    """A local ring in mid-run, and its secondaries in ring order."""
    folder.mkdir()
    process = spawn("local_ring", "--ckpt", endless, *ENDLESS, *flags, env={"TMPDIR": str(folder)})
    process.wait_bytes(300)
    children = sorted(children_of(process.pid), key=index_of)
    assert len(children) == 2
    return process, children


def index_of(pid: int) -> int:
    """Which secondary a process is, by its command line."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return int(words[words.index(b"--nodes-config") + 2])


def test_three_nodes(spawn: Spawn, checkpoint: Path, tmp_path: Path) -> None:
    process = spawn(
        "local_ring", "--nodes", 3, "--ckpt", checkpoint, "--prompt", "The ring", "--prompt", TEXT, "--n-tokens", 10,
        "--temperature", 0, "--prompt-style", "none", "--json", "--trace", tmp_path / "trace.json",
        "--key", key_file(tmp_path / "cluster.key").path,
        env={"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.wait() == 0, process.story()
    found = json.loads(process.out)
    check_trace(read_trace(tmp_path / "trace.json"))
    assert [s["token_ids"] for s in found["samples"]] == [list(reference(p, 10)) for p in ("The ring", TEXT)]
    assert [n["name"] for n in found["nodes"]] == ["starter", "secondary0", "secondary1"]
    assert not list(tmp_path.glob("mdi-ring-*")), "its folder is gone as well"


def check_trace(trace: Trace) -> None:
    """Every frame is on all three nodes, and reaches none before it has left the one before, as far as clocks can tell."""
    assert [node.name for node in trace.nodes] == ["starter", "secondary0", "secondary1"]
    assert trace.n_tokens == 20
    summary = summarize(trace)
    assert summary is not None and summary.n_frames >= 10 and 0 < summary.in_flight <= 3.1
    for node, following in zip(trace.nodes, trace.nodes[1:] + trace.nodes[:1], strict=True):
        sent = {span.frame: span for span in node.of(Activity.SEND)}
        arrived = {span.frame: span for span in following.of(Activity.ARRIVAL)}
        error_ns = 1e9 * (node.clock_error_s + following.clock_error_s)
        assert sent.keys() == arrived.keys() and len(sent) >= 10
        assert all(arrived[i].begin_ns >= sent[i].begin_ns - error_ns for i in sent)
        assert {span.frame for span in following.of(Activity.BLOCKS)} >= set(sent) - {0}
    assert explain(summary).findings


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_children_do_not_outlive_it(spawn: Spawn, endless: Path, tmp_path: Path, number: int, status: int) -> None:
    process, children = started(spawn, endless, tmp_path / "ring")
    begun = [
        "starting 3 processes",
        "control port",
        "secondary0 is ready",
        "the ring is closed: starter ->",
    ]
    places = [process.err.find(words) for words in begun]
    assert places == sorted(places) and -1 not in places, "it tells what happens"
    process.signal(number)
    assert process.wait(SOON_S) == status, process.story()
    wait_gone(children)
    assert not list((tmp_path / "ring").glob("mdi-ring-*")), "its children remove what a killed one could not"
    if number != signal.SIGKILL:
        assert "what each sample had reached" in process.out
        assert "Traceback" not in process.err, process.err
    assert ("interrupted: ending" in process.err) == (number == signal.SIGINT)


@pytest.mark.slow
def test_a_child_that_dies(spawn: Spawn, endless: Path, tmp_path: Path) -> None:
    process, children = started(spawn, endless, tmp_path / "ring", "--fixed")
    os.kill(children[1], signal.SIGKILL)
    assert process.wait(SOON_S) == 1, process.story()
    assert "secondary1 is lost" in process.err and "what each sample had reached" in process.out
    assert "Traceback" not in process.err
    wait_gone(children)


@pytest.mark.slow
def test_a_child_that_cannot_start(spawn: Spawn, checkpoint: Path) -> None:
    """Its own line says why, and the whole is over soon, not after all the waiting for a node that will not come."""
    process = spawn("local_ring", "--nodes", 2, "--devices", "cpu,cuda:77", "--ckpt", checkpoint, "--wait", 1000)
    assert process.wait(2 * SOON_S) not in (0, None), process.story()
    assert "cuda:77" in process.err and "Traceback" not in process.err, process.err
