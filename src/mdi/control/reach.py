"""Whether this node can reach another one, and how fast: its control port, its ring port, the link.

Each type of problem has its own remedy: see `PROBLEMS`.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import mdi
from mdi.cancel import Cancel, Periodic
from mdi.control.client import ControlClient
from mdi.control.messages import COMPILING, CONTROL_VERSION, ProbeRequest
from mdi.errors import AccessError, Code, ControlError, NodeLostError, RingError, WireError
from mdi.net.hello import Fault, Hello, meet
from mdi.net.keys import KeyFile
from mdi.net.message import problem_of
from mdi.net.wire import Frame, FrameType, read_frame, send_frame, tune
from mdi.spec.cluster import NodeConfig
from mdi.spec.decode import Number, Text, decode, shown
from mdi.units import duration

DEADLINE_S = 5.0
N_TRIES = 4  # the first connection may have to ask the network for an address
ENOUGH_S = 0.2  # a transfer of this time is long enough to measure the bandwidth

PROBLEMS = {
    "name": "the name cannot be resolved",
    "refused": "nothing listens there",
    "timeout": "no answer",
    "unreachable": "no way there",
    "silent": "it takes connections, but does not answer",
    "closed": "the connection was closed",
    "stranger": "what answers is no node of MDI-LLM",
    "other": "another node answers there",
    "key": "it does not have the same cluster key",
    "untried": "not tried",
}
OF_THE_SYSTEM = ("name", "refused", "timeout", "unreachable")  # problems whose details are this system's own words


@dataclass(frozen=True)
class Reach:
    """Result of trying one port.

    Attributes:
        problem: a key of PROBLEMS; "" if all is well.
        detail: the system's words, or the name that answered; only for this machine, not for others.
        round_trip_s: of one connection, the best of a few; 0 is unknown.
        bytes_s: bandwidth towards that node; 0 is not measured.
    """

    problem: Text = ""
    detail: Text = ""
    round_trip_s: Number = 0.0
    bytes_s: Number = 0.0

    @property
    def is_ok(self) -> bool:
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        """The report for the caller, without any bytes from the other side, which may be a stranger."""
        return {**asdict(self), "detail": self.detail if self.problem in OF_THE_SYSTEM else ""}

    @classmethod
    def from_json(cls, data: Any) -> Reach:
        """Raises ControlError if a peer's answer cannot be read."""
        reach = decode(cls, data, "the way to another node", ControlError)
        if reach.problem and reach.problem not in PROBLEMS:
            raise ControlError(f"the node tells of a problem {reach.problem[:50]!r} that this version does not know")
        return reach


UNTRIED = Reach("untried")


