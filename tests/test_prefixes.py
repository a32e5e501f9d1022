"""Caches of texts that have ended: who begins alike goes on from them, with the same ids, and they make way for others."""

from __future__ import annotations

import pytest

from families import greedy, model_of, prompt
from loopback import InProcessRing, Text, ring_of
from mdi.engine.memory import CacheMemory, Kept, NodeCaches, Prefixes
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import SamplingParams, Sequence
from mdi.model.caches import PAGE, SLACK, PageClass

GREEDY = SamplingParams(n_tokens=12, temperature=0)
SNAPSHOT = 1 << 47  # the first number behind those of texts: those of texts with an adapter begin at the next bit


def memory_of(n_pages: int, window: int | None = None, n_nodes: int = 1) -> CacheMemory:
    """Nodes on which a page takes one byte."""
    return CacheMemory(tuple(NodeCaches(f"node{i}", n_pages, (PageClass(window, 1),)) for i in range(n_nodes)))


def ring_memory(family: str, n_nodes: int) -> CacheMemory:
    with ring_of(model_of(family), n_nodes) as ring:
        nodes = [NodeCaches(f"node{i}", 1 << 40, tuple(s.caches.classes)) for i, s in enumerate(ring.stages)]
    return CacheMemory(tuple(nodes))


def ask(ring: InProcessRing, ids: list[int], owner: str | None) -> Text:
    text = Text(ring.engine.submit(ids, GREEDY, owner=owner))
    ring.run()
    return text


@pytest.mark.parametrize("family", ["Llama-3.1-8B", "Gemma-3-1b-it", "Mistral-7B-v0.1", "deepseek-v3-shape"])
@pytest.mark.parametrize("n_nodes", [1, 3])
def test_the_next_turn_has_the_ids_that_it_would_have_had(family: str, n_nodes: int) -> None:
    gpt, first = model_of(family), prompt(70, 1)
    answer = greedy(gpt, first, 12)
    second = [*first, *answer, *prompt(20, 2)]
    branch = [*first[:40], *prompt(30, 3)]
    with ring_of(gpt, n_nodes, memory=ring_memory(family, n_nodes)) as ring:
        assert ask(ring, first, "a").ids == answer
        assert ask(ring, second, "b").ids == greedy(gpt, second, 12)
        assert ring.engine.n_reused == 0, "others' caches are theirs"
        assert ask(ring, second, "a").ids == greedy(gpt, second, 12)
        assert ring.engine.n_reused >= 80, "the answer is in the cache too"
        assert ask(ring, branch, "a").ids == greedy(gpt, branch, 12)
        before = ring.engine.n_reused
        assert ask(ring, second, None).ids == greedy(gpt, second, 12)
        assert ring.engine.n_reused == before, "who has no owner neither takes nor leaves any"


def test_several_go_on_from_the_same_text_at_once() -> None:
    gpt, begin = model_of("Llama-3.1-8B"), prompt(64, 4)
    prompts = [[*begin, *prompt(5 + i, 5 + i)] for i in range(4)]
    with ring_of(gpt, 3, memory=ring_memory("Llama-3.1-8B", 3)) as ring:
        ask(ring, begin, "a")
        texts = [Text(ring.engine.submit(ids, GREEDY, owner="a")) for ids in prompts]
        ring.run()
        assert [text.ids for text in texts] == [greedy(gpt, ids, 12) for ids in prompts]
        assert ring.engine.n_reused == 4 * 64


def test_one_that_is_cancelled_leaves_what_it_had() -> None:
    gpt, ids = model_of("Llama-3.1-8B"), prompt(100, 6)
    with ring_of(gpt, 2, memory=ring_memory("Llama-3.1-8B", 2)) as ring:
        stopped = Text(ring.engine.submit(ids, GREEDY, ends=lambda token: True, owner="a"))
        ring.run()
        assert stopped.reason == "stop"
        assert ask(ring, ids, "a").ids == greedy(gpt, ids, 12) and ring.engine.n_reused == 99


