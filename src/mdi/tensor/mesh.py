"""Connections between all nodes of a group for their sums. The computing thread reads and writes them.

Every message has a length that both sides know. Sockets do not block: a node that must both send and receive does what can be
done, so that two nodes never wait for each other to read. A waiting node polls for a moment if cores are free, and sleeps
otherwise; while it sleeps, it still notices the end of the run.

A broken connection is replaced by another thread (`tensor.reconnects`), so that nobody waits for a node that computes.
"""

from __future__ import annotations

import select
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from mdi.errors import EngineError, NodeLostError
from mdi.tensor.peer import Buffer, Peer

SLEEP_S = 0.05  # after which a sleeping node checks whether the run is over
BROKEN_SLEEP_S = 0.002  # the same while a connection is being replaced
STALL_S = 300.0  # a node that lives computes its part of a frame's block in less
VERDICT_S = 8.0  # by then the ring names the lost node
N_TIMES = 4096  # of sums, that are kept
BUSY_S = 0.002  # how long a node looks for a message before it sleeps, where cores are free


class Tally:
    """What a node's sums took: how many, in all, and the last ones."""

    def __init__(self) -> None:
        self.n_sums, self.reduce_s, self.bytes_sent = 0, 0.0, 0
        self._last_s: deque[float] = deque(maxlen=N_TIMES)

    def count(self, seconds: float) -> None:
        self.n_sums += 1
        self.reduce_s += seconds
        self._last_s.append(seconds)

    @property
    def median_s(self) -> float:
        """Of the last sums; 0 without any."""
        return statistics.median(self._last_s.copy() or (0.0,))


class Mesh:
    """The connections of one node.

    Args:
        peers: by rank; this node's own place holds None.
        is_busy: look for messages for a moment before sleeping: for nodes that have cores to themselves.
        check: called now and then while this node sleeps, and when a connection broke; waits up to so many seconds for the
            end of the run, and raises what ended it.
    """

    def __init__(
        self, rank: int, peers: Sequence[Peer | None], is_busy: bool = False,
        check: Callable[[float], None] = lambda wait_s: None,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, len(peers)
        self._peers = list(peers)
        self._busy_s = BUSY_S if is_busy else 0.0
        self.check = check
        self.on_close: Callable[[], None] = lambda: None
        self.tally = Tally()
        self._copies: deque[list[bytearray]] = deque(([], []))  # what was sent in the last sum and in this one
        self._spare: list[bytearray] = []

    @property
    def names(self) -> list[str]:
        return [peer.name if peer is not None else "" for peer in self._peers]

    def peer(self, rank: int) -> Peer:
        found = self._peers[rank]
        assert found is not None
        return found

    def swap(self, sends: Iterable[tuple[int, Buffer]], receives: Iterable[tuple[int, int]]) -> dict[int, memoryview]:
        """Send messages and receive others, whichever can be done.

        Args:
            sends: (rank, bytes), at most one for each rank.
            receives: (rank, number of bytes), likewise.

        Returns:
            What came, by rank; good until the next message of that rank.

        Raises:
            RingError: a connection broke, or the run was ended. WireError: another message came. EngineError: nothing came
                for minutes.
        """
        try:
            return self._swap(sends, receives)
        except NodeLostError:
            self.check(VERDICT_S)  # the ring names the lost node; other nodes close their connections because of it
            raise

    def _swap(self, sends: Iterable[tuple[int, Buffer]], receives: Iterable[tuple[int, int]]) -> dict[int, memoryview]:
        begin = time.perf_counter()
        arriving = []
        for rank, n_bytes in receives:
            peer = self.peer(rank)
            peer.begin_receive(n_bytes)
            arriving.append((rank, peer))
        leaving = []
        for rank, data in self._lasting(list(sends)):
            peer = self.peer(rank)
            self.tally.bytes_sent += memoryview(data).nbytes
            if not peer.begin_send(data):
                leaving.append(peer)
        found: dict[int, memoryview] = {}
        while arriving or leaving:
            before = len(arriving), len(leaving)
            for entry in arriving[:]:
                if (message := entry[1].receive_on()) is not None:
                    arriving.remove(entry)
                    found[entry[0]] = message
            for peer in leaving[:]:
                if peer.send_on():
                    leaving.remove(peer)
            if before == (len(arriving), len(leaving)) and time.perf_counter() - begin >= self._busy_s:
                self._sleep(begin, [peer for _, peer in arriving], leaving)
        return found

    def _lasting(self, sends: Sequence[tuple[int, Buffer]]) -> Sequence[tuple[int, Buffer]]:
        """What is sent, copied once where it may have to be sent again: the caller then changes the array."""
        if not sends or self.peer(sends[0][0]).again is None:
            return sends
        if len(sends) == 1:
            return [(sends[0][0], self._copy(sends[0][1]))]
        copies = {id(data): data for _, data in sends}
        copies = {key: self._copy(data) for key, data in copies.items()}
        return [(rank, copies[id(data)]) for rank, data in sends]

    def _copy(self, sent: Buffer) -> Buffer:
        """In memory that was used before: new memory would cost more than the copy."""
        data = memoryview(sent).cast("B")
        buffer = self._spare.pop() if self._spare else bytearray()
        if len(buffer) < data.nbytes:
            buffer = bytearray(data.nbytes)
        self._copies[-1].append(buffer)
        copy = memoryview(buffer)[: data.nbytes]
        copy[:] = data
        return copy

    def _sleep(self, begin: float, arriving: Sequence[Peer], leaving: Sequence[Peer]) -> None:
        """Until something can be read or sent, or for a moment."""
        poll, sleep_s = select.poll(), SLEEP_S
        for peer in {*arriving, *leaving}:
            if peer.is_broken:
                sleep_s = BROKEN_SLEEP_S
            else:
                events = (select.POLLIN if peer in arriving else 0) | (select.POLLOUT if peer in leaving else 0)
                poll.register(peer.fd, events)
        if not poll.poll(1000 * sleep_s):
            self.check(0.0)
            if time.perf_counter() - begin > STALL_S:
                raise EngineError(f"nothing came from {', '.join(peer.name for peer in arriving)} for {STALL_S:.0f} s")

    def next_sum(self) -> None:
        """See Peer."""
        for peer in self.others:
            peer.next_sum()
        self._spare += self._copies.popleft()
        self._copies.append([])

    @property
    def others(self) -> list[Peer]:
        return [peer for peer in self._peers if peer is not None]

    def close(self) -> None:
        self.on_close()
        for peer in self.others:
            peer.close()
