"""How many prompt rows go beside decoding ones: by what both take."""

from __future__ import annotations

import random

import pytest

from mdi.engine.prefix_tasks import FIND, PrefixTask
from mdi.engine.scheduler import FIRST_ROWS, LEAST_ROWS, MANY_ROWS, PromptPace, Scheduler, rows_beside
from mdi.engine.sequence import Plan, PlannedSlice, SamplingParams, Sequence


def plan_of(number: int, n_prompt: int, n_decoding: int) -> Plan:
    slices = [PlannedSlice(i, 9, 1, 1, (1,)) for i in range(n_decoding)]
    if n_prompt:
        slices.append(PlannedSlice(99, 0, n_prompt, 0, (1,) * n_prompt, is_prompt=True))
    return Plan(number, tuple(slices), ())


@pytest.mark.parametrize(("decode_s", "row_s"), [(0.1, 0.005), (0.02, 0.00004), (0.001, 0.01)])
def test_a_frame_with_prompt_rows_takes_less_than_twice_as_long(decode_s: float, row_s: float) -> None:
    pace, now = PromptPace(), 0.0
    assert rows_beside(pace.doubling_rows, 1, 8) == FIRST_ROWS
    for number in range(200):
        n_prompt = rows_beside(pace.doubling_rows, 1, 8) if number % 40 > 20 else 0
        pace.sent(plan_of(number, n_prompt, 8), now)
        now += decode_s + n_prompt * row_s
        pace.returned(number, now)
    n_prompt = rows_beside(pace.doubling_rows, 1, 8)
    assert n_prompt == LEAST_ROWS or decode_s / 3 < n_prompt * row_s < decode_s, "and not slower than need be"


def test_a_frame_is_compared_with_those_that_have_as_many_texts() -> None:
    """At the end of texts that began together few decode, and their frames are short; the next ones begin behind them."""
    row_s, pace, now = 0.002, PromptPace(), 0.0
    for number in range(200):
        n_decoding = 16 if number < 50 else 1 if number < 100 else 8
        n_prompt = rows_beside(pace.doubling_rows, 1, n_decoding) if number >= 100 else 0
        pace.sent(plan_of(number, n_prompt, n_decoding), now)
        now += 0.007 + 0.003 * n_decoding + n_prompt * row_s
        pace.returned(number, now)
    assert 0.031 / 3 < n_prompt * row_s < 0.031


@pytest.mark.parametrize("tile", [8, 16, 32])
@pytest.mark.parametrize("scatter", [0.0, 0.4])
def test_rows_that_cost_nothing_until_a_tile_is_full_are_not_taken_for_cheap(tile: int, scatter: float) -> None:
    """Neither in a frame whose rows are as many as may be, nor at the 95th percentile where times scatter."""
    pace, chance, now = PromptPace(), random.Random(1), 0.0
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(600):
        n_prompt = min(64, rows_beside(pace.doubling_rows, 1, 8)) if number >= 100 else 0
        pace.sent(plan_of(number, n_prompt, 4), now)
        time_s = (0.03 + 0.06 * -(-(4 + n_prompt) // tile)) * chance.lognormvariate(0, scatter)
        now += time_s
        pace.returned(number, now)
        took[n_prompt > 0].append(time_s)
    before, beside = (sorted(times)[int(0.95 * len(times))] for times in took.values())
    assert beside <= 2 * before


def test_the_number_of_rows_follows_each_frame_up_slowly_and_down_fast() -> None:
    """Frames without prompts take a second."""
    pace, now, found = PromptPace(), 0.0, list[float]()
    times = [(0, 1.0), (10, 1.5), (10, 3.0), (10, 1.1), (10, 1.0), (10, 9.0), (10, 9.0), (10, 9.0), (10, 9.0), (5, 2.0)]
    for number, (n_prompt, time_s) in enumerate(times):
        pace.sent(plan_of(number, n_prompt, 4), now)
        now += time_s
        assert pace.returned(number, now) == pytest.approx(time_s)
        found.append(pace.doubling_rows)
    expected = [
        26.667,  # 16 rows beside, which make a frame 60 % slower
        20.0,  # 10 rows took half as long as a frame
        14.0,  # 10 rows as long as two: a third less at once
        15.4,  # 10 rows a tenth, which would be 100: a tenth more at once
        16.94,
        11.858,
        8.3006,
        5.81042,
        4.067294,
        4.474,  # 5 rows as long as a frame
    ]
    assert found == pytest.approx(expected, abs=1e-3) and pace.row_s is None
    for number in (10, 11):
        pace.sent(plan_of(number, 9, 4), now)
    pace.returned(10, now + 9)
    assert pace.doubling_rows == LEAST_ROWS
    assert pace.returned(11, now + 10) == 1.0, "behind the one before"
    assert pace.returned(11, now + 20) == 0.0, "nobody knows"


def test_many_that_wait_get_more_of_the_time_than_few_that_decode() -> None:
    assert rows_beside(20.0, 1, 8) == rows_beside(20.0, 4, 8) == 12
    assert (rows_beside(20.0, 16, 8), rows_beside(20.0, 200, 2)) == (40, 2000)


def test_frames_of_a_lost_ring_are_forgotten() -> None:
    pace = PromptPace()
    for number in range(3):
        pace.sent(plan_of(number, 0, 1), 0.0)
    pace.returned(2, 1.0)
    assert not pace.under_way


def test_rows_behind_a_task_do_not_count_its_time_as_theirs() -> None:
    pace = PromptPace()
    pace.sent(Plan(0, (), (), task=PrefixTask(FIND)), 0.0)
    pace.sent(plan_of(1, MANY_ROWS, 0), 1.0)
    assert pace.returned(0, 5.0) == 5.0
    pace.returned(1, 6.0)
    assert pace.row_s == 1.0 / MANY_ROWS


def test_prompt_rows_are_few_only_beside_others() -> None:
    scheduler = Scheduler(chunk_rows=64)
    scheduler.doubling_rows = 10.0

    def rows_of_next(tokens: dict[int, list[int]]) -> int:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan.number, {s.seq_id: [1] for s in plan.slices if s.n_logits})
        return max(s.n_rows for s in plan.slices)

    scheduler.submit(Sequence(0, (1,) * 70, SamplingParams(n_tokens=50), 1000))
    assert (rows_of_next({}), rows_of_next({})) == (64, 6)
    scheduler.submit(Sequence(1, (2,) * 70, SamplingParams(n_tokens=50), 1000))
    assert [rows_of_next({}) for _ in range(7)] == [10] * 7, "one waits, one decodes"
