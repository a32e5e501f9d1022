"""Texts of one prompt: the first one computes it, the others go on from its caches, with the ids that they have alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from families import model_of, prompt
from loopback import Text, ring_of
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams, Sequence
from mdi.model.caches import PAGE, SLACK, PageClass
from test_prefixes import memory_of, ring_memory

SAMPLED = SamplingParams(n_tokens=12, temperature=0.9, top_k=40)


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-3-1b-it", "Mistral-7B-v0.1", "deepseek-v3-shape"])
@pytest.mark.parametrize("n_nodes", [1, 3])
def test_each_has_the_ids_that_it_has_alone(family: str, n_nodes: int) -> None:
    gpt, ids = model_of(family), prompt(90, 1)
    params = [replace(SAMPLED, seed=seed) for seed in range(5)]
    with ring_of(gpt, n_nodes) as ring:
        alone = [ring.generate([ids], one)[0].ids for one in params]
    for memory in (None, ring_memory(family, n_nodes)):
        with ring_of(gpt, n_nodes, memory=memory) as ring:
            texts = [Text(ring.engine.submit(ids, one, owner="a")) for one in params]
            ring.run()
            assert [text.ids for text in texts] == alone and ring.engine.n_reused == 4 * 89
    assert len(set(map(tuple, alone))) > 1, "the seeds make no difference: the test shows nothing"


def run(scheduler: Scheduler, ends: dict[int, int] | None = None) -> dict[int, int]:
    """To the end. Returns prompt rows of each sequence; a copy must be of what is there: `ends` of the caches so far."""
    ends = ends or {}
    n_rows: dict[int, int] = {}
    while scheduler.has_work:
        plans = list(iter(scheduler.schedule, None))
        assert plans, "nobody goes on"
        for plan in plans:
            made = {new: ends[source] for source, new in plan.copies}
            for seq_id in plan.freed:
                ends.pop(seq_id, None)
            ends.update(made)
            for part in plan.slices:
                assert part.start <= ends.get(part.seq_id, 0), "a hole"
                ends[part.seq_id] = part.start + part.n_rows
                if part.is_prompt:
                    n_rows[part.seq_id] = n_rows.get(part.seq_id, 0) + part.n_rows
        for plan in plans:
            due, are_live = scheduler.due(plan.number)
            tokens = {part.seq_id: [1] for part, is_live in zip(due.slices, are_live, strict=True) if is_live}
            scheduler.update(plan.number, tokens)
    return n_rows


def text(seq_id: int, n_prompt: int = 100, n_tokens: int = 5, owner: str | None = None) -> Sequence:
    return Sequence(seq_id, tuple(range(n_prompt)), SamplingParams(n_tokens), 1000, owner=owner)


@pytest.mark.parametrize("n_frames", [1, 3])
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_the_prompt_is_computed_once_also_if_the_first_text_ends_at_once(n_frames: int, n_tokens: int) -> None:
    scheduler = Scheduler(n_frames)
    for seq_id in range(8):
        scheduler.submit(text(seq_id, n_tokens=n_tokens))
    assert run(scheduler) == {0: 100, **dict.fromkeys(range(1, 8), 1)}


def test_all_but_the_last_row_is_enough_to_begin_behind() -> None:
    scheduler = Scheduler(2, chunk_rows=99)
    for seq_id in range(2):
        scheduler.submit(text(seq_id))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and [(part.seq_id, part.start, part.n_rows) for part in first.slices] == [(0, 0, 99)]
    assert second is not None and [(part.seq_id, part.start, part.n_rows) for part in second.slices] == [
        (0, 99, 1),
        (1, 99, 1),
    ]
    assert second.copies == ((0, 1),)


def test_others_neither_wait_nor_share() -> None:
    """Another prompt, another owner, and a prompt that fills no page."""
    scheduler = Scheduler(2, chunk_rows=300)
    scheduler.submit(text(0))
    scheduler.submit(text(1, 101))
    scheduler.submit(text(2, owner="a"))
    assert run(scheduler) == {0: 100, 1: 101, 2: 100}
    for seq_id in (0, 1):
        scheduler.submit(text(seq_id, PAGE))
    assert run(scheduler) == {0: PAGE, 1: PAGE}


def test_who_waits_for_a_text_that_is_cancelled_computes_the_prompt() -> None:
    scheduler = Scheduler(1, chunk_rows=40)
    for seq_id in range(3):
        scheduler.submit(text(seq_id))
    plan = scheduler.schedule()
    assert plan is not None and [part.seq_id for part in plan.slices] == [0]
    scheduler.cancel(0)
    scheduler.update(plan.number, {})
    assert run(scheduler) == {1: 100, 2: 1}


@pytest.mark.parametrize("window", [None, 8])
def test_one_that_comes_later_shares_what_a_window_has_kept(window: int | None) -> None:
    """The first text has gone on; its window has dropped the end of the prompt once it is SLACK ahead."""
    for n_ahead, is_shared in ((SLACK // 2, True), (SLACK + PAGE, window is None)):
        nodes = (NodeCaches("starter", 10_000, (PageClass(window, 1),)),)
        scheduler = Scheduler(memory=CacheMemory(nodes), chunk_rows=100)
        scheduler.submit(text(0, n_tokens=200))
        for _ in range(n_ahead):
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(plan.number, {0: [1]})
        scheduler.submit(text(1))
        assert run(scheduler, {0: 99 + n_ahead})[1] == (1 if is_shared else 100)


@given(
    st.lists(st.tuples(st.sampled_from([20, 70, 100]), st.integers(1, 40)), min_size=2, max_size=8),
    st.integers(1, 3), st.integers(7, 20),
)  # fmt: skip
def test_texts_end_however_little_memory_there_is(texts: list[tuple[int, int]], n_frames: int, n_pages: int) -> None:
    scheduler = Scheduler(n_frames, memory=memory_of(n_pages))
    for seq_id, (n_prompt, n_tokens) in enumerate(texts):
        scheduler.submit(text(seq_id, n_prompt, n_tokens, "a"))
    run(scheduler)
    assert scheduler.n_running == scheduler.n_waiting == 0
