"""Connects the nodes of a group: each calls those before it, on their ring ports, once the ring is closed.

The handshake is the ring's: a HELLO that must fit, after a proof of the cluster key where there is one. Then all send
each other as much as opens TCP's windows.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from mdi.errors import AccessError, MdiError, NodeLostError, WireError
from mdi.net.handshake import CONNECT_S
from mdi.net.hello import Hello
from mdi.net.listener import Expectation, RingListener
from mdi.net.meeting import CannotConnectError, call
from mdi.net.reconnect import Dialer, Waiter
from mdi.net.ring import Seat
from mdi.net.wire import HANDSHAKE_LIMITS, SILENCE_S, FrameType, read_frame, tune
from mdi.tensor.allreduce import AllReduce
from mdi.tensor.group import Group
from mdi.tensor.mesh import Mesh
from mdi.tensor.numbers import Numbers
from mdi.tensor.peer import Peer
from mdi.tensor.reconnects import Reconnects

_EPOCH = 0x7465_6E73_6F72_0000  # a group's connections are not those of its ring
_FIRST_BYTES = 1 << 16
_DEPTH_BYTES = 1 << 22  # of a socket's own buffers, asked for

Check = Callable[[float], None]


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

    def connect(self, check: Check, is_busy: bool) -> AllReduce:
        """Connect to all others.

        Args:
            check: see Mesh; also called while waiting for others.
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
                peers[rank] = self._await(rank, expectation, check)
            mesh = Mesh(group.rank, peers, is_busy, check)
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
            code = e.code if isinstance(e, MdiError) else NodeLostError.code
            raise NodeLostError(member.name, f"{self._own_name} and {where} could not connect: {e}", code) from None
        _deepen(sock)
        return Peer(member.name, sock, codec.session, Dialer(pair, HANDSHAKE_LIMITS, process), is_caller=True)

    def _await(self, rank: int, expectation: Expectation, check: Check) -> Peer:
        name, deadline = self._group.members[rank].name, time.monotonic() + CONNECT_S
        while (sock := expectation.wait(0.2)) is None:
            check(0.0)
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
    """Send something larger than a sum over every connection, so that TCP does not pace or hold back the sums.

    Only connections of the first node carry more than rows otherwise. With BBR and links of 10 ms, an exchange of 8 KB between
    four nodes took 12.9 ms without this, and 11.3 with it.
    """
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    data = bytes(_FIRST_BYTES)
    mesh.swap([(rank, data) for rank in others], [(rank, len(data)) for rank in others])
