"""The benchmark of fine-tuning writes a line for each case; a tiny model, and no rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import finetune_speed

FLAGS = ("--method", "lora", "--method", "prefix", "--rows", "2", "--texts", "2", "--nodes", "2", "--tokens", "6")


@pytest.mark.slow
def test_each_case_has_a_line(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    finetune_speed.main(["tiny-1m", "--folder", str(tmp_path / "tiny"), *FLAGS, "--json", str(file)])
    record = json.loads(file.read_text(encoding="utf-8"))
    lora, prefix = record["lines"]
    assert record["shape"] == "tiny-1m"
    assert [(one["nodes"], one["method"], one["texts"], one["rows"]) for one in (lora, prefix)] == [
        (2, "lora", 2, 0),
        (2, "prefix", 2, 2),
    ]
    for way in ("forward", "backward"):
        assert all(0 < one[f"{way}_classes_tokens_s"] <= one[f"{way}_blocks_tokens_s"] for one in (lora, prefix))
