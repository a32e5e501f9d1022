"""Configs that ask for too much are refused before anything is built, and sizes are known without building."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from litgpt.config import Config, configs
from litgpt.model import GPT

import mdi.stages.torch_stage
from families import DEEPSEEK_V3, FAMILIES, config_of
from mdi.cancel import Cancel
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.shapes import full_config, model_shapes
from mdi.control.client import ControlClient
from mdi.control.messages import InitRequest, PartSpec, ProfileRequest
from mdi.errors import CheckpointError, ControlError
from mdi.model.caches import kind_of
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import BlockSpec
from mdi.spec.extent import Extent
from mdi.spec.limits import LIMITS, excess
from mdi.spec.model_id import ModelId
from mdi.stages.model_family import ModelFamily
from mdi.stages.torch_stage import Stage, module_bytes, run_bytes
from secondaries import entry_of, secondary

RUN = "0123456789abcdef"
PLAIN = asdict(config_of("Llama-2-7b-hf"))
EXPERTS = asdict(config_of("Mixtral-8x7B-v0.1"))

HOSTILE = {
    "experts": {**EXPERTS, "n_expert": 100_000},
    "experts in all": {**EXPERTS, "n_layer": 1000, "n_expert": 1000},
    "blocks": {**PLAIN, "n_layer": 20_000},
    "blocks with windows": {**PLAIN, "n_layer": 300_000_000, "sliding_window_size": 16},
    "wide": {**PLAIN, "n_embd": 1 << 40},
    "heads": {**PLAIN, "n_head": 1 << 13, "head_size": 1 << 13},
    "latent": {**DEEPSEEK_V3, "latent_attention": {**DEEPSEEK_V3["latent_attention"], "kv_lora_rank": 1 << 40}},
    "not a number": {**PLAIN, "n_layer": float("nan")},
    "less than none": {**EXPERTS, "n_expert": -1},
    "any other": {**PLAIN, "rope_base": 1 << 80},
}


def told(plain: dict[str, Any]) -> Any:
    """What a stranger says instead of a ModelConfig."""
    return SimpleNamespace(plain=lambda: plain)


def model_id(config: Any) -> ModelId:
    return ModelId("m", config, config_hash(config) if isinstance(config, ModelConfig) else "c", "float32")


def init_request(config: Any, stop: int) -> InitRequest:
    """One that claims that its parts have a byte each."""
    parts = tuple(PartSpec(f"block.{i}", f"{i:064x}", 1) for i in range(1, stop))
    return InitRequest(
        run=RUN, epoch=RUN, index=1, names=("starter", "secondary0"), placement="p", next_addr="127.0.0.1", next_port=1,
        model=model_id(config), blocks=(1, stop), parts=parts, extent=Extent(10),
    )  # fmt: skip


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the blocks that stages build from here on, within their stage."""
    found: list[int] = []
    real = mdi.stages.torch_stage.Block

    def make_block(of: BlockSpec, width: int, layer: int) -> Any:
        found.append(layer)
        return real(of, width, layer)

    monkeypatch.setattr(mdi.stages.torch_stage, "Block", make_block)
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_large_is_refused_at_each_door(name: str) -> None:
    config, stop = HOSTILE[name], 2
    assert excess(config)
    for read, request in (
        (InitRequest.from_json, init_request(told(config), stop).to_json()),
        (ProfileRequest.from_json, ProfileRequest(model_id(told(config))).to_json()),
    ):
        with pytest.raises(ControlError) as caught:
            read({**request, "parts": [vars(part) for part in request.get("parts", ()) if isinstance(part, PartSpec)]})
        assert caught.value.status == 400
    with pytest.raises(CheckpointError):
        full_config(config, "model_config.yaml")


@pytest.mark.parametrize("size", [0, -1])
def test_a_window_without_positions_is_refused_at_each_door(size: int) -> None:
    """A token sees itself at least; kernels and caches would not mean the same by 0."""
    config = {**PLAIN, "sliding_window_size": size, "sliding_window_indices": [1] * PLAIN["n_layer"]}
    request = init_request(told(config), 2).to_json()
    with pytest.raises(ControlError, match="sliding_window_size") as caught:
        InitRequest.from_json(request)
    assert caught.value.status == 400
    with pytest.raises(CheckpointError, match="sliding_window_size") as told_by_file:
        full_config(config, "model_config.yaml")
    assert "model_config.yaml" in str(told_by_file.value) and "\n" not in str(told_by_file.value)


def test_no_model_that_exists_is_refused() -> None:
    for settings in configs:
        assert excess(settings) == "" == excess(asdict(Config(**settings)))
    for family in FAMILIES:
        assert excess(asdict(config_of(family))) == ""
    kimi = {**EXPERTS, "n_layer": 61, "n_expert": 384, "n_embd": 7168, "n_head": 64, "moe_intermediate_size": 2048}
    assert excess({**kimi, "vocab_size": 163_840, "block_size": 262_144}) == ""
    assert set(LIMITS) >= {key for key, value in kimi.items() if key.startswith("n_") and value and value > 100}


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_whole_model(family: str) -> None:
    config = config_of(family)
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in GPT(config).state_dict().items()}
    assert model_shapes(ModelConfig.from_litgpt(config), family) == expected


