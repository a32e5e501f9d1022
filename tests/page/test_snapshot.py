"""A ring that really runs, in this process, as the page sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily

from mdi.engine.recorder import SERVE_SPANS
from mdi.engine.sequence import SamplingParams
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.serve.backend import handlers
from mdi.serve.prometheus import ring_metrics
from mdi.serve.snapshot import Snapshots
from mdi.spec.options import StarterOptions
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode, write_checkpoint

NAMES = ["starter", "secondary0", "secondary1"]
Ring = tuple[Run, list[SecondaryNode], Snapshots]


def host_of(starter: Run) -> Any:
    return SimpleNamespace(loaded={"tiny": SimpleNamespace(run=starter)})


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    with secondaries(2, tmp_path) as nodes:
        options = StarterOptions(
            ckpt=write_checkpoint(tmp_path / "tiny"),
            prompt_style="none",
            device="cpu",
            n_spans=SERVE_SPANS,
            placement="even",
        )
        starter = Run(GivenNodes(cluster_of(nodes)), options, 60)
        try:
            starter.open()
            yield starter, nodes, Snapshots(host_of(starter))
        finally:
            starter.close()


def write(starter: Run, n_texts: int = 3) -> None:
    for _ in range(n_texts):
        starter.submit("The ring", encode("The ring"), SamplingParams(30, temperature=0))
    starter.read()


def closed(snapshots: Snapshots) -> dict[str, Any]:
    """The first snapshot in which every node has noticed that the ring is closed."""
    for _ in range(500):
        found = snapshots.take()["tiny"]
        if all(node["frames"] is not None for node in found["nodes"]):
            return found
    raise AssertionError(found)


def test_a_ring_at_work(ring: Ring) -> None:
    starter, _, snapshots = ring
    first = closed(snapshots)
    assert [node["name"] for node in first["nodes"]] == NAMES and first["n_tokens"] == 0
    write(starter)
    found = snapshots.take()["tiny"]
    assert snapshots.latest["tiny"] is found
    assert found["n_tokens"] == 90 and found["tokens_s"] > 0
    assert found["tokens_per_round"] == 90 / (90 - found["n_confirmed"])
    for node in found["nodes"]:
        assert node["is_here"] and node["state"] == "SERVING" and node["frames"] > 0
        assert 0 < node["busy"] <= 1 and 0 <= node["waiting"] <= 1 and node["bytes_s"] > 0
        assert node["memory"]["rss_bytes"] > 0 and node["cache"]["limit"] > 0
    assert [node["blocks"] for node in found["nodes"]] == [list(blocks) for blocks in starter.model.weights.blocks]
    assert [(link["source"], link["target"]) for link in found["links"]] == list(
        zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)
    )
    for link in found["links"]:
        assert 0 <= link["delay_s"] < 1 and 0 < link["error_s"] < 1


def test_the_snapshot_as_metrics(ring: Ring) -> None:
    starter, _, snapshots = ring
    closed(snapshots)
    write(starter)
    families = {family.name: family for family in ring_metrics(snapshots.take())}
    computed = families["mdi_node_compute_seconds"]
    assert isinstance(computed, CounterMetricFamily)
    assert [sample.labels["node"] for sample in computed.samples] == NAMES
    assert all(sample.value > 0 for sample in computed.samples)


def test_a_node_that_is_gone(ring: Ring) -> None:
    _, nodes, snapshots = ring
    snapshots.take()
    nodes[1].close()
    found = {node["name"]: node for node in snapshots.take()["tiny"]["nodes"]}
    assert found["secondary0"]["is_here"] and not found["secondary1"]["is_here"]
    assert found["secondary1"]["memory"] is None and found["secondary1"]["busy"] is None


def test_a_ring_that_is_formed_again(ring: Ring) -> None:
    """What the page says comes from the engine: why the texts wait."""
    starter, _, snapshots = ring
    closed(snapshots)
    assert snapshots.take()["tiny"]["state"] == "idle"
    starter.loop.policy.trouble = "secondary1 is lost; the texts wait"
    found = snapshots.take()["tiny"]
    assert (found["state"], found["words"]) == ("recovering", "secondary1 is lost; the texts wait.")
    assert [node["state"] for node in found["nodes"]] == ["WAITING"] * 3
    report = handlers(host_of(starter), snapshots)["doctor"]({"model": "tiny"})
    assert report["text"].count("WAITING") == 3, "doctor uses the words of the page"


def test_plan_and_doctor_of_a_running_ring(ring: Ring) -> None:
    starter, _, snapshots = ring
    ask = handlers(host_of(starter), snapshots)
    closed(snapshots)
    assert "error" in ask["plan"]({"model": "tiny"}), "nothing was measured yet"
    write(starter)
    snapshots.take()
    planned = ask["plan"]({"model": "tiny"})
    assert "error" not in planned, planned
    assert planned["words"].startswith("For 1 text at once")
    assert sum(stop - start for start, stop in (node["blocks"] for node in planned["plan"]["nodes"])) == 5
    report = ask["doctor"]({"model": "tiny"})
    assert [node["name"] for node in report["nodes"]] == NAMES
    assert report["text"].count("SERVING") == 3, "as on the page"
    assert not [one for one in report["problems"] if "busy" in one["what"]], "busy with this ring is as it should be"
    write(starter)


def test_without_a_ring() -> None:
    host: Any = SimpleNamespace(loaded={})
    snapshots = Snapshots(host)
    assert snapshots.take() == {}
    ask = handlers(host, snapshots)
    assert "error" in ask["plan"]({"model": "tiny"}) and not ask["doctor"]({"model": "tiny"})["problems"]
