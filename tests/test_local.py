"""A local ring whose processes are stopped or killed: it ends soon, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

import mdi.control.client
import mdi.run.local
import mdi.run.setup
from mdi.cancel import Cancel
from mdi.control.client import ControlClient
from mdi.control.reach import reach_node
from mdi.errors import NodeLostError
from mdi.run.local import FIRST_PAUSE_S, LAST_PAUSE_S, LOCK, PREFIX, LocalRing, Pause, RingFolder, sweep
from mdi.spec.cluster import NodeConfig
from test_exchange import served
from waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and locks of POSIX")

DEADLINE_S = 30.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Sleeping(LocalRing):
    """Its nodes only wait for the end of the ring."""

    def spawn(self, nodes: Path, index: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def wait_stopped(pid: int) -> None:
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def test_a_child_that_was_stopped_is_lost(folder: Path) -> None:
    with Sleeping(3, None, 1, None, False, False, stopped_s=0.1) as ring:
        ring.check()
        os.kill(ring.pids[1], signal.SIGSTOP)
        wait_stopped(ring.pids[1])
        ring.check()
        threading.Event().wait(0.2)
        with pytest.raises(NodeLostError) as caught:
            ring.check()
        assert caught.value.node == "secondary1"
        children = list(ring.children)
    assert children[1].returncode == -signal.SIGKILL, "it would not have noticed anything else"
    assert children[0].returncode in (0, -signal.SIGTERM)
    assert not list(folder.iterdir())


def test_a_short_stop_is_forgotten(folder: Path) -> None:
    with Sleeping(2, None, 1, None, False, False, stopped_s=0.1) as ring:
        for _ in range(2):
            os.kill(ring.pids[0], signal.SIGSTOP)
            wait_stopped(ring.pids[0])
            ring.check()
            os.kill(ring.pids[0], signal.SIGCONT)
            until(lambda: psutil.Process(ring.pids[0]).status() != psutil.STATUS_STOPPED)
            threading.Event().wait(0.2)
            ring.check()


def test_a_child_that_ends_is_started_again(folder: Path) -> None:
    with Sleeping(3, None, 1, None, False, False) as ring:
        before = list(ring.children)
        ring.revive()
        assert ring.children == before
        os.kill(ring.pids[1], signal.SIGKILL)
        before[1].wait(DEADLINE_S)
        ring.revive()
        assert ring.children[0] is before[0] and ring.children[1].poll() is None
        assert before[1].stdin is not None and before[1].stdin.closed
        again = ring.children[1]
        os.kill(again.pid, signal.SIGKILL)
        again.wait(DEADLINE_S)
        ring.revive()
        assert ring.children[1] is again, "not at once a second time"
        children = list(ring.children)
    assert all(child.poll() is not None for child in children)


def test_pauses_grow_and_are_forgotten_after_a_long_life() -> None:
    pause, now, starts = Pause(), 1000.0, []
    for _ in range(2000):
        if pause.may_start(now):
            starts.append(now)
        now += 0.1
    assert [round(b - a) for a, b in zip(starts, starts[1:], strict=False)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pause.may_start(now + 3 * LAST_PAUSE_S) and pause.length_s == 2 * FIRST_PAUSE_S


def test_a_folder_of_a_killed_ring_is_removed_and_no_other(folder: Path) -> None:
    code = f"""
import signal, os, tempfile
tempfile.tempdir = {str(folder)!r}
from mdi.run.local import RingFolder
kept = RingFolder()
(kept.path / "cache0").mkdir()
(kept.path / "cache0" / "part").write_bytes(bytes(9))
os.kill(os.getpid(), signal.SIGKILL)
"""
    src = str(Path(mdi.run.local.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": src}, timeout=DEADLINE_S)
    (left,) = folder.glob(f"{PREFIX}*")
    other = folder / f"{PREFIX}of-somebody"
    other.mkdir()
    alive = RingFolder()
    assert not left.exists() and alive.path.is_dir()
    sweep()
    assert (alive.path / LOCK).exists() and other.is_dir()
    alive.close()
    assert [path.name for path in folder.iterdir()] == [other.name]


def test_a_node_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections, because the system does, and says nothing: it is not about to start."""
    asked: list[int] = []

    def silent(sock: object) -> None:
        asked.append(1)
        sock.recv(1)  # type: ignore[attr-defined]

    with served(silent) as (client, _), pytest.raises(NodeLostError) as caught:
        monkeypatch.setattr(ControlClient.status, "__defaults__", (None, 0.3))
        reach_node(client, 1000.0, Cancel())
    assert caught.value.node == "secondary0" and asked == [1]


def test_a_node_that_is_not_there_yet_is_waited_for() -> None:
    with Cancel(1.2, late=KeyboardInterrupt) as cancel, pytest.raises(KeyboardInterrupt):
        reach_node(ControlClient(NodeConfig("secondary0", "127.0.0.1", 1, 1)), 1000.0, cancel)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_child_that_waits_for_its_stdin_can_end_before() -> None:
    """In good order, though a thread still reads; and by SIGTERM once it is closed."""
    code = (
        "import sys, threading, time\nfrom mdi.cli.secondary import leave_with_stdin\n"
        "threading.Thread(target=leave_with_stdin, daemon=True).start()\ntime.sleep(float(sys.argv[1]))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(mdi.run.local.__file__).parents[2])}
    for seconds, status in ((0.1, 0), (60, -signal.SIGTERM)):
        command = [sys.executable, "-c", code, str(seconds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as child:
            assert child.stdin is not None and child.stderr is not None
            if status:
                child.stdin.close()
            assert child.wait(DEADLINE_S) == status
            assert child.stderr.read() == b""
