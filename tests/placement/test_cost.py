"""The cost model: numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mdi.placement.model
from clusters import MB, block, cluster, model, node
from mdi.errors import UsageError
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.rows import Column
from mdi.placement.cost import CostModel, LinkSpeed, seconds, time_of
from mdi.placement.model import Workload, model_shape
from mdi.placement.plan import plan
from mdi.placement.profile import HOP_S, LinkProfile
from tiny_checkpoint import tiny_config

TIMES = ((1, 1.0), (4, 1.6), (16, 4.0))


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (2, 1.2), (4, 1.6), (10, 2.8), (16, 4.0), (26, 6.0)])
def test_times_lie_on_straight_lines(rows: int, seconds: float) -> None:
    assert time_of(TIMES, rows) == pytest.approx(seconds)


def test_few_times() -> None:
    assert time_of(((4, 2.0),), 1) == 2.0
    assert time_of(((1, 2.0),), 8) == 2.0
    assert time_of(((1, 2.0),), 16) == 4.0 and time_of(((1, 2.0),), 12) == time_of(((16, 2.0),), 24) == 3.0
    assert time_of(((1, 2.0), (4, 1.9)), 100) == pytest.approx(1.9)  # noise does not make many rows free


def equal(n_nodes: int, n_sequences: int, n_layer: int = 6, **changes: object) -> CostModel:
    nodes = [node(f"n{i}", read_bytes_s=0.0, head_s=((1, 3e-3), (128, 3e-3)), **changes) for i in range(n_nodes)]
    return CostModel(cluster(*nodes), model(n_layer), Workload(n_sequences, 100))


def test_the_slowest_stage_sets_the_pace_when_frames_fill_the_ring() -> None:
    found = equal(3, 3).predict((0, 1, 2), (1, 2, 3))
    assert (found.n_rows, found.n_frames) == (1, 3)
    assert found.stage_s == pytest.approx((4e-3, 2e-3, 3e-3))
    assert found.round_s == pytest.approx(3 * 4e-3) and found.tokens_s == pytest.approx(3 / 12e-3)
    assert (found.limit, found.slowest) == ("stage", 0)


def test_a_small_model_takes_time_and_memory_of_the_starter() -> None:
    """As much as its weights are beside those of a block, whose time is known."""
    cost = equal(3, 3, 30)
    block = cost.shape.reference.weight_bytes
    beside = CostModel(cost.profile, cost.shape, replace(cost.workload, draft_bytes=2 * block))
    before, after = (one.predict((0, 1, 2), (2, 2, 2)).stage_s for one in (cost, beside))
    assert after[0] == pytest.approx(before[0] + 2e-3) and after[1:] == before[1:]
    assert beside.memory(0, 0, 2, 3).weights - cost.memory(0, 0, 2, 3).weights == 2 * block
    assert beside.memory(1, 2, 4, 3) == cost.memory(1, 2, 4, 3)
    counts = [plan(cost.profile, cost.shape, one.workload).placement.counts for one in (cost, beside)]
    assert counts == [(8, 11, 11), (7, 12, 11)]


def test_each_link_carries_the_columns_of_its_cut() -> None:
    cost = equal(3, 1)
    wide = CostModel(
        cost.profile, replace(cost.shape, cut_bytes=(8192, 8192, 4096, 12288, 4096, 4096, 4096)), cost.workload
    )
    found = wide.predict((0, 1, 2), (1, 2, 3))
    fixed = HOP_S + 150e-6
    assert found.link_s == pytest.approx([fixed + n / 125e6 for n in (8192, 12288, 4096)])
    kept = CostModel(wide.profile, wide.shape, replace(wide.workload, replay_bytes=1 << 40))
    assert kept.kept_bytes == 100 * 12288, "as many as at the widest cut"
    more = wide.activation_bytes(1, 1, 3) - cost.activation_bytes(1, 1, 3)
    assert more == 2 * 3 * (1 + 64) * (12288 - 4096), "buffers of three frames, with a row and a piece of a prompt"


def test_a_model_s_bytes_at_a_cut_are_those_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_litgpt(tiny_config())
    spec = spec_of(config)
    first, *others = spec.blocks
    more = replace(first, gives=(Column("more", 5),)), *others[:-1], replace(others[-1], reads=("more",))
    assert model_shape(config, "float32").cut_bytes is None
    monkeypatch.setattr(mdi.placement.model, "spec_of", lambda _: replace(spec, blocks=more))
    shape = mdi.placement.model.cached_shape.__wrapped__(config, "float32", "auto")
    n = 4 * spec.width
    assert shape.cut_bytes == (n, *[n + 20] * (spec.n_layer - 1), n) and shape.row_bytes == n and not shape.is_uniform


def test_one_sequence_waits_for_the_whole_way() -> None:
    found = equal(3, 1).predict((0, 1, 2), (1, 2, 3))
    link = HOP_S + 150e-6 + 4096 / 125e6
    assert found.link_s == pytest.approx((link,) * 3)
    assert found.round_s == pytest.approx(9e-3 + 3 * link) and found.limit == "round trip"
    assert [equal(1, n).predict((0,), (6,)).limit for n in (1, 8)] == ["stage", "stage"], "there is no way to go"


def test_as_many_sequences_as_frames_cannot_hide_long_links() -> None:
    cost = equal(2, 2)
    slow = tuple(LinkProfile(a, b, 0.1, 1e9) for a, b in (("n0", "n1"), ("n1", "n0")))
    cost = CostModel(replace(cost.profile, links=slow), cost.shape, cost.workload)
    found = cost.predict((0, 1), (2, 4))
    assert found.limit == "round trip" and found.round_s == pytest.approx(9e-3 + 0.1 + 2 * HOP_S, rel=1e-3)


def test_a_narrow_link_can_be_the_limit() -> None:
    cost = equal(3, 24)
    links = tuple(
        LinkProfile(a, b, 0.0, 1e6 if a == "n1" else 1e9) for a, b in (("n0", "n1"), ("n1", "n2"), ("n2", "n0"))
    )
    found = CostModel(replace(cost.profile, links=links), cost.shape, cost.workload).predict((0, 1, 2), (2, 2, 2))
    assert (found.n_rows, found.limit, found.slowest) == (8, "link", 1)
    assert found.round_s == pytest.approx(3 * 8 * 4096 / 1e6)


def test_looking_at_long_caches_takes_time() -> None:
    shape = model(2)
    short, long = (
        CostModel(cluster(node("a", read_bytes_s=1e9)), shape, Workload(4, length)).predict((0,), (2,)).round_s
        for length in (2, 2000)
    )
    # four sequences, half full, 2 blocks of 2048 bytes a position
    assert long - short == pytest.approx(4 * 2 * 2048 * (1000 - 1) / 1e9)


def test_blocks_that_work_more_take_longer() -> None:
    shape = model(blocks=(block(macs=5_000_000), block(), block()))
    cost = CostModel(cluster(node("a", read_bytes_s=0.0, head_s=((1, 1e-9),))), shape, Workload(1, 100))
    assert cost.predict((0,), (3,)).stage_s[0] == pytest.approx(4e-3)


def test_without_a_measured_head_it_goes_by_its_bytes() -> None:
    cost = CostModel(cluster(node("a", read_bytes_s=0.0)), model(1), Workload(1, 100))
    assert cost.predict((0,), (1,)).stage_s[0] == pytest.approx(1e-3 + 2e-3)


def test_without_measured_blocks_they_go_by_reading_speed() -> None:
    cost = CostModel(cluster(node("a", block_s=(), read_bytes_s=1e9)), model(1), Workload(1, 1))
    assert cost.predict((0,), (1,)).stage_s[0] == pytest.approx(10e-3 + 20e-3, rel=1e-3)


def test_memory_adds_up() -> None:
    shape = model(blocks=(block(), block(window=100), block()))
    cost = CostModel(cluster(node("a"), node("b")), shape, Workload(4, 1000))
    starter, other = cost.memory(0, 0, 1, 2), cost.memory(1, 1, 3, 2)
    assert starter.weights == 10 * MB + 40 * MB and other.weights == 20 * MB
    page = 32 * 2048
    assert starter.caches == 4 * 32 * page  # 1000 positions in whole pages
    assert (
        other.caches == 4 * (32 + 9) * page
    )  # of a window of 100: it, its slack, a chunk, and what begins its first page
    assert starter.process == 50 * MB
    rows = 2 + 64
    activations = 2 * rows * 16384 + 2 * 4 * 8 * 64 * 1000 + 512 * 1000 + 2 * 2 * rows * 4096
    loading = 10 * MB  # a block twice, before there are caches
    assert other.activations == max(activations, loading - other.caches)
    assert other.total == other.weights + other.caches + other.activations + other.process
    wide = CostModel(cost.profile, replace(shape, vocab_size=1_000_000), cost.workload)
    assert wide.memory(0, 0, 1, 2).activations == activations + 3 * 4 * 2 * 1_000_000, "the starter has logits"
    assert wide.memory(1, 1, 3, 2).activations == other.activations
    running = CostModel(cost.profile, replace(shape, runtime_bytes=3 * MB), cost.workload)
    assert running.memory(1, 1, 3, 2).total == other.total + 3 * MB
    assert running.fixed_bytes(1) == cost.fixed_bytes(1) + 3 * MB


def test_loading_may_need_more_than_running() -> None:
    shape = model(blocks=(replace(block(), load_bytes=40 * MB),))
    cost = CostModel(cluster(node("a")), shape, Workload(1, 10))
    use = cost.memory(0, 0, 1, 1)
    assert use.total == 50 * MB + 50 * MB + 40 * MB
    terms = cost.terms(1)
    assert terms.fits(0, 0, 1) and terms.most_blocks(0) >= 1
    tight = replace(node("a"), memory_bytes=use.total - 1)
    assert not CostModel(cluster(tight), shape, Workload(1, 10)).terms(1).fits(0, 0, 1)


@pytest.mark.parametrize("cache_mb", [0, 3, 8, 50])
def test_a_stage_reaches_as_far_as_it_fits_with_its_caches(cache_mb: int) -> None:
    """What the search of a placement takes for the end of a stage is what the check of memory allows."""
    shape = model(blocks=tuple(block(weight_mb=w, page_bytes=cache_mb * MB // 4) for w in (10, 12, 8, 10, 9, 30)))
    for memory_mb in (60, 90, 130, 200):
        cost = CostModel(cluster(node("a"), node("b", memory_mb=memory_mb)), shape, Workload(2, 60))
        terms = cost.terms(2)
        for start in range(6):
            fitting = [stop for stop in range(start, 7) if terms.fits(1, start, stop)]
            assert terms.reach(1, start, 1e9) == max(fitting, default=start)
            for stop in range(start, 7):
                assert terms.fits(1, start, stop) == (cost.memory(1, start, stop, 2).total <= memory_mb * MB)


def test_a_stage_reaches_as_far_as_its_time_lasts() -> None:
    """A block takes 1 ms; the starter has a head of 3 ms."""
    terms = equal(2, 2).terms(2)
    assert [terms.reach(0, 1, limit_s) for limit_s in (2.5e-3, 3.5e-3, 4.5e-3, 1.0)] == [1, 1, 2, 6]
    assert [terms.reach(1, 2, limit_s) for limit_s in (0.5e-3, 1.5e-3, 3.5e-3, 1.0)] == [2, 3, 5, 6]


def test_kept_rows_are_part_of_what_a_node_needs_whatever_it_holds() -> None:
    shape = model(4)
    with_rows = Workload(4, 1000, replay_bytes=1 << 40)
    without = Workload(4, 1000, replay_bytes=0)
    nodes = cluster(node("a"), node("b"))
    kept = with_rows.kept_bytes(shape.row_bytes, 2)
    costs = [CostModel(nodes, shape, work) for work in (with_rows, without)]
    assert kept > 0 and costs[0].kept_bytes == kept and costs[1].kept_bytes == 0
    for i in (0, 1):
        assert costs[0].fixed_bytes(i) - costs[1].fixed_bytes(i) == kept
        assert costs[0].memory(i, 0, 2, 2).total - costs[1].memory(i, 0, 2, 2).total == kept


def test_rows_and_frames_follow_the_scheduler() -> None:
    for n_sequences in range(1, 20):
        for n_nodes in range(1, 8):
            work = Workload(n_sequences, 10)
            rows, frames = work.rows_per_frame(n_nodes), work.frames(n_nodes)
            assert frames <= n_nodes and frames * rows >= n_sequences > (frames - 1) * rows


@pytest.mark.parametrize("numbers", [(0, 10), (1, 0)])
def test_a_run_has_something_to_do(numbers: tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        Workload(*numbers)


@pytest.mark.parametrize(
    ("algorithm", "n_nodes", "expected"),
    [
        ("star", 1, 0), ("star", 2, 2 * (1000 + 21)), ("star", 5, 2 * (1000 + 4 * 21)),
        ("exchange", 2, 1000 + 22), ("exchange", 5, 1000 + 4 * 22), ("ring", 5, 2 * 4 * (1000 + 4 + 2)),
        ("tree", 4, 2 * (2 * 1000 + 2 * 21)), ("tree", 5, 2 * (2 * 1000 + 3 * 21)),
    ],
)  # fmt: skip
def test_a_sum_takes_its_hops_and_what_the_busiest_node_sends(algorithm: str, n_nodes: int, expected: float) -> None:
    """A hop takes 1000 s, the whole of the bytes 20 s, and a message 1 s of either end."""
    assert seconds(algorithm, n_nodes, 200, LinkSpeed(1000.0, 10.0, 1.0)) == pytest.approx(expected)
