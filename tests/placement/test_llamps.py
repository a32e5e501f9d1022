"""LLaMPS' OPA and GMA on our ring, their weights, and the placements of the paper's table 3."""

from __future__ import annotations

from functools import partial

import pytest

from clusters import block, cluster, model, node
from leftovers import by_score, comparison_matrix, gma_scores, opa_scores, opa_weights, weights
from llamps import FITS, MISSED, STEPS, TABLE, Fit, Row
from mdi.errors import PlacementError
from mdi.placement.cost import CostModel
from mdi.placement.methods import filled, ranked, starting_rings
from mdi.placement.model import Workload


def cost_of(*memory_and_cores: tuple[float, float], n_layer: int = 6, n_sequences: int = 1) -> CostModel:
    nodes = (node(f"n{i}", memory_mb=mb, n_cores=cores) for i, (mb, cores) in enumerate(memory_and_cores))
    return CostModel(cluster(*nodes), model(n_layer), Workload(n_sequences, 10))


def test_the_starter_keeps_embedding_and_head_wherever_it_ranks() -> None:
    found = by_score(cost_of((150, 1), (100, 1), (90, 1)), "gma", gma_scores)
    # left over: n0 150 - 50 - 40 = 60, n1 50, n2 40 MB; n0 must load its 20 MB head twice, so that 4 blocks are left
    assert found.names == ("n0", "n1") and found.counts == (4, 2)

    found = by_score(cost_of((115, 1), (300, 1), (100, 1)), "gma", gma_scores)
    assert found.names == ("n0", "n1") and found.counts == (0, 6)
    assert dict(found.left_out) == {"n2": "all blocks were placed before its turn"}


def test_gma_goes_by_memory_and_opa_looks_at_cores_as_well() -> None:
    cost = cost_of((115, 1), (300, 1), (300, 8))
    assert list(starting_rings(cost)) == [(0, 1), (0, 2)]
    assert by_score(cost, "gma", gma_scores).names == ("n0", "n1")
    assert by_score(cost, "opa", opa_scores).names == ("n0", "n2")


def test_preferences_decide() -> None:
    cost = cost_of((115, 1), (1300, 1), (300, 3))
    memory, cores = ({("memory", "cores"): value} for value in (9.0, 1.0))
    assert by_score(cost, "opa", partial(opa_scores, preferences=memory)).names == (
        "n0",
        "n1",
    )
    assert by_score(cost, "opa", partial(opa_scores, preferences=cores)).names == ("n0", "n2")


def test_what_fills_nobody_is_refused() -> None:
    with pytest.raises(PlacementError, match="gma places 4 of 6 blocks"):
        by_score(cost_of((150, 1), (60, 1)), "gma", gma_scores)
    with pytest.raises(PlacementError):
        by_score(cost_of((80, 1), (900, 1)), "gma", gma_scores)


def test_where_blocks_differ_the_largest_counts() -> None:
    shape = model(blocks=(block(30), *[block(10)] * 5))
    cost = CostModel(cluster(node("a", memory_mb=170), node("b", memory_mb=400)), shape, Workload(1, 10))
    found = by_score(cost, "gma", gma_scores)
    assert found.counts[0] <= 2 and sum(found.counts) == 6


def test_weights_of_two_criteria() -> None:
    assert opa_weights({("memory", "cores"): 5}) == pytest.approx((5 / 6, 1 / 6))
    assert opa_weights({("cores", "memory"): 3}) == pytest.approx((1 / 4, 3 / 4))
    assert opa_scores([10, 4], [2, 8], {("memory", "cores"): 4}) == pytest.approx([0.8 * 10 + 0.4, 0.8 * 4 + 1.6])


def test_consistent_judgements_give_their_own_weights() -> None:
    matrix = comparison_matrix("abc", {("a", "b"): 2, ("b", "c"): 3, ("a", "c"): 6})
    assert weights(matrix) == pytest.approx((0.6, 0.3, 0.1))


def test_judgements_that_go_round_weigh_alike() -> None:
    matrix = comparison_matrix("abc", {("a", "b"): 5, ("b", "c"): 5, ("c", "a"): 5})
    assert weights(matrix) == pytest.approx((1 / 3,) * 3)


ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.label)


def chosen(row: Row, fit: Fit, method: str, preference: float = 5.0) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Servers in order, and their blocks."""
    overhead = fit.overhead(1) + row.model.cache_gb
    left_over = [gb - overhead for gb, _ in row.servers]
    cores = [float(n) for _, n in row.servers]
    if method == "opa":
        scores = opa_scores(left_over, cores, {("memory", "cores"): preference})
    else:
        scores = gma_scores(left_over, cores)
    counts = filled(ranked(scores), row.most_blocks(fit), row.model.n_layer)
    return tuple(f"S{i + 1}" for i in counts), tuple(counts.values())


@ROWS
def test_servers_and_their_order_are_those_printed(row: Row) -> None:
    fit = FITS[row.model.name]
    assert chosen(row, fit, "gma")[0] == row.gma
    assert chosen(row, fit, "opa")[0] == row.opa


@ROWS
@pytest.mark.parametrize("preference", [3.6, 4, 7, 9])
def test_one_set_of_preferences_does_for_the_whole_table(row: Row, preference: float) -> None:
    assert chosen(row, FITS[row.model.name], "opa", preference)[0] == row.opa


def test_with_less_preference_for_memory_the_table_does_not_come_out() -> None:
    row = next(row for row in TABLE if row.label == "Bloom 3b, 3")
    assert chosen(row, FITS[row.model.name], "opa", 3.4)[0] != row.opa


@ROWS
@pytest.mark.parametrize("method", ["gma", "opa"])
def test_block_counts_with_two_constants_per_model(row: Row, method: str) -> None:
    counts = chosen(row, FITS[row.model.name], method)[1]
    assert counts == MISSED.get((row.model.name, len(row.counts)), row.counts)


@pytest.mark.parametrize("row", [row for row in TABLE if row.model.name in STEPS], ids=lambda row: row.label)
@pytest.mark.parametrize("method", ["gma", "opa"])
def test_all_block_counts_if_the_overhead_grows_with_the_blocks(row: Row, method: str) -> None:
    servers, counts = chosen(row, STEPS[row.model.name], method)
    assert (servers, counts) == (getattr(row, method), row.counts)


@pytest.mark.parametrize("name", sorted({name for name, _ in MISSED}))
def test_no_two_constants_give_the_missed_rows(name: str) -> None:
    """need(n) = overhead + n * block: the least and the most that each row allows for the block contradict each other."""
    bounds = []  # (blocks, GB): need(blocks) <= GB, and (blocks, GB): need(blocks) > GB
    for row in TABLE:
        if row.model.name != name:
            continue
        memories = [row.servers[int(server[1]) - 1][0] for server in row.gma]
        bounds += [(n, gb, True) for n, gb in zip(row.counts, memories, strict=True)]
        bounds += [(n + 1, gb, False) for n, gb in list(zip(row.counts, memories, strict=True))[:-1]]
    # need(b) - need(a) > gb_b - gb_a for an unfit b and a fit a < b; and < for a fit b and an unfit a < b.
    fit_points = [(n, gb) for n, gb, fits in bounds if fits]
    unfit_points = [(n, gb) for n, gb, fits in bounds if not fits]
    least = max((gb_b - gb_a) / (b - a) for b, gb_b in unfit_points for a, gb_a in fit_points if b > a)
    most = min((gb_b - gb_a) / (b - a) for b, gb_b in fit_points for a, gb_a in unfit_points if b > a)
    assert least > most
