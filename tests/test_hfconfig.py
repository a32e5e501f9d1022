"""config.json of real models: what is derived of it is what litgpt's table has for the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from litgpt.config import Config

from mdi.checkpoint.hfconfig import PUBLISHED, choose_config, derive_config, published_config
from mdi.checkpoint.shapes import model_shapes
from mdi.errors import CheckpointError
from mdi.kernels.blocks import why_not_in_kernels
from mdi.model.plain import ModelConfig, litgpt_fields
from mdi.placement.model import model_shape
from real_configs import OFFICIAL, OWN, REAL, REFUSED

# not what is computed; or (eps of Gemma and SmolLM) the table is less exact than the file
_NOT_COMPARED = ("name", "hf_config", "padding_multiple", "vocab_size", "norm_eps")
# where the table differs from the model's own file, which is followed
_TABLE_DIFFERS = {
    "Mistral 7B v0.1": {"block_size"},  # the table stops at the window
    "Qwen 2.5 7B Instruct": {"block_size"},
    "Phi 3 mini 4K": {"sliding_window_size"},  # 2047 there
    "Gemma 7B": {"block_size"},
    "Gemma 7B, with hidden_activation": {"block_size"},
    "Gemma 3 1B": {"block_size"},
    "Gemma 3 1B, transformers 5": {"block_size"},
    "TinyLlama 1.1B, dynamic": {"block_size", "rope_adjustments"},  # the table has none of it
    "Gemma 3 4B, its language part": {"padded_vocab_size"},  # with the rows for images
    "Gemma 3 27B, its language part": {"padded_vocab_size"},
}


@pytest.mark.parametrize("form", REAL)
def test_a_real_config_gives_the_settings_of_litgpts_table(form: str) -> None:
    name, hf = REAL[form]
    found = derive_config(hf, "my-model", Path("config.json")).plain()
    expected = ModelConfig.from_litgpt(Config.from_name(name)).plain()
    differing = {key for key in expected if key not in _NOT_COMPARED and found[key] != expected[key]}
    assert differing == _TABLE_DIFFERS.get(form, set())
    eps = next((hf[key] for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if key in hf), None)
    assert eps is None or found["norm_eps"] == eps


def _folder(path: Path, hf: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf))
    return path


@pytest.mark.parametrize("form", {**REAL, **OFFICIAL})
def test_a_folder_with_a_name_of_the_table_has_what_its_config_json_says(form: str, tmp_path: Path) -> None:
    name, hf = {**REAL, **OFFICIAL}[form]
    known = Config.from_name(name)
    assert known.hf_config, "a model of the table"
    for folder in {name, known.hf_config["name"]}:
        config = choose_config(_folder(tmp_path / folder, hf))
        assert config == derive_config(hf, known.name, Path("config.json"))


@pytest.mark.parametrize("form", OFFICIAL)
def test_a_name_given_by_hand_does_not_change_positions(form: str, tmp_path: Path) -> None:
    name, hf = OFFICIAL[form]
    with pytest.raises(CheckpointError, match=r"rope_(base|adjustments) is .*without --model-name") as e:
        choose_config(_folder(tmp_path / "my-model", hf), name)
    assert "\n" not in str(e.value) and len(str(e.value)) < 600


@pytest.mark.parametrize(
    ("form", "changes", "field"),
    [
        ("Mistral 7B v0.1", {"sliding_window": 2048}, "sliding_window_size"),
        ("Llama 2 7B", {"rms_norm_eps": 1e-6}, "norm_eps"),
        ("Pythia 14M", {"rotary_pct": 0.5}, "rotary_percentage"),
        ("Llama 2 7B", {"rope_theta": 20000.0}, "rope_base"),
    ],
)  # fmt: skip
def test_a_name_given_by_hand_must_agree_with_config_json(
    form: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    name, hf = REAL[form]
    assert choose_config(_folder(tmp_path / "a", hf), name).name == name
    with pytest.raises(CheckpointError, match=f"'{name}': {field} is "):
        choose_config(_folder(tmp_path / "b", {**hf, **changes}), name)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e400])
def test_a_number_that_is_none_is_one_line(value: float, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "my-model", {**REAL["Llama 2 7B"][1], "rope_theta": value})
    with pytest.raises(CheckpointError, match="config.json"):
        choose_config(folder)


def test_more_blocks_than_any_model_has_are_refused_before_lists_of_them_are_made(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "my-model", {**REAL["Llama 2 7B"][1], "num_hidden_layers": 1025})
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1025; at most 1024 are supported"):
        choose_config(folder)


@pytest.mark.parametrize("form", OWN)
def test_a_real_config_of_a_family_that_litgpt_lacks(form: str) -> None:
    expected, hf = OWN[form]
    found = derive_config(hf, "my-model", Path("config.json"))
    assert {key: found.plain()[key] for key in expected} == expected
    assert why_not_in_kernels(found) is None
    with pytest.raises(ValueError, match="only nodes that generate"):
        litgpt_fields(found)


# Billions of weights by name: all and those of a token (without the embedding), as the makers say, and the share by which ours
# may differ. Those of dense models are what transformers counts in a model of this config.json.
LARGE: dict[str, tuple[float, float, float]] = {
    "openai/gpt-oss-20b": (20.91, 3.61, 2e-3),
    "openai/gpt-oss-120b": (116.83, 5.13, 2e-3),
    "zai-org/GLM-4.5": (355, 32, 0.03),  # with the block that predicts further tokens
    "zai-org/GLM-4.5-Air": (106, 12, 0.08),  # without it
    "zai-org/GLM-4.6": (355, 32, 0.03),
    "zai-org/GLM-4.7": (355, 32, 0.03),
    "zai-org/GLM-4.7-Flash": (30, 3.6, 0.01),  # here and below without blocks that predict further tokens
    **{f"deepseek-ai/DeepSeek-{one}": (671, 37, 0.015) for one in ("V3", "V3-0324", "R1", "R1-0528", "V3.1")},
    "moonshotai/Moonlight-16B-A3B": (15.29 + 0.671, 2.24 + 0.336, 0.01),  # of its report, and embedding and head
    **{f"moonshotai/Kimi-K2-Instruct{one}": (1026, 32, 0.015) for one in ("", "-0905")},
    "MiniMaxAI/MiniMax-M2": (228.7, 10, 0.06),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (80, 3.56, 0.01),
    "Qwen/Qwen3.5-35B-A3B": (35, 3, 0.02),  # without the parts that see
    "Qwen/Qwen3.5-122B-A10B": (122, 9.4, 0.05),
    "Qwen/Qwen3.5-397B-A17B": (397, 16.7, 0.03),
    "google/gemma-4-E2B": (4.628569344, 2.3, 0.02),  # without the parts that see and hear
    "google/gemma-4-E4B": (7.463013376, 4.5, 0.03),
    "google/gemma-4-26B-A4B": (25.23, 3.8, 0.03),
    "google/gemma-4-31B": (30.69734528, 30.7, 1e-3),
    "bigscience/bloom-560m": (0.559214592, 0.559, 1e-3),
    "bigscience/bloom-1b1": (1.065314304, 1.065, 1e-3),
    "bigscience/bloom-1b7": (1.722408960, 1.722, 1e-3),
    "bigscience/bloom-3b": (3.002557440, 3.002, 1e-3),
    "bigscience/bloom-7b1": (7.069016064, 7.069, 1e-3),
    "bigscience/bloom": (176.247271424, 176.2, 1e-3),
    "tiiuae/falcon-rw-1b": (1.311625216, 1.311, 2e-3),
    "tiiuae/falcon-rw-7b": (7.516020736, 7.514, 1e-3),
    "openai-community/gpt2": (0.124439808, 0.1236, 2e-3),
    "openai-community/gpt2-medium": (0.354823168, 0.3535, 2e-3),
    "openai-community/gpt2-large": (0.774030080, 0.7722, 2e-3),
    "openai-community/gpt2-xl": (1.557611200, 1.555, 1e-3),
    "facebook/opt-125m": (0.125239296, 0.1236, 2e-3),
    "facebook/opt-1.3b": (1.315758080, 1.311, 1e-3),
    "facebook/opt-2.7b": (2.651596800, 2.645, 1e-3),
    "facebook/opt-6.7b": (6.658473984, 6.648, 1e-3),
    "facebook/opt-13b": (12.853473280, 12.84, 1e-3),
    "facebook/opt-30b": (29.974540288, 29.96, 1e-3),
    "facebook/opt-66b": (65.719701504, 65.69, 1e-3),
}


@pytest.mark.parametrize("name", LARGE)
def test_models_are_as_large_as_their_makers_say(name: str) -> None:
    """What `plan.py` counts with. Dense models have one matrix as embedding and head."""
    billions, active, differs = LARGE[name]
    config = published_config(name)
    assert config is not None and config == published_config(name.partition("/")[2])
    sizes = {name: math.prod(shape) for name, shape in model_shapes(config, "").items()}
    n_all = sum(sizes.values()) - (0 if config.n_expert else sizes["lm_head.weight"])
    assert n_all / 1e9 == pytest.approx(billions, rel=differs if config.n_expert else 2e-5)
    shape = model_shape(config, "mxfp4")
    assert (shape.head_macs + sum(block.macs for block in shape.blocks)) / 1e9 == pytest.approx(active, rel=differs)
    if "gpt-oss" in name:
        assert [block.cache.window for block in shape.blocks[:4]] == [128, None, 128, None]
        assert 4.25 < 8 * shape.weight_bytes / n_all < 4.75  # bits: nearly all are in experts


# Those that litgpt has as well, by its names.
BOTH = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tiny-llama-1.1b-chat",
    **{f"meta-llama/{one}": one for one in ("Llama-2-7b-hf", "Llama-3.1-8B", "Llama-3.1-70B")},
    **{f"Qwen/{one}": one for one in ("Qwen2.5-3B", "Qwen2.5-32B")},
}


@pytest.mark.parametrize("name", BOTH)
def test_a_published_model_of_litgpts_table_is_the_same_one(name: str) -> None:
    found = published_config(name)
    assert found is not None and found == published_config(name.partition("/")[2])
    expected = ModelConfig.from_litgpt(Config.from_name(BOTH[name]))
    named = (
        "name",
        "hf_config",
        "padding_multiple",
        "vocab_size",
    )  # what is in each: rows of the embedding are compared
    assert [key for key in vars(expected) if key not in named and vars(found)[key] != vars(expected)[key]] == []
    assert model_shape(found, "int8").weight_bytes == model_shape(expected, "int8").weight_bytes


def test_every_published_model_is_counted_or_refused() -> None:
    assert set(PUBLISHED) - set(LARGE) - set(BOTH) == {"facebook/opt-350m"}
    with pytest.raises(CheckpointError, match="word_embed_proj_dim"):
        published_config("opt-350m")
    assert published_config("pythia-14m") is None


@pytest.mark.parametrize(
    ("name", "form"),
    {
        "gpt-oss-20b": "gpt-oss 20B", "gpt-oss-120b": "gpt-oss 120B", "GLM-4.5": "GLM 4.5", "GLM-4.5-Air": "GLM 4.5 Air",
        "MiniMax-M2": "MiniMax M2", "bloom-560m": "BLOOM 560M", "falcon-rw-1b": "Falcon RW 1B", "gpt2": "GPT-2",
        "opt-125m": "OPT 125M", "GLM-4.7-Flash": "GLM 4.7 Flash", "DeepSeek-V3": "DeepSeek V3",
        "Kimi-K2-Instruct": "Kimi K2",
    }.items(),
)  # fmt: skip
def test_a_published_model_is_what_its_own_config_json_says(name: str, form: str) -> None:
    assert published_config(name) == derive_config(OWN[form][1], name, Path("config.json"))


def test_a_node_of_eight_gigabytes_holds_blocks_of_gpt_oss() -> None:
    """A block of experts is loaded in rows: its 3.3 GB in float32 are never there at once."""
    shape = model_shape(derive_config(OWN["gpt-oss 20B"][1], "my-model", Path("config.json")), "mxfp4")
    block = shape.reference
    assert block.load_bytes < 0.02e9 < 0.4e9 < block.weight_bytes < 0.5e9
    assert sum(b.weight_bytes for b in shape.blocks[:12]) + block.load_bytes < 6e9


@pytest.mark.parametrize("case", REFUSED)
def test_what_litgpt_cannot_compute_is_refused_by_name(case: str) -> None:
    word, hf = REFUSED[case]
    with pytest.raises(CheckpointError) as e:
        derive_config(hf, "my-model", Path("config.json"))
    assert word in str(e.value)


@pytest.mark.parametrize("form", ["Gemma 3 4B, its language part", "gpt-oss 20B"])
def test_a_window_without_positions_is_refused(form: str) -> None:
    hf = (REAL | OWN)[form][1]
    with pytest.raises(CheckpointError, match="sliding_window") as e:
        derive_config({**hf, "sliding_window": 0}, "my-model", Path("config.json"))
    assert "\n" not in str(e.value)


def test_the_language_part_of_a_larger_model(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    whole = {"model_type": "gemma3", "text_config": REAL["Gemma 3 4B, its language part"][1], "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(whole))
    config = choose_config(directory)
    assert config.n_layer == 34 and "Gemma" in config.name


@pytest.mark.parametrize(
    ("scaling", "expected", "context"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 1024},
            {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 2048},
            4096,
        ),
        (
            {"type": "yarn", "factor": 4.0, "beta_fast": None, "truncate": False},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "truncate": False},
            8192,
        ),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 512},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            2048,
        ),
        (
            {"type": "su", "original_max_position_embeddings": 512, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
            {
                "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512,
                "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
            },
            2048,
        ),
    ],
)  # fmt: skip
def test_scaling_of_positions_is_kept_in_transformers_terms(
    scaling: dict[str, Any], expected: dict[str, Any], context: int
) -> None:
    config = derive_config({**REAL["TinyLlama 1.1B"][1], "rope_scaling": scaling}, "my-model", Path("config.json"))
    assert config.plain()["rope_adjustments"] == expected and config.block_size == context
