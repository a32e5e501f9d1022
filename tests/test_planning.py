"""From live nodes to a placement: profiles of all of them, the ways between them, and a run on what was chosen."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mdi.cancel
import mdi.placement.cluster_measurement
import mdi.placement.profiler
import mdi.run.setup
import mdi.stages.torch_stage
from caches import own_cache
from mdi.cancel import Cancel
from mdi.checkpoint.chunks import write_chunks
from mdi.checkpoint.source import open_source
from mdi.cli import launch
from mdi.cli.session import chosen_placement
from mdi.control.client import ControlClient
from mdi.control.messages import ProfileRequest
from mdi.control.server import open_ports
from mdi.engine.sequence import SamplingParams
from mdi.errors import (
    CheckpointError,
    Code,
    ControlError,
    MdiError,
    NodeLostError,
    NoMemoryError,
    PlacementError,
    UsageError,
)
from mdi.host.computing import Computing
from mdi.host.threads import host_of
from mdi.model.plain import ModelConfig
from mdi.node.secondary import SecondaryNode
from mdi.placement.cluster_measurement import BROKEN_S, ClusterMeasurement
from mdi.placement.planning import format_blocks
from mdi.placement.profile import NodeProfile
from mdi.placement.profiler import Profiler
from mdi.placement.profiling import Bench, Speeds, Subject
from mdi.run.local import free_ports
from mdi.run.nodes import GivenNodes, dismiss
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig, standalone
from mdi.spec.model_id import ModelId
from mdi.spec.options import StarterOptions
from mdi.stages.starter_weights import StarterWeights
from mdi.stages.torch_stage import Stage
from secondaries import cluster_of, entry_of, secondaries
from tiny_checkpoint import encode, reference, tiny_config, write_checkpoint

GB = 1 << 30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


def speeds(block_ms: float) -> Speeds:
    times = tuple((rows, block_ms / 1e3 * rows) for rows in (1, 4, 16, 128))  # computing is the limit, not reading
    return Speeds(1e9, 1e10, times, ((1, 1e-4), (16, 2e-4)))


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds of a block on each node, in place of what this machine would measure just now."""
    block_ms = {"starter": 1.0, "secondary0": 1.0, "secondary1": 1.0}
    monkeypatch.setattr(Profiler, "measure", lambda self, subject, check: speeds(block_ms[self.name]))
    # These nodes stand for machines of their own.
    monkeypatch.setattr(mdi.placement.cluster_measurement, "level_times", lambda nodes, alike: tuple(nodes))
    return block_ms


def starter_of(
    nodes: list[SecondaryNode], ckpt: Path, tmp_path: Path, n_texts: int = 3, leave: bool = False, **options: Any
) -> Run:
    fields = {"ckpt": ckpt, "prompt_style": "none", "device": "cpu", "cache_dir": tmp_path / "starter", "wait_s": 5.0}
    return Run(GivenNodes(cluster_of(nodes)), StarterOptions(**{**fields, **options}), 55, n_texts=n_texts, leave=leave)


def run(starter: Run, n_samples: int = 3) -> list[list[int]]:
    try:
        starter.open()
        BLOCKS[:] = starter.model.weights.blocks
        samples = [
            starter.submit("The ring", encode("The ring"), SamplingParams(5, temperature=0)) for _ in range(n_samples)
        ]
        starter.read()
        starter.close()
        return [list(sample.token_ids) for sample in samples]
    finally:
        starter.close()


EXPECTED = list(reference("The ring", 5))
BLOCKS: list[tuple[int, int]] = []  # of the last run


# Runs


