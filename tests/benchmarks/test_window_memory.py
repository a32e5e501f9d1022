"""Times of TPI-LLM's table 1 that docs/seeds.md has as predicted are what the model of a plan gives."""

from __future__ import annotations

import pytest
from litgpt.config import Config

import window_memory
from mdi.model.plain import ModelConfig
from mdi.placement.cost import seconds
from mdi.spec.options import DEFAULT_SUM
from write_results import load

NAME = "Llama 2-3B"


def test_predicted_times_are_those_of_the_file() -> None:
    of, _, (*_, limit_gib), _, times = window_memory.MODELS[NAME]
    config = ModelConfig.from_litgpt(Config.from_name(of))
    found = load("window_memory")["models"][NAME]["times"]
    first_s, token_s = window_memory.predicted_s(config, limit_gib)
    assert [first_s, token_s] == pytest.approx(found["ours"], rel=1e-3)
    assert tuple(found["paper"]) == times
    sums_s = 2 * config.n_layer * seconds(DEFAULT_SUM, 8, 4 * config.n_embd, window_memory.LINK)
    blocks = 4 * config.n_layer * (4 * config.n_embd**2 + 3 * config.n_embd * config.intermediate_size) / 8
    head = 4 * config.padded_vocab_size * config.n_embd
    computing_s = (blocks + head) / window_memory.MEMORY_S  # longer than it reads
    assert token_s == pytest.approx(sums_s + computing_s, rel=0.03)
