"""Nodes of one machine, and how many of its cores each computes on, in the kernels and in torch."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from mdi.control_groups import n_cores
from mdi.errors import UsageError
from mdi.spec.cluster import NodeConfig


def host_of(addr: str) -> str:
    """The machine behind an address, as far as it is known: nodes of one machine share its cores."""
    try:
        found = str(socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return addr
    return "loopback" if found.startswith("127.") or found == "::1" else found


def threads_of_others(node: NodeConfig, nodes: Sequence[NodeConfig]) -> list[int | None]:
    """Threads of the other nodes on this node's machine, None where the nodes file says nothing; nodes on GPUs do not count."""
    others = [other for other in nodes if other.name != node.name and (other.device or "auto") in ("auto", "cpu")]
    if not others:
        return []
    host = host_of(node.addr)
    return [_threads_of(other) for other in others if host_of(other.addr) == host]


def _threads_of(node: NodeConfig) -> int | None:
    return node.threads or (len(node.cores) if node.cores else None)


def share_cores(nodes: Sequence[NodeConfig]) -> bool:
    """Whether nodes on the machine of the first one, this node, have more threads than cores. How many cores other machines
    have is not known here.
    """
    host = host_of(nodes[0].addr)
    here = [node for node in nodes if (node.device or "auto") in ("auto", "cpu") and host_of(node.addr) == host]
    cores = [core for node in here for core in node.cores or ()]
    if len(here) < 2:
        return False
    return len(set(cores)) < len(cores) or sum(_threads_of(node) or 1 for node in here) > usable_cores()


def fair_threads(others: Sequence[int | None], cores: float | None = None) -> int:
    """Threads for a node that was not given a number: one for each whole core that it can have.

    A thread more than cores only makes the others wait, and under a quota stops all of them for the rest of the period. Of
    two threads on one core (hyper-threading) the second brings nothing.

    Args:
        others: threads of the other nodes of this machine; those without a number get as many as this one.
        cores: that this process may use; None asks the system.
    """
    left = (usable_cores() if cores is None else cores) - sum(n for n in others if n is not None)
    return max(1, int(left / (1 + sum(n is None for n in others))))


def usable_cores() -> float:
    """Cores that this process may use; two that are one core of the hardware count once."""
    usable = n_cores()
    return min(usable, psutil.cpu_count(logical=False) or usable)


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # with which a user chooses for all programs


class _Threads(threading.local):
    here: int | None = None  # of `computing_threads`, on this thread


_of_thread = _Threads()
of_process: int | None = None


def n_threads() -> int:
    """Threads that this node computes with, as far as the calling thread is concerned."""
    return _of_thread.here or of_process or _named() or fair_threads(())


def _named() -> int | None:
    """The value of the environment."""
    for name in THREAD_VARIABLES:
        with contextlib.suppress(ValueError):
            if (n := int(os.environ.get(name, "0").split(",")[0])) > 0:
                return n
    return None


def choose_threads(n: int | None, cores: Sequence[int] | None = None, others: Sequence[int | None] = ()) -> None:
    """Compute with `n` threads, on `cores`; and let the ring's threads in quickly while Python computes.

    Without a number of threads: as many as cores; without those, what OMP_NUM_THREADS or MKL_NUM_THREADS say; else this
    node's share of its machine.

    Args:
        others: threads of the other nodes on this machine, see `mdi.host.threads`.

    Raises:
        UsageError: a core that this process does not have, or a system that cannot pin.
    """
    global of_process
    if cores is not None:
        pin_to_cores(cores)
        n = n or len(cores)
    of_process = n or _named() or fair_threads(others)
    # With the default of 5 ms, a ring thread would wait so long for the interpreter each time.
    sys.setswitchinterval(0.0005)
    tell_torch()


@contextlib.contextmanager
def computing_threads(n: int | None) -> Iterator[None]:
    """Within this context, the calling thread computes with so many threads; None changes nothing."""
    before = _of_thread.here
    compute_with(n or before)
    try:
        yield
    finally:
        compute_with(before)


def compute_with(n: int | None) -> None:
    """From now on, the calling thread computes with so many threads; None is the process's number."""
    _of_thread.here = n
    tell_torch()


def tell_torch() -> None:
    """Have torch, where it is loaded, compute with as many; it keeps a number for each thread of the process."""
    if "torch" in sys.modules:
        import torch

        torch.get_num_threads()  # at the first call on a thread, torch takes over what another one set last
        torch.set_num_threads(n_threads())


def pin_to_cores(cores: Sequence[int]) -> None:
    """Keep this process on `cores`: the threads that there are, and those that they start; UsageError if that cannot be."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"this system ({sys.platform}) cannot restrict a process to some cores: leave --cores out")
    allowed = os.sched_getaffinity(0)
    strange = sorted(set(cores) - allowed)
    if strange:
        raise UsageError(
            f"this process cannot run on core {strange[0]} (--cores, or `cores` in the nodes file); it may use "
            f"{', '.join(map(str, sorted(allowed)))}"
        )
    tasks = Path("/proc/self/task")
    threads = [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else []
    os.sched_setaffinity(0, cores)
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)
