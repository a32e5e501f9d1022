"""Connects the nodes of a group, and the ring as they see it.

Each node calls those before it, on their ring ports, once the ring is closed. The handshake is the ring's: a HELLO that must
fit, after a proof of the cluster key where there is one. Then all send each other as much as opens TCP's windows.

A frame goes through a group from node to node. Each node passes it on before it computes its share, and the last one sends the
result to the next stage. A task about prefixes goes on with each node's answer (FILL before it), also where the group is the
whole ring.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from mdi.cancel import Cancel
from mdi.engine.rows import ArrayRows, rows_of
from mdi.engine.worker import FrameStage, SecondaryLoop
from mdi.errors import AccessError, Code, MdiError, NodeLostError, WireError
from mdi.net.handshake import CONNECT_S
from mdi.net.hello import CannotConnectError, Hello, call
from mdi.net.listener import Expectation, RingListener
from mdi.net.reconnect import Dialer, Waiter
from mdi.net.ring import Ring, Seat, TcpRing
from mdi.net.wire import HANDSHAKE_LIMITS, SILENCE_S, Frame, FrameType, read_frame, tune
from mdi.tensor.group import Group
from mdi.tensor.mesh import Mesh, Peer, Reconnects
from mdi.tensor.sums import AllReduce, Numbers

_EPOCH = 0x7465_6E73_6F72_0000  # a group's connections are not those of its ring
_FIRST_BYTES = 1 << 16
_DEPTH_BYTES = 1 << 22  # of a socket's own buffers, asked for


@dataclass(frozen=True)
class _Pair(Seat):
    """A node's side of its connection to one other node of the group."""

    other: int = 0

    @property
    def prev_name(self) -> str:
        return self.names[self.other]

    @property
    def next_name(self) -> str:
        return self.names[self.other]


class GroupLinks:
    """The connections of one node to the others of its group, from the moment they are expected.

    Args:
        epoch, placement: of the run's ring.
        process: of this node, see Hello.
        silence_s: a node that cannot be connected with again for so long is lost.
    """

    def __init__(
        self, group: Group, listener: RingListener, epoch: int, placement: str, process: str = "",
        silence_s: float = SILENCE_S,
    ) -> None:  # fmt: skip
        self._group, self._listener, self._placement = group, listener, placement
        self._epoch = epoch ^ _EPOCH
        self._process, self._silence_s = process, silence_s
        self._expected: dict[int, Expectation] = {
            rank: listener.expect(self._epoch, self._hello(rank), answer=self._pair(rank).hello)
            for rank in range(group.rank + 1, group.size)
        }

    def _hello(self, rank: int) -> Hello:
        return Hello(rank, self._group.size, self._placement, self._group.members[rank].name)

    def _pair(self, rank: int) -> _Pair:
        group = self._group
        member, names = group.members[rank], tuple(member.name for member in group.members)
        return _Pair(
            self._epoch, group.rank, names, self._placement, member.addr, member.port, process=self._process,
            keys=self._listener.keys, silence_s=self._silence_s, other=rank,
        )  # fmt: skip

    def connect(self, cancel: Cancel, is_busy: bool) -> AllReduce:
        """Connect to all others.

        Args:
            cancel: see Mesh; also looked at while others are awaited.
            is_busy: see Mesh.

        Raises:
            RingError: one of them is not there.
        """
        group = self._group
        peers: list[Peer | None] = [None] * group.size
        mesh: Mesh | None = None
        try:
            for rank in range(group.rank):
                peers[rank] = self._call(rank)
            for rank, expectation in self._expected.items():
                peers[rank] = self._await(rank, expectation, cancel)
            mesh = Mesh(group.rank, peers, is_busy, cancel)
            Reconnects(mesh, self._silence_s, _deepen)
            open_windows(mesh)
            return AllReduce(mesh, group.algorithm, Numbers(group.reduce_dtype))
        except BaseException:
            if mesh is not None:
                mesh.close()
            for peer in peers:
                if peer is not None and peer.again is not None:
                    peer.again.stop()
                    peer.close()
            raise

    def _call(self, rank: int) -> Peer:
        member = self._group.members[rank]
        where = f"{member.name} at {member.addr}:{member.port}"
        sock: socket.socket | None = None
        try:
            pair = self._pair(rank)
            sock, codec = call((member.addr, member.port), pair.hello, self._listener.keys, CONNECT_S)
            answer = read_frame(sock, codec)
            if answer is None or answer.type is not FrameType.HELLO or answer.epoch != self._epoch:
                raise WireError("it does not take part in this group")
            process = Hello.from_bytes(answer.payload).process
        except CannotConnectError as e:
            raise NodeLostError(
                member.name, f"{self._own_name} cannot reach {where}: {e}. The nodes of a group must reach each other's "
                "ring ports: check addr, port_in and firewall",
            ) from None  # fmt: skip
        except (AccessError, WireError, OSError) as e:
            if sock is not None:
                sock.close()
            code = e.code if isinstance(e, MdiError) else Code.RING
            raise NodeLostError(member.name, f"{self._own_name} and {where} could not connect: {e}", code) from None
        _deepen(sock)
        return Peer(member.name, sock, codec.session, Dialer(pair, HANDSHAKE_LIMITS, process), is_caller=True)

    def _await(self, rank: int, expectation: Expectation, cancel: Cancel) -> Peer:
        name, deadline = self._group.members[rank].name, time.monotonic() + CONNECT_S
        while (sock := expectation.wait(0.2)) is None:
            cancel.check()
            if time.monotonic() > deadline:
                raise NodeLostError(name, f"{name} did not connect to {self._own_name}")
        assert expectation.caller is not None
        _deepen(sock)
        again = Waiter(self._pair(rank), HANDSHAKE_LIMITS, self._listener, expectation.caller)
        return Peer(name, sock, expectation.codec.session, again)

    @property
    def _own_name(self) -> str:
        return self._group.members[self._group.rank].name

    def close(self) -> None:
        """Expect no more connections; existing ones stay."""
        for expectation in self._expected.values():
            self._listener.forget(expectation)