def finished(scheduler: Scheduler, seq_id: int, ids: list[int], owner: str | None = "a") -> None:
    """Run a text of one new token to its end, with nobody beside it."""
    scheduler.submit(Sequence(seq_id, tuple(ids), SamplingParams(n_tokens=1, temperature=0), 10_000, owner=owner))
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan.number, {s.seq_id: [1] for s in plan.slices if s.n_logits})


def test_what_is_kept_makes_way_the_longest_unused_first() -> None:
    scheduler = Scheduler(memory=memory_of(10), kept_share=1)
    texts = [[i] * (3 * PAGE) for i in range(3)]
    finished(scheduler, 0, texts[0])
    finished(scheduler, 1, texts[1])
    finished(scheduler, 2, texts[0])  # used again: now 1 is the oldest
    assert scheduler.n_reused == 3 * PAGE - 1
    finished(scheduler, 3, texts[2], owner=None)  # needs 3 pages and AHEAD_POSITIONS
    before = scheduler.n_reused
    finished(scheduler, 4, texts[0])
    assert scheduler.n_reused > before, "0 or its copy is still there"


def test_a_frame_copies_only_what_was_there_before_it() -> None:
    scheduler = Scheduler(memory=memory_of(13), kept_share=1)
    held: set[int] = set()
    for seq_id in range(60):
        ids = [seq_id % 3] * (2 * PAGE + seq_id % 29)
        scheduler.submit(Sequence(seq_id, tuple(ids), SamplingParams(n_tokens=3, temperature=0), 10_000, owner="a"))
        for _ in range(1 + seq_id % 4):
            if (plan := scheduler.schedule()) is None:
                break
            assert all(source in held for source, _ in plan.copies)
            held -= set(plan.freed)
            held |= {s.seq_id for s in plan.slices}
            scheduler.update(plan.number, {s.seq_id: [1] for s in plan.slices if s.n_logits})
    assert scheduler.n_reused > 0


def test_the_longest_beginning_wins_and_beginnings_of_others_are_needless() -> None:
    kept = Prefixes(memory_of(100), 1)
    ids = list(range(5 * PAGE))
    assert kept.add(Kept(1, "a", tuple(ids[: 2 * PAGE]), (2,))) == []
    assert kept.add(Kept(2, "b", tuple(ids), (5,))) == []
    assert kept.add(Kept(3, "a", tuple(ids[: 4 * PAGE]), (4,))) == [1]
    assert kept.find("a", ids) == (3, 4 * PAGE) and kept.find("a", ids[: 4 * PAGE]) == (3, 4 * PAGE - 1)
    assert kept.find("a", [*ids[: PAGE + 5], 9999]) == (3, PAGE + 5)
    assert kept.find("a", ids[: PAGE - 1]) is None and kept.find("c", ids) is None
    assert kept.total == [9] and len(kept) == 2
    kept.drop(3)
    assert kept.find("a", ids) is None and kept.total == [5]


def test_what_another_one_begins_with_is_not_kept_a_second_time() -> None:
    kept, ids = Prefixes(memory_of(100), 1), tuple(range(5 * PAGE))
    assert kept.add(Kept(1, "a", ids, (5,))) == []
    assert kept.add(Kept(2, "a", (7,) * PAGE, (1,))) == []
    assert kept.add(Kept(3, "a", ids[: 2 * PAGE + 3], (3,))) == [3] and kept.add(Kept(4, "a", ids, (5,))) == [4]
    assert kept.add(Kept(5, "b", ids[: 2 * PAGE], (2,))) == [], "of another owner"
    assert kept.add(Kept(6, "a", (*ids[: 2 * PAGE], 9999), (3,))) == [], "it goes on otherwise"
    assert len(kept) == 4 and kept.total == [11]
    assert kept.drop_oldest() == 2, "1 was used when 4 ended"


