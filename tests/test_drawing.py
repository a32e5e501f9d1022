"""How tokens are drawn where nobody says it: by the model's generation_config.json, else as this project does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdi.text.drawing import OWN, drawing_of
from mdi.text.texts import TextCodec
from tiny_checkpoint import write_checkpoint

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def test_without_a_word_of_the_publisher_it_is_our_own() -> None:
    assert drawing_of({}) == {**NEUTRAL, "temperature": 0.8, "min_p": 0.05} == dict(OWN)
    assert drawing_of({"eos_token_id": 2, "do_sample": True}) == dict(OWN)


def test_what_the_publisher_leaves_out_has_no_effect() -> None:
    assert drawing_of({"temperature": 0.6, "top_k": 20}) == {**NEUTRAL, "temperature": 0.6, "top_k": 20}
    assert drawing_of({"top_p": 0.9}) == {**NEUTRAL, "top_p": 0.9}
    assert drawing_of({"repetition_penalty": 1.1}) == {**OWN, "repetition_penalty": 1.1}, "it chooses no tokens"


@pytest.mark.parametrize(
    "wrong", [-1, 3, True, "0.5", None, float("nan"), float("inf"), [0.5]], ids=lambda value: repr(value)
)
def test_what_makes_no_sense_is_left_out(wrong: Any) -> None:
    assert drawing_of({"temperature": wrong}) == dict(OWN)
    assert drawing_of({"top_p": 0, "repetition_penalty": 0}) == dict(OWN)


def test_a_checkpoint_brings_its_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    assert TextCodec.from_checkpoint(folder).drawing == dict(OWN)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.2, "top_p": 0.9}))
    codec = TextCodec.from_checkpoint(folder)
    assert codec.drawing == {**NEUTRAL, "temperature": 0.2, "top_p": 0.9} == codec.facts()["drawing"]
