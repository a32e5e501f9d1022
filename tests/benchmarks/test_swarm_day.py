"""The simulation of a swarm: its servers are those of Petals' appendix E, and balancing keeps all blocks served."""

from __future__ import annotations

from swarm import MINUTES, N_LAYER, appendix_e, nobody_moves, of_petals, ours, simulate


def test_servers_and_their_number_are_those_of_the_appendix() -> None:
    day = appendix_e(1)
    assert len(day.servers) == 206 and len(day.present) == MINUTES
    assert all(0 <= s.speed <= 100 and 1 <= s.n_blocks <= 10 and s.start + s.n_blocks <= N_LAYER for s in day.servers)
    counts = [len(present) for present in day.present]
    assert 15 <= min(counts) <= 25 and 100 <= max(counts) <= 110 and all(len(set(p)) == len(p) for p in day.present)


def test_balancing_is_better_than_joining_well_and_that_than_chance() -> None:
    day = appendix_e(2, 40)
    chance, joins, petals, full = (
        simulate(day, balance, at_random)
        for balance, at_random in (
            (nobody_moves, True),
            (nobody_moves, False),
            (of_petals(0.1), False),
            (ours(0.1), False),
        )
    )
    medians = [one.summary()["median"] for one in (chance, joins, petals, full)]
    assert medians == sorted(medians) and full.summary()["zero"] == 0
    assert all(s <= 1 + 1e-9 for one in (chance, joins, petals, full) for s in one.share), "above the bound"
    assert full.n_moves > 0 == joins.n_moves
