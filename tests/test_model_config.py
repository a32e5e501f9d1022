"""The configuration of our own says what litgpt's Config says, for each of its models, and refuses what that refuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path
from typing import Any

import pytest
from litgpt.config import Config, configs

from families import DEEPSEEK_V3, FAMILIES, config_of
from mdi.checkpoint.source import open_source
from mdi.spec.model import ModelConfig
from missing_libraries import without
from tiny_models import HF_KINDS, tiny_hf

ROOT = Path(__file__).parents[1]


def test_it_has_litgpts_fields_and_defaults() -> None:
    assert list(asdict(Config())) == list(ModelConfig().plain())
    assert asdict(Config()) == ModelConfig().plain()
    with pytest.raises(FrozenInstanceError):
        ModelConfig().n_layer = 3  # type: ignore[misc]


def test_every_model_of_litgpts_table_is_the_same() -> None:
    assert len(configs) > 100
    for settings in configs:
        lit, own = Config(**settings), ModelConfig(**settings)
        assert own.plain() == asdict(lit) and own.rope_n_elem == lit.rope_n_elem, settings["name"]
        assert ModelConfig(**asdict(lit)).plain() == asdict(lit)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_same(family: str) -> None:
    lit = config_of(family)
    own = ModelConfig(**asdict(lit))
    assert own.plain() == asdict(lit) and own.rope_n_elem == lit.rope_n_elem


_WINDOW: dict[str, Any] = {"n_layer": 2, "sliding_window_size": 4}


@pytest.mark.parametrize(
    "settings",
    [
        {"n_head": 7, "n_embd": 48},
        {"n_head": 6, "n_query_groups": 4},
        {"mlp_class_name": "LLaMAMLP"},
        {**_WINDOW, "sliding_window_indices": [1]},
        {**_WINDOW, "sliding_window_indices": [1, 2]},
        {"n_layer": 2, "rope_local_base_freq": 1.0, "rope_indices": [1]},
        {"first_k_dense_replace": 1},
        {**DEEPSEEK_V3, "n_query_groups": 2},
        {**DEEPSEEK_V3, "n_expert_groups": 1},
        {**DEEPSEEK_V3, "n_expert_groups": 3},
        {**DEEPSEEK_V3, "n_topk_groups": None},
        {**DEEPSEEK_V3, "n_topk_scores_per_group": 9},
        {"no_such_field": 1},
    ],
)
def test_it_refuses_what_litgpt_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, ValueError, TypeError)):
        Config(**settings)
    with pytest.raises((ValueError, TypeError)):
        ModelConfig(**settings)


def test_sigmoids_are_divided_by_their_sum_or_refused() -> None:
    settings = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "sigmoid_router": True}
    assert ModelConfig(**settings, norm_topk_prob=True).norm_topk_prob
    with pytest.raises(ValueError, match="norm_topk_prob"):
        ModelConfig(**settings)


def test_indices_are_cut_to_the_blocks() -> None:
    settings = {**_WINDOW, "sliding_window_indices": [1, 0, 1]}
    assert ModelConfig(**settings).plain() == asdict(Config(**settings))
    assert ModelConfig(**_WINDOW).sliding_window_indices == [1, 1]


def test_a_folder_of_every_family_is_read_without_torch_and_litgpt(tmp_path: Path) -> None:
    folders = [tiny_hf(tmp_path / family.lower() / "mine", family)[0] for family in HF_KINDS]
    expected = [open_source(folder).config_hash for folder in folders]
    code = without(("torch", "litgpt", "lightning")) + (
        "from mdi.checkpoint.source import open_source\n"
        "for path in sys.argv[1:]:\n"
        "    source = open_source(path)\n"
        "    [source.array(name) for name in source.specs]\n"
        "    print(source.config_hash)\n"
    )
    argv = [sys.executable, "-c", code, *map(str, folders)]
    done = subprocess.run(argv, cwd=ROOT / "src", capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == expected, done.stderr
