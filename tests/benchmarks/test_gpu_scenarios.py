"""The comparison on a GPU: scenarios fit together, and systems load a shape whose weights are made up. On the CPU."""

from pathlib import Path

import numpy as np
import pytest

from gpu import GPU_SCENARIOS, LARGE, Gpu
from mdi.checkpoint.packing import plain
from mdi.kernels.weight_formats import LAYOUTS
from mdi.model.plain import ModelConfig
from mdi.model.tensors import EMBEDDING
from peers.litgpt_peer import LitgptPeer
from peers.protocol import Case
from random_checkpoint import config_of, make_checkpoint
from random_packed import RandomPacked
from side_by_side.files import Chunks, Gguf
from side_by_side.setup import Setup


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("name", GPU_SCENARIOS)
def test_scenarios_fit_together(name, shape):
    setup = Setup(shape, Path("work"), (0, 1))
    scenario = GPU_SCENARIOS[name](Gpu(setup, "cuda:0"))
    systems = {spec.name: spec for spec in scenario.systems}
    labels = {run.label for run in scenario.runs}
    assert len(systems) == len(scenario.systems) and len(labels) == len(scenario.runs)
    assert {run.system for run in scenario.runs} == set(systems)
    assert all({check.above, *check.below} <= labels for check in scenario.checks)
    for spec in scenario.systems:
        asked = (spec.options.get("device"), spec.options.get("devices"), spec.options.get("gpu_layers"))
        assert any(asked) or "cuda:0" in spec.options["flags"], f"{spec.name} would run on the CPU"
    assert {type(need) for need in setup.needs} >= ({Chunks} if name == "rings" else {Chunks, Gguf})


def test_a_peer_makes_weights_up_where_there_are_none(tmp_path):
    make_checkpoint(tmp_path / "m", "tiny-3m")
    assert not (tmp_path / "m" / "lit_model.pth").exists()
    peer = LitgptPeer(
        {"ckpt": str(tmp_path / "m"), "dtype": "bfloat16", "max_length": 16, "threads": 1, "device": "cpu"}
    )
    (times,) = peer.run(Case(1, 5, 4))["times_s"]
    assert len(times) == 4 and sorted(times) == times


@pytest.mark.parametrize("form", LAYOUTS)
def test_made_up_weights_exist_in_every_format(form):
    source = RandomPacked(ModelConfig.from_litgpt(config_of("tiny-3m")), form)
    table = plain(source.weights("embedding", source.packing))[EMBEDDING]
    assert table.shape == (32000, 256) and 0.015 < np.std(table) < 0.025
    assert all(len(source.array(name)) == spec.shape[0] for name, spec in source.specs.items())