def test_shapes_of_every_type_of_model_that_litgpt_knows() -> None:
    sizes = ("name", "hf_config", "head_size", "rope_base", "rotary_percentage", *LIMITS)
    kinds = {
        str({k: v for k, v in asdict(Config(**c)).items() if k not in sizes and "rope" not in k}): c for c in configs
    }
    assert len(kinds) > 20
    for settings in kinds.values():
        config = Config(**settings)
        config.n_layer, config.n_expert, config.block_size = 1, min(config.n_expert, 3), 8
        config.n_expert_per_token = min(config.n_expert_per_token, config.n_expert)
        with torch.device("meta"):
            expected = {name: tuple(t.shape) for name, t in GPT(config).state_dict().items()}
        assert model_shapes(ModelConfig.from_litgpt(config), config.name) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_class_name": "Nothing"},
        {"norm_class_name": "BatchNorm1d"},
        {"shared_attention_norm": True},
        {"n_embd": None},
    ],
)
def test_shapes_of_what_litgpt_does_not_build(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as e:
        model_shapes(full_config({**asdict(config_of("Llama-2-7b-hf")), **change}, "it"), "it")
    assert "it" in str(e.value) and e.value.code == "weights"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_dense", [0, 2, 5, 9])
def test_shapes_where_the_first_blocks_have_no_experts(family: str, n_dense: int) -> None:
    config = config_of(family)
    if not config.n_expert:
        return
    config.first_k_dense_replace = n_dense
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in GPT(config).state_dict().items()}
    assert model_shapes(ModelConfig.from_litgpt(config), family) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_of_blocks_that_are_not_built(family: str) -> None:
    config = config_of(family)
    own = ModelConfig.from_litgpt(config)
    stage = Stage(spec_of(own), 1, config.n_layer)
    assert [kind_of(one).window for one in spec_of(own).blocks[1:]] == [block.attn.of.window for block in stage.blocks]
    assert run_bytes(spec_of(own), 1, config.n_layer, 90, torch.float16) == stage.run_bytes(90, torch.float16)


def test_a_stage_can_be_given_up_between_its_blocks(built: list[int]) -> None:
    class Third(Cancel):
        def check(self) -> None:
            if len(built) == 3:
                self.cancel(ControlError("the starter is gone"))
            super().check()

    with pytest.raises(ControlError):
        Stage(spec_of(ModelConfig.from_litgpt(config_of("Llama-2-7b-hf", n_layer=50))), 10, 50, Third())
    assert built == [0, 1, 2]


def test_a_node_builds_nothing_for_weights_that_have_not_come(tmp_path: Path, built: list[int]) -> None:
    """The largest model that is allowed, by parts of a byte: told what it lacks, and nothing of it stands in memory."""
    config = ModelConfig.from_litgpt(config_of("Mixtral-8x7B-v0.1", n_layer=64, n_expert=512))
    with secondary(0, tmp_path / "cache") as node:
        client = ControlClient(entry_of(node))
        client.init(init_request(config, 64))
        while (status := client.status(RUN))["missing"] is None and status["state"] == "LOADING":
            threading.Event().wait(0.02)
        assert len(status["missing"]) == 63 and built == []
        client.stop(RUN)


def test_modules_count_as_memory(built: list[int]) -> None:
    """Where torch computes, many experts take memory even without weights: on a small board more than there is."""
    config = ModelConfig.from_litgpt(config_of("Mixtral-8x7B-v0.1", n_layer=64, n_expert=512))
    request = init_request(config, 64)
    caches = run_bytes(spec_of(config), 1, 64, request.extent.max_length, torch.float32)
    needed = ModelFamily().stage_bytes(config, (1, 64), replace(request.extent, kv_dtype="float32"))
    assert needed - caches == module_bytes(spec_of(config), 1, 64) > 300e6
    assert built == []


def test_a_stranger_s_request_leaves_the_node_free(tmp_path: Path, built: list[int]) -> None:
    with secondary(0, tmp_path / "cache") as node:
        client = ControlClient(entry_of(node))
        for config in (HOSTILE["experts"], HOSTILE["blocks"], HOSTILE["blocks with windows"]):
            for ask in (
                lambda config=config: client.init(init_request(told(config), 2)),
                lambda config=config: client.profile(ProfileRequest(model_id(told(config)))),
            ):
                with pytest.raises(ControlError) as caught:
                    ask()  # type: ignore[no-untyped-call]
                assert caught.value.status == 400
        assert client.status()["state"] == "IDLE" and built == []


def test_measuring_ends_when_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of large blocks may take long to build: the node is free again at the next block."""
    monkeypatch.setattr("mdi.node.self_measurement.PROFILE_S", 0.2)
    config = ModelConfig.from_litgpt(config_of("Mixtral-8x7B-v0.1", n_layer=8))
    go_on, n_built = threading.Event(), 0
    real = mdi.stages.torch_stage.Block

    def make_block(of: BlockSpec, width: int, layer: int) -> Any:
        nonlocal n_built
        n_built += 1
        assert go_on.wait(60)
        return real(of, width, layer)

    monkeypatch.setattr(mdi.stages.torch_stage, "Block", make_block)
    with secondary(0, tmp_path / "cache") as node:
        client = ControlClient(entry_of(node))
        with pytest.raises(ControlError) as caught:
            client.profile(ProfileRequest(model_id(config), fresh=True))
        assert caught.value.status == 504
        go_on.set()
        while client.status()["measuring"]:
            threading.Event().wait(0.02)
        assert n_built <= 1
