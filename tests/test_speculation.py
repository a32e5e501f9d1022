"""How many guesses are under way: rings in simulated time, from the first token on, and what the sources propose."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guessing_model import learned_speed as speed
from mdi.engine.guesses import LONG, N_PLACES, SHORT, Index, Repetition
from mdi.engine.prices import Prices
from mdi.engine.sequence import Plan, PlannedSlice, SamplingParams
from mdi.engine.sequence import Sequence as Text
from mdi.engine.speculation import LOOK_EACH, N_KNOWN, N_OWN, N_ROUNDS, Speculation, most_frames, tokens_per_s


@pytest.mark.parametrize("stages_ms", [(10, 10, 10, 10), (10, 10, 10, 70), (70, 10, 10, 10), (10,), (5, 10, 10, 5, 10)])
@pytest.mark.parametrize("link_ms", [0, 10])
def test_guesses_that_are_always_wrong_cost_hardly_anything(stages_ms: Sequence[int], link_ms: int) -> None:
    stages_s = [ms / 1000 for ms in stages_ms]
    plain, _ = speed(stages_s, link_ms / 1000, None)
    wrong, scheduler = speed(stages_s, link_ms / 1000, 0.0)
    assert scheduler.n_guessed and not scheduler.n_confirmed
    assert wrong > 0.97 * plain


@pytest.mark.parametrize(
    ("n_nodes", "link_s", "p", "most_rows", "least"),
    [
        (4, 0.0, 0.8, 1, 2.2), (4, 0.0, 0.8, 4, 2.8), (8, 0.0, 0.9, 4, 5.2), (4, 0.0, 1.0, 1, 3.6), (8, 0.01, 0.9, 4, 5.0),
        (1, 0.0, 0.8, 4, 1.8), (4, 0.0, 0.5, 4, 1.4),
    ],
)  # fmt: skip
def test_right_guesses_make_a_text_faster(n_nodes: int, link_s: float, p: float, most_rows: int, least: float) -> None:
    stages_s = [0.01] * n_nodes
    plain, _ = speed(stages_s, link_s, None)
    found, scheduler = speed(stages_s, link_s, p, most_rows=most_rows)
    assert found > least * plain
    assert scheduler.n_confirmed > 0.4 * 2000 * p


def test_dear_rows_are_not_sent() -> None:
    """A row that costs as much as a frame brings nothing on one node."""
    plain, _ = speed([0.01], p=None)
    found, scheduler = speed([0.01], p=0.8, price=float)
    assert found > 0.97 * plain and scheduler.n_guessed < 30, "before prices are known"


@pytest.mark.parametrize(
    ("n_nodes", "n_texts", "most_rows", "row", "least"),
    [
        (1, 2, 4, 0.1, 1.6), (1, 4, 4, 0.1, 1.3), (1, 16, 4, 0.1, 0.97), (4, 8, 4, 0.1, 1.3), (2, 5, 4, 0.1, 1.1),
        (1, 2, 8, 0.01, 2.8), (1, 16, 8, 0.01, 1.5),
    ],
)  # fmt: skip
def test_texts_that_fill_all_nodes_have_guesses_in_the_frames_that_they_share(
    n_nodes: int, n_texts: int, most_rows: int, row: float, least: float
) -> None:
    """The last ones as over windows, where each frame is a pass over the disk. Sixteen texts whose rows cost a tenth of a frame
    each gain little.
    """

    def of(p: float | None) -> float:
        return speed([0.01] * n_nodes, 0.0, p, 500, most_rows, lambda n: 1 + row * (n - 1), n_texts=n_texts)[0]

    plain = of(None)
    assert of(0.0) > 0.98 * plain
    assert of(0.8) > least * plain


@pytest.mark.parametrize("n_texts", [1, 4])
def test_one_late_frame_does_not_end_guesses_for_good(n_texts: int) -> None:
    late = [True]

    def price(n: int) -> float:
        return 20.0 if n > n_texts and late and late.pop() else 1 + 0.05 * (n - 1)

    plain, _ = speed([0.01], p=None, price=price, n_texts=n_texts, n_tokens=3000)
    found, _ = speed([0.01], p=0.8, price=price, n_texts=n_texts, n_tokens=3000)
    assert not late and found > 1.3 * plain


@pytest.mark.parametrize("n_texts", [2, 8])
def test_dear_rows_are_not_sent_beside_those_of_other_texts(n_texts: int) -> None:
    plain, _ = speed([0.01], p=None, n_texts=n_texts, n_tokens=1000)
    found, _ = speed([0.01], p=0.8, price=lambda n: n if n > n_texts else 1.0, n_texts=n_texts, n_tokens=1000)
    assert found > 0.97 * plain


def test_the_first_texts_of_a_frame_have_guesses_until_rows_get_dear() -> None:
    """Up to seven rows cost nothing, and then each one as much as a frame."""
    speculation = Speculation(kinds=frozenset({"lookup"}))
    speculation.begin_ring(1)
    text = Text(1, (5,) * 30, SamplingParams(n_tokens=100), 1000)
    speculation.begin(text, None)
    for n_rows in range(1, 13):
        speculation.rounds.note(n_rows, max(1.0, n_rows - 6.0))
    speculation.limits(text, 1, 4, 3)
    for i in range(N_ROUNDS + 1):  # the first may have a prompt ahead
        parts = tuple(PlannedSlice(j, i, 1, 1, (1,)) for j in range(4))
        speculation.sent(Plan(i, parts, ()), float(i))
        speculation.returned(i, i + 1.0, 0.0, 4)
    assert [speculation.limits(text, 1, 4, n_beside) for n_beside in (3, 4, 5, 6)] == [(1, 4), (1, 3), (1, 2), (1, 1)]
    text.ids.append(5)
    assert len(text.ids) <= text.n_searched, "its guesses were not wrong: it is asked again soon"
    text.n_searched = 0
    assert speculation.limits(text, 1, 4, 3) == (1, 4)


@pytest.mark.parametrize(
    ("n_nodes", "n_texts", "least"),
    [(2, 2, 2.0), (4, 2, 2.2), (4, 3, 2.0), (4, 4, 2.0), (8, 2, 2.6), (8, 3, 2.4), (8, 4, 2.0), (8, 8, 2.0)],
)
def test_texts_that_share_a_ring_share_its_depth(n_nodes: int, n_texts: int, least: float) -> None:
    """Their guesses wait for each other in the slowest stage, as those of one text do."""
    stages_s = [0.01] * n_nodes
    plain, _ = speed(stages_s, p=None, n_texts=n_texts, n_tokens=1000)
    wrong, _ = speed(stages_s, p=0.0, n_texts=n_texts, n_tokens=1000)
    found, _ = speed(stages_s, p=0.8, n_texts=n_texts, n_tokens=1000)
    assert wrong > 0.97 * plain
    assert found > least * plain


@pytest.mark.parametrize("p", [0.3, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("n_rows", [1, 2])
def test_the_formula_is_that_of_a_simulated_ring(p: float, n_rows: int) -> None:
    def price(n: int) -> float:
        return 1 + 0.1 * (n - 1)

    found, _ = speed([0.01] * 4, 0.002, p, most_rows=n_rows, n_tokens=6000)
    stage_s = 0.01 * price(n_rows)
    round_s = 4 * (stage_s + 0.002)
    formula = tokens_per_s(p, n_rows, most_frames(round_s, stage_s), round_s, stage_s)
    assert found == pytest.approx(formula, rel=0.15)


def propose(source: Repetition, ids: list[int], n: int, guessed: Sequence[int] = ()) -> list[int]:
    source.learn(ids)
    return source.propose([*ids, *guessed], n)


def test_a_repetition_counts_after_several_tokens_only() -> None:
    ids = [*range(100, 120), 7, *range(100, 100 + LONG)]
    assert propose(Repetition(), ids, 4) == [108, 109, 110, 111]
    assert propose(Repetition(), ids, 4, [108, 109]) == [110, 111, 112, 113]
    assert propose(Repetition(), ids[: 21 + LONG - 1], 4) == []
    proven = Repetition()
    proven.n_least = SHORT
    assert propose(proven, ids[: 21 + SHORT], 4) == [103, 104, 105, 106]
    assert propose(Repetition(), ids, 4, [999]) == [], "another source has guessed something else"


def test_a_repetition_goes_on_behind_its_own_end() -> None:
    ids = [1, 2, 3] * 5
    assert propose(Repetition(), ids, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert propose(Repetition(), ids, 4, [1, 2, 3, 1]) == [2, 3, 1, 2]


def test_of_the_last_places_that_one_counts_which_is_equal_the_furthest_back() -> None:
    run = list(range(100, 100 + LONG))
    ids = [50, 51, 52, *run, 900, 60, 52, *run, 901, 52, *run, 902]
    assert propose(Repetition(), [*ids, 51, 52, *run], 1) == [900]
    assert propose(Repetition(), [*ids, 60, 52, *run], 1) == [901]
    assert propose(Repetition(), [*ids, 52, *run], 1) == [902], "of equal ones the last"
    assert propose(Repetition(), [*ids, 70, *run], 1) == [902]
    other = Index([7, 50, 51, 52, *run, 903])
    assert propose(Repetition([other]), [*ids, 7, 50, 51, 52, *run], 1) == [903]
    assert propose(Repetition([other]), [*ids, 8, 50, 51, 52, *run], 1) == [900], "the text itself comes first"
    shorter = Index([52, *run, 904])
    assert propose(Repetition([shorter]), [*ids, 7, 50, 51, 52, *run], 1) == [900]


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 2), min_size=4, max_size=60), n=st.integers(1, 4), n_first=st.integers(0, 60))
def test_an_index_that_has_grown_finds_what_all_places_say(ids: list[int], n: int, n_first: int) -> None:
    index, text = Index(ids[:n_first]), ids[-n:]
    index.find(text, n)
    index.extend(ids[n_first:])
    ends = [end for end in range(n, len(ids)) if ids[end - n : end] == text][-N_PLACES:]

    def n_equal(end: int) -> int:
        return next((i for i in range(end) if ids[end - 1 - i] != ids[-1 - i]), end)

    assert index.find(ids, n) == max(((n_equal(end), end) for end in ends), default=None)


def test_a_repetition_is_followed_from_token_to_token_and_left_where_the_text_differs() -> None:
    source, ids = Repetition(), [*range(50), *range(10, 20)]
    assert propose(source, ids, 2) == [20, 21]
    assert propose(source, [*ids, 20, 21], 2) == [22, 23]
    assert propose(source, [*ids, 20, 21, 5], 2) == []
    assert propose(source, [*ids, 20, 21, 5, 30], 2) == []


def test_a_prediction_is_followed_from_its_beginning_and_found_again() -> None:
    source = Repetition([Index(range(200, 260))], begun=3)
    source.n_least = SHORT
    assert propose(source, [1, 2, 3], 3) == [200, 201, 202]
    assert propose(source, [1, 2, 3, 200], 3) == [201, 202, 203], "too few to be looked for"
    assert propose(source, [1, 2, 3, 200, 201], 3) == [202, 203, 204]
    assert propose(source, [1, 2, 3, 200, 201, 9, 240, 241], 2) == []
    assert propose(source, [1, 2, 3, 200, 201, 9, 240, 241, 242], 2) == [243, 244]


def test_texts_of_the_same_owner_are_looked_into_and_no_others() -> None:
    speculation = Speculation()
    texts = [
        Text(i, tuple(ids), SamplingParams(), 1000, owner=owner)
        for i, (ids, owner) in enumerate(
            [
                (range(60), "me"),
                (range(10, 10 + LONG), "me"),
                (range(10, 10 + LONG), "you"),
                (range(10, 10 + LONG), None),
            ]
        )
    ]
    for text in texts:
        speculation.begin(text, None)
        if not text.seq_id:
            speculation.forget(text)
    assert [speculation.propose(text, 2) for text in texts[1:]] == [[18, 19], [], []]


def test_a_source_that_is_wrong_pauses_longer_each_time() -> None:
    """On one node further rows cost something, so that bad guesses do not pay."""
    speculation = Speculation(kinds=frozenset({"lookup"}))
    for n_rows in (1, 2, 3, 4):
        speculation.rounds.note(n_rows, 1 + 0.3 * n_rows)
    text = Text(1, tuple([5] * 20), SamplingParams(n_tokens=10**6), 10**6)
    speculation.begin(text, None)

    def pauses(n_tokens: int, is_right: bool) -> list[int]:
        """Between tokens that are guessed, in the next ones of the text."""
        asked = []
        for _ in range(n_tokens):
            if found := speculation.propose(text, 1):
                text.guess(found)
                asked.append(len(text.ids))
                text.guessed.clear()
                speculation.judge(text, int(is_right), not is_right)
            text.ids.append(5)
        return [b - a for a, b in zip(asked, asked[1:], strict=False) if b - a > 1]

    assert pauses(4000, False) == [65, 129, 257, 513, 1025, 1025]
    pauses(1024, True)
    assert pauses(400, True) == [], "it is right now"


def test_repetitions_are_looked_for_every_few_tokens_until_guesses_were_right() -> None:
    speculation = Speculation(kinds=frozenset({"lookup"}))
    speculation.begin_ring(4)
    text = Text(1, tuple(range(LONG)), SamplingParams(n_tokens=10**6), 10**6)
    speculation.begin(text, None)
    speculation.limits(text, 1, 1)
    for i in range(N_ROUNDS):
        speculation.sent(Plan(i, (PlannedSlice(1, i, 1, 1, (1,)),), ()), float(i))
        speculation.returned(i, i + 0.5, 0.0, 1)

    def waits(first: int) -> list[int]:
        """Tokens from one look to the next, where nothing repeats itself."""
        found = []
        for token in range(first, first + 4 * LOOK_EACH):
            if len(text.ids) > text.n_searched:
                assert speculation.limits(text, 1, 1) == (1, 1)
                found.append(len(text.ids))
            text.ids.append(token)
        return [b - a for a, b in zip(found, found[1:], strict=False)]

    assert waits(1000) == [LOOK_EACH] * 3
    text.ids += range(LONG)  # what the text began with
    for _ in range(20):
        (guess,) = speculation.propose(text, 1)
        text.guess([guess])
        text.accept_drawn(guess)
        speculation.judge(text, 1, False)
    text.ids.append(5000)
    assert set(waits(2000)) == {1}


class Knowing:
    """Knows the next token, and always the same one."""

    def learn(self, ids: list[int]) -> bool:
        return True

    def propose(self, ids: list[int], n: int) -> list[int]:
        return [5] * n

    def close(self) -> None:
        """Nothing is kept."""


class Alone:
    """One text over one node, in simulated time: a frame takes 10 ms, and its guesses what a test says."""

    def __init__(self, kinds: tuple[str, ...] = ("draft",)) -> None:
        self.speculation = Speculation()
        self.speculation.begin_ring(1)
        self.text = Text(1, (5,) * 3, SamplingParams(n_tokens=10**6), 10**6)
        self.speculation.begin(self.text, None)
        guessed = self.speculation.texts[1]
        guessed.sources = {kind: Knowing() for kind in kinds}
        guessed.rates |= {kind: copy.deepcopy(guessed.rates["lookup"]) for kind in kinds}
        self.number, self.now = 0, 0.0

    def frame(self, guessing_s: float, hidden_s: float = 0.0, is_free: str = "") -> int:
        """A frame goes round. Returns how many guesses it had; with any, it leaves so much later, which nobody says. Those of
        the source `is_free` take no time.
        """
        text, found = self.text, list[int]()
        if len(text.ids) > text.n_searched and (n_rows := self.speculation.limits(text, 1, 1)[1]) > 1:
            found = self.speculation.propose(text, n_rows - 1)
        n = 1 + len(found)
        guessing_s = 0.0 if self.speculation.texts[1].last == is_free else guessing_s
        plan = Plan(self.number, (PlannedSlice(1, 0, n, n, (5,) * n, n_guessed=n - 1),), (), is_plain=not found)
        text.guess(found)
        self.now += guessing_s + hidden_s if found else 0
        if found or self.speculation.is_watching(self.number):
            self.speculation.sent(plan, self.now, guessing_s)
        self.now += 0.01
        for _ in range(n):
            text.accept_drawn(5)
        self.speculation.judge(text, len(found), False)
        self.speculation.returned(self.number, self.now, 0.0, n)
        self.number += 1
        return len(found)


def test_a_source_that_takes_longer_than_it_saves_is_left_alone() -> None:
    for guessing_s, pays in ((0.0001, True), (0.1, False)):
        alone = Alone()
        found = [alone.frame(guessing_s) for _ in range(200)]
        assert (sum(found) > 300) is pays and (sum(found) < 5) is not pays, guessing_s


def test_guesses_that_make_frames_slower_stop_soon_whatever_was_promised() -> None:
    """Every guess is right, and yet a text is slower with them."""
    alone = Alone()
    found = [alone.frame(0.0, hidden_s=0.05) for _ in range(300)]
    assert 0 < sum(map(bool, found)) <= 6
    plain_s = 0.01 * len(alone.text.generated)
    assert alone.now < 1.04 * plain_s


def test_slow_guesses_are_tried_again_after_longer_and_longer_pauses() -> None:
    alone = Alone()
    tried = [i for i in range(8000) if alone.frame(0.0, hidden_s=0.05)]
    assert [b - a for a, b in zip(tried, tried[1:], strict=False) if b - a > 10] == [257, 1025, 2049, 2049, 2049]


def test_rows_that_were_dear_are_tried_again_later() -> None:
    """One node: what its rows cost may be another thing after a while."""
    n_frames = [0]

    def price(n: int) -> float:
        n_frames[0] += 1
        return float(n) if n_frames[0] < 500 else 1 + 0.05 * (n - 1)

    plain, _ = speed([0.01], p=None, n_tokens=6000)
    found, _ = speed([0.01], p=0.8, price=price, n_tokens=6000)
    assert found > 1.3 * plain


def test_another_source_goes_on_while_one_is_left_alone() -> None:
    alone = Alone(("draft", "lookup"))
    found = [alone.frame(0.1, is_free="lookup") for _ in range(60)]
    assert alone.speculation.texts[1].last == "lookup" and sum(found) > 120


def test_a_text_has_one_frame_in_flight_where_nodes_do_not_wait() -> None:
    for is_deep in (True, False):
        speculation = Speculation(kinds=frozenset({"lookup"}))
        speculation.begin_ring(4, is_deep)
        text = Text(1, (5,) * 30, SamplingParams(n_tokens=100), 1000)
        speculation.begin(text, None)
        speculation.limits(text, 8, 1)
        for i in range(N_ROUNDS):
            speculation.sent(Plan(i, (PlannedSlice(1, i, 1, 1, (1,)),), ()), float(i))
            speculation.returned(i, i + 0.5, 0.0, 1)
        n_frames, n_rows = speculation.limits(text, 8, 1)
        assert n_rows > 1 and (n_frames == 4 if is_deep else n_frames == 1)


def measured(n_texts: int = 1, n_nodes: int = 4, round_s: float = 0.5) -> tuple[Speculation, Text]:
    """A ring after its first rounds, and a text that repeats itself."""
    speculation = Speculation(kinds=frozenset({"lookup"}))
    speculation.begin_ring(n_nodes)
    text = Text(1, (5,) * 30, SamplingParams(n_tokens=10**6), 10**6)
    speculation.begin(text, None)
    speculation.limits(text, 8 if n_texts == 1 else 1, n_texts)
    for i in range(N_ROUNDS + 1):
        rounds(speculation, i, round_s, 0.0, n_texts)
    return speculation, text


def rounds(
    speculation: Speculation, number: int, round_s: float, busy_s: float, n_texts: int = 1, n_guesses: int = 0
) -> None:
    n = 1 + n_guesses
    parts = tuple(PlannedSlice(j, number, n, n, (1,) * n, n_guessed=n_guesses) for j in range(n_texts))
    speculation.sent(Plan(number, parts, ()), float(number))
    speculation.returned(number, number + round_s, busy_s, n * n_texts)


def test_no_more_frames_are_in_flight_than_this_node_has_time_for() -> None:
    """Head, drawing and guesses take it a quarter of a second a frame, blocks an eighth. It had computed before, too."""
    speculation, text = measured()
    assert speculation.limits(text, 8, 1)[0] == 4
    for number in range(N_ROUNDS + 1, N_OWN + 1):
        rounds(speculation, number, 0.5, 100 + number / 4)
    assert speculation.limits(text, 8, 1)[0] == 4, "only the time of frames of this ring counts"
    for number in range(N_OWN + 1, 2 * N_OWN + N_KNOWN):
        rounds(speculation, number, 0.5, 100 + number / 4)
    assert speculation.limits(text, 8, 1)[0] == 2


def test_rounds_without_guesses_come_the_less_often_the_more_texts_there_are() -> None:
    speculation, text = measured(n_texts=4, n_nodes=1, round_s=0.9)
    without = []
    for number in range(N_ROUNDS + 1, 1500):
        n_guesses = speculation.limits(text, 1, 4)[1] - 1
        if n_guesses:
            speculation.judge(text, len(speculation.propose(text, 1)), False)
        else:
            without.append(number)
        rounds(speculation, number, 0.9, 0.0, 4, min(1, n_guesses))
    assert without == [515, 1028]


def test_guesses_end_where_a_constraint_does_not_allow_them() -> None:
    class Pair:
        """Allows two more tokens."""

        def n_valid(self, tokens: list[int]) -> int:
            return min(2, len(tokens))

    for guessed, left in (([], [5, 5]), ([5], [5]), ([5, 5], []), ([5, 5, 5], [])):
        speculation = Speculation(kinds=frozenset({"lookup"}))
        text = Text(1, (5,) * 30, SamplingParams(n_tokens=100), 1000)
        speculation.begin(text, Pair())
        text.guess(guessed)
        assert speculation.propose(text, 4) == left


def test_guesses_may_come_before_a_ring_is_measured() -> None:
    """Over a new ring no time is known, while the rates of the sources are."""
    speculation = Speculation(kinds=frozenset({"lookup"}))
    text = Text(1, tuple([5] * 20), SamplingParams(n_tokens=100), 1000)
    speculation.begin(text, None)
    for _ in range(20):
        text.guess(speculation.propose(text, 1))
        text.accept_drawn(5)
        speculation.judge(text, 1, False)
    speculation.begin_ring(3)
    assert speculation.propose(text, 1) == [5]


def test_the_price_of_unknown_rows_follows_from_fewer() -> None:
    prices = Prices()
    assert prices.of(3, 7.0) == 7.0
    prices.note(1, 10.0)
    assert prices.of(2) == pytest.approx(11) and prices.of(1) == 10
    prices.note(4, 16.0)
    prices.note(9, 1000.0)
    assert prices.of(9) == pytest.approx(2 * 26), "most likely it was late"
    prices.forget_more(4)
    assert prices.of(4) == 16 and prices.of(3) == pytest.approx(14) and prices.of(6) == pytest.approx(20)


@given(st.lists(st.integers(2, 200), min_size=1, max_size=60, unique=True), st.floats(0.0, 0.5))
def test_prices_of_many_rows_are_those_of_about_as_many(noted: list[int], row_s: float) -> None:
    """Each group of them is known by its mean, so that a price that grows evenly is found exactly."""
    prices = Prices()
    for n_rows in (1, *noted):
        prices.note(n_rows, 3 + row_s * n_rows)
    for n_rows in range(1, 250):
        assert prices.of(n_rows) == pytest.approx(3 + row_s * n_rows)


def test_a_frame_that_waited_can_make_a_price_smaller_only() -> None:
    prices = Prices()
    prices.note_most(100, 9.0)
    assert prices.of(100, 7.0) == 7.0, "nothing is known"
    prices.note(100, 5.0)
    prices.note_most(100, 9.0)
    assert prices.of(100) == 5.0
    for _ in range(50):
        prices.note_most(101, 1.0)
    assert 1.0 <= prices.of(100) < 1.1
