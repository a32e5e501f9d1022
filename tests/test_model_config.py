"""The configuration of our own says what litgpt's Config says, for each of its models, and refuses what that refuses."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from litgpt.config import Config, configs

from families import DEEPSEEK_V3, FAMILIES, config_of
from mdi.checkpoint.manifest import config_hash
from mdi.checkpoint.shapes import model_shapes
from mdi.checkpoint.source import open_source
from mdi.model.plain import ModelConfig, spec_of, why_not_litgpt
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
    assert ModelConfig(**_WINDOW).sliding_window_indices == (1, 1)


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


def test_it_cannot_be_changed_and_has_a_hash() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    settings: dict[str, Any] = {**_WINDOW, "sliding_window_indices": [1, 0], "rope_adjustments": yarn}
    config = ModelConfig(**settings)
    scaling: Any = config.rope_adjustments
    for change in (
        lambda: scaling.update(factor=3.0), lambda: scaling.pop("factor"), lambda: scaling.clear(),
        lambda: scaling.__setitem__("factor", 3.0), lambda: scaling.__delitem__("factor"), lambda: scaling.__ior__({"a": 1}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    assert hash(config) == hash(ModelConfig(**settings)) and config == ModelConfig(**settings) == copy.deepcopy(config)
    plain = config.plain()
    plain["rope_adjustments"]["factor"], plain["sliding_window_indices"][0] = 3.0, 0
    assert config.plain()["rope_adjustments"] == yarn and config.plain()["sliding_window_indices"] == [1, 0]
    assert (
        ModelConfig.of(json.loads(json.dumps(config.plain())))
        == config
        == ModelConfig.of(yaml.safe_load(yaml.safe_dump(config.plain())))
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([], "expected the settings of a model"),
        ({"n_layers": 3}, "unknown field 'n_layers'"),
        ({"n_embd": "wide"}, "n_embd: expected a number, found 'wide'"),
        ({"norm_eps": float("nan")}, "norm_eps: expected a number"),
        ({"bias": None}, "bias: expected true or false, found null"),
        ({"mlp_class_name": [1]}, "mlp_class_name: expected a text"),
        ({"rope_indices": [0.5]}, "rope_indices: expected a list of whole numbers"),
        ({"latent_attention": 3}, "latent_attention: expected an object"),
        ({"n_layer": 10**9}, "n_layer: expected a whole number from 0"),
        ({"n_layer": 0}, "at least one block"),
        ({"n_head": 7}, "n_embd 4096 is no multiple"),
    ],
)
def test_a_plain_form_that_does_not_fit_is_refused_in_one_line(settings: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        ModelConfig.of(settings)
    assert "\n" not in str(caught.value)


RMS: dict[str, Any] = {"norm_class_name": "RMSNorm"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "Gemma-2", **RMS}, (True, True)), ({"name": "Gemma-2"}, (False, True)),
        ({"name": "OLMo-1B"}, (False, False)), ({"name": "OLMo-2", **RMS}, (False, True)),
        ({"name": "Llama", **RMS}, (False, True)),
    ],
)  # fmt: skip
def test_norms_follow_from_the_name_where_only_litgpts_fields_are_known(
    settings: dict[str, Any], says: tuple[bool, bool]
) -> None:
    config = ModelConfig(**settings)
    assert (config.norm_unit_offset, config.norm_has_weight) == says
    assert not {"norm_unit_offset", "norm_has_weight"} & config.plain().keys()


@pytest.mark.parametrize(
    ("family", "name"),
    [("Gemma-2-9b", "mine"), ("Llama-3.1-8B", "a Gemma"), ("OLMo-1B-hf", "mine"), ("pythia-14m", "OLMo")],
)  # fmt: skip
def test_norms_are_those_of_the_fields_whatever_the_name_is(family: str, name: str) -> None:
    """In the kernels, in the shapes, and in litgpt's model."""
    lit = config_of(family)
    expected = ModelConfig.from_litgpt(lit)
    config = replace(expected, name=name)
    assert ModelConfig.of(config.plain()) == config != ModelConfig.of({**expected.plain(), "name": name})
    assert config_hash(config) != config_hash(ModelConfig.of({**expected.plain(), "name": name}))
    norm = spec_of(config).ends.final_norm
    assert norm is not None and norm.unit_offset == expected.norm_unit_offset
    assert model_shapes(config, "") == model_shapes(expected, "")
    norms = [Config(**one).norm_class(8) for one in (config.litgpt_plain(), asdict(lit))]
    assert str(norms[0].state_dict()) == str(norms[1].state_dict())
    assert getattr(norms[0], "add_unit_offset", None) == getattr(norms[1], "add_unit_offset", None)


