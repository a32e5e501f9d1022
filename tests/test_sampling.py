"""Drawing tokens: the right distribution, the cuts of top-k and top-p, and seeds that belong to one sequence each."""

from __future__ import annotations

import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.engine.sampling import Sampler, seed_of
from mdi.engine.sequence import SamplingParams

VOCAB = 12


def logits_of(seed: int, n_rows: int = 1) -> torch.Tensor:
    return torch.randn(n_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_k": None, **fields})  # type: ignore[arg-type]


def draws(logits: torch.Tensor, which: SamplingParams, n: int) -> collections.Counter[int]:
    sampler = Sampler()
    return collections.Counter(sampler.sample(logits, [(0, which)])[0] for _ in range(n))


def test_temperature_zero_is_greedy_beside_rows_that_are_drawn() -> None:
    logits = logits_of(0, 3)
    tokens = Sampler().sample(logits, [(0, params(temperature=0)), (1, params()), (2, params(temperature=0))])
    best = logits.argmax(dim=-1).tolist()
    assert (tokens[0], tokens[2]) == (best[0], best[2])


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.8}])
def test_frequencies_follow_the_distribution(fields: dict[str, float]) -> None:
    which = params(**fields)
    logits = logits_of(1)
    n = 4000
    expected = torch.softmax(logits[0].double() / which.temperature, dim=-1)
    order = expected.argsort(descending=True)
    kept = order[: which.top_k or VOCAB]
    share = expected[kept] / expected[kept].sum()
    kept = kept[: int((share.cumsum(0) - share < which.top_p).sum())]
    wanted = torch.zeros(VOCAB, dtype=torch.double)
    wanted[kept] = expected[kept] / expected[kept].sum()
    counts = draws(logits, which, n)
    assert set(counts) <= set(kept.tolist())
    for token in range(VOCAB):
        p = float(wanted[token])
        assert abs(counts[token] / n - p) < 5 * (p * (1 - p) / n) ** 0.5 + 1e-9


def test_top_k_one_and_a_tiny_top_p_are_greedy() -> None:
    logits = logits_of(2)
    best = int(logits.argmax())
    assert set(draws(logits, params(top_k=1), 50)) == {best}
    assert set(draws(logits, params(top_p=1e-9), 50)) == {best}


def test_a_top_k_beyond_the_vocabulary_is_all() -> None:
    assert draws(logits_of(3), params(top_k=500), 100) == draws(logits_of(3), params(), 100)


def test_an_extreme_temperature_still_gives_a_token() -> None:
    for temperature in (1e-6, 1e30, float("inf")):
        tokens = draws(logits_of(4), params(temperature=temperature), 20)
        assert set(tokens) <= set(range(VOCAB))


def test_half_precision_logits_are_drawn_in_float32() -> None:
    logits = logits_of(5).bfloat16()
    assert draws(logits, params(), 100) == draws(logits.float(), params(), 100)


def test_a_sequence_draws_the_same_in_any_company() -> None:
    logits = logits_of(6, 4)
    alone = Sampler()
    expected = [alone.sample(logits[i : i + 1], [(9, params(seed=3))])[0] for i in (0, 1, 2, 3)]
    among = Sampler()
    found = []
    for i in range(4):
        rows = torch.cat([logits[3:], logits[i : i + 1], logits[:1]])
        found.append(among.sample(rows, [(1, params(seed=5)), (2, params(seed=3)), (4, params(temperature=0))])[1])
    assert found == expected


def test_a_forgotten_sequence_begins_anew() -> None:
    sampler = Sampler()
    logits = logits_of(7)
    first = [sampler.sample(logits, [(0, params())])[0] for _ in range(10)]
    sampler.forget(0)
    sampler.forget(99)
    assert [sampler.sample(logits, [(0, params())])[0] for _ in range(10)] == first


@settings(deadline=None)
@given(seed=st.integers(0, 2**63), index=st.integers(0, 1000))
def test_seeds_are_seeds_and_those_of_samples_differ(seed: int, index: int) -> None:
    one, other = seed_of(seed, index), seed_of(seed, index + 1)
    assert one != other and 0 <= one < 1 << 63
    torch.Generator().manual_seed(one)


def test_neighbouring_seeds_do_not_share_samples() -> None:
    seeds = {seed_of(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
