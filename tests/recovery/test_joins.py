"""Nodes that come while a run goes on: who is taken in, and who is not."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.recovery.joins
import mdi.recovery.moves
from cluster_keys import key_file
from clusters import model
from loopback import DEADLINE_S
from mdi.config import ClusterConfig, NodeConfig, standalone
from mdi.discovery.announcement import Announcement
from mdi.discovery.arrivals import Arrivals
from mdi.engine.sequence import SamplingParams
from mdi.errors import UsageError
from mdi.node.starter import StarterNode
from mdi.partition.model import Workload
from mdi.recovery.joins import Joins
from mdi.recovery.moving import MovingCut
from mdi.recovery.replacement import Stage
from mdi.recovery.roll_call import Answer, Roll
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, entry_of, secondaries
from tiny_checkpoint import encode, write_checkpoint

RING = (Stage("starter", 0, 6), Stage("secondary0", 6, 12))
NEW = NodeConfig("board", "10.0.0.9", 8088, 5088)


class World:
    """A ring of two, and what is there beside it.

    Attributes:
        processes: of the ring; admitted: nodes that the keeper was told of.
        outside: processes of nodes that answer and are not in the ring.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spares: frozenset[str] = frozenset()) -> None:
        self.processes = {"secondary0": "p0"}
        self.outside = {"secondary1": "p1"} if spares else {}
        self.admitted: list[NodeConfig] = []
        self.heard: dict[str, NodeConfig] = {}
        self.is_used = True
        monkeypatch.setattr(mdi.recovery.joins, "call_roll", self.roll)
        clients: Any = {
            name: self.client(NodeConfig(name, "h", i, i)) for i, name in enumerate(["secondary0", *spares])
        }
        keeper: Any = self
        self.joins = Joins(keeper, cut(12), clients, spares, lambda: self.heard)

    @staticmethod
    def client(node: NodeConfig) -> Any:
        return SimpleNamespace(node=node)

    def admit(self, node: NodeConfig, name: str) -> Any:
        self.admitted.append(node)
        self.outside[name] = "new"
        return self.client(NodeConfig(name, node.addr, node.port, node.port_in))

    def may_use(self, name: str) -> bool:
        return self.is_used

    def roll(self, clients: Any, awaited: frozenset[str], timeout_s: float) -> Roll:
        names = [client.node.name for client in clients]
        return Roll(
            {n: Answer(n, self.outside[n], "IDLE", 1 << 30, False) for n in names if n in self.outside}, frozenset()
        )


def cut(n_blocks: int) -> MovingCut:
    """Over nodes that nothing was measured of; the texts have far to go."""
    return MovingCut(model(n_blocks, head_bytes=0), None, Workload(1, 100), 1 << 20, lambda: 10**6)


def test_a_node_that_no_file_names_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert world.joins.best(RING) is None
    world.heard = {"p0": NodeConfig("board", "h2", 1, 1), "new": NEW}
    found = world.joins.best(RING)
    assert world.admitted == [NEW], "the first is in the ring already"
    assert found is not None and set(found.names) == {"starter", "secondary0", "secondary1"}
    assert max(found.counts) == 4
    assert world.joins.best(RING) == found and len(world.admitted) == 1, "it is known now"


def test_who_gains_less_than_a_tenth_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.heard = {"new": NEW}
    ring = tuple(Stage(f"secondary{k - 1}" if k else "starter", k, k + 1) for k in range(12))  # a block each
    assert world.joins.best(ring) is None and world.admitted == [NEW]


def test_spares_and_nodes_that_come_and_go_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, frozenset({"secondary1"}))
    assert world.joins.best(RING) is None
    world.heard, world.is_used = {"new": NEW}, False
    assert world.joins.best(RING) is None and world.admitted == [NEW]
    world.is_used = True
    found = world.joins.best(RING)
    assert found is not None and "secondary2" in found.names and "secondary1" not in found.names


def test_only_who_proves_that_it_has_the_key_has_come(tmp_path: Path) -> None:
    keys, other = key_file(tmp_path / "cluster.key"), key_file(tmp_path / "other.key")
    with (
        secondaries(1, tmp_path / "a", keys=keys) as (friend,),
        secondaries(1, tmp_path / "b", keys=other) as (stranger,),
    ):
        told = [
            Announcement.of("board", "127.0.0.1", node.control_port, node.ring_port, node.process, keys.first)
            for node in (friend, stranger)
        ]
        arrivals = Arrivals(lambda stack: [lambda: told], keys)
        assert arrivals.nodes() == {friend.process: entry_of(friend, name="board")}
        arrivals.close()

    def deaf(stack: object) -> Any:
        raise UsageError("no network")

    assert Arrivals(deaf, keys).nodes() == {}


def test_a_run_goes_on_over_a_node_that_was_started_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It stands in no nodes file; the text is that of one node alone."""
    monkeypatch.setattr(mdi.recovery.moves, "LOOK_S", 0.1)
    ckpt = write_checkpoint(tmp_path / "endless", with_end=False, block_size=65536)
    options = StarterOptions(ckpt=ckpt, prompt_style="none", device="cpu", placement="even")
    with secondaries(2, tmp_path) as nodes:
        ids = generate(cluster_of(nodes[:1]), options, {nodes[1].process: entry_of(nodes[1], name="board")})
    alone = generate(standalone(), options, n_tokens=len(ids))
    assert ids == alone


def generate(
    cluster: ClusterConfig, options: StarterOptions, later: dict[str, NodeConfig] | None = None, n_tokens: int = 60000
) -> list[int]:
    """Ids of a text; with nodes that come later, until the ring has gone on over them for a while."""
    heard: dict[str, NodeConfig] = {}
    params = SamplingParams(n_tokens, temperature=0)
    with StarterNode(cluster, options, newcomers=lambda: heard) as starter:
        starter.place(1, 60000)
        starter.prepare(60000)
        starter.start()
        sample = starter.submit("Who are you?", encode("Who are you?"), params)
        reader = threading.Thread(target=starter.generate)
        reader.start()
        if later is not None:
            wait_for(lambda: len(sample.token_ids) > 20)
            heard.update(later)
            wait_for(lambda: starter.cluster.n_nodes == 3)
            n_then = len(sample.token_ids)
            wait_for(lambda: len(sample.token_ids) > n_then + 20)
            assert "secondary1" in starter.names and not starter.n_recoveries
            sample.cancel()
        reader.join()
        return list(sample.token_ids)


def wait_for(is_so: Any) -> None:
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("it never came about")
