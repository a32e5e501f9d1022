"""Nodes that are lost before any has blocks: while they measure themselves, or because they never were there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from requests import PreparedRequest

import mdi.control.client
import mdi.control.exchange
import mdi.run.form
from mdi.control.client import ControlClient
from mdi.engine.sequence import SamplingParams
from mdi.errors import NodeLostError, RingError
from mdi.net.message import ExchangeError, Message
from mdi.node.secondary import SecondaryNode
from mdi.placement.profiler import Profiler
from mdi.placement.profiling import Speeds
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, entry_of, secondaries
from tiny_checkpoint import encode, reference, write_checkpoint

PROMPT, N_TOKENS = "The ring", 8


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ports of nodes that are gone: they refuse connections."""
    ports: set[int] = set()
    exchange = mdi.control.exchange.exchange

    def refuse(request: PreparedRequest, addr: str, port: int, *args: Any) -> Any:
        if port in ports:
            raise ExchangeError("refused", "connection refused")
        return exchange(request, addr, port, *args)

    class Refused(Message):
        def __init__(self, addr: str, port: int, *args: Any) -> None:
            if port in ports:
                raise ExchangeError("refused", "connection refused")
            super().__init__(addr, port, *args)

    monkeypatch.setattr(mdi.control.exchange, "exchange", refuse)
    monkeypatch.setattr(mdi.control.client, "Message", Refused)
    speeds = Speeds(1e9, 1e10, ((1, 1e-3), (128, 1e-1)), ((1, 1e-4), (16, 2e-4)))
    monkeypatch.setattr(Profiler, "measure", lambda self, subject, check: speeds)
    return ports


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterConfig]:
    """A starter, two secondaries and a spare."""
    with secondaries(3, tmp_path) as nodes:
        spare = entry_of(nodes[2], is_spare=True)
        yield replace(cluster_of(nodes[:2]), spares=(spare,))


def generate(cluster: ClusterConfig, tmp_path: Path, **options: Any) -> tuple[list[int], Run]:
    """A greedy text's ids, and the starter that generated it."""
    checkpoint = write_checkpoint(tmp_path / "tiny", 4)
    fields = {"ckpt": checkpoint, "prompt_style": "none", "device": "cpu", "cache_dir": tmp_path, "wait_s": 0.1}
    with Run(GivenNodes(cluster), StarterOptions(**{**fields, "silence_s": 0.5, **options}), 40, n_texts=1) as starter:
        sample = starter.submit(PROMPT, encode(PROMPT), SamplingParams(N_TOKENS, temperature=0))
        starter.read()
        starter.close()
        return list(sample.token_ids), starter


@pytest.fixture
def dies_measuring(dead: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """secondary0 is gone as soon as it was asked to measure itself."""
    profile = ControlClient.profile

    def ask(self: ControlClient, *args: Any) -> Any:
        if self.node.name == "secondary0":
            dead.update((self.node.port, self.node.port_in))
        return profile(self, *args)

    monkeypatch.setattr(ControlClient, "profile", ask)


EXPECTED = list(reference(PROMPT, N_TOKENS, 4))


@pytest.mark.usefixtures("dies_measuring")
def test_a_spare_takes_the_place_of_a_node_that_is_lost_while_it_measures_itself(
    cluster: ClusterConfig, tmp_path: Path
) -> None:
    ids, starter = generate(cluster, tmp_path, placement="throughput")
    assert ids == EXPECTED
    assert "secondary0" not in starter.names and not starter.cluster.spares


@pytest.mark.usefixtures("dies_measuring")
@pytest.mark.parametrize("n_secondaries", [1, 2])
def test_without_a_spare_the_others_go_on(cluster: ClusterConfig, tmp_path: Path, n_secondaries: int) -> None:
    cluster = replace(cluster, secondaries=cluster.secondaries[:n_secondaries], spares=())
    ids, starter = generate(cluster, tmp_path, placement="throughput")
    assert ids == EXPECTED and set(starter.names) <= {"starter", "secondary1"}


@pytest.mark.usefixtures("dies_measuring")
def test_a_fixed_run_ends_with_it(cluster: ClusterConfig, tmp_path: Path) -> None:
    with pytest.raises(NodeLostError) as lost:
        generate(cluster, tmp_path, placement="throughput", fixed=True)
    assert (lost.value.node, lost.value.code) == ("secondary0", "lost")


@pytest.mark.slow
def test_a_node_that_hangs_while_it_measures_itself_is_lost(
    cluster: ClusterConfig, tmp_path: Path, dead: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its answer to the question how fast it is comes, nor a sign of life."""
    profile, over = SecondaryNode.profile, threading.Event()

    def hang(self: SecondaryNode, *args: Any) -> Any:
        if self.config.name == "secondary0":
            dead.update((self.control_port, self.ring_port))
            over.wait()
        return profile(self, *args)

    monkeypatch.setattr(SecondaryNode, "profile", hang)
    monkeypatch.setattr(mdi.control.client, "ANSWER_S", 2.0)
    try:
        ids, starter = generate(replace(cluster, spares=()), tmp_path, placement="throughput")
    finally:
        over.set()
    assert ids == EXPECTED and "secondary0" not in starter.names


@pytest.mark.parametrize("placement", ["throughput", "even"])
def test_a_spare_takes_the_place_of_a_node_that_never_was_there(
    cluster: ClusterConfig, tmp_path: Path, dead: set[int], placement: str
) -> None:
    dead.add(cluster.secondaries[1].port)
    ids, starter = generate(cluster, tmp_path, placement=placement)
    assert ids == EXPECTED and "secondary1" not in starter.names


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["throughput", "even"])
def test_a_node_that_never_was_there_ends_the_run_where_no_spare_is(
    cluster: ClusterConfig, tmp_path: Path, dead: set[int], placement: str
) -> None:
    dead.update({cluster.secondaries[1].port, cluster.spares[0].port})
    for nodes in (cluster, replace(cluster, spares=())):
        with pytest.raises(NodeLostError) as lost:
            generate(nodes, tmp_path, placement=placement)
        assert lost.value.node == "secondary1"


def test_a_ring_port_that_cannot_be_reached_is_tried_twice(
    cluster: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node lives and answers what it is asked, so it is not lost: nothing is different the third time."""
    n_tried = 0

    def refuse(*args: Any, **options: Any) -> Any:
        nonlocal n_tried
        n_tried += 1
        raise NodeLostError("secondary0", "port 4711")

    monkeypatch.setattr(mdi.run.form, "close_starter_ring", refuse)
    with pytest.raises(RingError, match="port 4711") as caught:
        generate(replace(cluster, spares=()), tmp_path, layers="1,2,2")
    assert type(caught.value) is RingError and n_tried == 2