def _deepen(sock: socket.socket) -> None:
    """Large buffers, so that a node can send a sum while the other one computes."""
    tune(sock)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):  # a system may grant less
            sock.setsockopt(socket.SOL_SOCKET, option, _DEPTH_BYTES)


def open_windows(mesh: Mesh) -> None:
    """Send something larger than a sum over every connection, so that TCP does not pace or delay the sums.

    Only connections of the first node carry more than rows otherwise. With BBR and links of 10 ms, an exchange of 8 KB between
    four nodes took 12.9 ms without this, and 11.3 with it.
    """
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    data = bytes(_FIRST_BYTES)
    mesh.swap([(rank, data) for rank in others], [(rank, len(data)) for rank in others])


class LogitSender(Protocol):
    """A member's stage: mdi.stages.kernel_stage.KernelStage."""

    n_embd: int

    def send_logits(self, x: np.ndarray) -> None:
        """Its part of the logits of rows (M, n_embd), to the group's first node."""


class MemberRing:
    """The ring that SecondaryLoop sees on a node of a group.

    Args:
        stage: the node's share.
        is_whole: the group is the whole ring: its first node, the starter, has the result as well, and nothing leaves but
            this node's part of the logits. The loop must keep only the rows that need some.
    """

    def __init__(self, inner: Any, stage: LogitSender, group: Group, is_whole: bool) -> None:
        self._inner, self._stage = inner, stage
        self._passes_on, self._sends = not group.is_last, group.is_last and not is_whole
        self._is_whole = is_whole

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        return self._taken(self._inner.recv(timeout_s))

    def poll(self) -> Frame | None:
        return self._taken(self._inner.poll())

    def _taken(self, frame: Frame | None) -> Frame | None:
        if frame is not None and self._passes_on and not frame.is_task:
            self._inner.send(
                replace(frame, payload=bytes(frame.payload))
            )  # the buffer is used again when it is released
        return frame

    def send(self, frame: Frame) -> None:
        if self._sends or frame.is_task:  # with this node's answer, which the next one adds its own to
            self._inner.send(frame)
        elif self._is_whole and frame.n_rows:
            self._stage.send_logits(rows_of(frame, self._stage.n_embd))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LeaderRing:
    """The ring that the starter's engine sees where its node computes a share: frames that it sends hold embedded rows.

    Args:
        stage: the starter's share of the blocks.
        is_whole: as MemberRing's; then the rows come back at once, and one frame is in flight.
    """

    def __init__(self, inner: TcpRing, stage: FrameStage, is_whole: bool) -> None:
        self._inner, self._is_whole = inner, is_whole
        self._loop = _Share(stage, inner)
        self.capacity = 1 if is_whole else inner.capacity

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    @property
    def n_nodes(self) -> int:
        return self._inner.n_nodes

    @property
    def compute_s(self) -> float:
        return self._loop.compute_s

    def send(self, frame: Frame) -> None:
        self._inner.send(frame)
        if frame.is_task:  # it goes round the ring
            return
        done = self._loop.computed(frame)
        if self._is_whole:
            self._inner.inbox.put(done)

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        return self._inner.recv(timeout_s)

    def release(self, frame: Frame) -> None:
        if frame.is_task or not self._is_whole:
            self._inner.release(frame)

    def wake(self) -> None:
        self._inner.wake()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Share(SecondaryLoop):
    """A loop's computing, without its ring: rows that need logits come back, as from a ring's last node."""

    def __init__(self, stage: FrameStage, ring: Ring) -> None:
        super().__init__(stage, ArrayRows(), ring, is_last=True)

    def computed(self, frame: Frame) -> Frame:
        return self._compute(frame)