def test_norms_that_nothing_computes_are_refused() -> None:
    for settings in ({"norm_unit_offset": True}, {"norm_has_weight": False, **RMS}):
        with pytest.raises(ValueError, match="norm"):
            ModelConfig(**settings)


def test_query_key_and_value_may_have_biases_of_their_own() -> None:
    config = ModelConfig(qkv_bias=False)
    assert config.bias and "transformer.h.0.attn.qkv.bias" not in model_shapes(config, "")
    assert "transformer.h.0.attn.qkv.bias" in model_shapes(ModelConfig(), "")
    assert ModelConfig.of(config.plain()) == config and why_not_litgpt(config) is not None


_NET = {"n_head": 4, "n_groups": 2, "k_size": 8, "v_size": 8, "n_taps": 4, "blocks": [1, 0]}
_EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 4}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rotary_percentage": 1.5}, "rotary positions of 192 numbers in heads of 128"),
        ({"rotary_percentage": -0.5}, "rotary positions of -64 numbers in heads of 128"),
        ({"n_layer": 2, "delta_net": {**_NET, "n_taps": 65}}, "delta_net: the sizes"),
        ({"n_layer": 2, "delta_net": {**_NET, "k_size": (1 << 14) + 1}}, "delta_net: the sizes"),
        ({"n_layer": 2, "delta_net": {**_NET, "n_head": 1 << 10, "v_size": 1 << 9}}, "delta_net: the sizes"),
        ({**_EXPERTS, "n_expert_per_token": 0}, "a row uses 0 of 4 experts"),
        ({**_EXPERTS, "n_expert_per_token": 5}, "a row uses 5 of 4 experts"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping 0.0"),
        ({"attention_logit_softcapping": -2.0}, "attention_logit_softcapping -2.0"),
        ({"v_norm": True}, "v_norm is for models with norm_qk"),
    ],
)
def test_what_nothing_could_compute_is_refused(settings: dict[str, Any], reason: str) -> None:
    assert ModelConfig.of({"n_layer": 2, "delta_net": _NET}) and ModelConfig.of({**_EXPERTS, "n_expert_per_token": 4})
    with pytest.raises(ValueError, match=re.escape(reason)):
        ModelConfig.of(settings)


def test_some_blocks_may_know_no_positions() -> None:
    rotary = {"n_layer": 3, "rotary_percentage": 1.0}
    config = ModelConfig(**rotary, rotary_indices=(1, 0, 1, 0))
    assert [one.mixer.positions is None for one in spec_of(config).blocks] == [False, True, False]
    assert ModelConfig.of(config.plain()) == config and why_not_litgpt(config) == "blocks without positions"
    all_rotate = ModelConfig(**rotary, rotary_indices=(1, 1, 1))
    assert all_rotate == ModelConfig(**rotary) and "rotary_indices" not in all_rotate.plain()
    for settings in (
        {"rotary_indices": (1, 0)},
        {"rotary_indices": (2, 0, 1)},
        {"rotary_indices": (1, 0, 1), "alibi": "bloom", "rotary_percentage": 0.0},
    ):
        with pytest.raises(ValueError, match=r"rotary_indices"):
            ModelConfig(**{**rotary, **settings})
