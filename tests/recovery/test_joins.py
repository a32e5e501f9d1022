"""Nodes that come while a run goes on: who is taken in, and who is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.run.loop
from cluster_keys import key_file
from clusters import cluster, model, node
from guessing import guess_always, of_two_tokens
from loopback import DEADLINE_S
from mdi.checkpoint.store import BlockStore
from mdi.control.discovery import Announcement, Arrivals
from mdi.engine.sequence import SamplingParams
from mdi.errors import Code, ControlError, UsageError
from mdi.placement.cost import CostModel
from mdi.placement.model import Workload
from mdi.run.cut import MovingCut
from mdi.run.loop import Joins
from mdi.run.nodes import GivenNodes
from mdi.run.policy import Answer, Form, Roll, Stage
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig, standalone
from mdi.spec.options import ParallelOptions, StarterOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.stages.window_budget import taken_bytes
from secondaries import close_ports, cluster_of, entry_of, secondaries
from tiny_checkpoint import encode

RING = (Stage("starter", 0, 6), Stage("secondary0", 6, 12))
NEW = NodeConfig("board", "10.0.0.9", 8088, 5088)


class World:
    """A ring of two, and what is there beside it.

    Attributes:
        processes: of the ring; admitted: addresses of nodes that may take part from now on.
        outside: processes of nodes that answer and are not in the ring.
    """

    def __init__(self, spares: frozenset[str] = frozenset()) -> None:
        self.processes = {"secondary0": "p0"}
        self.outside = {"secondary1": "p1"} if spares else {}
        self.admitted: list[tuple[str, int, int]] = []
        self.heard: dict[str, NodeConfig] = {}
        self.is_used = True
        self.clients = {
            name: self.client(NodeConfig(name, "h", i, i)) for i, name in enumerate(["secondary0", *spares])
        }
        self.joins = Joins(self, cut(12), spares, lambda: self.heard, ask=self.roll)

    def best(self, ring: Sequence[Stage] = RING) -> Form | None:
        return self.joins.best(ring, self.processes)

    @staticmethod
    def client(node: NodeConfig) -> Any:
        return SimpleNamespace(node=node)

    def admit(self, node: NodeConfig) -> Any:
        self.admitted.append((node.addr, node.port, node.port_in))
        self.outside[node.name] = "new"
        self.clients[node.name] = self.client(node)
        return self.clients[node.name]

    def may_use(self, name: str) -> bool:
        return self.is_used

    def with_spare(self, ring: Sequence[Stage], free: Sequence[str]) -> Form | None:
        return None

    def roll(self, clients: Any, awaited: frozenset[str], timeout_s: float) -> Roll:
        names = [client.node.name for client in clients]
        return Roll(
            {n: Answer(n, self.outside[n], "IDLE", 1 << 30, False) for n in names if n in self.outside}, frozenset()
        )


def test_a_node_is_learnt_while_another_thread_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop forms a ring at the very moment that a node which has come is measured."""
    names = ("starter", "secondary0", "secondary1")
    shape, workload, profile = model(12, head_bytes=0), Workload(1, 100), cluster(*map(node, names))
    *before, new = profile.nodes
    moving = MovingCut(shape, replace(profile, nodes=tuple(before)), workload, 1 << 20, lambda: 10**6)
    ring = [Stage(node.name, 4 * k, 4 * k + 4) for k, node in enumerate(profile.nodes)]
    planned: list[tuple[int, ...] | None] = []
    made = mdi.run.cut.CostModel

    def slowly(*args: Any) -> CostModel:
        planned.append(moving(ring, {}))
        return made(*args)

    monkeypatch.setattr(mdi.run.cut, "CostModel", slowly)
    moving.learn(new)
    assert len(planned) == 1 and planned[0] is not None and sum(planned[0]) == 12


def cut(n_blocks: int) -> MovingCut:
    """Over nodes that nothing was measured of; the texts have far to go."""
    return MovingCut(model(n_blocks, head_bytes=0), None, Workload(1, 100), 1 << 20, lambda: 10**6)


def test_a_node_that_no_file_names_is_taken_in() -> None:
    world = World()
    assert world.best() is None
    world.heard = {"p0": NodeConfig("board", "h2", 1, 1), "new": NEW}
    found = world.best()
    assert world.admitted == [(NEW.addr, NEW.port, NEW.port_in)], "the first is in the ring already"
    assert found is not None and set(found.names) == {"starter", "secondary0", "secondary1"}
    assert max(found.counts) == 4
    assert world.best() == found and len(world.admitted) == 1, "it is known now"


