"""Links that become slower while a run goes on: they are noticed, and the ring takes another order if that pays."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mdi.net.link as link_module
import mdi.run.loop
import mdi.run.run
from clusters import cluster, model, node
from mdi.engine.sequence import SamplingParams
from mdi.net.link import Seen, Work, ping, seen_in, work_in
from mdi.net.wire import Frame
from mdi.placement.model import Workload
from mdi.placement.profile import ClusterProfile, LinkProfile
from mdi.run.cut import MovingCut, slower_links
from mdi.run.loop import SlowLinks
from mdi.run.nodes import GivenNodes
from mdi.run.policy import Better, Form, Stage
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode
from waiting import until

NAMES = ("starter", "secondary0", "secondary1", "secondary2")
RING = tuple(Stage(name, 3 * k, 3 * k + 3) for k, name in enumerate(NAMES))
SLOW = ("secondary0", "secondary1")


def measured(names: Sequence[str] = NAMES) -> ClusterProfile:
    links = tuple(LinkProfile(a, b, 2e-4, 1e8) for a in names for b in names if a != b)
    return cluster(*map(node, names), links=links)


def moving(n_rounds: int = 10**6, profile: ClusterProfile | None = None) -> MovingCut:
    shape = model(12, head_bytes=0)
    return MovingCut(shape, profile or measured(), Workload(4, 100), 1 << 26, lambda: n_rounds)


def ways(seconds: float = 1e-3, **slow: float) -> dict[tuple[str, str], float]:
    """Of all links of RING."""
    pairs = zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True)
    return {pair: slow.get(pair[0], seconds) for pair in pairs}


def pairs_of(form: Form) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in zip(form.names, [*form.names[1:], form.names[0]], strict=True)}


def test_the_slow_pair_stands_apart_in_the_new_order() -> None:
    found = moving().in_another_order(RING, ways(secondary0=0.2))
    assert found is not None and found.is_moved
    assert found.names[0] == "starter" and set(found.names) == set(NAMES)
    assert frozenset(SLOW) not in pairs_of(found)
    assert [stage.start for stage in found.stages[1:]] == [stage.stop for stage in found.stages[:-1]]
    assert (found.stages[0].start, found.stages[-1].stop) == (0, 12)


@pytest.mark.parametrize(
    "what, n_rounds, told",
    [
        ("nothing is slower", 10**6, ways()),
        ("not by much", 10**6, ways(secondary0=0.009)),
        ("the texts end soon", 1, ways(secondary0=0.2)),
        ("all links of a node are slow", 10**6, ways(secondary0=0.2, secondary1=0.2)),
        ("all links are slow", 10**6, ways(0.2)),
        ("nothing is known", 10**6, {}),
    ],
)
def test_the_order_stays_where_another_one_gains_nothing(what: str, n_rounds: int, told: Any) -> None:
    assert moving(n_rounds).in_another_order(RING, told) is None


def test_without_measurements_the_order_stays() -> None:
    cut = MovingCut(model(12), None, Workload(4, 100), 1 << 20, lambda: 10**6)
    assert cut.in_another_order(RING, ways(secondary0=0.2)) is None
    assert moving(profile=measured(NAMES[:3])).in_another_order(RING, ways(secondary0=0.2)) is None


def test_a_slow_pair_is_slow_in_both_directions() -> None:
    found = slower_links(measured(), ways(secondary0=0.2), 4096)
    assert found[SLOW] == found[SLOW[::-1]] == pytest.approx(0.2 - 2e-4 - 4096 / 1e8)
    assert sum(found.values()) == pytest.approx(2 * found[SLOW])


def test_that_a_link_was_slow_is_remembered_for_some_time() -> None:
    """Else the ring would go back to it."""
    now = [0.0]
    seen: list[Any] = []
    cut: Any = SimpleNamespace(in_another_order=lambda ring, ways: seen.append(dict(ways)))
    links = SlowLinks("run", cut, lambda: now[0])

    def look(names: tuple[str, ...], told: dict[str, Any]) -> None:
        clients = [
            SimpleNamespace(
                node=SimpleNamespace(name=name), status=lambda run, s, name=name: {"measured": told.get(name)}
            )
            for name in names[1:]
        ]
        stages = tuple(Stage(name, 0, 1) for name in names)
        links.best(SimpleNamespace(stages=stages, clients=clients, link=None))  # type: ignore[arg-type]

    look(
        NAMES,
        {"secondary0": {"next_way_s": 0.2}, "secondary1": {"next_way_s": None}, "secondary2": {"next_way_s": "x"}},
    )
    look(("starter", "secondary1", "secondary0"), {"secondary0": {"next_way_s": 0.1}})
    assert seen == [{SLOW: 0.2}, {SLOW: 0.2, ("secondary0", "starter"): 0.1}]
    now[0] = 1000.0
    look(NAMES, {})
    assert seen[-1] == {}


@pytest.mark.parametrize("work", [Work(), Work(7, 2.5)])
@pytest.mark.parametrize("seen", [None, Seen(3, 0.25)])
def test_a_ping_says_which_frame_came_last(work: Work, seen: Seen | None) -> None:
    frame = ping(1, work, seen)
    assert work_in(frame) == work and seen_in(frame) == seen


@pytest.mark.parametrize("ago_s", [-1.0, math.nan, math.inf])
def test_nonsense_in_a_ping_is_no_frame(ago_s: float) -> None:
    assert seen_in(ping(1, Work(), Seen(3, ago_s))) is None


# Runs


def options_of(endless: Path) -> StarterOptions:
    return StarterOptions(ckpt=endless, prompt_style="none", device="cpu", placement="even")


def text_alone(endless: Path, n_tokens: int) -> list[int]:
    with Run(GivenNodes(standalone()), options_of(endless), n_tokens + 20, n_texts=1) as run:
        sample = run.submit("The ring", encode("The ring"), SamplingParams(n_tokens, temperature=0))
        run.read()
    return list(sample.token_ids)


def test_texts_go_on_in_another_order(endless: Path, tmp_path: Path) -> None:
    """Blocks change places, and the texts are the same as those of one node."""
    with (
        secondaries(2, tmp_path) as nodes,
        Run(GivenNodes(cluster_of(nodes)), options_of(endless), 20_000, n_texts=1) as run,
    ):
        first, *others = run.loop.policy.ring
        edges = (first.stop, first.stop + others[1].stop - others[1].start, others[1].stop)
        turned = Form((first, Stage("secondary1", *edges[:2]), Stage("secondary0", *edges[1:])), is_moved=True)
        sample = run.submit("The ring", encode("The ring"), SamplingParams(20_000, temperature=0))
        run.loop.put(Better(turned, run.loop.policy.ring))
        until(lambda: (ring := run.loop.running) is not None and ring.number > 1)
        assert run.names == ("starter", "secondary1", "secondary0")
        n_then = run.engine.n_tokens
        until(lambda: run.engine.n_tokens > n_then + 20)
        sample.cancel()
        run.read()
        found = list(sample.token_ids)
    assert found == text_alone(endless, len(found))


def test_a_link_that_becomes_slow_is_left(endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdi.run.loop, "LOOK_S", 0.2)
    monkeypatch.setattr(link_module, "PING_INTERVAL_S", 0.02)
    # As if the nodes had measured themselves: on this machine they would find that one node alone is the fastest.
    monkeypatch.setattr(mdi.run.run, "MovingCut", lambda shape, _, *rest: MovingCut(shape, measured(), *rest))
    is_slow, send = threading.Event(), link_module.send_frame
    with secondaries(3, tmp_path) as nodes:
        source, target = nodes[:2]

        def slowly(sock: socket.socket, frame: Frame, *args: Any, **kwargs: Any) -> int:
            rings = [worker.ring for worker in source.workers]
            links = [ring.next_link for ring in rings if ring is not None]
            mine = [one.connection.sock for one in links if one.connection is not None]
            if is_slow.is_set() and sock in mine and sock.getpeername()[1] == target.ring_port:
                time.sleep(0.1)
            return send(sock, frame, *args, **kwargs)

        monkeypatch.setattr(link_module, "send_frame", slowly)
        with Run(GivenNodes(cluster_of(nodes)), options_of(endless), 20_000, n_texts=1) as run:
            assert run.names == NAMES
            sample = run.submit("The ring", encode("The ring"), SamplingParams(20_000, temperature=0))
            is_slow.set()
            until(lambda: (ring := run.loop.running) is not None and ring.number > 1)
            order = run.names
            sample.cancel()
            run.read()
            pairs = {frozenset(pair) for pair in zip(order, [*order[1:], order[0]], strict=True)}
            assert frozenset(SLOW) not in pairs
            found = list(sample.token_ids)
    assert found == text_alone(endless, len(found))
