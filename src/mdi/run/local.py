"""Secondaries as child processes on this machine; they always end with it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from mdi.errors import NodeLostError, UsageError
from mdi.files import default_cache_dir, module_environment
from mdi.host.threads import fair_threads
from mdi.spec.cluster import ClusterConfig, load_cluster

PREFIX, LOCK = "mdi-ring-", "in-use"  # of a temporary folder, and the file in it that is locked
END_S = 5.0
STOPPED_S = 6.0
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0  # between two starts of a child that ends again and again
# Below those that systems give out by themselves: from 32768 on in Linux, from 49152 on elsewhere.
_PORTS = range(20_000, 32_000)
_number = itertools.count(int(os.getpid() * 0.618034 % 1 * len(_PORTS)))  # processes that begin together are far apart
_marks: deque[int] = deque(maxlen=64)  # until the process ends, or has asked for so many more

logger = logging.getLogger("mdi")


class LocalRing:
    """A context in which N - 1 secondaries run as processes; the caller is the starter.

    The children hold one end of a pipe as their stdin and end when it closes: however this process ends, they follow.

    Args:
        devices: "cuda:0,cuda:1", one for each node; None leaves the choice to the nodes.
        n_threads: CPU threads per node; None divides the cores among the nodes.
        ckpt: read by the secondaries themselves, so that nothing has to be sent.
        cores: divided among the nodes, each of which stays on its own; None pins nothing.
        kv_memory: bytes for caches on each node.
        n_spares: nodes besides those of the ring, which replace lost ones.
        key: file of the cluster's key.
        stopped_s: a child that was stopped (for example by SIGSTOP) for so long is lost.
        end_s: time for the children to clean up.
    """

    cluster: ClusterConfig  # from `__enter__` on

    def __init__(
        self,
        n_nodes: int,
        devices: str | None,
        n_threads: int | None,
        ckpt: Path | None,
        verbose: bool,
        debug: bool,
        cores: Sequence[int] | None = None,
        kv_memory: int | None = None,
        n_spares: int = 0,
        key: Path | None = None,
        stopped_s: float = STOPPED_S,
        end_s: float = END_S,
    ) -> None:
        self._stopped_s, self._end_s = stopped_s, end_s
        if n_nodes < 1:
            raise UsageError(f"--nodes must be at least 1, got {n_nodes}")
        if n_spares < 0:
            raise UsageError(f"--spares must be 0 or more, got {n_spares}")
        self._n_in_ring = n_nodes
        n_nodes += n_spares
        names = [None] * n_nodes if devices is None else _named_devices(devices, n_nodes)
        if n_threads is not None and n_threads < 1:
            raise UsageError(f"--threads must be at least 1, got {n_threads}")
        self._devices = names
        self._n_nodes = n_nodes
        self._cores = cores
        self._kv_memory = kv_memory
        self.threads_of_starter = n_threads or fair_threads(
            [None] * (self._n_in_ring - 1), None if cores is None else len(cores)
        )
        self._ckpt = ckpt
        self._key = key
        self._flags = [flag for flag, is_set in (("-v", verbose), ("-d", debug)) if is_set]
        self.children: list[subprocess.Popen[bytes]] = []
        self._reported: set[int] = set()  # process numbers of children that `check` has found to be lost
        self._stopped_since: dict[int, float] = {}  # process number -> time.monotonic()
        self._pauses = [Pause() for _ in range(n_nodes - 1)]
        self._folder: RingFolder | None = None

    def __enter__(self) -> LocalRing:
        self._folder = RingFolder()
        self._path.write_text(json.dumps(self._nodes()), encoding="utf-8")
        try:
            self.cluster = self.load(self._path)
            for index in range(self._n_nodes - 1):
                self.children.append(self.spawn(self._path, index))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in self.children:
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()
            with contextlib.suppress(OSError):
                child.kill() if _is_stopped(child.pid) else child.terminate()
        deadline = time.monotonic() + self._end_s
        for child in self.children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # stuck in a driver
                child.kill()
                child.wait(self._end_s)
        if self._folder is not None:
            self._folder.close()

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return self._folder.path / "nodes.json"

    @property
    def pids(self) -> list[int]:
        """Process numbers of the secondaries."""
        return [child.pid for child in self.children]

    def check(self) -> None:
        """Raises NodeLostError, once for each child, if one has ended or does not run any more.

        What it has printed itself says why.
        """
        for node, child in zip(self.cluster.secondaries, self.children, strict=False):  # spares come last
            if child.pid in self._reported:
                continue
            status = child.poll()
            if status is not None:
                self._reported.add(child.pid)
                raise NodeLostError(node.name, f"{node.name} has ended by itself (status {status})")
            if not _is_stopped(child.pid):
                self._stopped_since.pop(child.pid, None)
            elif time.monotonic() - self._stopped_since.setdefault(child.pid, time.monotonic()) > self._stopped_s:
                self._reported.add(child.pid)
                raise NodeLostError(
                    node.name, f"{node.name} (process {child.pid}) was stopped {self._stopped_s:.0f} s ago"
                )

    def revive(self) -> None:
        """Start children again that have ended: at once, but one that ends again and again after longer and longer pauses."""
        names = [node.name for node in (*self.cluster.secondaries, *self.cluster.spares)]
        for index, (name, child, pause) in enumerate(zip(names, self.children, self._pauses, strict=True)):
            if child.poll() is None or not pause.may_start(time.monotonic()):
                continue
            logger.warning("%s has ended by itself (status %s): it is started again", name, child.returncode)
            try:
                started = self.spawn(self._path, index)
            except OSError as e:  # for example no memory: there may be some after the next pause
                logger.warning("%s cannot be started: %s", name, e)
                continue
            self.children[index] = started
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()

    def load(self, path: Path) -> ClusterConfig:
        """Read the nodes file that `arrange` laid out."""
        return load_cluster(path)

    def arrange(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The nodes file of these nodes, starter first."""
        return {"nodes": {"starter": entries[0], "secondary": entries[1:]}}

    def command(self, path: Path, index: int) -> list[str]:
        """The command that runs secondary `index`, from 0 on."""
        return [sys.executable, "-m", "mdi.cli", "secondary", "--nodes-config", str(path), str(index)]

    def _nodes(self) -> dict[str, Any]:
        ports = iter(free_ports(2 * self._n_nodes))
        entries = []
        for index, device in enumerate(self._devices):
            entry: dict[str, Any] = {
                "addr": "127.0.0.1",
                "communication": {"port": next(ports)},
                "inference": {"port_in": next(ports)},
                "threads": self.threads_of_starter,
            }
            if index >= self._n_in_ring:
                entry["spare"] = True
            if device:
                entry["device"] = device
            if self._cores is not None:
                entry["cores"] = list(cores_of_node(self._cores, index % self._n_in_ring, self._n_in_ring))
            if self._kv_memory is not None:
                entry["kv_memory"] = self._kv_memory
            entries.append(entry)
        return self.arrange(entries)

    def spawn(self, nodes: Path, index: int) -> subprocess.Popen[bytes]:
        assert self._folder is not None
        command = [*self.command(nodes, index), "--until-stdin-closes"]
        command += ["--cache-dir", str(self._folder.path / f"cache{index}"), "--prefix-dir", str(default_cache_dir())]
        command += self._flags
        if not self._flags:
            command.append("--quiet")
        if self._key is not None:
            command += ["--key", str(self._key)]
        if self._ckpt is not None:
            command += ["--ckpt", str(self._ckpt)]
        env = {**module_environment(), "OMP_NUM_THREADS": str(self.threads_of_starter)}
        # A process group of its own: Ctrl-C goes only to the starter, which ends the run on all nodes.
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, env=env, start_new_session=os.name == "posix", creationflags=flags
        )


