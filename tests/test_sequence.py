"""One sequence: when it ends, what it keeps, and how much cache it may come to need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.engine.sequence import Event, Inbox, Request, SamplingParams, Sequence, seed_of
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


@pytest.mark.parametrize(
    "params",
    [
        {"n_tokens": 1}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": None}, {"top_p": 1.0}, {"top_p": 1e-9}, {"min_p": 0.0},
        {"min_p": 1.0}, {"repetition_penalty": 1e-9}, {"presence_penalty": -2.0}, {"frequency_penalty": -2.0},
    ],
)  # fmt: skip
def test_parameters_at_their_limits_are_possible(params: dict[str, object]) -> None:
    assert vars(SamplingParams(**params)).items() >= params.items()  # type: ignore[arg-type]


def test_parameters_that_change_logits() -> None:
    changing: list[dict[str, Any]] = [
        {"presence_penalty": -0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"repetition_penalty": 0.9},
        {"logit_bias": ((3, 0.0),)}, {"suppressed": (0,)},
    ]  # fmt: skip
    assert all(SamplingParams(**fields).changes_logits for fields in changing)
    assert not SamplingParams(temperature=0.3, top_k=2, top_p=0.5, min_p=0.5, n_logprobs=3).changes_logits
    tokens, biases = SamplingParams(logit_bias=((3, 0.5), (1, -2.0))).biases
    assert (tokens.tolist(), biases.tolist(), biases.dtype) == ([3, 1], [0.5, -2.0], np.float32)


def test_seeds_of_samples() -> None:
    """What a seed means stays; the numbers are those of the two steps, without their highest bit."""
    assert [seed_of(0, 0), seed_of(1, 0), seed_of(0, 1)] == [0, 0x1E3779B97F4A7C15, 0x51B54A32D192ED03]
    assert (seed_of(1, 1), seed_of(7, 3)) == (0x6FECC3EC50DD6918, 5234364376659667868)


def test_what_may_be_shared_is_of_one_owner_and_one_adapter() -> None:
    one = Sequence(1, (4, 5), SamplingParams(), 99, owner="me", adapter="a")
    assert one.kept_for == "a/me" and one.prompt_key == ("me", "a", (4, 5))
    nobodys = Sequence(1, (4, 5), SamplingParams(), 99, adapter="a")
    assert nobodys.kept_for is None and nobodys.prompt_key == (None, "a", (4, 5))


@pytest.mark.parametrize(
    ("read_from", "first_wanted", "n_shared"), [(None, 4, 3), (0, 0, 0), (2, 2, 2), (4, 4, 3)], ids=str
)
def test_rows_that_are_wanted_are_not_taken_from_another_text(
    read_from: int | None, first_wanted: int, n_shared: int
) -> None:
    one = sequence(3)
    one.read_from = read_from
    one.ids += [7, 8]
    assert (one.first_wanted, one.n_shared) == (first_wanted, n_shared)
    if read_from is None:
        assert sequence(3).n_shared == 2, "its last row gives the first token"


def test_a_text_with_lost_caches_is_a_prompt_of_all_its_tokens() -> None:
    one = sequence(3, 10, n_tokens=9)
    assert (one.n_to_send, one.in_prefill, one.n_cached, one.n_positions) == (3, True, 3, 10)
    assert one.begin_behind(2) == 2 and (one.n_sent, one.n_reused, one.n_to_send) == (2, 2, 1)
    one.n_sent = 3
    assert not one.in_prefill
    one.accept(7)
    one.n_sent, one.n_reached, one.n_flying = 6, 6, 2
    one.guess([8, 9])
    assert (one.n_cached, one.n_guessed, one.n_to_send) == (6, 2, -2)
    one.rewind()
    assert (one.n_sent, one.n_reached, one.n_flying, one.n_evictions, one.n_misses) == (0, 0, 0, 1, 1)
    assert (one.n_to_send, one.in_prefill, one.n_cached) == (4, True, 4) and not one.guessed
    assert one.begin_behind(3) == 3 and (one.n_sent, one.n_reused) == (3, 2), "only what was there when it began"
    one.rewind()
    assert (one.n_evictions, one.n_misses) == (2, 1), "no guess was under way"
    one.ids += range(20)
    assert one.n_cached == 10, "the last one of all is never sent"


def test_guesses_count_up_to_the_first_wrong_one() -> None:
    one = sequence(3, n_tokens=9)
    one.n_sent, one.n_flying = 7, 1
    for tokens in ([5, 6], [7, 8]):
        one.guess(tokens)
    assert one.n_guessed == 4
    assert one.accept_drawn(5) == (5,) and (one.n_confirmed, list(one.guessed), one.n_sent) == (1, [6, 7, 8], 7)
    assert one.accept_drawn(6) == (6,) and (one.n_confirmed, one.n_misses, one.n_flying) == (2, 0, 1)
    assert one.accept_drawn(9) == (9,) and (one.n_confirmed, one.n_misses, one.n_flying) == (2, 1, 0)
    assert (one.n_sent, list(one.guessed), one.ids) == (5, [], [50, 51, 52, 5, 6, 9])
    assert one.accept_drawn(4) == (4,) and (one.n_confirmed, one.n_misses, one.n_sent) == (2, 1, 5), (
        "nothing was guessed"
    )


@pytest.mark.parametrize(("last", "n_sent"), [(7, 4), (8, 3)])
def test_a_right_guess_that_ends_the_text_leaves_no_others(last: int, n_sent: int) -> None:
    """A stop sequence is cut off: what was sent behind it is void."""
    one = sequence(3, n_tokens=2 if last == 7 else 9, stop_sequences=((8,),))
    one.n_sent = 7
    one.guess([5, last, 1, 1])
    assert [one.accept_drawn(token) for token in (5, last)] == [(5,), (7,) if last == 7 else ()]
    assert (one.n_confirmed, one.n_sent, list(one.guessed)) == (2, n_sent, [])


def test_rounds_left_are_fewer_where_guesses_are_right() -> None:
    one = sequence(2, 1000, n_tokens=100)
    one.ids += range(20)
    assert one.n_rounds_left == 80
    one.n_confirmed = 15
    assert one.n_rounds_left == 20
    one.ids += range(80)
    assert one.n_rounds_left == 0


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


# What a reader hears


def request_of(one: Sequence, ends: Any = None, constraint: Any = None, cancel: Any = None) -> Request:
    return Request(one, None, ends, cancel, constraint)


def test_rows_and_scores_that_come_again_after_a_loss_count_once() -> None:
    request = request_of(sequence())
    rows, came = np.arange(6, dtype=np.float32).reshape(1, 3, 2), list[Any]()
    request.read_rows(0, lambda first, new: came.append((first, new[0].tolist())))
    for first, stop in ((0, 2), (0, 1), (0, 2), (1, 3)):
        request.take_rows(first, rows[:, first:stop])
    assert came == [(0, rows[0, :2].tolist()), (2, rows[0, 2:].tolist())]

    request.read_rows(0, lambda first, new: None)
    for first, stop in ((0, 2), (0, 1), (0, 2), (1, 3)):
        request.take_scores(first, [(float(i), []) for i in range(first, stop)])
    assert [own for event in (request.events.get(), request.events.get()) for own, _ in event.logprobs] == [
        0.0,
        1.0,
        2.0,
    ]
    assert request.events.empty()


def test_events_come_up_to_the_last_one() -> None:
    cancelled = list[tuple[int, str]]()

    def request_left() -> Request:
        return request_of(sequence(), cancel=lambda *of: cancelled.append(of))

    request = request_left()
    events = [Event(1, (7,), None), Event(1, (), None), Event(1, (8,), "length"), Event(1, (9,), None)]
    for event in events:
        request.events.put(event)
    with request:
        assert list(request) == events[:3]
    assert not cancelled, "it has ended by itself"
    with pytest.raises(KeyError), request_left():
        raise KeyError
    assert cancelled == [(1, "cancelled")]


@pytest.mark.parametrize(("n_reused", "n_virtual", "told"), [(9, 0, 9), (9, 4, 5), (3, 4, 0)])
def test_rows_of_an_adapter_are_no_tokens_that_were_reused(n_reused: int, n_virtual: int, told: int) -> None:
    one = Sequence(1, (0,) * 12, SamplingParams(), 99, n_reused=n_reused, n_virtual=n_virtual)
    assert (request_of(one).n_reused, request_of(one).n_prompt) == (told, 12)


def test_a_reader_ends_its_text_by_a_token_that_is_delivered() -> None:
    heard = list[int]()
    request = request_of(sequence(), lambda token: heard.append(token) or token == 7)  # type: ignore[func-returns-value]
    assert not request.is_met_by((5, 6), 6) and request.is_met_by((7, 8), 9) and not request.is_met_by((), 7)
    assert heard == [5, 6, 7, 8], "all of them"
    assert not request_of(sequence()).is_met_by((7,), 7)


class Full:
    """A constraint that lets nothing follow behind token 7."""

    def __init__(self) -> None:
        self.n_asked = 0

    def allowed(self) -> int:
        self.n_asked += 1
        return self.n_asked

    def take(self, token: int) -> bool:
        return token == 7


def test_a_constraint_is_asked_once_for_each_token_and_ends_the_text() -> None:
    request = request_of(sequence(), constraint=Full())
    assert [request.allowed(), request.allowed()] == [1, 1]
    assert not request.is_met_by((7,), None) and not request.is_full, "no token was drawn"
    assert not request.is_met_by((), 6) and [request.allowed(), request.allowed()] == [2, 2]
    assert request.is_met_by((), 7) and request.is_full and request.allowed() == 3
    assert request_of(sequence()).allowed() is None


def test_log_probabilities_come_with_their_tokens() -> None:
    """Also in another order, and for a text that goes on."""
    one = sequence(3)
    one.ids += [7, 7]
    request = request_of(one)
    for number in (2, 4, 3, 3):
        request.keep_logprobs(number, (float(number), []))
    assert [request.logprobs_of_next(n) for n in (0, 1, 2)] == [(), ((2.0, []),), ((3.0, []), (4.0, []))]


def test_commands_are_taken_once_in_order_and_refused_behind_the_end() -> None:
    inbox, done = Inbox(), list[int]()
    assert inbox.put(lambda: done.append(1)) and inbox.put(lambda: done.append(2))
    for command in inbox.take():
        command()
    assert done == [1, 2] and inbox.take() == []
    assert inbox.put(lambda: done.append(3))
    inbox.close()
    assert not inbox.put(lambda: done.append(4))
    for command in inbox.take():
        command()
    assert done == [1, 2, 3]
