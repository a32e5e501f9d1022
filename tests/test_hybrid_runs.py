"""Rings with stages that are groups of nodes: the same tokens as litgpt's own model, also when a member is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mdi.placement.profile
import mdi.run.choice
from cluster_keys import key_file
from mdi.checkpoint.source import open_source
from mdi.engine.speculation import Speculation
from mdi.errors import SplitError, UsageError
from mdi.kernels import library
from mdi.metrics import RunMetrics
from mdi.node.secondary import SecondaryNode
from mdi.placement.profile import ClusterProfile, LinkProfile
from mdi.spec.cluster import ClusterConfig
from mdi.spec.options import ParallelOptions
from mdi.spec.window import WindowMemory, WindowOptions
from mdi.tensor.group import RingStage, counts_after, groups_after, stages_of
from secondaries import cluster_of, entry_of, secondaries
from test_tensor_runs import PROMPTS, checkpoint, lose_after, run  # noqa: F401
from tiny_checkpoint import reference

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

Groups = Sequence[str | None]


def grouped(nodes: list[SecondaryNode], groups: Groups) -> ClusterConfig:
    """A cluster whose nodes are in these groups, starter first."""
    others = tuple(entry_of(node, group=group) for node, group in zip(nodes, groups[1:], strict=True))
    cluster = cluster_of(nodes)
    return ClusterConfig(replace(cluster.starter, group=groups[0]), others)


def expect_texts(ids: list[list[int]], metrics: RunMetrics) -> list[dict[str, Any]]:
    assert ids == [list(reference(text, 8)) for text in PROMPTS]
    told = metrics.to_json()
    assert told["parallel"] == "ring"
    return told["nodes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups", [("a", "a", "b", "b"), ("a", None, "a"), (None, "b", "b"), ("a", "a", None, "b", "b")]
)
def test_texts_are_those_of_the_whole_model(groups: Groups, checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    with secondaries(len(groups) - 1, tmp_path) as nodes:
        found = run(grouped(nodes, groups), checkpoint, tmp_path, ParallelOptions(), prompts=PROMPTS)
    told = expect_texts(*found)
    stages = {stage.name: stage for stage in stages_of({node["name"]: node.get("group") for node in told})}
    in_groups = {node["name"]: node["group"] for node in told if "group" in node}
    assert sorted(in_groups.values()) == sorted(name for name in groups if name is not None)
    for stage in stages.values():
        of_stage = [node for node in told if node["name"] in stage.members]
        assert len({tuple(node["layers"]) for node in of_stage}) == 1
        if stage.is_group:
            heads = sorted(tuple(node["heads"]) for node in of_stage)
            assert heads[0][0] == 0 and heads[-1][1] == 6
            assert len({node["reduces"] for node in of_stage}) == 1 and of_stage[0]["reduces"] > 0


@pytest.mark.parametrize("groups", [("a", "a", "b", "b"), (None, "b", "b")])
def test_texts_with_guesses_are_those_of_the_whole_model(
    groups: Groups, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr("mdi.run.form.share_cores", lambda nodes: False)
    monkeypatch.setattr(Speculation, "limits", lambda self, sequence, n_places, n_texts, n_beside: (n_places, 3))
    with secondaries(len(groups) - 1, tmp_path) as nodes:
        cluster = grouped(nodes, groups)
        ids, metrics = run(cluster, checkpoint, tmp_path, ParallelOptions(), prompts=PROMPTS, draft=str(checkpoint))
    expect_texts(ids, metrics)
    n_guessed, n_confirmed = metrics.guesses
    assert n_guessed >= n_confirmed > 5, "the small model is the model itself"


def test_blocks_and_shares_by_hand(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    parallel = ParallelOptions(parts=(1.0, 2.0, 3.0, 0.0), algorithm="star")
    with secondaries(3, tmp_path) as nodes:
        cluster = grouped(nodes, ("a", "a", "b", "b"))
        told = expect_texts(*run(cluster, checkpoint, tmp_path, parallel, prompts=PROMPTS, layers="1,4"))
    assert [tuple(node["layers"]) for node in told] == [(0, 1), (0, 1), (1, 5), (1, 5)]
    n_heads = {node["name"]: node["heads"][1] - node["heads"][0] for node in told}
    assert n_heads == {"starter": 2, "secondary0": 4, "secondary1": 6, "secondary2": 0}


def test_groups_with_a_key_and_windows(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    keys, memory = key_file(tmp_path / "cluster.key"), WindowMemory(window=WindowOptions(2))
    with secondaries(2, tmp_path, keys=keys) as nodes:
        cluster = replace(grouped(nodes, (None, "b", "b")), keys=keys)
        told = expect_texts(
            *run(cluster, checkpoint, tmp_path, ParallelOptions(), prompts=PROMPTS, weight_memory=memory)
        )
    assert [node.get("group") for node in told] == [None, "b", "b"]
    assert all(node["weights_read_bytes"] > 5 * node["weights_resident_bytes"] > 0 for node in told), (
        "again for every frame"
    )


def test_stages_by_what_nodes_measure(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """A group of a fast node and a slow one: shares go by how fast they are, blocks by how fast the stages are."""
    boards = mdi.placement.profile.boards()
    starter, fast, slow = (replace(board, block_s=((1, s),), memory_bytes=10**9, head_s=())
                           for board, s in zip(boards.nodes, (0.1, 0.1, 0.6), strict=True))  # fmt: skip
    fast, slow = replace(fast, group="b"), replace(slow, group="b")
    measured = replace(boards, nodes=(starter, fast, slow))
    monkeypatch.setattr(mdi.run.choice, "measured_cluster", lambda *args: measured)
    with secondaries(2, tmp_path) as nodes:
        cluster = grouped(nodes, (None, "b", "b"))
        told = expect_texts(
            *run(cluster, checkpoint, tmp_path, ParallelOptions(), prompts=PROMPTS, placement="throughput")
        )
    n_heads = {one["name"]: one["heads"][1] - one["heads"][0] for one in told if "heads" in one}
    assert n_heads == {"secondary0": 5, "secondary1": 1}
    assert told[0]["layers"][1] == 2 and told[1]["layers"] == told[2]["layers"]


def test_groups_that_nobody_named(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """--parallel auto: the starter and the last node are near each other, and so are the two others."""
    pairs = ({"starter", "secondary2"}, {"secondary0", "secondary1"})
    times = ((1, 0.1), (2, 0.15), (3, 0.2))  # by which two groups are a third faster than anything else
    board = replace(mdi.placement.profile.boards().nodes[0], block_s=times, memory_bytes=10**9, head_s=())
    names = ("starter", "secondary0", "secondary1", "secondary2")
    ways = tuple(LinkProfile(a, b, 1e-4 if {a, b} in pairs else 0.05, 1e8) for a in names for b in names if a != b)
    with contextlib.closing(open_source(checkpoint)) as source:
        of = source.model, source.config_hash, "float32"
    measured = ClusterProfile(tuple(replace(board, name=name) for name in names), ways, *of)
    monkeypatch.setattr(mdi.run.choice, "measured_cluster", lambda *args: measured)
    with secondaries(3, tmp_path) as nodes:
        told = expect_texts(
            *run(
                cluster_of(nodes),
                checkpoint,
                tmp_path,
                ParallelOptions("auto"),
                prompts=PROMPTS,
                placement="throughput",
            )
        )
    assert {node["name"]: node["group"] for node in told} == {
        **dict.fromkeys(("starter", "secondary2"), "starter+secondary2"),
        **dict.fromkeys(("secondary0", "secondary1"), "secondary0+secondary1"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("groups, n_left", [(("a", "a", "b", "b"), 3), ((None, "b", "b"), 2)])
def test_texts_go_on_when_a_member_is_lost(
    groups: Groups, n_left: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Its group is formed anew without it, and all caches are computed again."""
    with secondaries(len(groups) - 1, tmp_path) as nodes:
        lost = lose_after(8, nodes[0], monkeypatch)
        ids, metrics = run(
            grouped(nodes, groups), checkpoint, tmp_path, ParallelOptions(), n_tokens=16, fixed=False, layers="2,3",
        )  # fmt: skip
    assert lost.is_set() and ids == [list(reference(PROMPTS[0], 16))]
    assert metrics.n_nodes == n_left
    (recovery,) = metrics.to_json()["recoveries"]
    assert recovery["replaced_by"] == ("starter" if groups[0] else "secondary1")