def test_who_gains_less_than_a_tenth_stays_outside() -> None:
    world = World()
    world.heard = {"new": NEW}
    ring = tuple(Stage(f"secondary{k - 1}" if k else "starter", k, k + 1) for k in range(12))  # a block each
    assert world.best(ring) is None and world.admitted == [(NEW.addr, NEW.port, NEW.port_in)]


def test_spares_and_nodes_that_come_and_go_wait() -> None:
    world = World(frozenset({"secondary1"}))
    assert world.best() is None
    world.heard, world.is_used = {"new": NEW}, False
    assert world.best() is None and world.admitted == [(NEW.addr, NEW.port, NEW.port_in)]
    world.is_used = True
    found = world.best()
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


def test_a_run_goes_on_over_a_node_that_was_started_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endless: Path
) -> None:
    """It stands in no nodes file; the text is that of one node alone."""
    monkeypatch.setattr(mdi.run.loop, "LOOK_S", 0.1)
    options = StarterOptions(ckpt=endless, prompt_style="none", device="cpu", placement="even")
    seen: list[Run] = []
    with secondaries(2, tmp_path, kv_memory=1 << 28) as nodes:
        gate = Gate(nodes[1].store)

        def look(starter: Run, n_tokens: Callable[[], int]) -> None:
            """Parts are on their way, and the first ring still generates."""
            seen.append(starter)
            assert gate.is_reached.wait(DEADLINE_S)
            n_then = n_tokens()
            wait_for(lambda: n_tokens() > n_then + 20)
            assert starter.ring is not None and starter.ring.number == 1 and starter.loop.running is starter.ring
            gate.is_open.set()

        heard = {nodes[1].process: entry_of(nodes[1], name="board")}
        ids = generate(cluster_of(nodes[:1]), options, heard, look=look)
        assert {held.use for held in nodes[0].stages.listed} == {"UNUSED"}
    assert seen[0].ring is not None
    limits = {node.name: node.limit_bytes for node in seen[0].ring.memory.nodes if node.name != "starter"}
    assert limits == {"secondary0": 1 << 28, "secondary1": 1 << 28}, "what the ring before had is free"
    alone = generate(standalone(), options, n_tokens=len(ids))
    assert ids == alone


@pytest.mark.parametrize("failure", ["no memory", "parts that do not come", "the node ends", "the run ends"])
def test_a_ring_goes_on_if_the_next_one_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endless: Path, failure: str
) -> None:
    monkeypatch.setattr(mdi.run.loop, "LOOK_S", 0.1)
    options = StarterOptions(ckpt=endless, prompt_style="none", device="cpu", placement="even")
    with secondaries(2, tmp_path) as nodes:
        gate, later = Gate(nodes[1].store), nodes[1]
        if failure == "no memory":
            later.stages.available = lambda device: 1000

        def look(starter: Run, n_tokens: Callable[[], int]) -> None:
            if failure != "no memory":
                assert gate.is_reached.wait(DEADLINE_S)
            if failure == "the run ends":
                return
            if failure == "the node ends":
                close_ports(later)
            gate.error = ControlError("the disk is full", 507, code=Code.DISK)
            gate.is_open.set()
            if failure == "the node ends":
                wait_for(lambda: not is_loading())
            else:
                wait_for(lambda: starter.loop.policy.refused is not None)
            n_then = n_tokens()
            wait_for(lambda: n_tokens() > n_then + 20)
            assert starter.loop.running is not None and starter.loop.running.number == 1
            assert not starter.trouble and not starter.n_recoveries and starter.names == ("starter", "secondary0")

        ids = generate(
            cluster_of(nodes[:1]), options, {later.process: entry_of(later, name="board")}, look=look, joins=False
        )
        gate.is_open.set()
        wait_for(lambda: not is_loading())
        wait_for(lambda: not later.runs.active)
    assert ids == generate(standalone(), options, n_tokens=len(ids))


KINDS = ("ring", "window", "memory", "tensor", "tensor with a window", "hybrid")


