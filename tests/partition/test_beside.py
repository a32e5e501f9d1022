"""A second model in what the first one leaves."""

from __future__ import annotations

import json

import pytest

from clusters import MB, cluster, model, node
from mdi.errors import PlacementError, UsageError
from mdi.partition.beside import left_over
from mdi.partition.model import Workload
from mdi.partition.plan import plan


def test_both_models_fit_together_and_a_third_does_not() -> None:
    nodes = cluster(
        node("starter", memory_mb=500), node("secondary0", memory_mb=300), node("secondary1", memory_mb=300)
    )
    first = plan(nodes, model(24), Workload(1, 100))
    rest = left_over(nodes, json.dumps(first.to_json()), "first.json")
    second = plan(rest, model(18), Workload(1, 100))
    taken = dict.fromkeys(("starter", "secondary0", "secondary1"), 0)
    for report in (first, second):
        for one in report.nodes:
            taken[one.name] += one.memory.total
    for entry in nodes.nodes:
        shared = 0 if entry.name == "starter" else entry.process_bytes  # a secondary is one process for both
        assert taken[entry.name] - shared <= entry.memory_bytes
    with pytest.raises(PlacementError):
        plan(left_over(rest, json.dumps(second.to_json()), "second.json"), model(24), Workload(1, 100))


def test_what_a_plan_takes_is_what_the_next_one_has_less() -> None:
    nodes = cluster(node("starter"), node("secondary0"), node("secondary1", memory_mb=60))
    report = plan(nodes, model(6), Workload(2, 100))
    rest = left_over(nodes, json.dumps(report.to_json()), "x")
    for before, after in zip(nodes.nodes, rest.nodes, strict=True):
        planned = next((one for one in report.nodes if one.name == before.name), None)
        used = (
            0 if planned is None else planned.memory.total - (planned.memory.process if before.name != "starter" else 0)
        )
        assert before.memory_bytes - after.memory_bytes == used and after.memory_bytes >= 50 * MB


def test_the_nodes_of_a_group_take_their_parts() -> None:
    nodes = cluster(node("starter"), node("secondary0", 3.0, group="b"), node("secondary1", 1.0, group="b"))
    report = plan(nodes, model(6), Workload(1, 100), method="even")
    rest = left_over(nodes, json.dumps(report.to_json()), "x")
    used = [before.memory_bytes - after.memory_bytes for before, after in zip(nodes.nodes, rest.nodes, strict=True)]
    of_group = report.nodes[1].memory
    assert used[1] == pytest.approx(3 * used[2], abs=3) and used[1] + used[2] == pytest.approx(
        of_group.total - of_group.process, abs=3
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"nodes": [], "groups": 5}',
        '{"nodes": [{"name": "", "bytes": {}}], "groups": [{"name": "", "members": [], "parts": [2]}]}',
        "[]",
        "{}",
        '{"nodes": 5}',
        '{"nodes": [{"name": "starter"}]}',
        '{"nodes": [{"name": "starter", "bytes": {"total": -1, "process": 0}}]}',
        '{"nodes": [{"name": "starter", "bytes": {"total": "1", "process": 0}}]}',
        '{"nodes": [{"name": "other", "bytes": {"total": 1, "process": 0}}]}',
    ],
)
def test_what_is_no_plan_of_these_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        left_over(cluster(node("starter")), text, "x.json")
