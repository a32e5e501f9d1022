"""What computes the blocks of each node, and what its caches hold, as plans show and reckon with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from families import config_of
from mdi.cli import launch
from mdi.control.client import ControlClient
from mdi.control.messages import ProfileRequest
from mdi.errors import PlacementError
from mdi.host.computing import choose_computing
from mdi.kernels import library
from mdi.model.plain import ModelConfig
from mdi.placement.model import Workload, model_shape, with_paths
from mdi.placement.plan import format_plan, plan
from mdi.placement.profile import ClusterProfile, LinkProfile, NodeProfile
from mdi.placement.profiler import Profiler
from mdi.placement.profiling import Speeds
from mdi.run.choice import planned_ring
from mdi.spec.model_id import ModelId
from mdi.spec.options import Requested, StarterOptions
from secondaries import entry_of, secondary
from tiny_checkpoint import tiny_config

CONFIG = ModelConfig.from_litgpt(tiny_config())
SHAPE = model_shape(CONFIG, "float32")
KERNELS = "kernels (avx2)"


def node(name: str, computed_by: str, device: str = "cpu") -> NodeProfile:
    times = ((1, 1e-3), (16, 4e-3))
    return NodeProfile(name, device, 4.0, 10**9, 10**10, 0.0, 10e9, times, (), 10**7, computed_by=computed_by)


def cluster(*nodes: NodeProfile) -> ClusterProfile:
    names = [one.name for one in nodes]
    links = tuple(LinkProfile(a, b, 1e-4, 1e8) for a in names for b in names if a != b)
    return ClusterProfile(nodes, links, SHAPE.name, SHAPE.config_hash, "float32")


def paths(profile: ClusterProfile, config: ModelConfig, form: str) -> list[str]:
    found = with_paths(profile, config, model_shape(config, form).config_hash, form)
    return [one.computed_by for one in found.nodes]


def test_a_secondary_says_what_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profiler, "measure", lambda *args: Speeds(0.0, 1e9, (), ()))
    expected = f"kernels ({library.instruction_set()})"
    latent = ModelConfig.from_litgpt(config_of("deepseek-v3-shape"))
    asked = (
        (CONFIG, None, expected),
        (CONFIG, "bfloat16", "torch: --dtype bfloat16"),
        (latent, None, "torch: latent attention with rows of 16 and 8 numbers"),
    )
    with secondary(0, tmp_path / "cache") as one:
        for config, dtype, path in asked:
            request = ProfileRequest(ModelId("tiny", config, "h" * 64, "float32"), dtype=dtype)
            found = NodeProfile.from_json(ControlClient(entry_of(one)).profile(request)["profile"])
            assert found.computed_by == path


def test_a_model_that_was_not_measured() -> None:
    """Of a node that computed the measured model in torch nobody knows what it does with another one."""
    nodes = node("starter", KERNELS), node("a", "torch: a node without kernels"), node("b", "", "cuda:0")
    gpu = "torch: the device cuda:0"
    assert paths(cluster(*nodes), CONFIG, "int8") == [KERNELS, "torch: a node without kernels", gpu]
    assert paths(cluster(*nodes), replace(CONFIG, n_layer=3), "float32") == [KERNELS, "", gpu]
    latent = ModelConfig.from_litgpt(config_of("deepseek-v3-shape"))
    assert paths(cluster(*nodes), latent, "int8")[0] == "torch: latent attention with rows of 16 and 8 numbers"
    assert paths(cluster(*nodes), CONFIG, "bfloat16")[0] == "torch: --dtype bfloat16"


def test_a_plan_shows_what_computes_and_why() -> None:
    why = "a node without kernels (there is no C++ compiler)"
    profile = cluster(node("starter", KERNELS), node("secondary0", f"torch: {why}"), node("secondary1", ""))
    report = plan(profile, SHAPE, Workload(2, 64), layers=[2, 2, 1])
    lines = format_plan(report).splitlines()
    assert KERNELS in next(line for line in lines if line.startswith("starter "))
    assert f"torch:    secondary0: {why}" in lines
    assert [entry["computed_by"] for entry in report.to_json()["nodes"]] == [KERNELS, f"torch: {why}", None]


def test_caches_in_int8_where_torch_computes_are_told() -> None:
    profile = cluster(node("starter", KERNELS), node("secondary0", "torch: the device cuda:0", "cuda:0"))
    for kv_dtype, n in (("int8", 1), ("bf16", 0)):
        report = plan(profile, model_shape(CONFIG, "float32", kv_dtype), Workload(2, 64), layers=[2, 3])
        assert sum("secondary0" in note for note in report.notes) == n


def tight() -> ClusterProfile:
    """Memory for the caches of sixteen sequences in int8, and not in float32."""
    shape = model_shape(CONFIG, "float32", "int8")
    caches = [16 * sum(b.cache_bytes(CONFIG.block_size) for b in s.blocks) for s in (shape, SHAPE)]
    used = plan(cluster(node("starter", KERNELS)), shape, Workload(16, CONFIG.block_size)).nodes[0].memory.total
    assert caches[1] > 2 * caches[0]
    return cluster(replace(node("starter", KERNELS), memory_bytes=used + (caches[1] - caches[0]) // 2))


def test_a_run_is_placed_by_what_its_caches_hold() -> None:
    from types import SimpleNamespace

    weights: Any = SimpleNamespace(model=ModelId("tiny", CONFIG, SHAPE.config_hash, "float32"), config=CONFIG)

    def place(kv_dtype: str) -> Any:
        computing = choose_computing(CONFIG, Requested(device="cpu"), "float32")
        work = Workload(16, CONFIG.block_size)
        return planned_ring(tight(), weights, StarterOptions(ckpt=Path(), kv_dtype=kv_dtype), computing, work).placement

    assert place("int8").counts == (5,)
    with pytest.raises(PlacementError):
        place("auto")


def test_the_command_reckons_with_what_caches_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, config = tmp_path / "cluster.json", tmp_path / "model_config.yaml"
    path.write_text(json.dumps(tight().to_json()))
    config.write_text(yaml.safe_dump(CONFIG.plain()))
    flags = ["--profiles", str(path), "--config", str(config), "--n-samples", "16", "--json"]
    assert launch("plan", flags) == 1
    capsys.readouterr()
    assert launch("plan", [*flags, "--kv-dtype", "int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kv_dtype"], found["nodes"][0]["computed_by"]) == ("int8", KERNELS)
