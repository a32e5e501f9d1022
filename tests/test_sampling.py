"""Drawing tokens: the right distribution, the cuts of top-k and top-p, and seeds that belong to one sequence each."""

from __future__ import annotations

import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.engine.sampling import sample, seed_of, uniform
from mdi.engine.sequence import SamplingParams

VOCAB = 12


def logits_of(seed: int, n_rows: int = 1) -> torch.Tensor:
    return torch.randn(n_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_k": None, **fields})  # type: ignore[arg-type]


def draws(logits: torch.Tensor, which: SamplingParams, n: int) -> collections.Counter[int]:
    return collections.Counter(sample(logits, [(which, i)])[0] for i in range(n))


def test_temperature_zero_is_greedy_beside_rows_that_are_drawn() -> None:
    logits = logits_of(0, 3)
    tokens = sample(logits, [(params(temperature=0), 0), (params(), 0), (params(temperature=0), 0)])
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


def test_a_sequence_draws_the_same_in_any_company_and_once_more() -> None:
    logits = logits_of(6, 4)
    expected = [sample(logits[i : i + 1], [(params(seed=3), i)])[0] for i in range(4)]
    for i in (0, 1, 2, 3, 1):  # the last: a token that was lost on its way is drawn again
        rows = torch.cat([logits[3:], logits[i : i + 1], logits[:1]])
        assert sample(rows, [(params(seed=5), 7), (params(seed=3), i), (params(temperature=0), 0)])[1] == expected[i]


def test_what_float32_cannot_hold_is_greedy() -> None:
    best = int(logits_of(2).argmax())
    for fields in ({"temperature": 1e-46}, {"top_p": 1e-46}):
        assert set(draws(logits_of(2), params(**fields), 20)) == {best}


def test_uniform_numbers_are_even_and_independent_of_their_neighbours() -> None:
    n = 20_000
    for seeds in ([1] * n, range(n), [seed_of(7, i) for i in range(n)]):
        numbers = torch.tensor([uniform(seed, i if seeds[0] == seeds[1] else 0) for i, seed in enumerate(seeds)])
        counts = torch.histc(numbers, 20, 0, 1)
        assert float(((counts - n / 20) ** 2 / (n / 20)).sum()) < 50  # chi square of 19 degrees: 1 in 10,000 is above
        pairs = torch.stack([numbers[:-1], numbers[1:]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / n**0.5


@given(seed=st.integers(-(2**70), 2**70), n=st.integers(0, 2**40))
def test_uniform_numbers_are_below_one(seed: int, n: int) -> None:
    assert 0 <= uniform(seed, n) < 1


@settings(deadline=None)
@given(seed=st.integers(0, 2**63), index=st.integers(0, 1000))
def test_seeds_are_seeds_and_those_of_samples_differ(seed: int, index: int) -> None:
    one, other = seed_of(seed, index), seed_of(seed, index + 1)
    assert one != other and 0 <= one < 1 << 63
    torch.Generator().manual_seed(one)


def test_neighbouring_seeds_do_not_share_samples() -> None:
    seeds = {seed_of(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