def test_measured_in_truth(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is replaced: whatever the nodes measure, the text is right; and the second time nothing is measured."""
    with secondaries(2, tmp_path) as nodes:
        for node in nodes:
            node.profiler.span_s = 0.01
        monkeypatch.setattr(mdi.placement.profiler, "SPAN_S", 0.01)
        assert run(starter_of(nodes, tiny, tmp_path)) == [EXPECTED] * 3

        def fail(*args: Any) -> Any:
            raise AssertionError("measured again")

        monkeypatch.setattr(Bench, "run", fail)
        assert run(starter_of(nodes, tiny, tmp_path)) == [EXPECTED] * 3


def test_the_slow_node_gets_less(tiny: Path, tmp_path: Path, fixed: dict[str, float]) -> None:
    fixed.update(starter=10.0, secondary0=30.0, secondary1=10.0)
    with secondaries(2, tmp_path) as nodes:
        starter = starter_of(nodes, tiny, tmp_path, 30)
        assert run(starter, 30) == [EXPECTED] * 30
        held = dict(zip(starter.names, (stop - start for start, stop in BLOCKS), strict=True))
        assert sum(held.values()) == 5 and held.get("secondary0", 0) < held["secondary1"]


def test_a_node_that_only_slows_the_ring_down_is_left_out(
    tiny: Path, tmp_path: Path, fixed: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fixed.update(starter=20.0, secondary0=5000.0, secondary1=20.0)
    with secondaries(2, tmp_path) as nodes:
        starter = starter_of(nodes, tiny, tmp_path)
        assert run(starter) == [EXPECTED] * 3
        assert starter.names == ("starter", "secondary1")
        assert nodes[0].status(None)["model"] is None
    assert "left out: secondary0" in caplog.text and "placement throughput: blocks starter" in caplog.text


@pytest.mark.parametrize("slow", [["secondary0"], ["secondary0", "secondary1"]], ids=["one", "all"])
def test_nodes_that_were_left_out_are_ended_as_well(
    tiny: Path, tmp_path: Path, fixed: dict[str, float], slow: list[str]
) -> None:
    fixed.update(dict.fromkeys(fixed, 20.0) | dict.fromkeys(slow, 5000.0))
    with secondaries(2, tmp_path) as nodes:
        starter = starter_of(nodes, tiny, tmp_path, leave=True)
        try:
            starter.open()
            assert set(starter.names) == {"starter", "secondary0", "secondary1"} - set(slow)
        finally:
            starter.close()
        assert all(node.is_leaving for node in nodes)


@pytest.mark.usefixtures("in_torch")
def test_a_run_computes_with_what_was_measured(tiny: Path, tmp_path: Path, fixed: dict[str, float]) -> None:
    """Device and threads of the nodes file, where the node itself was told nothing."""
    fixed.update(starter=5000.0)
    seen: list[tuple[str, Any, int]] = []

    class Watched(Stage):
        def forward(self, x: torch.Tensor, slices: Any) -> torch.Tensor:
            seen.append((threading.current_thread().name, str(x.device), torch.get_num_threads()))
            return super().forward(x, slices)

    with secondaries(2, tmp_path, device=None) as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mdi.stages.torch_stage, "Stage", Watched)
        entries = tuple(entry_of(node, device="cpu", threads=n) for n, node in enumerate(nodes, 1))
        by_hand = StarterOptions(ckpt=tiny, prompt_style="none", device="cpu", layers="1,2,2")
        starter = Run(GivenNodes(ClusterConfig(OWN_NODE, entries)), by_hand, 60, n_texts=3)
        assert run(starter) == [EXPECTED] * 3
        asked: list[ProfileRequest] = []
        profile = ControlClient.profile
        patch.setattr(
            ControlClient, "profile", lambda self, request, *waiting: (asked.append(request), profile(self, request))[1]
        )
        options = {"ckpt": tiny, "prompt_style": "none", "device": "cpu", "cache_dir": tmp_path / "starter"}
        starter = Run(GivenNodes(ClusterConfig(OWN_NODE, entries)), StarterOptions(**options), 60, n_texts=3)
        assert run(starter) == [EXPECTED] * 3
    assert set(seen) == {("secondary0", "cpu", 1), ("secondary1", "cpu", 2)}
    assert [(request.device, request.threads) for request in asked] == [("cpu", 1), ("cpu", 2)]


def test_all_secondaries_may_be_left_out(tiny: Path, tmp_path: Path, fixed: dict[str, float]) -> None:
    fixed.update(starter=1.0, secondary0=5000.0, secondary1=5000.0)
    with secondaries(2, tmp_path) as nodes:
        starter = starter_of(nodes, tiny, tmp_path)
        assert run(starter) == [EXPECTED] * 3
        assert starter.names == ("starter",)


@pytest.mark.parametrize("method", ["latency", "throughput"])
def test_every_placement_runs(tiny: Path, tmp_path: Path, fixed: dict[str, float], method: str) -> None:
    with secondaries(2, tmp_path) as nodes:
        assert run(starter_of(nodes, tiny, tmp_path, placement=method)) == [EXPECTED] * 3


def test_what_is_given_is_not_measured(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def fail(*args: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(Profiler, "profile", fail)
    chunked = write_checkpoint(tmp_path / "chunked")
    source = open_source(chunked)
    write_chunks(source, chunked, (1, 1, 3))
    source.close()
    with secondaries(2, tmp_path) as nodes:
        for ckpt, options, counts, how in (
            (tiny, {"layers": "1,3,1"}, [1, 3, 1], "as --layers says"),
            (tiny, {"placement": "even"}, None, "shared out evenly"),
            (tiny, {"layers": "2,1,2", "placement": "throughput"}, [2, 1, 2], "as --layers says"),
            (chunked, {}, [1, 1, 3], "as its chunks are"),
        ):
            starter = starter_of(nodes, ckpt, tmp_path, **options)
            try:
                starter.open()
                found = [stop - start for start, stop in starter.model.weights.blocks]
                assert counts is None or found == counts
                told = format_blocks(starter.names, starter.model.weights.blocks)
                assert f"blocks {told}, {how}" in caplog.messages
            finally:
                starter.close()
        alone = Run(GivenNodes(standalone()), StarterOptions(ckpt=tiny), 60, n_texts=3)
        alone.open()
        alone.close()


def test_a_placement_that_is_asked_for_goes_before_chunks(tmp_path: Path, fixed: dict[str, float]) -> None:
    chunked = write_checkpoint(tmp_path / "chunked")
    source = open_source(chunked)
    write_chunks(source, chunked, (0, 1, 4))
    source.close()
    fixed.update(starter=1.0, secondary0=1.0, secondary1=50.0)
    with secondaries(2, tmp_path) as nodes:
        starter = starter_of(nodes, chunked, tmp_path, 12, placement="throughput")
        assert run(starter, 12) == [EXPECTED] * 12
        assert "secondary1" not in starter.names or BLOCKS != [(0, 0), (0, 1), (1, 5)]


def test_what_cannot_fit_is_refused_before_anything_is_sent(
    tiny: Path, tmp_path: Path, fixed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Profiler, "available_bytes", lambda self, device: 100_000)
    with secondaries(2, tmp_path) as nodes:
        starter = starter_of(nodes, tiny, tmp_path)
        with pytest.raises(PlacementError):
            run(starter)
        assert not any(node.store.parts() for node in nodes)
        assert all(node.status(None)["state"] == "IDLE" for node in nodes)


def test_a_starter_without_memory_does_not_begin_to_load(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mdi.stages.store.device_free_bytes", lambda device: 1000)
    alone = Run(GivenNodes(ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0))), StarterOptions(ckpt=tiny), 60)
    with pytest.raises(NoMemoryError) as caught:
        alone.open()
    assert caught.value.code == "memory"


def test_a_starter_that_cannot_measure_itself_says_so(
    tiny: Path, tmp_path: Path, fixed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profiler.profile

    def fail(self: Profiler, *args: Any) -> NodeProfile:
        if self.name == "starter":
            raise CheckpointError("one block takes too much")
        return profile(self, *args)

    monkeypatch.setattr(Profiler, "profile", fail)
    with secondaries(1, tmp_path) as nodes, pytest.raises(CheckpointError) as e:
        run(starter_of(nodes, tiny, tmp_path))
    assert "starter" in str(e.value) and "one block takes too much" in str(e.value)


def test_a_node_that_could_not_be_ended_is_told(caplog: pytest.LogCaptureFixture) -> None:
    gone = ControlClient(NodeConfig("secondary7", "127.0.0.1", 1, 2))
    assert dismiss([gone], "a" * 16, leave=True, patient=False) == [{}]
    assert "secondary7 did not get the request to end: secondary7 at 127.0.0.1:1 does not answer" in caplog.text


def test_a_cut_anew_needs_all_its_parts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    weights = StarterWeights(folder, None, 3, None)
    weights.cut_anew((3, 2))
    assert weights.blocks == [(0, 3), (3, 5)]
    assert weights.stage_bytes(1) == sum(weights.part_bytes(f"block.{i}") for i in (3, 4))
    weights.close()


# The survey


REQUEST = ProfileRequest(ModelId("m", ModelConfig(n_layer=1), "h", "float32"))
OWN = NodeProfile("starter", "cpu", 1.0, GB, GB, 0.0, 1e9, (), (), 0)


def measurement_of(cluster: ClusterConfig, **changes: Any) -> ClusterMeasurement:
    fields = {"request": REQUEST, "own": lambda: OWN, "wait_s": 0.2, "cancel": Cancel(), **changes}
    return ClusterMeasurement(cluster, **fields)


class Answering:
    """Nodes say at once what they are; `asked` says who was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, client: ControlClient, request: ProfileRequest, *waiting: Any) -> dict[str, Any]:
        self.asked.append(client.node.name)
        return {"profile": replace(OWN, name=f"{client.node.name} by itself").to_json(), "format": "int8"}