@pytest.mark.slow
def test_what_cannot_be_is_told_before_anything_is_loaded(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    with secondaries(2, tmp_path) as nodes:
        for parallel in (ParallelOptions(is_head_shared=True), ParallelOptions(parts=(1.0, 1.0))):
            with pytest.raises(UsageError):
                run(grouped(nodes, (None, "b", "b")), checkpoint, tmp_path, parallel)
        with pytest.raises(SplitError):
            run(grouped(nodes, (None, "b", "b")), checkpoint, tmp_path, ParallelOptions(), layers="1,2,2")


def test_the_stages_of_a_ring() -> None:
    assert stages_of({"n0": "a", "n1": None, "n2": "a", "n3": "b"}) == (
        RingStage("a", ("n0", "n2")), RingStage("n1", ("n1",)), RingStage("b", ("n3",)),
    )  # fmt: skip


@pytest.mark.parametrize(
    "names, groups",
    [
        (("n0", "n1", "n2", "n3"), ("a", "a", "b", None)),
        (("n0", "spare", "n2", "n3"), ("a", "a", "b", None)),
        (("n0", "n1", "one", "two"), ("a", "a", "b", None)),
        (("n0", "spare", "n3"), ("a", "a", None)),
        (("n0",), ("a",)),
    ],
)
def test_who_is_new_takes_the_place_of_who_is_lost(names: tuple[str, ...], groups: Groups) -> None:
    before = {"n0": "a", "n1": "a", "n2": "b", "n3": None}
    assert groups_after(before, names) == dict(zip(names, groups, strict=True))


def test_blocks_stay_where_all_stages_are_left() -> None:
    two, one = RingStage("a", ("n0", "n1")), RingStage("b", ("n2",))
    assert counts_after({"a": 4, "b": 7}, (two, one)) == (4, 7)
    assert counts_after({"a": 4, "b": 5, "c": 2}, (two, one)) == (7, 4), "by how many nodes each has"
    assert counts_after({"a": 4, "b": 7}, (one,)) == (11,)
    with pytest.raises(SplitError):
        counts_after({"a": 1, "b": 0, "c": 0}, (two, one))
