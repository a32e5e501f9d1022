"""Connections of a group that break while all its nodes live: sums go on, with the same bits, and nothing is summed twice."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster_keys import key_file
from families import model_of, prompt
from mdi.cancel import Cancel
from mdi.checkpoint.packing import Packing
from mdi.errors import NodeLostError, RingEndedError, WireError
from mdi.kernels.slices import Slice
from mdi.model.plain import ModelConfig
from mdi.net.keys import KeyFile
from mdi.net.link import Connection
from mdi.net.listener import RingListener, open_socket
from mdi.net.wire import FrameCodec
from mdi.spec.options import SUMS
from mdi.tensor import joining
from mdi.tensor.group import Group, Member
from mdi.tensor.joining import GroupLinks
from mdi.tensor.mesh import Mesh
from mdi.tensor.shares import Shares, share_out
from mdi.tensor.sums import AllReduce
from tensor_groups import DEADLINE_S, on_all, stages_of
from waiting import until

EPOCH, PLACEMENT = 7, "a cut"
LARGE = 1 << 24  # bytes: more than the sockets of a connection hold


class Unwaited(Cancel):
    """The end of a run, of which no ring tells later: nobody waits for it."""

    def wait(self, seconds: float) -> None:
        self.check()


class Nodes:
    """The nodes of one group, each with a ring port.

    Attributes:
        end: cancelled when the run has ended, which every node then hears.
    """

    def __init__(self, n: int, algorithm: str, keys: KeyFile | None, silence_s: float) -> None:
        self.end = Unwaited()
        self.listeners = [RingListener(open_socket("127.0.0.1", 0, "ring port"), f"node{r}", keys) for r in range(n)]
        members = tuple(Member(f"node{r}", "127.0.0.1", one.port) for r, one in enumerate(self.listeners))
        bounds = Shares(tuple(range(n + 1)), tuple(range(n + 1)))
        groups = [Group(r, members, bounds, Packing("float32", "float32"), algorithm) for r in range(n)]
        links = [
            GroupLinks(group, listener, EPOCH, PLACEMENT, f"process{group.rank}", silence_s)
            for group, listener in zip(groups, self.listeners, strict=True)
        ]
        self.sums: list[AllReduce] = on_all(n, lambda rank: links[rank].connect(self.end, False))
        for one in links:
            one.close()

    @property
    def meshes(self) -> list[Mesh]:
        return [one.mesh for one in self.sums]

    @property
    def n_reconnected(self) -> int:
        return sum(peer.n_reconnected for mesh in self.meshes for peer in mesh.others)

    def reset(self, a: int, b: int) -> None:
        """As when a router between the two forgets the connection: what was under way is gone."""
        with contextlib.suppress(OSError):
            self.meshes[a].peer(b).sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end.cancel(RingEndedError("the ring was ended"))
        for mesh in self.meshes:
            mesh.close()
        for listener in self.listeners:
            listener.close()


@contextlib.contextmanager
def group_of(
    n: int, algorithm: str = "exchange", keys: KeyFile | None = None, silence_s: float = 30.0
) -> Iterator[Nodes]:
    threads = threading.active_count()
    found = Nodes(n, algorithm, keys, silence_s)
    try:
        yield found
    finally:
        found.close()
        until(lambda: threading.active_count() <= threads)


def parts_of(n: int, number: int) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [rng.normal(0, 1, (1 + number % 3, 256)).astype(np.float32) for _ in range(n)]


def bits_of(
    n: int, algorithm: str, n_sums: int, disturb: Callable[[Nodes, int, int], None], **fields: KeyFile | None
) -> tuple[list[bytes], int]:
    """The sums that all nodes have, and how often connections were replaced."""
    with group_of(n, algorithm, **fields) as nodes:

        def work(rank: int) -> list[bytes]:
            found = []
            for number in range(n_sums):
                disturb(nodes, rank, number)
                x = parts_of(n, number)[rank]
                nodes.sums[rank].reduce(x)
                found.append(x.tobytes())
            return found

        results = on_all(n, work)
        n_kept = max(peer.n_kept for mesh in nodes.meshes for peer in mesh.others)
        assert n_kept <= 4 * (n - 1), "of two sums"
        assert all(result == results[0] for result in results)
        return results[0], nodes.n_reconnected


def undisturbed(nodes: Nodes, rank: int, number: int) -> None:
    pass


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("algorithm", SUMS)
@pytest.mark.parametrize("n", [2, 4])
def test_sums_go_on_whatever_breaks(n: int, algorithm: str, is_sealed: bool, tmp_path: Path) -> None:
    chances = [random.Random(rank) for rank in range(n)]

    def disturb(nodes: Nodes, rank: int, number: int) -> None:
        if chances[rank].random() < 0.1:
            nodes.reset(rank, chances[rank].choice([other for other in range(n) if other != rank]))

    keys = key_file(tmp_path / "key") if is_sealed else None
    wanted, n_before = bits_of(n, algorithm, 60, undisturbed)
    found, n_replaced = bits_of(n, algorithm, 60, disturb, keys=keys)
    assert found == wanted and n_before == 0 and n_replaced > 2


@pytest.mark.parametrize("n", [2, 4])
def test_frames_go_on_whatever_breaks_while_they_are_computed(n: int) -> None:
    """Connections break at any time, in a sum of the kernels or between two, and other threads replace them meanwhile."""
    gpt, ids = model_of("Llama-3.1-8B"), prompt(40, 3)
    config, is_over = ModelConfig.from_litgpt(gpt.config), threading.Event()
    done: list[int] = []

    def frames_of(nodes: Nodes) -> list[bytes]:
        stages = stages_of(gpt, share_out(config, [1.0] * n), nodes.sums)
        rows = [np.random.default_rng(i).normal(0, 1, (1 + i % 3, config.n_embd)) for i in range(len(ids))]
        x = [one.astype(np.float32) for one in rows]

        def work(rank: int) -> list[bytes]:
            found = []
            for i, one in enumerate(x):
                found.append(stages[rank](one, [Slice(0, i, len(one))]).tobytes())
                done.append(i)
            return found

        results = on_all(n, work)
        assert all(result == results[0] for result in results)
        return results[0]

    def break_often(nodes: Nodes) -> None:
        """Not again before a frame was computed: a connection that breaks several times in vain counts as lost."""
        chance, n_done = random.Random(n), -1
        while not is_over.wait(0.002):
            if len(done) > n_done:
                n_done = len(done)
                nodes.reset(*chance.sample(range(n), 2))

    with group_of(n) as nodes:
        wanted = frames_of(nodes)
        assert nodes.n_reconnected == 0
    with group_of(n) as nodes:
        breaker = threading.Thread(target=break_often, args=(nodes,), name="breaker")
        breaker.start()
        try:
            assert frames_of(nodes) == wanted
        finally:
            is_over.set()
            breaker.join()
        assert nodes.n_reconnected > 2


def test_another_thread_has_a_connection_though_its_node_computes() -> None:
    """A node that waits for others in the kernels gives connections back to who asks for them."""
    with group_of(2) as nodes:
        x = np.ones((1, 8), dtype=np.float32)
        waiting = threading.Thread(target=nodes.sums[0].reduce, args=(x,), name="waiting")
        waiting.start()
        for _ in range(3):
            nodes.meshes[0].peer(1).abandon("it connected again")
            until(lambda: not nodes.meshes[0].peer(1).is_broken)
        nodes.sums[1].reduce(np.ones((1, 8), dtype=np.float32))
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive() and x.tolist() == [[2.0] * 8]


def test_all_connections_at_once() -> None:
    """As when a switch is started again: no circle of nodes waits for each other."""

    def disturb(nodes: Nodes, rank: int, number: int) -> None:
        if rank == 0 and number in (3, 4, 9):
            for a in range(5):
                for b in range(a):
                    nodes.reset(a, b)

    wanted, _ = bits_of(5, "exchange", 20, undisturbed)
    found, n_replaced = bits_of(5, "exchange", 20, disturb)
    assert found == wanted and n_replaced >= 20


@pytest.mark.parametrize("sender", [0, 1])
def test_a_node_that_has_done_its_part_sends_it_again_though_it_computes_nothing(sender: int) -> None:
    data, receiver = bytes(range(200)) * 7, 1 - sender
    array = bytearray(data)
    with group_of(2) as nodes:
        nodes.meshes[sender].swap([(receiver, memoryview(array))], [])
        array[:] = bytes(len(array))  # the sum is written there
        nodes.reset(sender, receiver)  # what the sockets hold is gone
        until(lambda: nodes.n_reconnected == 2)
        assert bytes(nodes.meshes[receiver].swap([], [(sender, len(data))])[sender]) == data
        nodes.meshes[receiver].swap([(sender, data[:5])], [])  # and nothing comes twice
        assert bytes(nodes.meshes[sender].swap([], [(receiver, 5)])[receiver]) == data[:5]


def test_messages_of_two_sums_are_sent_again() -> None:
    with group_of(2) as nodes:
        one, other = nodes.meshes
        for data in (b"first", b"after"):
            one.next_sum()
            one.swap([(1, memoryview(bytearray(data)))], [])
        nodes.reset(0, 1)
        until(lambda: nodes.n_reconnected == 2)
        assert [bytes(other.swap([], [(0, 5)])[0]) for _ in range(2)] == [b"first", b"after"]


def test_a_connection_that_is_broken_on_one_side_only() -> None:
    """The node that is called again leaves the old connection, which still looks intact to it."""
    with group_of(2) as nodes:
        peer = nodes.meshes[1].peer(0)
        intact = peer.sock
        peer.sock, end = socket.socketpair()
        peer.sock.setblocking(False)
        end.close()

        def work(rank: int) -> bytes:
            x = np.full((1, 8), rank + 1, dtype=np.float32)
            nodes.sums[rank].reduce(x)
            return x.tobytes()

        with intact:
            assert on_all(2, work) == [np.full((1, 8), 3, dtype=np.float32).tobytes()] * 2


@pytest.mark.parametrize("sender", [0, 1])
def test_a_message_that_is_cut_in_the_middle(sender: int) -> None:
    receiver = 1 - sender
    data = np.arange(LARGE // 4, dtype=np.uint32).tobytes()
    with group_of(2) as nodes:

        def work(rank: int) -> bytes:
            mesh = nodes.meshes[rank]
            if rank == sender:
                return bytes(mesh.swap([(receiver, data)], []).get(receiver, b""))
            until(lambda: nodes.meshes[sender].peer(receiver).is_behind)
            mesh.peer(sender).begin_receive(len(data))
            mesh.peer(sender).receive_on()
            nodes.reset(*random.Random(1).sample([0, 1], 2))
            return bytes(mesh.swap([], [(sender, len(data))])[sender])

        assert on_all(2, work)[receiver] == data
        assert nodes.n_reconnected >= 2


def test_a_new_connection_that_breaks_at_once_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(2) as nodes:
        errors = iter([OSError(errno.EINVAL, "some systems say so of a connection that is reset already")] * 2)

        def tune_later(sock: socket.socket) -> None:
            if (error := next(errors, None)) is not None:
                raise error

        monkeypatch.setattr(joining, "tune", tune_later)
        nodes.reset(0, 1)
        until(lambda: nodes.n_reconnected >= 2)
        assert next(errors, None) is None


def test_a_node_that_is_gone_is_lost() -> None:
    with group_of(2, silence_s=1.0) as nodes:
        nodes.listeners[0].close()
        nodes.meshes[0].close()
        with pytest.raises(NodeLostError) as lost:
            nodes.sums[1].reduce(np.ones((1, 8), dtype=np.float32))
        assert lost.value.node == "node0"


def test_a_node_that_does_not_call_again_is_lost() -> None:
    with group_of(2, silence_s=0.5) as nodes:
        nodes.meshes[1].close()
        with pytest.raises(NodeLostError) as lost:
            nodes.sums[0].reduce(np.ones((1, 8), dtype=np.float32))
        assert lost.value.node == "node1"


def test_who_waits_for_a_connection_hears_that_the_run_is_over() -> None:
    with group_of(2) as nodes:
        nodes.meshes[1].close()
        until(lambda: nodes.meshes[0].peer(1).is_broken)
        nodes.end.cancel(RingEndedError("the ring was ended"))
        with pytest.raises(RingEndedError):
            nodes.sums[0].reduce(np.ones((1, 8), dtype=np.float32))


@pytest.mark.parametrize("received", [None, 200, 1 << 40])
def test_a_node_that_cannot_have_had_what_it_says_is_refused(received: int | None) -> None:
    with group_of(2) as nodes:
        on_all(2, lambda rank: [nodes.sums[rank].reduce(np.ones((1, 8), dtype=np.float32)) for _ in range(3)])
        one, other = socket.socketpair()
        with one, other, pytest.raises(WireError):
            nodes.meshes[0].peer(1).replace(Connection(one, FrameCodec(), received))


def test_what_no_node_can_lack_is_not_kept() -> None:
    with group_of(3) as nodes:

        def work(rank: int) -> int:
            for _ in range(10):
                nodes.sums[rank].reduce(np.ones((1, 8), dtype=np.float32))
            return max(peer.n_kept for peer in nodes.meshes[rank].others)

        assert on_all(3, work) == [2, 2, 2], "those of the last sum and of the one before"