def test_all_nodes_and_all_ways(tmp_path: Path) -> None:
    answering = Answering()
    with secondaries(2, tmp_path) as nodes, open_ports(NodeConfig("starter", "127.0.0.1", 0, 0)) as (port, port_in):
        cluster = replace(cluster_of(nodes), starter=NodeConfig("starter", "127.0.0.1", port, port_in))
        survey = measurement_of(cluster, ask=answering)
        profiles, links = survey.run()
    assert [profile.name for profile in profiles] == ["starter", "secondary0", "secondary1"]
    assert sorted(answering.asked) == ["secondary0", "secondary1"] and survey.formats["secondary0"] == "int8"
    names = {profile.name for profile in profiles}
    assert {(link.source, link.target) for link in links} == {(a, b) for a in names for b in names if a != b}
    assert all(0 < link.round_trip_s < 1 and link.bytes_s > 1e6 for link in links)


def test_nodes_of_one_machine_share_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    full = replace(OWN, shared_bytes=GB)
    answer = {"profile": full.to_json(), "format": "int8"}
    with secondaries(2, tmp_path) as nodes:
        profiles, _ = measurement_of(cluster_of(nodes), own=lambda: full, ask=lambda *_: answer).run()
    assert [profile.memory_bytes for profile in profiles] == [GB // 3] * 3
    assert "starter, secondary0, secondary1 share the memory of their machine" in caplog.text


def test_what_takes_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(mdi.cancel, "REPORT_S", -1.0)
    with secondaries(1, tmp_path) as nodes, open_ports(OWN_NODE) as (port, port_in):
        cluster = replace(cluster_of(nodes), starter=replace(OWN_NODE, port=port, port_in=port_in))
        measurement_of(cluster, ask=Answering()).run()
    assert "measuring the link from secondary0 to starter (1 of 2)" in caplog.messages
    config = ModelConfig.from_litgpt(tiny_config())
    Profiler("starter", tmp_path, span_s=0.001).profile(Subject(config, "h", Computing("cpu", "float32")), None)
    assert "starter measures a block at 16 rows (7 of 11)" in caplog.messages


def test_a_way_that_does_not_exist_is_no_choice(tmp_path: Path) -> None:
    """One ring port cannot be reached, the starter's: a node's is needed to ask it anything. No placement is to count on it."""
    with secondaries(1, tmp_path) as nodes, open_ports(NodeConfig("starter", "127.0.0.1", 0, 0)) as (port, _):
        wrong = NodeConfig("starter", "127.0.0.1", port, port)
        _, links = measurement_of(ClusterConfig(wrong, (entry_of(nodes[0]),)), ask=Answering()).run()
    found = {(link.source, link.target): link for link in links}
    assert found["secondary0", "starter"].round_trip_s == BROKEN_S
    assert found["starter", "secondary0"].round_trip_s < BROKEN_S


def test_all_nodes_measure_at_the_same_time(tmp_path: Path) -> None:
    """As they compute in a run, those of one machine, too: each waits here until all have begun."""
    begun = threading.Barrier(3, timeout=60)

    def profile(self: ControlClient, request: ProfileRequest, *waiting: Any) -> dict[str, Any]:
        begun.wait()
        return {"profile": OWN.to_json(), "format": "float32"}

    def own() -> NodeProfile:
        begun.wait()
        return OWN

    with secondaries(2, tmp_path) as nodes:
        profiles, _ = measurement_of(cluster_of(nodes), own=own, ask=profile).run()
    assert [one.name for one in profiles] == ["starter", "secondary0", "secondary1"]


def test_nodes_that_are_alike_are_equally_fast(tmp_path: Path) -> None:
    """Noise while one of them measured itself must not decide who gets all blocks."""
    times = {"starter": 0.001, "secondary0": 0.002, "secondary1": 0.006}

    def profile_of(name: str, n_threads: int = 1) -> NodeProfile:
        return replace(OWN, name=name, block_s=((1, times[name]),), n_threads=n_threads)

    def profile(self: ControlClient, request: ProfileRequest, *waiting: Any) -> dict[str, Any]:
        own = profile_of(self.node.name, 2 if self.node.name == "secondary1" else 1)
        return {"profile": own.to_json(), "format": "float32"}

    with secondaries(2, tmp_path) as nodes:
        cluster = cluster_of(nodes)
        survey = measurement_of(cluster, own=lambda: profile_of("starter"), own_format="float32", ask=profile)
        profiles, _ = survey.run()
    assert [p.block_s[0][1] for p in profiles] == [pytest.approx(0.0015), pytest.approx(0.0015), 0.006]


def test_a_node_that_is_not_there() -> None:
    gone = ClusterConfig(OWN_NODE, (NodeConfig("secondary0", "127.0.0.1", 1, 2),))
    with pytest.raises(NodeLostError) as e:
        measurement_of(gone).run()
    assert "mdi secondary" in str(e.value) and "mdi doctor" in str(e.value)


OWN_NODE = NodeConfig("starter", "127.0.0.1", 0, 0)


@pytest.mark.parametrize(
    "answer", [{}, {"profile": None}, {"profile": {}}, {"profile": {**OWN.to_json(), "n_cores": -1}}]
)
def test_a_profile_that_cannot_be_read(tmp_path: Path, answer: Any) -> None:
    with secondaries(1, tmp_path) as nodes, pytest.raises(ControlError) as e:
        measurement_of(cluster_of(nodes), ask=lambda *_: answer).run()
    assert "secondary0" in str(e.value)


def test_a_node_that_stays_busy(tmp_path: Path) -> None:
    """It is asked again as long as there is time, since the other run may end in a moment."""
    asked: list[str] = []

    def profile(self: ControlClient, request: ProfileRequest, *waiting: Any) -> dict[str, Any]:
        asked.append(self.node.name)
        if len(asked) == 3:
            raise ControlError(f"{self.node.name} cannot measure itself", 409, code=Code.USAGE)
        raise ControlError(f"{self.node.name} is busy with another run (RUNNING)", 409, code=Code.BUSY)

    with secondaries(1, tmp_path) as nodes, pytest.raises(ControlError) as caught:
        measurement_of(cluster_of(nodes), ask=profile).run()
    assert len(asked) == 3 and caught.value.code == "usage"
    asked.clear()
    with secondaries(1, tmp_path / "again") as nodes, pytest.raises(ControlError) as caught:
        measurement_of(cluster_of(nodes), ask=profile, busy_s=-1.0).run()
    assert len(asked) == 1 and caught.value.code == "busy"


def test_what_the_caller_raises_ends_the_waiting(tmp_path: Path) -> None:
    class Enough(MdiError):
        pass

    cancel = Cancel()
    cancel.cancel(Enough())
    with secondaries(1, tmp_path) as nodes, pytest.raises(Enough):
        measurement_of(cluster_of(nodes), cancel=cancel).run()


def test_hosts() -> None:
    assert host_of("127.0.0.1") == host_of("127.0.0.2") == host_of("localhost")
    assert host_of("192.168.1.11") == "192.168.1.11" != host_of("192.168.1.12")
    assert host_of("no-such-host.invalid") == "no-such-host.invalid"


# The flag


def test_the_default_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MDI_PLACEMENT", raising=False)
    assert chosen_placement(None) is None
    assert chosen_placement("latency") == "latency"
    monkeypatch.setenv("MDI_PLACEMENT", "even")
    assert chosen_placement(None) == "even"
    assert chosen_placement("latency") == "latency"
    monkeypatch.setenv("MDI_PLACEMENT", "best")
    with pytest.raises(UsageError) as e:
        chosen_placement(None)
    assert "MDI_PLACEMENT='best'" in str(e.value) and e.value.code == "usage"


# The command


def nodes_file(path: Path, nodes: list[SecondaryNode]) -> Path:
    ports = free_ports(2)
    entries = [
        {"addr": "127.0.0.1", "communication": {"port": port}, "inference": {"port_in": port_in}}
        for port, port_in in ((ports[0], ports[1]), *((node.control_port, node.ring_port) for node in nodes))
    ]
    path.write_text(json.dumps({"nodes": {"starter": entries[0], "secondary": entries[1:]}}))
    return path


def test_a_plan_of_nodes_that_are_running(
    tiny: Path,
    tmp_path: Path,
    fixed: dict[str, float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MDI_CACHE_DIR", own_cache(tmp_path / "starter"))
    fixed.update(secondary1=100.0)
    saved = tmp_path / "cluster.json"
    with secondaries(2, tmp_path) as nodes:
        path = nodes_file(tmp_path / "nodes.json", nodes)
        live = [
            "--nodes-config",
            str(path),
            "--ckpt",
            str(tiny),
            "--n-samples",
            "6",
            "--sequence-length",
            "60",
            "--json",
        ]
        assert launch("plan", [*live, "--save-profiles", str(saved)]) == 0
        found = json.loads(capsys.readouterr().out)
        for wrong in (["--nodes-config", str(path)], [*live, "--profiles", str(saved)], [*live, "--wait", "-1"]):
            assert launch("plan", wrong) == 2
        capsys.readouterr()
    blocks = {node["name"]: node["blocks"][1] - node["blocks"][0] for node in found["nodes"]}
    assert sum(blocks.values()) == 5 and blocks["secondary0"] > blocks.get("secondary1", 0)
    # what was written down makes the same plan, with no node running
    args = ["--profiles", str(saved), "--ckpt", str(tiny), "--n-samples", "6", "--sequence-length", "60", "--json"]
    assert launch("plan", args) == 0
    assert json.loads(capsys.readouterr().out) == found