@pytest.mark.parametrize(("n_short", "gone"), [(4 * PAGE, []), (10 * PAGE - 3, [2])])
def test_a_beginning_is_kept_where_the_longer_one_was_there_before_and_cannot_be_cut_to_it(
    n_short: int, gone: list[int]
) -> None:
    kept, ids = Prefixes(memory_of(100, window=2), 1), tuple(range(10 * PAGE))
    assert kept.add(Kept(1, "a", ids, (10,), 10 * PAGE)) == []
    assert kept.add(Kept(2, "a", ids[:n_short], (9,), n_short)) == gone


@pytest.mark.parametrize(("share", "n_left"), [(0.0, 0), (1.0, 6)])
def test_nodes_free_all_that_is_not_kept(share: float, n_left: int) -> None:
    """Where a window cannot go back, the end of each prompt is copied; too little memory for it is as if there were none."""
    scheduler, held = Scheduler(memory=memory_of(60, window=2), kept_share=share), set[int]()
    for seq_id in range(3):
        params = SamplingParams(3 * PAGE, temperature=0)
        scheduler.submit(Sequence(seq_id, (seq_id,) * 4 * PAGE, params, 10_000, owner="a"))
        while (plan := scheduler.schedule()) is not None:
            held -= set(plan.freed)
            held |= {s.seq_id for s in plan.slices} | {new_id for _, new_id in plan.copies}
            scheduler.update(plan.number, {s.seq_id: [1] for s in plan.slices if s.n_logits})
    assert len(held) == n_left


def of_long_prompt(window: int | None, owner: str | None) -> tuple[Scheduler, list[tuple[int, int, int]]]:
    """A text that decodes behind 10,000 tokens. Returns in which frames it was copied, too, and to which snapshot."""
    scheduler = Scheduler(memory=memory_of(10_000, window), kept_share=1)
    scheduler.submit(Sequence(1, tuple(range(10_000)), SamplingParams(n_tokens=300), 20_000, owner=owner))
    copied: list[tuple[int, int, int]] = []
    for number in range(170):
        plan = scheduler.schedule()
        assert plan is not None and plan.number == number and scheduler.schedule() is None, "one frame at a time"
        copied += [(number, source, copy - SNAPSHOT) for source, copy in plan.copies]
        scheduler.update(number, {part.seq_id: [1] for part in plan.slices if part.n_logits})
    return scheduler, copied


@pytest.mark.parametrize(("window", "owner", "n_copies"), [(2, "a", 3), (None, "a", 0), (2, None, 0)])
def test_a_long_prompt_is_copied_here_and_there_and_at_its_end(
    window: int | None, owner: str | None, n_copies: int
) -> None:
    """Where a window could not go back there later, and for who has an owner. A copy comes with the frame behind."""
    _, copied = of_long_prompt(window, owner)
    assert copied == [(64, 1, 1), (128, 1, 2), (157, 1, 3)][:n_copies]


@pytest.mark.parametrize(("n_alike", "snapshot", "start"), [(9000, 2, 8192), (8192, 2, 8192), (8100, 1, 4096)])
def test_another_text_goes_on_from_the_last_copy_that_it_can(n_alike: int, snapshot: int, start: int) -> None:
    scheduler, _ = of_long_prompt(2, "a")
    scheduler.submit(Sequence(2, (*range(n_alike), 1, 2, 3), GREEDY, 20_000, owner="a"))
    plan = scheduler.schedule()
    assert plan is not None and plan.copies == ((SNAPSHOT + snapshot, 2),)
    assert [part.start for part in plan.slices if part.seq_id == 2] == [start] and scheduler.n_reused == start


def test_windows_are_not_cut_beyond_what_they_kept() -> None:
    kept = Prefixes(memory_of(100, window=PAGE), 1)
    ids = tuple(range(10 * PAGE))
    kept.add(Kept(1, "a", ids, (10,)))
    assert kept.find("a", ids[: 5 * PAGE]) is None
    assert kept.find("a", ids[: 10 * PAGE - SLACK + 1]) == (1, 10 * PAGE - SLACK)


