"""One sequence: when it ends, what it keeps, and how much cache it may come to need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.engine.sequence import SamplingParams, Sequence
from mdi.errors import UsageError


def sequence(n_prompt: int = 3, max_length: int = 100, **params: object) -> Sequence:
    return Sequence(1, tuple(range(50, 50 + n_prompt)), SamplingParams(**params), max_length)  # type: ignore[arg-type]


def feed(one: Sequence, tokens: list[int]) -> list[tuple[int, ...]]:
    """What append gave out at each token, up to the end of the sequence."""
    said = []
    for token in tokens:
        said.append(one.accept(token))
        if one.finish_reason:
            break
    return said


def test_length_ends_it() -> None:
    one = sequence(n_tokens=3)
    assert feed(one, [1, 2, 3, 4]) == [(1,), (2,), (3,)]
    assert (one.generated, one.finish_reason) == ([1, 2, 3], "length")


def test_a_full_context_ends_it() -> None:
    one = sequence(n_prompt=3, max_length=5)
    assert feed(one, [1, 2, 3]) == [(1,), (2,)]
    assert (one.ids, one.finish_reason) == ([50, 51, 52, 1, 2], "length")


def test_a_prompt_as_long_as_the_context_gets_one_token() -> None:
    one = sequence(n_prompt=5, max_length=5)
    assert one.n_positions == 5
    assert feed(one, [1, 2]) == [(1,)]
    assert (one.generated, one.finish_reason) == ([1], "length")


def test_eos_is_not_kept() -> None:
    one = sequence(eos_ids=frozenset({7, 8}))
    assert feed(one, [1, 8, 2]) == [(1,), ()]
    assert (one.generated, one.finish_reason) == ([1], "eos")


def test_eos_goes_before_length() -> None:
    one = sequence(n_tokens=1, eos_ids=frozenset({7}))
    feed(one, [7])
    assert (one.generated, one.finish_reason) == ([], "eos")


def test_a_stop_sequence_is_cut_off() -> None:
    one = sequence(stop_sequences=((9,), (1, 2, 3)))
    assert feed(one, [1, 1, 2, 3, 4]) == [(), (1,), (), ()]
    assert (one.generated, one.finish_reason) == ([1], "stop")


def test_a_stop_sequence_does_not_reach_into_the_prompt() -> None:
    one = sequence(n_prompt=3, stop_sequences=((52, 1),))
    feed(one, [1, 2])
    assert (one.generated, one.finish_reason) == ([1, 2], None)


def test_of_stop_sequences_that_end_together_the_longer_is_cut_off() -> None:
    one = sequence(stop_sequences=((2,), (1, 2)))
    feed(one, [7, 1, 2])
    assert (one.generated, one.finish_reason) == ([7], "stop")


def test_the_beginning_of_a_stop_sequence_is_kept_where_the_text_ends_otherwise() -> None:
    length, eos = (
        sequence(n_tokens=2, stop_sequences=((1, 2, 3),)),
        sequence(eos_ids=frozenset({8}), stop_sequences=((1, 2, 3),)),
    )
    assert feed(length, [1, 2]) == [(), (1, 2)]
    assert feed(eos, [1, 2, 8]) == [(), (), (1, 2)]


def test_an_empty_stop_sequence_stops_nothing() -> None:
    one = sequence(stop_sequences=((),))
    feed(one, [1, 2])
    assert one.finish_reason is None


@pytest.mark.parametrize(
    "params",
    [
        {"n_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5},
        {"min_p": 1.5}, {"repetition_penalty": 0.0},
    ],
)  # fmt: skip
def test_impossible_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refused:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert refused.value.code == "value"


@settings(deadline=None)
@given(
    n_prompt=st.integers(1, 12),
    max_length=st.integers(1, 16),
    n_tokens=st.integers(1, 12),
    stops=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    tokens=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_it_always_ends_within_what_it_reserved(
    n_prompt: int, max_length: int, n_tokens: int, stops: tuple[tuple[int, ...], ...], tokens: list[int]
) -> None:
    one = sequence(
        min(n_prompt, max_length), max_length, n_tokens=n_tokens, stop_sequences=stops, eos_ids=frozenset({3})
    )
    said = feed(one, tokens)
    assert one.finish_reason in ("eos", "stop", "length")
    n_taken = len(said)
    assert n_taken <= n_tokens
    # Every token but the last is sent back into the ring.
    assert one.n_prompt + n_taken - 1 <= one.n_positions <= max(max_length, 1)
    assert one.generated == tokens[: len(one.generated)] == [token for given in said for token in given]
    assert not any(tuple(one.generated[i : i + len(stop)]) == stop for stop in stops for i in range(len(one.generated)))
