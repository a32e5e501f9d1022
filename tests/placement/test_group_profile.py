"""Groups as the nodes of a ring, and whether a ring or shares on all nodes are better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusters import block, cluster, model, node
from mdi.checkpoint.hfconfig import published_config
from mdi.errors import PlacementError
from mdi.model.plain import spec_of
from mdi.model.spec import LatentAttention
from mdi.placement.cost import CostModel
from mdi.placement.model import Workload, model_shape
from mdi.placement.parallel import ParallelChoice, candidates, choose_measured, merged, stage_places, with_groups
from mdi.placement.plan import format_plan, plan
from mdi.placement.profile import ClusterProfile, LinkProfile
from mdi.placement.tensor_plan import plan_tensor

NAMES = ("starter", "a0", "a1", "b0")
WORK = Workload(1, 256)


def links(round_trip_s: float, names: tuple[str, ...] = NAMES) -> tuple[LinkProfile, ...]:
    return tuple(LinkProfile(a, b, round_trip_s, 125e6) for a in names for b in names if a != b)


def grouped(round_trip_s: float = 1e-4, memory_mb: float = 1000) -> ClusterProfile:
    nodes = [node(name, memory_mb=memory_mb) for name in NAMES]
    nodes[1], nodes[2] = replace(nodes[1], group="a"), replace(nodes[2], group="a")
    return cluster(*nodes, links=links(round_trip_s))


def test_a_group_is_one_node_that_is_as_fast_as_all_of_it() -> None:
    assert stage_places(grouped()) == [[0], [1, 2], [3]]
    one, groups = merged(grouped(), model(), WORK)
    starter, group, other = one.nodes
    assert [found.name for found in one.nodes] == ["starter", "a", "b0"] and starter.group == other.group == ""
    assert [(found.members, found.parts) for found in groups] == [(("a0", "a1"), (0.5, 0.5))]
    alone, together = dict(other.block_s)[1], dict(group.block_s)[1]
    assert together == pytest.approx(alone / 2 + 2 * groups[0].sum_s)
    assert 1.8 * other.memory_bytes < group.memory_bytes < 2 * other.memory_bytes
    way = {(link.source, link.target): link.round_trip_s for link in one.links}
    assert way["starter", "a"] == pytest.approx(2e-4), "a frame goes through the nodes of a group one after the other"
    assert way["a", "b0"] == pytest.approx(1e-4)


def test_the_share_of_a_node_follows_its_speed_and_its_memory_limits_the_group() -> None:
    nodes = (node("starter"), node("a0", 3.0, 100, group="a"), node("a1", 1.0, 2000, group="a"))
    one, groups = merged(cluster(*nodes), model(), WORK)
    assert groups[0].parts == pytest.approx((0.75, 0.25))
    assert one.nodes[1].memory_bytes < 130e6, "the fast one has little"


def test_each_node_of_a_group_has_all_latent_rows_and_what_makes_them() -> None:
    config = published_config("GLM-4.7-Flash")
    assert config is not None
    shape, work = model_shape(config, "int8", "fp16"), Workload(8, 32768)
    profile = cluster(node("starter"), *(node(name, memory_mb=15_000, group="a") for name in ("a0", "a1")))
    one, groups = merged(profile, shape, work)
    cost, group = CostModel(one, shape, work), one.nodes[1]
    free = profile.nodes[1].memory_bytes - cost.fixed_bytes(1)
    most = group.memory_bytes - cost.fixed_bytes(1)
    stop = next(n for n in range(1, shape.n_layer) if cost.held[n + 1] - cost.held[1] > most)
    mixer = spec_of(config).blocks[1].mixer
    assert isinstance(mixer, LatentAttention) and mixer.q_rank is not None and groups[0].parts == (0.5, 0.5)
    made = (
        (mixer.q_rank + mixer.kv_rank + mixer.rope_size) * shape.row_bytes // 4
    )  # numbers in int8, without their scales

    def of_node(stop: int) -> float:
        """Bytes of blocks [1, stop), at least."""
        whole = cost.caches_bytes(1, stop) + (stop - 1) * made
        return (cost.held[stop] - cost.held[1] + whole) / 2

    assert 0.85 * free < of_node(stop) <= free
    shared = plan_tensor(CostModel(cluster(node("a0", memory_mb=90_000), node("a1", memory_mb=90_000)), shape, work))
    assert shared.weight_bytes[1] > (cost.weights[-1] + shape.n_layer * made) / 2
    short = [
        replace(one, memory_bytes=int(shared.weight_bytes[0] + cost.caches[-1] * 0.9)) for one in profile.nodes[1:]
    ]
    with pytest.raises(PlacementError):
        plan_tensor(CostModel(replace(profile, nodes=tuple(short)), shape, work))


def test_a_cluster_without_groups_stays_as_it_is() -> None:
    profile = cluster(node("starter"), node("a"))
    assert merged(profile, model(), WORK) == (profile, ())


def test_a_plan_shows_the_stages() -> None:
    report = plan(grouped(), model(6), Workload(8, 256), method="even")
    assert [stage.name for stage in report.nodes] == ["starter", "a", "b0"]
    assert [(group.name, group.members) for group in report.groups] == [("a", ("a0", "a1"))]
    told = report.to_json()
    assert told["groups"][0]["parts"] == (0.5, 0.5) and told["parallel"]["mode"] == "ring"
    assert "a0 50%, a1 50%" in format_plan(report) and "--parallel auto takes ring" in format_plan(report)


def choice(profile: ClusterProfile, n_texts: int = 1, **changes: object) -> ParallelChoice:
    return choose_measured(profile, model(6, **changes), Workload(n_texts, 256))


def alike(round_trip_s: float, memory_mb: float = 1000) -> ClusterProfile:
    return cluster(*(node(name, memory_mb=memory_mb) for name in NAMES), links=links(round_trip_s))


def test_one_text_is_shared_out_over_fast_links_and_goes_round_a_ring_over_slow_ones() -> None:
    assert choice(alike(1e-4)).mode == "tensor"
    assert choice(alike(1e-2)).mode == "ring"


def test_many_texts_go_round_a_ring() -> None:
    modes = [choice(alike(3e-4), n).mode for n in (1, 32)]
    assert modes == ["tensor", "ring"]


def test_memory_decides_where_only_one_way_fits() -> None:
    """Nodes without memory for a whole block can have a share of each."""
    large = (block(100), block(100))
    nodes = [node(name, memory_mb=memory) for name, memory in zip(NAMES, (175, 130, 130, 130), strict=True)]
    small = cluster(*nodes, links=links(1e-2))
    found = choice(small, blocks=large)
    assert found.mode == "tensor" and found.ring_tokens_s is None and found.tensor is not None
    with pytest.raises(PlacementError) as e:
        plan(small, model(blocks=large), Workload(1, 256))
    assert "--parallel tensor" in str(e.value) and e.value.code == "memory"
    with pytest.raises(PlacementError):
        choice(cluster(*nodes[:2], links=links(1e-4, NAMES[:2])), blocks=large)


def in_pairs(near_s: float, far_s: float) -> ClusterProfile:
    """starter and b0 near each other, and so a0 and a1."""
    pairs = ({"starter", "b0"}, {"a0", "a1"})
    way = [replace(link, round_trip_s=near_s if {link.source, link.target} in pairs else far_s) for link in links(1.0)]
    return cluster(*(node(name) for name in NAMES), links=tuple(way))


def test_near_nodes_become_groups_where_that_is_faster() -> None:
    profile = in_pairs(1e-4, 1e-3)
    found = choice(profile, 4)
    assert found.mode == "groups" and found.grouping is not None
    assert set(found.grouping.stages) == {("starter", "b0"), ("a0", "a1")} and set(found.grouping.used) == {
        "starter+b0",
        "a0+a1",
    }
    assert found.ring_tokens_s is not None and found.tensor_tokens_s is not None
    assert found.grouping.tokens_s > max(found.ring_tokens_s, found.tensor_tokens_s)
    same, groups = merged(with_groups(profile, found.grouping.groups), model(6), Workload(4, 256))
    assert len(same.nodes) == 2 and [group.members for group in groups] == [("starter", "b0"), ("a0", "a1")]
    assert choice(profile, 64).mode == "ring", "many texts keep all nodes busy without sums"
    report = plan(profile, model(6), Workload(4, 256))
    assert report.parallel is not None and report.parallel.mode == "groups"
    assert report.to_json()["parallel"]["grouping"]["used"] == found.grouping.used
    assert "starter+b0" in format_plan(report)


def test_links_that_are_much_the_same_make_no_groups() -> None:
    assert not list(candidates(in_pairs(1e-3, 1.5e-3))) and not list(candidates(alike(1e-4)))
    assert len(list(candidates(in_pairs(1e-4, 1e-3)))) == 1
    far = in_pairs(1e-4, 1e-3)
    in_torch = replace(far, nodes=(replace(far.nodes[0], computed_by="torch: a reason"), *far.nodes[1:]))
    assert not list(candidates(in_torch)), "b0 stays nearer to the starter than the group"
    named = replace(far, nodes=(*far.nodes[:3], replace(far.nodes[3], group="mine")))
    assert choice(named, 4).grouping is None, "who names groups knows what they want"


def test_of_two_ways_the_faster_is_taken() -> None:
    for round_trip_s in (1e-4, 1e-3, 1e-2):
        for n_texts in (1, 2, 4, 8):
            found = choice(alike(round_trip_s), n_texts)
            assert found.tensor_tokens_s is not None and found.ring_tokens_s is not None
            assert (found.mode == "tensor") == (found.tensor_tokens_s > found.ring_tokens_s)
