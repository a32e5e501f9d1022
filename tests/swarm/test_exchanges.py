"""How nodes of a swarm are asked, of which some are silent, ordinary ones, or at another place than before."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_swarm_table import Clock, announced

from cluster_keys import key_file
from mdi.cancel import Cancel
from mdi.control import meeting
from mdi.control.meeting import Exchanges, Peer
from mdi.control.swarm import EXPIRY_S, Announced, SwarmTable
from mdi.node.secondary import SecondaryNode
from mdi.run.swarm import Swarm
from secondaries import entry_of, secondaries
from waiting import DEADLINE_S

LONG_S = 600.0  # nobody who waits so long passes a test


@contextlib.contextmanager
def silent(n: int) -> Iterator[list[socket.socket]]:
    """Ports of machines that hang: they take connections, and say nothing."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        for one in made:
            one.settimeout(DEADLINE_S)
        yield made


def peer_of(node: SecondaryNode) -> Peer:
    return Peer("127.0.0.1", node.control_port)


def of(node: SecondaryNode, **changes: Any) -> Announced:
    """As a standing node would announce itself."""
    return announced(
        process=node.process, addr="127.0.0.1", port=node.control_port, ring_port=node.ring_port, **changes
    )


def together(one: Callable[..., Any], barrier: threading.Barrier) -> Callable[..., Any]:
    """The same, once as many calls are under way as the barrier wants."""

    def called(*args: Any) -> Any:
        barrier.wait(DEADLINE_S)
        return one(*args)

    return called


def test_all_are_asked_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So those that hang hold nobody up: each of these answers only once all were asked."""
    monkeypatch.setattr(meeting, "ASK_S", DEADLINE_S)
    with secondaries(3, tmp_path) as nodes:
        at_control, at_ring = threading.Barrier(3), threading.Barrier(3)
        for node in nodes:
            node.status = together(node.status, at_control)  # type: ignore[method-assign]
            node.swarm = together(node.swarm, at_ring)  # type: ignore[method-assign]
        nodes[1].table.add([of(nodes[1])])
        assert Swarm([peer_of(node) for node in nodes], None, 0.0).first(Cancel()).port == nodes[1].control_port


def test_who_is_silent_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "ASK_S", 0.05)
    with silent(1) as (one,):
        asking = Exchanges(SwarmTable(), [Peer(*one.getsockname())], None)
        asking.look(3, 3)
        one.accept()[0].close()
        asking.look(3, 3)
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.accept()


@pytest.mark.parametrize("is_given", [True, False])
def test_nobody_is_waited_for_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool) -> None:
    monkeypatch.setattr(meeting, "ASK_S", LONG_S)
    with silent(1) as (one,):
        addr, port = one.getsockname()
        table, cancel = SwarmTable(), Cancel()
        if not is_given:
            table.add([announced(addr=addr, ring_port=port)])
        asking = Exchanges(table, [Peer(addr, port)] if is_given else [], key_file(tmp_path / "key"))
        looks = threading.Thread(target=lambda: asking.look(3, 3, cancel=cancel))
        looks.start()
        with one.accept()[0]:
            cancel.cancel()
            looks.join(DEADLINE_S)
            assert not looks.is_alive()


@pytest.mark.slow
def test_a_standing_node_is_found_behind_ordinary_ones(tmp_path: Path) -> None:
    """These answer, and know nobody."""
    with secondaries(5, tmp_path) as nodes:
        nodes[-1].table.add([of(nodes[-1])])
        found = Swarm([], None, 0.0, lambda: [entry_of(node) for node in nodes]).first(Cancel())
        assert found.port == nodes[-1].control_port


def test_a_node_that_is_back_at_another_port_is_asked_there(tmp_path: Path) -> None:
    with secondaries(1, tmp_path) as (node,), socket.create_server(("127.0.0.1", 0)) as gone:
        ports, status = [gone.getsockname()[1]], node.status
        gone.close()

        def told(run: str | None) -> dict[str, Any]:
            return {**status(run), **({"ring_port": ports.pop()} if ports else {})}

        node.status = told  # type: ignore[method-assign]
        node.table.add([of(node)])
        asking = Exchanges(table := SwarmTable(), [peer_of(node)], None)
        asking.look(3, 3)
        assert not ports and not table.nodes
        asking.look(3, 3)
        assert [one.process for one in table.nodes] == [node.process]


def test_where_a_node_was_is_asked_after_its_announcement_has_expired(tmp_path: Path) -> None:
    """Two parts of a swarm that do not reach each other for a time know nobody of the other one any more."""
    with secondaries(2, tmp_path) as nodes:
        clock = Clock()
        table = SwarmTable(clock)
        table.add([of(nodes[0]), of(nodes[1], is_leaving=True)])
        clock.now = EXPIRY_S
        assert table.nodes == [] and [one.process for one in table.former] == [nodes[0].process]
        nodes[0].table.add([of(nodes[0], version=2)])
        Exchanges(table, [], None).look(3, 3)
        assert table.versions == {nodes[0].process: 2} and table.former == []


def test_where_nodes_were_is_asked_now_and_then_while_others_are_known(tmp_path: Path) -> None:
    with secondaries(2, tmp_path) as nodes:
        clock = Clock()
        table = SwarmTable(clock)
        table.add([of(nodes[0])])
        clock.now = EXPIRY_S
        table.add([of(nodes[1])])
        for number, node in enumerate(nodes):
            node.table.add([announced(number)])
        Exchanges(table, [], None).look(3, 3)
        assert {f"{number:016x}" for number in range(2)} <= table.versions.keys()


def test_a_long_answer_comes_in_pieces(tmp_path: Path) -> None:
    with secondaries(1, tmp_path) as (node,):
        node.table.add([announced(number) for number in range(300)])
        asking = Exchanges(table := SwarmTable(), [peer_of(node)], None)
        asking.look(3, 3)
        assert len(table.nodes) == 300