@dataclass(frozen=True)
class Route:
    """Both ports of one node, as seen from another.

    Attributes:
        status: the control port's answer to `GET /`; None if there is none.
        clock_skew_s: how far its clock is ahead of the asking node's; 0 if it does not say.
    """

    control: Reach
    ring: Reach
    status: dict[str, Any] | None = None
    clock_skew_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.control.is_ok and self.ring.is_ok

    def to_json(self) -> dict[str, Any]:
        return {"control": self.control.to_json(), "ring": self.ring.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Route:
        """Raises ControlError if a peer's answer cannot be read."""
        if not isinstance(data, dict):
            raise ControlError(f"the ways to another node: expected an object, found {shown(data)}")
        return cls(Reach.from_json(data.get("control")), Reach.from_json(data.get("ring")))


def try_node(request: ProbeRequest, deadline_s: float = DEADLINE_S, keys: KeyFile | None = None) -> Route:
    """Try both ports of a node from here: connect, and ask for the status. Reports nothing else of the answers.

    Args:
        keys: of the cluster, if it has some.

    Never raises for network errors; takes at most a few deadlines.
    """
    client = ControlClient(NodeConfig(request.name, request.addr, request.port, request.port_in), keys)
    control = knock(request.addr, request.port, deadline_s)
    if control.problem == "name":
        return Route(control, control)
    if not control.is_ok:  # a firewall may let only the starter in there, and the ring goes another way
        return Route(control, greet(request.addr, request.port_in, "", deadline_s, keys))
    before = time.time()
    try:
        status = client.status(timeout_s=deadline_s)
    except ControlError as e:
        return Route(Reach(e.problem or "stranger", str(e)), greet(request.addr, request.port_in, "", deadline_s, keys))
    clock = status.get("clock_s")
    skew = float(clock) - (before + time.time()) / 2 if isinstance(clock, (int, float)) else 0.0
    ring = greet(request.addr, request.port_in, str(status.get("name", "")), deadline_s, keys)
    if request.measure and ring.is_ok:
        ring = replace(ring, bytes_s=bandwidth(client))
    return Route(control, ring, status, skew)


def knock(addr: str, port: int, deadline_s: float) -> Reach:
    """Connect and leave: the time from SYN to SYN-ACK is one round trip."""
    best = float("inf")
    try:
        found = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        return Reach("name", str(e))
    family, kind, proto, _, address = found[0]
    for _ in range(N_TRIES):
        with socket.socket(family, kind, proto) as sock:
            sock.settimeout(deadline_s)
            begin = time.perf_counter()
            try:
                sock.connect(address)
            except OSError as e:
                return Reach(problem_of(e), e.strerror or str(e))
            best = min(best, time.perf_counter() - begin)
    return Reach(round_trip_s=best)


def greet(addr: str, port_in: int, name: str, deadline_s: float, keys: KeyFile | None = None) -> Reach:
    """Say HELLO on a ring port, for a run that does not exist: a node of ours says no, and its name."""
    epoch = secrets.randbits(64)
    begin, round_trip_s = time.perf_counter(), 0.0
    try:
        with socket.create_connection((addr, port_in), deadline_s) as sock:
            round_trip_s = time.perf_counter() - begin
            tune(sock)
            sock.settimeout(deadline_s)
            codec = meet(sock, keys)
            question = Hello(0, 2, "", extensions={"question": True}).to_bytes()
            send_frame(sock, Frame.message(FrameType.HELLO, epoch, question), codec)
            frame = read_frame(sock, codec)
    except AccessError as e:
        return Reach("key", str(e))
    except WireError as e:
        return Reach("stranger", str(e))
    except (OSError, UnicodeError) as e:
        if round_trip_s and isinstance(e, TimeoutError):
            return Reach("silent")
        return Reach(problem_of(e), getattr(e, "strerror", None) or str(e))
    if frame is None:
        return Reach("closed", "it closed the connection without a word")
    if frame.type is not FrameType.ERROR:
        return Reach("stranger", f"it answered with a {frame.type.name} frame")
    fault = Fault.from_bytes(frame.payload)
    reporter = fault.reporter
    if fault.code is Code.KEY:
        return Reach("key")
    if name and reporter != name:
        return Reach("other", f"it calls itself {reporter[:60] or 'nothing'}, the control port {name[:60]}")
    return Reach(round_trip_s=round_trip_s)


def bandwidth(client: ControlClient) -> float:
    """Bytes per second towards a node; 0 if it takes none (it may be running).

    The slope between a small and a larger transfer, so that the fixed cost of a request does not count as a slow link.
    """
    try:
        small = min(_echo_s(client, 1 << 14) for _ in range(2))
        n_bytes, taken = 1 << 18, 0.0
        for n_bytes in (1 << 18, 1 << 20, 1 << 22):
            taken = _echo_s(client, n_bytes)
            if taken > ENOUGH_S:
                break
        else:
            taken = min(taken, _echo_s(client, n_bytes))
    except ControlError:
        return 0.0
    return (n_bytes - (1 << 14)) / (taken - small) if taken > 1.2 * small else n_bytes / taken


def _echo_s(client: ControlClient, n_bytes: int) -> float:
    begin = time.perf_counter()
    client.echo(n_bytes)
    return time.perf_counter() - begin


BUSY_S = 12.0  # a node whose last starter was killed gives it up after ten seconds of silence

COMPILED_S = 0.1
LOG_COMPILING_S = 10.0

logger = logging.getLogger("mdi")


def reach_node(client: ControlClient, wait_s: float, cancel: Cancel) -> dict[str, Any]:
    """The status of a node, waited for; a starter may well be started before its secondaries.

    A node that compiles its kernels is waited for, however long that takes: it answers meanwhile.

    Raises:
        NodeLostError: it does not answer in time.
        RingError: it is of another version.
        ControlError: something else answers there.
    """
    deadline = time.monotonic() + wait_s
    report = Periodic(LOG_COMPILING_S)
    for attempt in itertools.count():
        cancel.check()
        try:
            status = client.status()
        except ControlError as e:
            if e.status is not None:
                raise
            if e.problem == "silent":  # there is a process, but it hangs or was stopped
                raise NodeLostError(
                    client.node.name, f"{e}: look at the output of {client.node.name}, end it, and start it again"
                ) from None
            if time.monotonic() > deadline:
                raise NodeLostError(
                    client.node.name, f"{e}: is mdi secondary running there, and are address and communication port right? "
                    "mdi doctor tells more",
                ) from None  # fmt: skip
            if attempt == 6:  # three seconds: a node that is just starting is not reported
                logger.info("waiting for %s (up to %.0f s): %s", client.node.name, wait_s, e)
            cancel.wait(0.5)
            continue
        if status["state"] != COMPILING:
            break
        deadline = time.monotonic() + wait_s
        if report.is_due():
            logger.info("%s", compiling(client.node.name, status))
        cancel.wait(COMPILED_S)
    if status.get("control_version") != CONTROL_VERSION:
        raise RingError(
            f"{client.where} runs version {status.get('version')} of MDI-LLM (control protocol "
            f"{status.get('control_version')}), this machine version {mdi.__version__} (control protocol {CONTROL_VERSION}): "
            "install the same version on both"
        )
    return status


def compiling(name: str, status: dict[str, Any]) -> str:
    """A line about a node that compiles its kernels, which it began when it was started."""
    up_s = status.get("up_s")
    so_far = f" ({duration(up_s)} so far)" if isinstance(up_s, (int, float)) else ""
    return f"{name} compiles its kernels, once{so_far}"
