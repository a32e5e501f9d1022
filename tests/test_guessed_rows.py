"""Which rows of guesses a scheduler sends: how many, in which frames, beside which others, and what memory they take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mdi.engine.memory import CacheMemory
from mdi.engine.scheduler import MOST_GUESSES, Scheduler
from mdi.engine.sequence import Event, Plan, SamplingParams
from mdi.engine.sequence import Sequence as Text
from mdi.model.caches import PAGE
from test_guessed_frames import memory_of


class Always:
    """Guesses, always the same token."""

    def __init__(self, at_once: tuple[int, int]) -> None:
        self._at_once = at_once

    def limits(self, sequence: Text, n_places: int, n_texts: int, n_beside: int = 0) -> tuple[int, int]:
        return min(n_places, self._at_once[0]), self._at_once[1]

    def propose(self, sequence: Text, n: int) -> list[int]:
        return [1] * n

    def judge(self, sequence: Text, n_right: int, is_wrong: bool) -> None:
        """It is always the same."""


def scheduler_of(
    n_frames: int, n_places: int, at_once: tuple[int, int], texts: Sequence[Text], memory: CacheMemory | None = None
) -> Scheduler:
    """These have their first tokens; from now on the next ones are guessed."""
    scheduler = Scheduler(n_frames, memory=memory)
    scheduler.rewind(n_frames, memory, n_places)
    for one in texts:
        scheduler.submit(one)
        while (plan := scheduler.schedule()) is not None:
            answer(scheduler, plan, 2)
            if one.generated:
                break
    scheduler.guesser = Always(at_once)
    return scheduler


def text(seq_id: int, n_prompt: int = 2, n_tokens: int = 100, owner: str | None = None) -> Text:
    return Text(seq_id, (3,) * n_prompt, SamplingParams(n_tokens=n_tokens), 500, owner=owner)


def plans_of(scheduler: Scheduler) -> list[Plan]:
    """All frames that may leave now."""
    return list(iter(scheduler.schedule, None))


def answer(scheduler: Scheduler, plan: Plan, token: int) -> None:
    """The frame is back, and this token is drawn: from all rows, or from the first one if it is no guess."""
    _, are_live = scheduler.due(plan.number)
    live = [part for part, is_live in zip(plan.slices, are_live, strict=True) if is_live]
    scheduler.update(plan.number, {part.seq_id: [token] * (part.n_logits if token == 1 else 1) for part in live})


# Memory


def test_rows_of_guesses_take_memory_and_are_counted() -> None:
    memory = memory_of(40, None)
    scheduler = scheduler_of(1, 1, (1, MOST_GUESSES), [text(1, PAGE - 2)], memory)
    (plan,) = plans_of(scheduler)
    end = plan.slices[0].start + plan.slices[0].n_rows
    assert end > PAGE and scheduler.used == memory.needs(end)
    answer(scheduler, plan, 2)
    assert scheduler.used == memory.needs(end), "the nodes still have the pages"


def test_guesses_neither_put_out_a_text_nor_drop_kept_caches() -> None:
    """Seven pages: one is kept, two texts have three each, and guesses of either would take a fourth."""
    texts = [text(0, PAGE, 1, owner="me"), text(1, PAGE - 1, 400), text(2, PAGE - 1, 400)]
    scheduler = scheduler_of(1, 1, (1, MOST_GUESSES), texts, memory_of(7, None))
    guesser, scheduler.guesser = scheduler.guesser, None
    freed: list[int] = []
    while len(texts[2].ids) < 3 * PAGE - 1:
        scheduler.guesser = guesser if len(texts[2].ids) > 3 * PAGE - 8 else None
        (plan,) = plans_of(scheduler)
        freed += plan.freed
        answer(scheduler, plan, 2)
    assert scheduler.n_running == 2 and not scheduler.n_preempted and not freed and not scheduler.n_guessed


@pytest.mark.parametrize(("n_pages", "n_guessed"), [(6, 0), (7, 1), (8, 2)])
def test_texts_can_still_grow_by_two_pages_beside_guesses(n_pages: int, n_guessed: int) -> None:
    """Two texts of a page each need six pages for that; a guess takes the first row of another one."""
    texts = [text(1, PAGE - 2), text(2, PAGE - 1)]
    scheduler = scheduler_of(1, 1, (1, 4), texts, memory_of(n_pages, None))
    assert [len(one.ids) for one in texts] == [PAGE] * 2
    (plan,) = plans_of(scheduler)
    assert sum(part.n_guessed > 0 for part in plan.slices) == n_guessed


# Frames


def test_a_frame_has_no_more_rows_with_guesses_than_it_may_have() -> None:
    for n_texts in (1, 3, 8):
        scheduler = Scheduler(1, decode_rows=8)
        scheduler.guesser = Always((1, 100))
        for seq_id in range(n_texts):
            scheduler.submit(text(seq_id))
        answer(scheduler, plans_of(scheduler)[0], 2)
        (plan,) = plans_of(scheduler)
        assert len(plan.slices) == n_texts and sum(part.n_rows for part in plan.slices) <= 8


class Asked(Always):
    """Remembers what it was asked and told."""

    def __init__(self, at_once: tuple[int, int]) -> None:
        super().__init__(at_once)
        self.seen: list[tuple[int, int, int]] = []
        self.judged: list[tuple[int, bool]] = []

    def judge(self, sequence: Text, n_right: int, is_wrong: bool) -> None:
        self.judged.append((n_right, is_wrong))

    def limits(self, sequence: Text, n_places: int, n_texts: int, n_beside: int = 0) -> tuple[int, int]:
        self.seen.append((n_places, n_texts, n_beside))
        return super().limits(sequence, n_places, n_texts, n_beside)


@pytest.mark.parametrize(
    ("n_frames", "n_places", "n_texts", "expected"),
    [
        (1, 1, 1, [(1, 1, 0)]),
        (1, 1, 3, [(1, 3, 2), (1, 3, 5), (1, 3, 8)]),  # four rows of each before, and one of each behind
        (2, 7, 3, [(2, 3, 1), (2, 3, 4), (2, 3, 0)]),  # two in one frame, one in the other
    ],
)
def test_a_guesser_knows_the_places_and_the_rows_beside(
    n_frames: int, n_places: int, n_texts: int, expected: list[tuple[int, int, int]]
) -> None:
    scheduler = Scheduler(1)
    for seq_id in range(n_texts):
        scheduler.submit(text(seq_id))
    (plan,) = plans_of(scheduler)
    answer(scheduler, plan, 2)
    scheduler.n_frames, scheduler.n_places = n_frames, n_places
    scheduler.guesser = asked = Asked((1, 4))
    plans = [next_one for _ in range(n_frames) if (next_one := scheduler.schedule()) is not None]
    assert asked.seen == expected
    assert [part.n_rows for plan in plans for part in plan.slices] == [4] * n_texts
    assert scheduler.n_guessed == 3 * n_texts and not any(plan.is_guessed or plan.is_plain for plan in plans)


@pytest.mark.parametrize(
    ("n_tokens", "n_rows", "decode_rows", "expected"),
    [
        (100, 5, 4096, 4),  # with the row of the last known token
        (5, 100, 4096, 3),  # of the last one, no row is needed
        (2, 100, 4096, 0),
        (100, 100, 6, 5),
        (400, 300, 4096, MOST_GUESSES),
        (100, 1, 4096, 0),
    ],
)
def test_no_more_is_guessed_than_is_of_use(n_tokens: int, n_rows: int, decode_rows: int, expected: int) -> None:
    scheduler = Scheduler(1, decode_rows=decode_rows)
    scheduler.submit(text(0, n_tokens=n_tokens))
    (plan,) = plans_of(scheduler)
    answer(scheduler, plan, 2)
    scheduler.guesser = Always((1, n_rows))
    (plan,) = plans_of(scheduler)
    assert [(part.start, part.n_rows, part.n_logits, part.n_guessed) for part in plan.slices] == [
        (2, 1 + expected, 1 + expected, expected)
    ]
    assert plan.is_plain is not bool(expected)
    answer(scheduler, plan, 1)
    assert scheduler.n_confirmed == scheduler.n_guessed == expected


@pytest.mark.parametrize(("n_texts", "n_guessed"), [(2, 2), (3, 3), (4, 0)])
def test_guesses_travel_alone_while_texts_are_few_beside_the_places(n_texts: int, n_guessed: int) -> None:
    scheduler = Scheduler(1)
    for seq_id in range(n_texts):
        scheduler.submit(text(seq_id))
    (plan,) = plans_of(scheduler)
    answer(scheduler, plan, 2)
    scheduler.n_places = 7
    scheduler.guesser = Always((7, 1))
    plain, *alone = plans_of(scheduler)
    assert len(plain.slices) == n_texts and plain.is_plain and not plain.is_guessed
    assert [len(plan.slices) for plan in alone][:1] == ([n_guessed] if n_guessed else [])
    assert all(plan.is_guessed and not plan.is_plain for plan in alone)


def test_rows_behind_a_wrong_guess_are_void() -> None:
    scheduler = scheduler_of(1, 4, (4, 1), [text(1)])
    plain, *guessed = plans_of(scheduler)
    assert [scheduler.due(plain.number)[1], len(guessed)] == [[True], 3]
    answer(scheduler, plain, 2)
    again = scheduler.schedule()
    for plan in guessed:
        assert scheduler.due(plan.number)[1] == [False] and scheduler.update(plan.number, {}) == []
    assert again is not None and scheduler.due(again.number)[1] == [True]
    assert scheduler.update(again.number, {1: [2]}) == [Event(1, (2,), None)]


def test_no_further_frame_of_a_text_leaves_where_fewer_are_allowed_than_are_under_way() -> None:
    scheduler = scheduler_of(1, 4, (2, 1), [text(1)])
    assert [plan.is_guessed for plan in plans_of(scheduler)] == [False, True]
    scheduler.guesser = Always((1, 1))
    assert scheduler.schedule() is None
    scheduler.guesser = Always((3, 1))
    assert [plan.is_guessed for plan in plans_of(scheduler)] == [True]


@pytest.mark.parametrize(
    ("drawn", "judged"),
    [
        ([1, 1, 1, 7], (3, False)),
        ([1, 1, 7], (2, True)),
        ([7], (0, True)),
        ([1, 1], (2, False)),  # the other rows are void
        ([1, 0], (1, True)),  # the text's end was not guessed
        ([1, 1, 1, 0], (3, False)),
    ],
)
def test_a_guesser_learns_how_many_were_right(drawn: list[int], judged: tuple[int, bool]) -> None:
    scheduler = Scheduler(1)
    one = Text(0, (3, 3), SamplingParams(eos_ids=frozenset({0})), 500)
    scheduler.submit(one)
    answer(scheduler, plans_of(scheduler)[0], 2)
    scheduler.guesser = asked = Asked((1, 4))
    (plan,) = plans_of(scheduler)
    scheduler.update(plan.number, {0: drawn})
    assert asked.judged == [judged] and (scheduler.n_guessed, scheduler.n_confirmed) == (3, judged[0])
    assert [plan.slices[0].start for plan in plans_of(scheduler) if plan.slices] == (
        [] if one.finish_reason else [len(one.ids) - 1]
    )


def test_a_guess_that_ends_the_text_was_right() -> None:
    """Though those behind it are void."""
    scheduler = Scheduler(1)
    scheduler.submit(Text(0, (3, 3), SamplingParams(stop_sequences=((1,),)), 500))
    answer(scheduler, plans_of(scheduler)[0], 2)
    scheduler.guesser = asked = Asked((1, 4))
    (plan,) = plans_of(scheduler)
    assert scheduler.update(plan.number, {0: [1]}) == [Event(0, (), "stop")] and asked.judged == [(1, False)]


def test_a_token_that_needs_no_draw_counts_as_a_right_guess() -> None:
    scheduler = Scheduler(1)
    one = text(0, n_tokens=3)
    scheduler.submit(one)
    (plan,) = plans_of(scheduler)
    answer(scheduler, plan, 2)
    assert scheduler.accept_certain(0, 7) == [Event(0, (7,), None)] and scheduler.accept_certain(0, 8) == [
        Event(0, (8,), "length")
    ]
    assert (scheduler.n_guessed, scheduler.n_confirmed, one.n_guessed, one.n_confirmed) == (2, 2, 2, 2)
    assert not scheduler.n_running and next(iter(plans_of(scheduler))).freed == (0,)


def test_frames_of_guesses_alone_take_no_place_of_a_prompt() -> None:
    scheduler = scheduler_of(2, 6, (6, 1), [text(1)])
    first, *guessed = plans_of(scheduler)
    assert not first.is_guessed and len(guessed) == 5 and all(plan.is_guessed for plan in guessed)
    scheduler.submit(text(2))
    answer(scheduler, first, 2)
    plan = scheduler.schedule()
    assert plan is not None and [part.seq_id for part in plan.slices] == [1, 2]


def test_frames_of_guesses_alone_hold_up_no_other_text() -> None:
    scheduler = scheduler_of(2, 6, (3, 1), [text(1), text(2)])
    one, two, *guessed = plans_of(scheduler)
    assert [len(plan.slices) for plan in (one, two)] == [1, 1] and guessed
    answer(scheduler, one, 2)
    plan = scheduler.schedule()
    assert plan is not None and not plan.is_guessed and plan.slices[0].seq_id == one.slices[0].seq_id


def test_nothing_is_guessed_while_a_text_waits() -> None:
    memory = memory_of(4, None)  # for one text
    scheduler = scheduler_of(2, 6, (6, 1), [text(1, 70, 40)], memory)
    scheduler.submit(text(2, 70, 40))
    assert [plan.is_guessed for plan in plans_of(scheduler)] == [False] and scheduler.n_waiting == 1


def test_what_was_under_way_at_a_loss_are_known_tokens_alone() -> None:
    """Void frames and guesses bring no text under suspicion."""
    scheduler = scheduler_of(1, 4, (4, 2), [text(1)])
    plans = plans_of(scheduler)
    assert len(plans) == 4 and scheduler.in_flight == {1: (2, 3)}
    answer(scheduler, plans[0], 2)
    assert scheduler.in_flight == {}, "all that is under way is void"
    scheduler.schedule()
    assert scheduler.in_flight == {1: (3, 4)}
