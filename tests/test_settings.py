"""Files of settings that were made to do harm: a lot of little text, and numbers that no model has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mdi.checkpoint.folder import stated_blocks
from mdi.checkpoint.records import HashRecord
from mdi.checkpoint.shapes import full_config, read_config
from mdi.errors import CheckpointError
from mdi.spec.settings_file import YAML_LIMIT_BYTES, check_counts, parse_json, parse_yaml, read_yaml
from mdi.text.texts import TextCodec
from mdi_training.new_model import parse_shape
from tiny_checkpoint import write_checkpoint

DEEP = "[" * 100_000
BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))


@pytest.mark.parametrize(
    "content",
    [BOMB.encode(), b"a: &a [*a]", DEEP.encode(), b"n_layer: {", b"\xff\xfe\xff", b"a: " + b"x" * YAML_LIMIT_BYTES],
    ids=["aliases", "circle", "deep", "cut short", "bytes", "large"],
)
def test_yaml_that_does_harm_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_bytes(content)
    for read in (read_yaml, read_config):
        with pytest.raises(CheckpointError) as e:
            read(path)
        assert "model_config.yaml" in str(e.value)
    with pytest.raises(CheckpointError):
        parse_shape(content, path)
    assert stated_blocks(tmp_path) is None


def test_aliases_that_stand_for_little_are_read() -> None:
    assert parse_yaml(b"a: &a [1, 2]\nb: *a\n", "it") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": 10**9},
        {"n_layer": -1},
        {"n_layer": 3.5},
        {"n_layer": float("nan")},
        {"n_layer": True},
        {"n_expert": 10**6},
        {"n_layer": 1000, "n_expert": 1000},
        {"n_embd": 10**40},
        {"norm_eps": float("inf")},
        {"rope_base": float("nan")},
    ],
    ids=str,
)
def test_numbers_that_no_model_has_are_refused(changes: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as e:
        full_config(changes, "it")
    assert next(iter(changes)) in str(e.value)
    content = yaml.safe_dump({"n_layer": 2, **changes}).encode()
    (tmp_path / "model_config.yaml").write_bytes(content)
    with pytest.raises(CheckpointError) as e:
        read_config(tmp_path / "model_config.yaml")
    assert next(iter(changes)) in str(e.value)


def test_the_largest_models_that_there_are_are_accepted() -> None:
    check_counts({"n_layer": 126, "n_embd": 16384, "n_expert": 0}, "Llama 3.1 405B")
    check_counts({"n_layer": 61, "n_expert": 384, "n_embd": 7168, "vocab_size": 163840}, "Kimi K2")


def test_deep_json_is_a_value_error_that_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, check=lambda e: type(e) is ValueError):
        parse_json(DEEP)
    folder = write_checkpoint(tmp_path / "tiny")
    for name in ("tokenizer_config.json", "generation_config.json"):
        before = (folder / name).read_text() if (folder / name).is_file() else "{}"
        (folder / name).write_text(DEEP)
        with pytest.raises(CheckpointError) as e:
            TextCodec.from_checkpoint(folder)
        assert name in str(e.value)
        (folder / name).write_text(before)
    (folder / "parts.json").write_text(DEEP)  # best effort: as if it were not there
    assert HashRecord(folder / "parts.json").find("stored/head") is None


def test_blocks_by_the_settings(tmp_path: Path) -> None:
    assert stated_blocks(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 22}))
    assert stated_blocks(tmp_path) == 22
    (tmp_path / "model_config.yaml").write_text("n_layer: 3\n")
    assert stated_blocks(tmp_path) == 3
