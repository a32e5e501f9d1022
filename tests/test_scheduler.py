"""What goes into which frame: examples, and random arrivals, lengths, ends and cancels in which nothing may get lost."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.scheduler import AHEAD_POSITIONS, Scheduler, next_share
from mdi.engine.sequence import Event, Plan, SamplingParams, Sequence
from mdi.errors import EngineError
from mdi.model.caches import PageClass

EOS = 0


class Positions(CacheMemory):
    """A ring whose one node has room for so many positions, one by one."""

    def __init__(self, limit: int) -> None:
        super().__init__((NodeCaches("starter", limit, (PageClass(None, 1),)),))

    def needs(self, length: int) -> tuple[int, ...]:
        return (length,)


def sequence(seq_id: int, n_prompt: int = 3, n_tokens: int = 5, max_length: int = 1000) -> Sequence:
    params = SamplingParams(n_tokens=n_tokens, eos_ids=frozenset({EOS}))
    return Sequence(seq_id, tuple(range(100, 100 + n_prompt)), params, max_length)


def tokens_for(plan: Plan, token: int = 5) -> dict[int, list[int]]:
    return {part.seq_id: [token] for part in plan.slices if part.n_logits}


def rows_of(plan: Plan) -> list[tuple[int, int, int, int]]:
    return [(part.seq_id, part.start, part.n_rows, part.n_logits) for part in plan.slices]


def next_plan(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def test_one_sequence_from_prompt_to_end() -> None:
    scheduler = Scheduler(2)
    scheduler.submit(sequence(7, n_prompt=3, n_tokens=2))
    plan = next_plan(scheduler)
    assert rows_of(plan) == [(7, 0, 3, 1)] and plan.slices[0].ids == (100, 101, 102)
    assert scheduler.schedule() is None
    assert scheduler.update(plan.number, {7: [5]}) == [Event(7, (5,), None)]
    plan = next_plan(scheduler)
    assert rows_of(plan) == [(7, 3, 1, 1)] and plan.slices[0].ids == (5,)
    assert scheduler.update(plan.number, {7: [6]}) == [Event(7, (6,), "length")]
    plan = next_plan(scheduler)
    assert (plan.slices, plan.freed) == ((), (7,))
    assert scheduler.schedule() is None and scheduler.has_work
    assert scheduler.update(plan.number, {}) == [] and not scheduler.has_work


def test_a_long_prompt_goes_in_chunks_and_the_last_one_asks_for_logits() -> None:
    scheduler = Scheduler(4, chunk_rows=4)
    scheduler.submit(sequence(1, n_prompt=10))
    assert [rows_of(next_plan(scheduler)) for _ in range(3)] == [[(1, 0, 4, 0)], [(1, 4, 4, 0)], [(1, 8, 2, 1)]]
    assert scheduler.schedule() is None


def test_a_chunk_is_shared_by_prompts_and_joined_by_decoding_rows() -> None:
    scheduler = Scheduler(1, chunk_rows=4)
    scheduler.submit(sequence(1, n_prompt=1))
    plan = next_plan(scheduler)
    scheduler.submit(sequence(2, n_prompt=3))
    scheduler.submit(sequence(3, n_prompt=3))
    assert scheduler.schedule() is None  # one frame is in flight
    scheduler.update(plan.number, {1: [5]})
    assert rows_of(next_plan(scheduler)) == [(1, 1, 1, 1), (2, 0, 3, 1), (3, 0, 1, 0)]


def test_eos_comes_without_its_token() -> None:
    scheduler = Scheduler(1)
    scheduler.submit(sequence(1))
    assert scheduler.update(next_plan(scheduler).number, {1: [EOS]}) == [Event(1, (), "eos")]


def test_tokens_that_may_become_a_stop_sequence_are_held_back() -> None:
    scheduler = Scheduler(1)
    stopped, cancelled = (
        Sequence(i, (100,), SamplingParams(n_tokens=9, stop_sequences=((5, 6, 7),)), 50) for i in (1, 2)
    )
    scheduler.submit(stopped)
    scheduler.submit(cancelled)
    events = [scheduler.update(next_plan(scheduler).number, {1: [token], 2: [token]}) for token in (5, 5, 6)]
    held = [Event(1, (), None), Event(2, (), None)]  # the engine's: a constraint has to know of them
    assert events == [held, [Event(1, (5,), None), Event(2, (5,), None)], held]
    assert [event.drawn for part in events for event in part] == [5, 5, 5, 5, 6, 6]
    assert scheduler.cancel(2) == Event(2, (5, 6), "cancelled")
    assert scheduler.update(next_plan(scheduler).number, {1: [7]}) == [Event(1, (), "stop")]
    assert stopped.generated == [5]


def test_freed_ids_ride_on_the_next_frame() -> None:
    scheduler = Scheduler(2)
    scheduler.submit(sequence(1, n_tokens=1))
    first = next_plan(scheduler)
    scheduler.submit(sequence(2))
    second = next_plan(scheduler)
    scheduler.update(first.number, {1: [5]})
    assert scheduler.schedule() is None  # no frame for the sake of freeing while others are in flight
    scheduler.update(second.number, {2: [5]})
    assert next_plan(scheduler).freed == (1,)


def test_first_come_first_served_when_memory_is_short() -> None:
    scheduler = Scheduler(2, memory=Positions(10))
    large, small = sequence(1, n_prompt=6, n_tokens=5), sequence(2, n_prompt=1, n_tokens=1)
    blocked = sequence(3, n_prompt=8, n_tokens=3)
    for one in (large, blocked, small):
        scheduler.submit(one)
    assert [row[0] for row in rows_of(next_plan(scheduler))] == [1]
    assert scheduler.schedule() is None  # 2 would fit, but 3 was there first
    assert scheduler.n_running == 1
    assert scheduler.refusal(sequence(4, n_prompt=10, n_tokens=1)) is None
    assert "up to 11 tokens needs 11 bytes of cache on starter, which has 10 bytes" in str(
        scheduler.refusal(sequence(5, 10, 2))
    )


@pytest.mark.parametrize("number", [1, 7])
def test_a_frame_that_is_not_due_is_refused(number: int) -> None:
    scheduler = Scheduler(2)
    scheduler.submit(sequence(1))
    next_plan(scheduler)
    with pytest.raises(EngineError) as refused:
        scheduler.update(number, {1: [5]})
    assert refused.value.code == "wire"


def test_a_frame_out_of_nothing_is_refused() -> None:
    with pytest.raises(EngineError) as refused:
        Scheduler(1).update(0, {})
    assert refused.value.code == "wire"


@pytest.mark.parametrize("tokens", [{}, {2: [5]}, {1: [5], 2: [5]}])
def test_a_frame_with_other_rows_is_refused(tokens: dict[int, list[int]]) -> None:
    scheduler = Scheduler(1)
    scheduler.submit(sequence(1))
    with pytest.raises(EngineError):
        scheduler.update(next_plan(scheduler).number, tokens)


def test_cancelling_waiting_prefilling_flying_ready_and_ended_sequences() -> None:
    scheduler = Scheduler(1, chunk_rows=2, memory=Positions(20))
    for seq_id in (1, 2):
        scheduler.submit(sequence(seq_id, n_prompt=6))
    assert scheduler.cancel(2) == Event(2, (), "cancelled") and scheduler.cancel(2) is None
    plan = next_plan(scheduler)
    assert scheduler.cancel(1, "enough") == Event(1, (), "enough")
    assert scheduler.update(plan.number, {}) == []
    # 2 never had a cache: it was cancelled before it entered
    assert next_plan(scheduler).freed == (1,)
    assert scheduler.cancel(1) is None and scheduler.cancel(99) is None


@pytest.mark.parametrize(
    ("n_sequences", "n_frames", "expected"),
    [
        (1, 3, [1]),
        (3, 3, [1, 1, 1]),
        (4, 3, [2, 2]),  # and not 2 + 1 + 1: a round takes as long, with one more reading of the weights
        (5, 4, [1, 2, 2]),
        (6, 3, [2, 2, 2]),
        (7, 3, [2, 2, 3]),
        (8, 2, [4, 4]),
        (10, 3, [3, 3, 4]),
        (16, 5, [4, 4, 4, 4]),
        (17, 5, [3, 3, 3, 4, 4]),
    ],
)
def test_decoding_sequences_spread_evenly_over_the_frames(n_sequences: int, n_frames: int, expected: list[int]) -> None:
    scheduler = Scheduler(n_frames)
    for seq_id in range(n_sequences):
        scheduler.submit(sequence(seq_id, n_prompt=2, n_tokens=1000, max_length=10_000))
    flying: deque[Plan] = deque()
    sizes = []
    for _ in range(20 * n_frames):
        while (plan := scheduler.schedule()) is not None:
            flying.append(plan)
            sizes.append(len(plan.slices))
        scheduler.update(flying[0].number, tokens_for(flying.popleft()))
    n_used = len(expected)
    rounds = [sorted(sizes[at : at + n_used]) for at in range(10 * n_frames, len(sizes) - n_used)]
    assert len(rounds) > n_used and all(found == expected for found in rounds)


@pytest.mark.parametrize(
    ("n_decoding", "flying", "n_frames", "expected"),
    [
        (0, [], 3, 0), (1, [], 3, 1), (1, [1], 3, 0), (5, [], 3, 2), (5, [2], 3, 2), (5, [2, 2], 3, 1), (5, [1], 3, 2),
        (5, [1, 2], 3, 2), (5, [2, 2, 1], 3, 0), (4, [], 3, 2), (4, [2], 3, 2), (4, [3], 3, 2), (4, [1, 1], 3, 0),
        (7, [3], 3, 2), (7, [4], 3, 2), (7, [2, 2], 3, 3),
    ],
)  # fmt: skip
def test_the_share_of_the_next_frame(n_decoding: int, flying: list[int], n_frames: int, expected: int) -> None:
    assert next_share(n_decoding, flying, n_frames) == expected


def test_a_cohort_stays_together_and_takes_nobody_else_along() -> None:
    scheduler = Scheduler(2)
    beams = tuple(sequence(seq_id, n_prompt=2) for seq_id in range(3))
    for one in beams:
        one.cohort = beams
    for one in beams:
        scheduler.submit(one)
    plans = [next_plan(scheduler)]
    scheduler.submit(sequence(3))
    plans.append(next_plan(scheduler))
    assert scheduler.update(plans[0].number, tokens_for(plans[0])) == [], "its tokens are chosen together"
    scheduler.regroup(beams, [(0, 5), (1, 6), (0, 7)])
    assert [one.generated for one in beams] == [[5], [6], [7]]
    scheduler.update(plans[1].number, tokens_for(plans[1]))
    plans = [next_plan(scheduler), next_plan(scheduler)]
    assert [[part.seq_id for part in plan.slices] for plan in plans] == [[0, 1, 2], [3]]
    assert [plan.copies for plan in plans] == [((0, 2),), ()]


def test_one_sequence_per_frame_where_that_is_asked_for() -> None:
    scheduler = Scheduler(2, decode_rows=1)
    for seq_id in range(5):
        scheduler.submit(sequence(seq_id, n_prompt=1, n_tokens=1000, max_length=10_000))
    flying: deque[Plan] = deque([next_plan(scheduler)])  # all prompts in one frame
    order = []
    for _ in range(40):
        scheduler.update(flying[0].number, tokens_for(flying.popleft()))
        while (plan := scheduler.schedule()) is not None:
            flying.append(plan)
            assert len(plan.slices) == 1
            order.append(plan.slices[0].seq_id)
    assert order[:10] == [0, 1, 2, 3, 4] * 2 and set(Counter(order[:40]).values()) == {8}


def test_who_came_last_is_put_out_and_let_in_again_as_a_prompt_of_all_its_tokens() -> None:
    n_tokens = AHEAD_POSITIONS + 30
    limit = 2 * (1 + AHEAD_POSITIONS) + 10  # both can enter, and then grow until somebody has to go
    scheduler = Scheduler(1, chunk_rows=500, memory=Positions(limit))
    first, last = sequence(1, 1, n_tokens), sequence(2, 1, n_tokens)
    scheduler.submit(first)
    scheduler.submit(last)
    sent: list[list[tuple[int, int, int, int]]] = []
    freed: list[tuple[int, ...]] = []
    while scheduler.has_work:
        plan = next_plan(scheduler)
        sent.append(rows_of(plan))
        freed.append(plan.freed)
        scheduler.update(plan.number, tokens_for(plan))
    n_both = 1 + next(i for i, rows in enumerate(sent[1:]) if len(rows) == 1)
    assert sum(len(one) for one in freed) == 3 and freed[n_both] == (2,)
    assert [row[0] for row in sent[n_both]] == [1], "the first goes on alone"
    again = next(rows for rows in sent[n_both:] if rows and rows[0][0] == 2)
    assert again == [(2, 0, n_both + 1, 1)], "the prompt and all that was generated, in one piece"
    assert len(first.generated) == len(last.generated) == n_tokens


def test_what_was_in_flight_for_a_life_that_is_over_is_dropped() -> None:
    scheduler = Scheduler(2, memory=Positions(1000))
    one = sequence(1, n_prompt=3)
    scheduler.submit(one)
    next_plan(scheduler)
    assert scheduler.rewind(2, scheduler.memory) == []
    plan = next_plan(scheduler)
    assert (plan.number, rows_of(plan)) == (1, [(1, 0, 3, 1)])
    with pytest.raises(EngineError) as refused:
        scheduler.update(0, {1: [9]})
    assert refused.value.code == "wire"
    assert scheduler.update(plan.number, {1: [5]}) == [Event(1, (5,), None)]


def test_a_row_in_flight_of_a_text_that_was_put_out_and_let_in_again_counts_nothing() -> None:
    """Its token comes again with the new life: counted twice, the text would have it twice."""
    limit = 2 * (1 + AHEAD_POSITIONS) + 10
    scheduler = Scheduler(3, chunk_rows=500, memory=Positions(limit))
    first, last = sequence(1, 1, 500), sequence(2, 1, 500)
    scheduler.submit(first)
    prompt_of_first = next_plan(scheduler)
    scheduler.submit(last)
    flying = deque([prompt_of_first, next_plan(scheduler)])
    while not scheduler.n_preempted:  # each has a frame of its own
        scheduler.update(flying[0].number, tokens_for(flying.popleft()))
        plan = scheduler.schedule()
        flying.extend([] if plan is None else [plan])
    early = next(plan for plan in flying if any(part.seq_id == 2 for part in plan.slices))
    n_before = len(last.generated)
    scheduler.cancel(1)  # now there is memory
    assert flying[0] is early
    again = next_plan(scheduler)
    assert rows_of(again) == [(2, 0, len(last.ids), 1)]
    for plan in flying:
        assert scheduler.update(plan.number, tokens_for(plan, 11)) == []
    assert len(last.generated) == n_before
    assert scheduler.schedule() is None, "it waits for the frame of its present life"
    assert scheduler.update(again.number, tokens_for(again, 11)) == [Event(2, (11,), None)]
    assert last.generated[n_before:] == [11]


def test_who_was_put_out_is_let_in_again_before_those_who_wait() -> None:
    limit = 2 * (1 + AHEAD_POSITIONS) + 10
    scheduler = Scheduler(1, chunk_rows=500, memory=Positions(limit))
    for seq_id in (1, 2, 3):
        scheduler.submit(sequence(seq_id, 1, 500))
    while not scheduler.n_preempted:
        plan = next_plan(scheduler)
        scheduler.update(plan.number, tokens_for(plan))
    scheduler.cancel(1)
    assert [row[0] for row in rows_of(next_plan(scheduler))] == [2]


def test_suspected_texts_run_one_by_one_until_each_has_its_next_token() -> None:
    scheduler = Scheduler(1)
    for seq_id in range(5):
        scheduler.submit(sequence(seq_id, n_prompt=2))
    next_plan(scheduler)
    scheduler.isolate([1, 2, 3])
    scheduler.rewind(1, None)
    found = []
    for _ in range(4):
        plan = next_plan(scheduler)
        found.append(({row[0] for row in rows_of(plan)}, scheduler.is_isolating))
        scheduler.update(plan.number, tokens_for(plan))
    assert found == [({0, 1}, True), ({0, 1, 2}, True), ({0, 1, 2, 3, 4}, True), ({0, 1, 2, 3, 4}, False)]


def test_a_suspected_text_that_was_cancelled_holds_up_nobody() -> None:
    scheduler = Scheduler(1)
    for seq_id in (1, 2):
        scheduler.submit(sequence(seq_id, n_prompt=2))
    next_plan(scheduler)
    scheduler.isolate([1, 2])
    scheduler.rewind(1, None)
    plan = next_plan(scheduler)
    scheduler.cancel(1)
    scheduler.update(plan.number, tokens_for(plan))
    plan = next_plan(scheduler)
    assert [row[0] for row in rows_of(plan)] == [2]
    scheduler.update(plan.number, tokens_for(plan))
    assert not scheduler.is_isolating


@pytest.mark.parametrize(
    ("n_prompt", "n_kept", "replayed"), [(3, 3, True), (3, 2, False), (3, 0, False), (1, 1, True), (1, 0, False)]
)
def test_a_text_is_replayed_only_if_all_its_rows_were_kept(n_prompt: int, n_kept: int, replayed: bool) -> None:
    scheduler = Scheduler(1)
    scheduler.submit(sequence(1, n_prompt))
    scheduler.update(next_plan(scheduler).number, {1: [5]})
    assert scheduler.resume(1, None, {1: n_kept}) == []
    plan = next_plan(scheduler)
    assert plan.is_replay == replayed
    assert rows_of(plan) == ([(1, 0, n_prompt, 0)] if replayed else [(1, 0, n_prompt + 1, 1)])


def test_a_row_that_was_lost_in_flight_is_sent_again_after_the_replay() -> None:
    scheduler = Scheduler(1)
    scheduler.submit(sequence(1, n_prompt=3))
    scheduler.update(next_plan(scheduler).number, {1: [5]})
    assert rows_of(next_plan(scheduler)) == [(1, 3, 1, 1)]
    scheduler.resume(1, None, {1: 4})
    replay = next_plan(scheduler)
    assert replay.is_replay and rows_of(replay) == [(1, 0, 3, 0)]
    scheduler.update(replay.number, {})
    assert rows_of(next_plan(scheduler)) == [(1, 3, 1, 1)]


@pytest.mark.parametrize("chunk_rows", [2, 64], ids=["a part of it waits", "all of it is in flight"])
def test_a_text_whose_replay_was_not_over_begins_again(chunk_rows: int) -> None:
    """The node that got the replay may not have all of it, and need not be the one that is lost now."""
    scheduler = Scheduler(1, chunk_rows)
    scheduler.submit(sequence(1, n_prompt=3))
    while not scheduler.update((plan := next_plan(scheduler)).number, tokens_for(plan)):
        pass
    scheduler.resume(1, None, {1: 3})
    assert next_plan(scheduler).is_replay
    scheduler.resume(1, None, {1: 3})
    plan = next_plan(scheduler)
    assert not plan.is_replay and rows_of(plan)[0][:2] == (1, 0)


def test_a_text_whose_copied_cache_was_lost_in_flight_begins_again() -> None:
    """The rows of its beginning went out for another text: nobody can send them again for this one."""
    scheduler = Scheduler(1, chunk_rows=500, memory=Positions(1000))
    first, second = (Sequence(i, tuple(range(100, 190)), SamplingParams(n_tokens=i), 1000, owner="me") for i in (1, 9))
    scheduler.submit(first)
    assert scheduler.update(next_plan(scheduler).number, {1: [5]}) == [Event(1, (5,), "length")]
    scheduler.submit(second)
    plan = next_plan(scheduler)
    assert plan.copies == ((1, 9),) and plan.slices[0].start > 0
    scheduler.resume(1, scheduler.memory, {9: 90})
    assert rows_of(next_plan(scheduler)) == [(9, 0, 90, 1)]


def test_a_ring_that_holds_less_ends_only_what_it_could_never_hold() -> None:
    scheduler = Scheduler(1, memory=Positions(1000))
    for seq_id, n_prompt in enumerate((300, 50, 40)):
        scheduler.submit(sequence(seq_id, n_prompt, 5))
    scheduler.update(next_plan(scheduler).number, {})
    assert scheduler.rewind(1, Positions(60)) == [Event(0, (), "memory")]
    assert [row[:2] for row in rows_of(next_plan(scheduler))] == [(1, 0)]


@pytest.mark.parametrize("has_fresh", [True, False])
def test_a_prompt_goes_on_in_chunks_over_another_ring(has_fresh: bool) -> None:
    scheduler = Scheduler(1, chunk_rows=4)
    scheduler.submit(sequence(1, n_prompt=10))
    scheduler.update(next_plan(scheduler).number, {})
    scheduler.resume(1, None, {1: 4}, has_fresh)
    for expected in [(1, 0, 4, 0)] * has_fresh + [(1, 4, 4, 0), (1, 8, 2, 1), (1, 10, 1, 1)]:
        plan = next_plan(scheduler)
        assert rows_of(plan) == [expected] and plan.is_replay is (expected[1] == 0)
        assert plan.slices[0].is_prompt is (expected[1] in (4, 8))
        scheduler.update(plan.number, tokens_for(plan))


def test_rows_of_prompts_in_a_frame_are_known_while_it_is_under_way() -> None:
    scheduler = Scheduler(2, chunk_rows=5)
    scheduler.submit(sequence(1, n_prompt=3))
    scheduler.update(next_plan(scheduler).number, {1: [5]})
    scheduler.submit(sequence(2, n_prompt=9))
    plans = [next_plan(scheduler), next_plan(scheduler)]
    assert [rows_of(plan) for plan in plans] == [[(1, 3, 1, 1), (2, 0, 5, 0)], [(2, 5, 4, 1)]]
    assert [scheduler.prompt_rows(number) for number in range(4)] == [0, 5, 4, 0]
    assert scheduler.in_flight == {1: (3, 4), 2: (0, 9)} and scheduler.n_in_flight == 2
    scheduler.resume(2, None, {1: 4})
    replay = next_plan(scheduler)
    assert replay.is_replay and scheduler.prompt_rows(replay.number) == 3, "they are as many rows as those of a prompt"
    assert scheduler.in_flight == {}, "a node that gets them passes nothing on"


def test_guesses_beyond_the_accepted_tokens_are_taken_back() -> None:
    one = sequence(1, n_prompt=3)
    one.n_sent = 7  # four rows beyond the prompt went out for tokens that were guessed
    one.guess([5, 9, 8, 7])
    assert [one.accept_drawn(token) for token in (5, 6)] == [(5,), (6,)] and one.n_sent == 4 and not one.guessed


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    limit=st.integers(250, 600),
    n_frames=st.integers(1, 4),
    n_early=st.integers(1, 6),
    n_tokens=st.integers(60, 230),
)
def test_nobody_starves_though_more_keep_coming(
    seed: int, limit: int, n_frames: int, n_early: int, n_tokens: int
) -> None:
    """Each early one ends, though a new one comes for each that has ended, and caches are short all the time."""
    model = Model(random.Random(seed), n_frames, 64, Positions(limit), 4096)
    model.tokens = (1, 2)  # nobody ends by chance
    for _ in range(n_early):
        model.submit(20, n_tokens)
    early = list(model.sequences.values())
    for _ in range(n_early * (n_tokens + 20) * 4):
        n_live = sum(one.finish_reason is None for one in model.sequences.values())
        for _ in range(8 - n_live):
            model.submit(20, n_tokens)
        model.depart()
        model.land()
        if all(one.finish_reason for one in early):
            break
    assert all(one.finish_reason == "length" for one in early)
    model.finish()


class Model:
    """Random traffic through a scheduler, and what every node would see, checked frame by frame."""

    def __init__(
        self, rng: random.Random, n_frames: int, chunk_rows: int, memory: CacheMemory | None, decode_rows: int
    ) -> None:
        self.rng = rng
        self.scheduler = Scheduler(n_frames, chunk_rows, memory, decode_rows)
        self.flying: deque[Plan] = deque()
        self.sequences: dict[int, Sequence] = {}
        self.events: dict[int, list[Event]] = {}
        self.caches: dict[int, int] = {}  # positions that a node holds, by sequence
        self.n_preempted = 0
        self.tokens: tuple[int, ...] = (EOS, *range(1, 12))
        self.cancelled: set[int] = set()

    def arrive(self) -> None:
        rng = self.rng
        n_prompt = rng.choice([rng.randint(1, 20), rng.randint(1, MAX_LENGTH)])  # the engine refuses longer ones
        one = sequence(len(self.sequences), n_prompt, rng.randint(1, 8), MAX_LENGTH)
        self.submit_one(one)

    def submit(self, n_prompt: int, n_tokens: int) -> None:
        self.submit_one(sequence(len(self.sequences), n_prompt, n_tokens, MAX_LENGTH))

    def submit_one(self, one: Sequence) -> None:
        if self.scheduler.refusal(one) is None:
            self.sequences[one.seq_id] = one
            self.events[one.seq_id] = []
            self.scheduler.submit(one)

    def cancel(self) -> None:
        if self.sequences:
            seq_id = self.rng.choice(list(self.sequences))
            ended = self.sequences[seq_id].finish_reason is not None
            event = self.scheduler.cancel(seq_id)
            assert (event is None) == ended
            if event is not None:
                self.events[seq_id].append(event)
                self.cancelled.add(seq_id)

    def depart(self) -> None:
        while (plan := self.scheduler.schedule()) is not None:
            assert plan.slices or plan.freed
            self.flying.append(plan)
            assert len(self.flying) <= self.scheduler.n_frames
            self.look_at(plan)

    def look_at(self, plan: Plan) -> None:
        """What a node does with a frame."""
        for seq_id in plan.freed:
            self.n_preempted += not self.sequences[seq_id].finish_reason
            self.caches.pop(seq_id, None)
        assert len({part.seq_id for part in plan.slices}) == len(plan.slices)
        n_rows = sum(p.n_rows for p in plan.slices)
        assert n_rows <= self.scheduler.chunk_rows + min(self.scheduler.decode_rows, self.scheduler.n_running)
        for part in plan.slices:
            one = self.sequences[part.seq_id]
            # exactly once and in order: each slice begins where the cache ends
            assert part.start == self.caches.get(part.seq_id, 0) and part.n_rows == len(part.ids) > 0
            assert list(part.ids) == one.ids[part.start : part.start + part.n_rows]
            end = part.start + part.n_rows
            assert part.n_logits == (1 if end == len(one.ids) else 0)
            assert end <= one.n_positions
            self.caches[part.seq_id] = end
        self.weigh()
        live = [seq_id for seq_id, one in self.sequences.items() if one.finish_reason is None]
        held = [seq_id for seq_id in live if seq_id in self.caches]
        assert held == live[: len(held)], "who came later has caches, and who came before has none"

    def weigh(self) -> None:
        """What a node holds is never more than it said it could."""
        memory = self.scheduler.memory
        if memory is not None:
            needs = [memory.needs(end) for end in self.caches.values()]
            for node, total in zip(memory.nodes, map(sum, zip(*needs, strict=True)), strict=False):
                assert total <= node.limit_bytes

    def rewind(self) -> None:
        """The ring broke; the nodes of another one know nothing."""
        assert not self.scheduler.rewind(self.rng.randint(1, 6), self.scheduler.memory)
        self.flying.clear()
        self.caches.clear()

    def land(self) -> None:
        plan = self.flying.popleft()
        tokens = {p.seq_id: [self.rng.choice(self.tokens)] for p in plan.slices if p.n_logits}
        for event in self.scheduler.update(plan.number, tokens):
            assert event.seq_id in tokens and event.seq_id not in self.cancelled
            assert event.tokens == (() if event.finish_reason == "eos" else tuple(tokens[event.seq_id]))
            self.events[event.seq_id].append(event)

    def finish(self) -> None:
        n_steps = 0
        while self.scheduler.has_work:
            self.depart()
            assert self.flying, "work is left, but nothing moves"
            self.land()
            n_steps += 1
            assert n_steps < 10_000
        assert self.scheduler.schedule() is None and not self.flying


MAX_LENGTH = 390


@st.composite
def memories(draw: st.DrawFn) -> CacheMemory | None:
    """Rings of one to three nodes, some with sliding windows, with room for a sequence or for a few dozen."""
    if draw(st.booleans()):
        return None
    nodes = []
    for i in range(draw(st.integers(1, 3))):
        windows = draw(st.lists(st.none() | st.integers(4, 200), max_size=2))
        classes = tuple(PageClass(window, draw(st.integers(20, 300))) for window in windows)
        nodes.append(NodeCaches(f"node{i}", draw(st.integers(100, 20_000)), classes, 24))
    return CacheMemory(tuple(nodes))


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    n_frames=st.integers(1, 6),
    chunk_rows=st.integers(1, 24),
    memory=memories(),
    decode_rows=st.integers(1, 20),
    actions=st.lists(st.sampled_from(["arrive", "arrive", "cancel", "depart", "land", "land", "rewind"]), max_size=80),
)
def test_random_traffic(
    seed: int,
    n_frames: int,
    chunk_rows: int,
    memory: CacheMemory | None,
    decode_rows: int,
    actions: list[str],
) -> None:
    model = Model(random.Random(seed), n_frames, chunk_rows, memory, decode_rows)
    for action in actions:
        if action != "land" or model.flying:
            getattr(model, action)()
    model.finish()
    assert not model.caches and not any(model.scheduler.used)
    for seq_id, one in model.sequences.items():
        reasons = [event.finish_reason for event in model.events[seq_id]]
        assert one.finish_reason and reasons[-1] == one.finish_reason  # everybody ends, and is told so
        assert not any(reasons[:-1])  # once
        assert [token for e in model.events[seq_id] for token in e.tokens] == one.generated
    assert len(model.events) == len(model.sequences)


@settings(deadline=None, max_examples=100)
@given(n_frames=st.integers(1, 6), n_sequences=st.integers(1, 30), chunk_rows=st.integers(1, 64), data=st.data())
def test_frames_balance_after_arrivals_and_cancels(
    n_frames: int, n_sequences: int, chunk_rows: int, data: st.DataObject
) -> None:
    scheduler = Scheduler(n_frames, chunk_rows)
    flying: deque[Plan] = deque()

    def turn() -> list[int]:
        while (plan := scheduler.schedule()) is not None:
            flying.append(plan)
        scheduler.update(flying[0].number, tokens_for(flying.popleft()))
        return [len(plan.slices) for plan in flying]

    for seq_id in range(n_sequences):
        scheduler.submit(sequence(seq_id, data.draw(st.integers(1, 30)), 100_000, 1_000_000))
        if data.draw(st.booleans()):
            turn()
    for seq_id in data.draw(st.sets(st.integers(0, n_sequences - 1), max_size=n_sequences - 1)):
        scheduler.cancel(seq_id)
    for _ in range(40 * n_sequences + 4 * n_frames):
        turn()
    n_left = scheduler.n_running
    fullest = -(-n_left // n_frames)
    for _ in range(2 * n_frames):
        turn()
        while (plan := scheduler.schedule()) is not None:
            flying.append(plan)
        sizes = [len(plan.slices) for plan in flying if plan.slices]
        # no frame nearly empty beside a full one, and none too many
        assert sum(sizes) == n_left and max(sizes) == fullest and len(sizes) == -(-n_left // fullest)
        assert max(sizes) - min(sizes) <= 1
