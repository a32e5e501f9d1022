"""The table of published models in docs/models.md is what its command makes, and says that it is predicted."""

from __future__ import annotations

import pytest

import real_models
from mdi.checkpoint.hfconfig import published_config
from mdi.placement.cost import CostModel
from mdi.placement.model import Workload, model_shape
from mdi.placement.profile import ClusterProfile

QUICK = ("gemma-4-E2B", "gemma-4-E4B", "gpt-oss-20b", "gemma-4-31B")  # whose shapes are counted in a moment


def written() -> list[list[str]]:
    text = real_models.PAGE.read_text(encoding="utf-8")
    rows = text.partition("<!-- real models -->")[2].partition("<!-- end of real models -->")[0].strip().splitlines()
    return [row.strip("| ").split(" | ") for row in rows]


def test_the_page_has_what_the_command_makes() -> None:
    head, _, *rows = written()
    assert [row[0] for row in rows] == [f"{name}, {form}" for name, form in real_models.MODELS]
    some = tuple(one for one in real_models.MODELS if one[0] in QUICK)
    made = [row.strip("| ").split(" | ") for row in real_models.table(some).splitlines()]
    assert made[0] == head
    assert made[2:] == [row for row in rows if row[0].partition(",")[0] in QUICK]


def test_each_cell_says_that_it_is_predicted() -> None:
    assert all(cell.endswith("predicted") for row in written()[2:] for cell in row[2:])


def test_experts_that_no_row_uses_are_not_read() -> None:
    shape = model_shape(published_config("gpt-oss-20b"), "mxfp4")  # type: ignore[arg-type]
    block = shape.reference
    assert (block.n_experts, block.n_used) == (32, 4) and 0.9 < block.expert_bytes / block.weight_bytes < 1
    rest = block.weight_bytes - block.expert_bytes
    assert block.weights_read(1) == pytest.approx(rest + block.expert_bytes / 8)
    assert block.weights_read(2) == pytest.approx(rest + block.expert_bytes * (1 - (7 / 8) ** 2))
    assert block.weights_read(1000) == pytest.approx(block.weight_bytes)


def board(n_nodes: int) -> ClusterProfile:
    return real_models.CLUSTERS[0].profile(n_nodes)


def test_the_states_of_delta_nets_are_moved_for_each_token() -> None:
    """Of 16 texts 2 GB a step: each has 60 MiB, which are read and written."""
    shape = model_shape(published_config("Qwen3.5-35B-A3B"), "fp16")  # type: ignore[arg-type]
    states = [block.cache for block in shape.blocks if block.state_macs]
    assert len(states) == 30 and sum(one.read_bytes(1000) for one in states) == 2 * 60 << 20
    cost = CostModel(board(1), shape, Workload(16, 2))
    assert cost.looks[-1] * 16 == pytest.approx(2.01e9, rel=0.01)
