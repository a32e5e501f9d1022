"""Plans: numbers, limits and advice, and how they are shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from clusters import block, cluster, model, node
from mdi.errors import PlacementError
from mdi.placement.model import ModelShape, Workload
from mdi.placement.plan import format_plan, plan
from mdi.placement.planning import plan_lines
from mdi.placement.profile import ClusterProfile, LinkProfile
from mdi.units import size


def smaller(shape: ModelShape, by: int = 4, name: str = "int8") -> ModelShape:
    blocks = tuple(replace(b, weight_bytes=b.weight_bytes // by, load_bytes=b.load_bytes) for b in shape.blocks)
    return replace(shape, format=name, blocks=blocks, head_bytes=shape.head_bytes // by)


def uneven() -> ClusterProfile:
    return cluster(node("starter", 2.0, 300), node("secondary0", 1.0, 300), node("secondary1", 0.05, 300))


def test_for_one_text_equals_leave_the_work_to_the_starter() -> None:
    """And where another node is worth the way, it is said why this machine computes nothing."""
    for other in (1.0, 1.05):
        report = plan(cluster(node("starter", 1.0), node("secondary0", other)), model(12), Workload(1, 100))
        assert [one.name for one in report.nodes] == ["starter"] and not report.notes
    report = plan(cluster(node("starter", 1.0), node("secondary0", 4.0)), model(12), Workload(1, 100))
    assert [one.stop - one.start for one in report.nodes] == [0, 12]
    (note,) = report.notes
    assert "starter computes no block" in note and "secondary0" in note
    assert note in plan_lines(report) and any(note in line for line in format_plan(report).splitlines())


def test_a_report_agrees_with_itself() -> None:
    report = plan(uneven(), model(12), Workload(16, 100))
    data = report.to_json()
    assert json.loads(json.dumps(data)) == data
    assert [n["blocks"] for n in data["nodes"]][0][0] == 0 and data["nodes"][-1]["blocks"][1] == 12
    for entry in data["nodes"]:
        parts = entry["bytes"]
        assert parts["total"] == sum(parts[k] for k in ("weights", "caches", "activations", "process"))
        assert entry["left_bytes"] == entry["free_bytes"] - parts["total"] >= 0
    assert data["left_out"] and data["left_out"][0]["name"] == "secondary1"
    assert float(data["left_out"][0]["reason"].split()[-4]) > 1
    slowest = max(entry["stage_s"] for entry in data["nodes"])
    way = sum(entry["stage_s"] + entry["link_s"] for entry in data["nodes"])
    assert data["tokens_per_s"] == pytest.approx(16 / max(data["frames"] * slowest, way))


def test_the_table_names_every_node_and_number() -> None:
    text = format_plan(plan(uneven(), model(12), Workload(16, 100)))
    for word in ("starter", "secondary0", "left out: secondary1 (without it the ring is", "tokens/s for one sequence",
                 "for 16 (2 frames of 8 rows)", "limit:"):  # fmt: skip
        assert word in text
    rows = [line for line in text.splitlines() if line.startswith(("node", "starter", "secondary0"))]
    assert len({len(line) for line in rows}) <= 2 and rows[0].split()[0] == "node"


def limit(profile: ClusterProfile, n_sequences: int, counts: tuple[int, ...]) -> str:
    return plan(profile, model(sum(counts)), Workload(n_sequences, 100), layers=counts).limit


def test_a_frame_more_where_smaller_frames_hide_the_transfers() -> None:
    def frames(n_sequences: int, round_trip_s: float) -> tuple[int, int]:
        links = tuple(LinkProfile(*pair, round_trip_s, 1e9) for pair in (("a", "b"), ("b", "a")))
        two = cluster(node("a", head_s=((1, 1e-6),)), node("b"), links=links)
        report = plan(two, model(6), Workload(n_sequences, 100), layers=(3, 3))
        assert report.n_frames * report.n_rows >= n_sequences
        return report.n_frames, report.more_frames

    assert frames(48, 1e-6) == (2, 0)  # nothing to hide
    assert frames(48, 20e-3) == (3, 1)  # 16 rows take 4 ms a block, 24 take 6
    assert frames(2, 20e-3) == (2, 0)  # a row of its own for each
    assert frames(48, 10.0) == (2, 0)  # the way is all there is


def test_what_limits() -> None:
    two = cluster(node("a", read_bytes_s=0.0, head_s=((1, 1e-6),)), node("b", read_bytes_s=0.0))
    assert limit(two, 2, (1, 5)).startswith("the stage of b (5 blocks, ")
    assert limit(two, 2, (5, 1)).startswith("the stage of a (5 blocks with embedding and head, ")
    assert limit(two, 1, (3, 3)).startswith("the way round the ring, ")
    assert limit(cluster(node("a")), 1, (6,)) == "a, which does all the work"
    narrow = replace(two, links=(LinkProfile("a", "b", 0.0, 1e4), LinkProfile("b", "a", 0.0, 1e9)))
    narrow = replace(narrow, nodes=two.nodes)
    assert limit(narrow, 2, (3, 3)).startswith(("the link from a to b", "the way round"))


def test_advice_on_a_bad_placement() -> None:
    report = plan(uneven(), model(12), Workload(16, 100), method="even")
    assert any("--placement throughput" in line and "x faster" in line for line in report.advice)
    assert any(line.startswith("without secondary1 the ring is ") for line in report.advice)


def test_advice_of_more_sequences_and_a_smaller_format() -> None:
    shape = model(12)
    report = plan(uneven(), shape, Workload(1, 100), smaller=[smaller(shape)])
    assert any("sequences at once would give" in line for line in report.advice)
    assert any(line.startswith("--quantize int8 reads 4.0x fewer bytes") for line in report.advice)
    assert not any("--placement" in line for line in report.advice)


def test_a_tight_node_is_named() -> None:
    profile = cluster(node("a", memory_mb=172))
    report = plan(profile, model(6), Workload(1, 10))
    assert any(line.startswith("a will have only") for line in report.advice)


def test_a_refusal_says_what_would_fit() -> None:
    shape = model(12, (block(40),) * 12)
    profile = cluster(node("a", memory_mb=200), node("b", memory_mb=200))
    with pytest.raises(PlacementError) as e:
        plan(profile, shape, Workload(1, 100), smaller=[smaller(shape, 2, "fp16"), smaller(shape)])
    assert "--quantize int8 " in str(e.value) and e.value.code == "memory"
    assert "fp16" not in str(e.value)
    ((_, lack),) = e.value.missing
    assert size(lack) in str(e.value)


def test_a_refusal_for_many_sequences_offers_fewer() -> None:
    profile = cluster(node("a", memory_mb=200))
    with pytest.raises(PlacementError) as e:
        plan(profile, model(6), Workload(64, 400))
    assert "--n-samples 8 " in str(e.value) and e.value.code == "memory"
    with pytest.raises(PlacementError) as e:
        plan(profile, model(6, (block(page_bytes=32 * 20_000),) * 6), Workload(4, 500))
    assert "--n-samples 1 --sequence-length 250 " in str(e.value) and e.value.code == "memory"


def test_a_refusal_of_even_offers_another_placement() -> None:
    profile = cluster(node("a", memory_mb=300), node("b", memory_mb=80))
    with pytest.raises(PlacementError) as e:
        plan(profile, model(12), Workload(1, 100), method="even")
    assert "--placement throughput " in str(e.value) and e.value.code == "memory"


def test_times_of_another_format_are_scaled_and_that_is_said() -> None:
    shape = model(12)
    small = smaller(shape)
    profile = cluster(node("a", read_bytes_s=1e9, head_s=((1, 4e-3),)))
    report = plan(profile, small, Workload(1, 2), measured=shape)
    assert report.nodes[0].stage_s == pytest.approx(12 * 0.25e-3 + 1e-3, rel=0.01)
    assert "scaled" in report.notes[0]
    unknown = plan(profile, small, Workload(1, 2))
    assert "guessed from the nodes' reading speed" in unknown.notes[0]
    assert unknown.nodes[0].stage_s == pytest.approx(12 * 2.5e-3 + 5e-3, rel=0.01)
    unread = cluster(node("a", read_bytes_s=0.0))
    assert "may be far off" in plan(unread, small, Workload(1, 2)).notes[0]


def test_a_large_cluster_is_shown_in_short() -> None:
    nodes = [node("starter", 1, 400), *(node(f"secondary{i}", 0.01, 400) for i in range(30))]
    text = format_plan(plan(cluster(*nodes), model(6), Workload(1, 100)))
    assert "left out: 22 more" in text and len(text.splitlines()) < 25


def test_rows_that_are_kept_take_memory_that_caches_do_not_get() -> None:
    profile, shape = cluster(node("a", memory_mb=150), node("b", memory_mb=115)), model(6)
    plain, kept = (plan(profile, shape, Workload(2, 500, replay_bytes=n)) for n in (0, 64 << 20))
    assert kept.nodes[0].memory.total - plain.nodes[0].memory.total == 2 * 500 * shape.row_bytes, "no text has more"
    alone = plan(cluster(node("a", memory_mb=300)), shape, Workload(2, 500, replay_bytes=64 << 20))
    assert alone.nodes[0].memory == plan(cluster(node("a", memory_mb=300)), shape, Workload(2, 500)).nodes[0].memory
    with pytest.raises(PlacementError):
        plan(profile, shape, Workload(400, 500, replay_bytes=64 << 20))
