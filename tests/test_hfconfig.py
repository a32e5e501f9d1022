"""config.json of real models: what is derived of it is what litgpt's table has for the model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from litgpt.config import Config

from mdi.checkpoint.hfconfig import choose_config, derive_config
from mdi.errors import CheckpointError
from real_configs import REAL, REFUSED

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
    "Gemma 3 4B, its language part": {"padded_vocab_size"},  # with the rows for images
    "Gemma 3 27B, its language part": {"padded_vocab_size"},
}


@pytest.mark.parametrize("form", REAL)
def test_a_real_config_gives_the_settings_of_litgpts_table(form: str) -> None:
    name, hf = REAL[form]
    found = derive_config(hf, "my-model", Path("config.json"))
    expected: dict[str, Any] = asdict(Config.from_name(name))
    differing = {key for key in expected if key not in _NOT_COMPARED and found[key] != expected[key]}
    assert differing == _TABLE_DIFFERS.get(form, set())
    eps = next((hf[key] for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if key in hf), None)
    assert eps is None or found["norm_eps"] == eps


@pytest.mark.parametrize("case", REFUSED)
def test_what_litgpt_cannot_compute_is_refused_by_name(case: str) -> None:
    word, hf = REFUSED[case]
    with pytest.raises(CheckpointError) as e:
        derive_config(hf, "my-model", Path("config.json"))
    assert word in str(e.value)


def test_the_language_part_of_a_larger_model(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    whole = {"model_type": "gemma3", "text_config": REAL["Gemma 3 4B, its language part"][1], "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(whole))
    config, kind = choose_config(directory, None)
    assert kind == "gemma3_text" and config["n_layer"] == 34 and "Gemma" in config["name"]


def test_a_context_beyond_the_trained_one_is_not_offered_with_dynamic_scaling() -> None:
    _, hf = REAL["TinyLlama 1.1B, dynamic"]
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 1024}
    config = derive_config({**hf, "rope_scaling": scaling}, "my-model", Path("config.json"))
    assert config["block_size"] == 1024