@pytest.mark.parametrize(
    ("kind", "is_guessed"),
    [
        *((kind, False) for kind in KINDS),
        *((kind, True) for kind in ("ring", "tensor", "hybrid")),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in ("window", "memory", "tensor with a window")),
    ],
)
def test_a_leaving_node_computes_while_others_load_its_blocks(
    tmp_path: Path, endless: Path, kind: str, is_guessed: bool
) -> None:
    """Also of a text of which most tokens are guessed right, before the move and behind it."""
    plain = StarterOptions(ckpt=endless, prompt_style="none", device="cpu", dtype="float32", placement="even")
    options, groups = plain, (None, "b", "b") if kind == "hybrid" else (None, None, None)
    if "window" in kind:
        options = replace(options, weight_memory=WindowMemory(window=WindowOptions(1)))
    if kind == "memory":
        options = replace(options, weight_memory=WindowMemory(window=WindowOptions(memory=taken_bytes() + (1 << 28))))
    if "tensor" in kind:
        options = replace(options, parallel=ParallelOptions("tensor"))
    with secondaries(2, tmp_path) as nodes:
        leaving, other = nodes
        entries = tuple(entry_of(node, group=group) for node, group in zip(nodes, groups[1:], strict=True))
        cluster = replace(cluster_of(nodes), secondaries=entries)
        gate = Gate(other.store)
        gate.is_open.set()  # for its first blocks

        def look(starter: Run, n_tokens: Callable[[], int]) -> None:
            if is_guessed:
                wait_for(lambda: starter.engine.guesses[1] > 40)
            gate.is_open.clear()
            gate.is_reached.clear()
            leaving.leave()
            assert gate.is_reached.wait(DEADLINE_S)
            n_then = n_tokens()
            wait_for(lambda: n_tokens() > n_then + 20)
            assert starter.loop.running is not None and starter.loop.running.number == 1
            assert leaving.runs.is_running and not starter.trouble
            n_right = starter.engine.guesses[1]
            gate.is_open.set()
            wait_for(lambda: starter.names == ("starter", "secondary1") and starter.loop.running is not None)
            n_then = n_tokens()
            wait_for(lambda: n_tokens() > n_then + 20)
            assert not leaving.runs.active
            if is_guessed:
                wait_for(lambda: starter.engine.guesses[1] > n_right + 40)

        ids = generate(cluster, options, {}, look=look, joins=False, repeats=is_guessed)
        wait_for(lambda: not is_loading())
        wait_for(lambda: not other.runs.active)
        again = generate(cluster_of([other]), options, n_tokens=12, repeats=is_guessed)
    alone = generate(standalone(), replace(plain, draft="none"), n_tokens=len(ids), repeats=is_guessed)
    assert ids == alone and again == alone[:12]


def is_loading() -> bool:
    return any(thread.name == "load-ahead" for thread in threading.enumerate())


class Gate:
    """Parts that a node receives wait until it is open.

    Attributes:
        error: raised instead of receiving.
    """

    def __init__(self, store: BlockStore) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        self.error: ControlError | None = None
        receive = store.receive

        def wait(*args: Any, **named: Any) -> Any:
            self.is_reached.set()
            assert self.is_open.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error
            return receive(*args, **named)

        store.receive = wait  # type: ignore[method-assign]


def generate(
    cluster: ClusterConfig, options: StarterOptions, later: dict[str, NodeConfig] | None = None, n_tokens: int = 60000,
    look: Callable[[Run, Callable[[], int]], None] = lambda starter, n_tokens: None, joins: bool = True,
    repeats: bool = False,
) -> list[int]:  # fmt: skip
    """Ids of a text; with nodes that come later, until the ring has gone on over them for a while.

    Args:
        look: gets the run, and how many tokens the text has, once they have come.
        repeats: whether the text has only two tokens, which are guessed right again and again, unless nobody guesses.
    """
    heard: dict[str, NodeConfig] = {}
    params = SamplingParams(n_tokens, temperature=0)
    params = of_two_tokens(params, 40, 41) if repeats else params
    with Run(GivenNodes(cluster, lambda: heard), options, 60000, n_texts=1) as starter:
        if repeats and options.guesses:
            guess_always(starter.engine)
        sample = starter.submit("Who are you?", encode("Who are you?"), params)
        reader = threading.Thread(target=starter.read)
        reader.start()
        if later is not None:
            wait_for(lambda: len(sample.token_ids) > 20)
            heard.update(later)
            look(starter, lambda: len(sample.token_ids))
            if joins:
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
