"""The placements of LLaMPS' paper come out of our OPA and GMA."""

from __future__ import annotations

import pytest
from llamps import FITS, MISSED, STEPS, TABLE, Fit, Row

from mdi.partition.greedy import filled, gma_scores, opa_scores, ranked

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