@dataclass
class Pause:
    """Between the starts of one child. It is twice as long each time, unless the child has run for longer than the longest."""

    next_s: float = 0.0  # no start before
    length_s: float = FIRST_PAUSE_S

    def may_start(self, now_s: float) -> bool:
        """Whether the child may be started now; if so, it counts as started."""
        if now_s < self.next_s:
            return False
        if now_s > self.next_s + LAST_PAUSE_S:
            self.length_s = FIRST_PAUSE_S
        self.next_s, self.length_s = now_s + self.length_s, min(2 * self.length_s, LAST_PAUSE_S)
        return True


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _named_devices(text: str, n_nodes: int) -> list[str | None]:
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise UsageError(
            f"--devices {text!r}: entry {names.index('') + 1} is empty; name a device for each of the {n_nodes} "
            "nodes, like cpu,cuda:0"
        )
    if len(names) != n_nodes:
        raise UsageError(f"--devices names {len(names)} devices for {n_nodes} nodes")
    return [*names]


def pinnable_cores() -> list[int]:
    """Numbers of the cores that this process may use; UsageError where no process can be kept on some of them."""
    if not hasattr(os, "sched_getaffinity"):
        raise UsageError(f"this system ({sys.platform}) cannot restrict a process to some cores: leave --pin out")
    return sorted(os.sched_getaffinity(0))


def cores_of_node(cores: Sequence[int], index: int, n_nodes: int) -> Sequence[int]:
    """The share of one node; with more nodes than cores, several stay on the same one."""
    if len(cores) < n_nodes:
        return [cores[index % len(cores)]]
    return cores[index * len(cores) // n_nodes : (index + 1) * len(cores) // n_nodes]


def free_ports(n: int) -> list[int]:
    """`n` different ports that are free on loopback at this moment. Nobody gets one of them without naming it.

    A UDP socket on the same number, which nothing here uses, tells other processes that ask that it is given out.
    """
    found: list[int] = []
    while len(found) < n:
        port = _PORTS[next(_number) % len(_PORTS)]
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        found.append(port)
        if len(_marks) == _marks.maxlen:
            socket.close(_marks.popleft())
        _marks.append(mark.detach())
    return found


# Its temporary folder


class RingFolder:
    """The temporary folder of a local ring, made at once. It is removed with the ring, even if its process was killed.

    The process that uses it holds a lock on a file in it, which the system releases however the process ends. So a folder
    with a free lock is unused, and the ring's own children or the next ring remove it. Without such locks (Windows), a folder
    stays if its process was killed. `close` removes it.
    """

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        new = self.path / f"{LOCK}.new"
        self._file = open(new, "wb")  # noqa: SIM115 - held until close
        _lock(self._file.fileno())
        new.rename(self.path / LOCK)  # under its name it is locked from the beginning

    def close(self) -> None:
        self._file.close()  # first, for Windows removes no open file
        shutil.rmtree(self.path, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of rings whose process was killed."""
    if sys.platform == "win32":
        return
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or in use
            file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                _lock(file)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(file)


def _lock(file: int) -> None:
    """Raises OSError if another process has it."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
