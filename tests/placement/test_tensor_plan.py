"""Shares of every block by what nodes compute and hold, and the time of a token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdi.errors import PlacementError
from mdi.model.plain import ModelConfig
from mdi.placement.cost import CostModel
from mdi.placement.model import Workload, model_shape
from mdi.placement.plan import format_plan, plan
from mdi.placement.profile import boards
from mdi.placement.tensor_plan import plan_tensor, shares_of
from tiny_checkpoint import tiny_config


def test_shares_follow_speeds_as_far_as_memory_goes() -> None:
    assert shares_of([1, 1], [1, 1]) == [0.5, 0.5]
    assert shares_of([3, 1], [1, 1]) == [0.75, 0.25]
    assert shares_of([3, 1], [0.5, 1]) == [0.5, 0.5]
    assert shares_of([4, 1, 1], [0.4, 0.3, 1]) == pytest.approx([0.4, 0.3, 0.3])


def test_a_model_that_fits_nowhere_is_told() -> None:
    with pytest.raises(PlacementError):
        shares_of([1, 1], [0.4, 0.5])


def test_a_plan_says_what_shares_of_all_blocks_would_bring_to_one_text() -> None:
    profile, shape = boards(), model_shape(ModelConfig.from_litgpt(tiny_config()), "float32")
    report = plan(profile, shape, Workload(1, 64))
    assert report.tensor is not None and report.to_json()["tensor"]["algorithm"] == "exchange"
    assert sum(report.tensor.parts) == pytest.approx(1) and "--parallel tensor" in format_plan(report)
    assert plan(replace(profile, nodes=profile.nodes[:1], links=()), shape, Workload(1, 64)).tensor is None


def test_a_token_takes_the_slowest_share_the_sums_and_the_head() -> None:
    cost = CostModel(boards(), model_shape(ModelConfig.from_litgpt(tiny_config()), "float32"), Workload(1, 64))
    found = plan_tensor(cost)
    assert found.token_s == pytest.approx(found.blocks_s + found.sums_s + found.head_s)
    alone = cost.block_s(0, 1) * cost.work[cost.n_layer]
    assert found.blocks_s < alone and plan_tensor(cost, is_head_shared=True).head_s < found.head_s