def test_a_beginning_stays_where_the_longer_text_cannot_be_cut_to_it() -> None:
    """As a system prompt's, of a model with windows; a text that goes on as the longer one did begins behind it."""
    ids = tuple(range(10 * PAGE))
    other = [*ids[: 5 * PAGE], 9999]
    for window, gone, found in ((None, [1], (2, 5 * PAGE)), (PAGE, [], (1, 2 * PAGE))):
        kept = Prefixes(memory_of(100, window), 1)
        assert kept.add(Kept(1, "a", ids[: 2 * PAGE], (2,))) == []
        assert kept.add(Kept(2, "a", ids, (10,))) == gone
        assert kept.find("a", other) == found
        assert kept.find("a", [*ids, 9999]) == (2, 10 * PAGE)


class Wrong:
    """Guesses that are never drawn."""

    def limits(self, sequence: Sequence, n_places: int, n_texts: int, n_beside: int) -> tuple[int, int]:
        return 1, 20

    def propose(self, sequence: Sequence, n: int) -> list[int]:
        return [999] * n

    def judge(self, sequence: Sequence, n_right: int, is_wrong: bool) -> None:
        assert not n_right


@pytest.mark.parametrize(("has_guesses", "n_reached"), [(False, 100), (True, 119)])
@pytest.mark.parametrize("is_copied", [False, True])
def test_what_is_kept_says_how_far_the_nodes_got_behind_its_tokens(
    has_guesses: bool, n_reached: int, is_copied: bool
) -> None:
    """Rows of a stop sequence, and of guesses that were wrong: the windows of the nodes have moved on for them."""
    memory = memory_of(1 << 20, window=2)
    scheduler = Scheduler(1, memory=memory)
    scheduler.guesser = Wrong() if has_guesses else None
    ids = tuple(range(200, 290))
    scheduler.submit(Sequence(1, ids, SamplingParams(40, temperature=0, stop_sequences=((5, 6, 7),)), 1000, owner="a"))
    drawn = iter([*range(20, 28), 5, 6, 7])
    while scheduler.n_running or scheduler.n_waiting:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan.number, {s.seq_id: [next(drawn)] for s in plan.slices if s.n_logits})
    n = n_reached - SLACK - (not is_copied)
    scheduler.submit(Sequence(2, (*ids[:n], 1, 2), GREEDY, 1000, owner="a"))
    plan = scheduler.schedule()
    assert plan is not None and bool(plan.copies) == is_copied


def test_what_is_kept_of_a_text_says_how_far_the_nodes_got_before_its_frames_were_lost() -> None:
    memory = memory_of(1 << 20, window=1)
    scheduler = Scheduler(2, memory=memory)
    ids = tuple(range(400))
    scheduler.submit(Sequence(1, ids, GREEDY, 1000, owner="a"))
    for number in range(4):
        if number > 1:
            scheduler.update(number - 2, {})
        assert scheduler.schedule() is not None
    assert scheduler.in_flight == {1: (128, 256)}
    scheduler.resume(2, memory, {1: 128}, has_fresh=False)
    scheduler.cancel(1)
    scheduler.submit(Sequence(2, (*ids[:70], 1, 2), GREEDY, 1000, owner="a"))
    plan = scheduler.schedule()
    assert plan is not None and not plan.copies, "position 70 is behind the window of a node that got 192 to 255"
    assert plan.slices[0].start == 0


def test_no_more_is_kept_than_a_share_of_the_memory() -> None:
    kept = Prefixes(memory_of(10), 0.5)
    assert kept.add(Kept(1, "a", (1,) * PAGE, (2,))) == [] and kept.add(Kept(2, "a", (2,) * PAGE, (3,))) == []
    assert kept.add(Kept(3, "a", (3,) * PAGE, (1,))) == [1] and kept.add(Kept(4, "a", (4,) * PAGE, (6,))) == [2, 3, 4]
    assert kept.total == [0]
