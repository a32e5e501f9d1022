"""What guesses may not touch: memory that texts need, kept caches, other frames, prompts, and what is known of a loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guessing import Bold
from mdi.engine.cohort import Beams
from mdi.engine.guesses import DraftModel
from mdi.engine.recorder import Activity, Recorder
from mdi.engine.replay import SentRows
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import PromptPace, Scheduler
from mdi.engine.sequence import Plan, PlannedSlice, Request, SamplingParams
from mdi.engine.sequence import Sequence as Text
from mdi.engine.speculation import N_ROUNDS, Speculation
from mdi.engine.starter import StarterEngine
from mdi.errors import EngineError
from mdi.kernels.slices import Slice, SliceTable
from mdi.metrics import RunMetrics, SampleMetrics
from mdi.model.caches import PAGE
from mdi.net.ring import LoopbackRing
from mdi.net.wire import Frame, FrameType
from test_guessed_frames import (
    MAX_LENGTH,
    MODES,
    N_IDS,
    Broken,
    Remembering,
    Source,
    Wanted,
    generate,
    memory_of,
    outcome,
)
from test_guessed_rows import Always, text

WINDOW = 16
PARAMS = SamplingParams(n_tokens=60, temperature=0.9, top_k=20, seed=4)


# Kept and shared caches


def follow(n_cut: int, is_sibling: bool) -> None:
    """A text, ended or still under way with guesses beyond its end, and one with the beginning of it."""
    stage, ring, params = Remembering(WINDOW), LoopbackRing(9), replace(PARAMS, n_tokens=110)
    memory = memory_of(200, WINDOW)
    engine = StarterEngine(stage, Scheduler(9, memory=memory), MAX_LENGTH * 4, ArrayRows())
    prompt = [random.Random(5).randrange(1, N_IDS) for _ in range(96)]
    plain = StarterEngine(Remembering(), Scheduler(1), MAX_LENGTH * 4, ArrayRows())
    alone = plain.submit(prompt, params)
    plain.run(LoopbackRing(1))
    truth = [token for tokens, _, _ in outcome(alone) for token in tokens]
    engine.speculation = Source({0: truth}, MODES["wrong"], (9, 4))  # type: ignore[assignment]
    seen: list[int] = []
    late = []

    def ends(token: int) -> bool:
        seen.append(token)
        if is_sibling and len(seen) == n_cut:
            late.append(engine.submit(prompt, replace(PARAMS, n_tokens=5), owner="me"))
        return not is_sibling and len(seen) == 30

    first = engine.submit(prompt, params, ends, owner="me")
    engine.run(ring)
    whole = [*prompt, *(token for tokens, _, _ in outcome(first) for token in tokens)]
    if not is_sibling:
        late.append(engine.submit([*whole[:n_cut], 1, 2, 3], replace(PARAMS, n_tokens=5), owner="me"))
        engine.run(ring)
    (second,) = late
    ids = list(second.sequence.prompt_ids)
    expected = plain.submit(ids, replace(PARAMS, n_tokens=5))
    plain.run(LoopbackRing(1))
    assert outcome(second)[:5] == outcome(expected)[:5]


@pytest.mark.parametrize("n_cut", range(50, 120, 3))
def test_a_text_begins_behind_an_ended_one_only_where_guesses_have_not_moved_its_windows(n_cut: int) -> None:
    follow(n_cut, is_sibling=False)


@pytest.mark.parametrize("n_cut", range(20, 90, 3))
def test_a_text_begins_behind_a_running_one_only_where_guesses_have_not_moved_its_windows(n_cut: int) -> None:
    follow(n_cut, is_sibling=True)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("mode", MODES)
def test_texts_that_wait_for_a_copy_are_not_disturbed_by_guesses_of_its_source(mode: str, window: int | None) -> None:
    """Four texts of one prompt, and one that comes while the others are guessed: a copy leaves with the next frame, and nodes
    make it before the rows of this frame.
    """
    prompt = [random.Random(8).randrange(1, N_IDS) for _ in range(2 * PAGE)]
    memory = None if window is None else memory_of(400, window)

    def generate(source: Source | None) -> tuple[list[object], StarterEngine]:
        engine = StarterEngine(Remembering(window), Scheduler(3, 48, memory), MAX_LENGTH * 2, ArrayRows())
        engine.speculation = source  # type: ignore[assignment]
        late: list[Request] = []

        def ends(token: int) -> bool:
            if not late:
                late.append(engine.submit(prompt, replace(PARAMS, seed=9), owner="me"))
            return False

        requests = [engine.submit(prompt, replace(PARAMS, seed=i), ends, owner="me") for i in range(4)]
        engine.run(LoopbackRing(3))
        return [outcome(request) for request in (*requests, *late)], engine

    plain, _ = generate(None)
    truth = {i: [t for tokens, _, _ in one for t in tokens] for i, one in enumerate(plain)}  # type: ignore[misc,attr-defined]
    found, engine = generate(Source(truth, MODES[mode], (3, 3)))
    assert len(found) == 5 and found == plain
    assert engine.n_reused >= 3 * len(prompt) and engine.guesses[0] > 50


# Frames


def test_texts_that_are_continued_together_are_not_guessed() -> None:
    found = []
    for guesser in (None, Always((4, 3))):
        engine = StarterEngine(Remembering(), Scheduler(4), MAX_LENGTH, ArrayRows())
        engine.speculation = None if guesser is None else Source({}, MODES["wrong"], (4, 3))  # type: ignore[assignment]
        requests = engine.submit_beams([3, 4, 5], SamplingParams(n_tokens=12), Beams(3))
        engine.run(LoopbackRing(4))
        found.append([outcome(request) for request in requests])
        assert not engine.scheduler.n_guessed
    assert found[0] == found[1]


# Texts that share frames


class Looping(Remembering):
    """Each token follows from the one before, so that greedy texts repeat themselves."""

    def row_of(self, ids: list[int]) -> tuple[int, int]:
        return hash(ids[-1]) * 31 % 1009, ids[-1]


class Timed(Speculation):
    """Frames take as long as a price says, whatever this machine does."""

    def __init__(self, most_rows: int, row_s: float) -> None:
        super().__init__(most_rows)
        self._row_s = row_s
        self._now_s = 0.0

    def sent(self, plan: Plan, now_s: float, guessing_s: float = 0.0) -> None:
        super().sent(plan, self._now_s)
        self._now_s += 1.0 + self._row_s * sum(part.n_rows for part in plan.slices)

    def returned(self, number: int, now_s: float, busy_s: float, n_tokens: int) -> None:
        super().returned(number, self._now_s, 0.0, n_tokens)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    n_texts=st.integers(2, 6), most_rows=st.integers(2, 8), row_s=st.sampled_from([0.001, 0.1]),
    window=st.none() | st.integers(3, 40), limit=st.none() | st.integers(6, 20), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_texts_of_one_node_are_guessed_beside_each_other_and_stay_the_same(
    n_texts: int, most_rows: int, row_s: float, window: int | None, limit: int | None, seed: int
) -> None:
    """One of them draws its tokens, and repeats nothing."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(1, N_IDS) for _ in range(chance.randint(1, 20))] for _ in range(n_texts)]
    memory = None if limit is None else memory_of(limit, window)
    found = []
    for speculation in (None, Timed(most_rows, row_s)):
        engine = StarterEngine(Looping(window), Scheduler(1, 16, memory), MAX_LENGTH, ArrayRows())
        engine.speculation = speculation
        greedy = SamplingParams(n_tokens=90, temperature=0)
        requests = [engine.submit(ids, PARAMS if not i else greedy) for i, ids in enumerate(prompts)]
        engine.run(LoopbackRing(1))
        found.append([outcome(request) for request in requests])
        assert not any(engine.scheduler.used)
    assert found[0] == found[1]
    assert limit is not None or engine.guesses[1] > 20


# Prompts


def frame_of(slices: Sequence[Slice]) -> Frame:
    return Frame(FrameType.BATCH, 0, 1, slices=SliceTable(slices))


def test_rows_of_guesses_are_no_prompt_in_a_trace() -> None:
    recorder = Recorder()
    recorder.add(
        Activity.BLOCKS, 0, 1, frame_of([Slice(1, 9, 4, 4), Slice(2, 9, 1, 1), Slice(3, 0, 7, 1), Slice(4, 0, 5, 0)])
    )
    (span,) = recorder.buffer.last()
    assert (span.n_rows, span.n_prompt_rows) == (17, 12)


def test_rows_of_certain_tokens_are_no_prompt_in_a_trace() -> None:
    scheduler, recorder = Scheduler(2), Recorder()
    recorder.prompt_rows = scheduler.prompt_rows
    found = []

    def leave() -> Plan:
        plan = scheduler.schedule()
        assert plan is not None
        recorder.add(Activity.BLOCKS, 0, 1, Frame(FrameType.BATCH, 0, plan.number, slices=slices_of(plan)))
        found.append((recorder.buffer.last()[-1].n_rows, recorder.buffer.last()[-1].n_prompt_rows))
        return plan

    scheduler.submit(text(1, 7))
    scheduler.update(leave().number, {1: [2]})
    scheduler.accept_certain(1, 3)
    scheduler.submit(text(2, 5))
    leave()
    assert found == [(7, 7), (2 + 5, 5)]


def slices_of(plan: Plan) -> SliceTable:
    return SliceTable([Slice(one.seq_id, one.start, one.n_rows, one.n_logits) for one in plan.slices])


def test_rows_of_guesses_are_no_prompt_for_the_pace() -> None:
    pace = PromptPace()
    prompt = PlannedSlice(2, 0, 7, 1, (1,) * 7, is_prompt=True)
    pace.sent(Plan(0, (PlannedSlice(1, 9, 4, 4, (1, 2, 3, 4), n_guessed=3), prompt), ()), 0.0)
    assert pace.under_way[0][1:] == (7, 1)


def test_frames_with_prompts_say_nothing_about_the_price_of_rows() -> None:
    speculation = Speculation(kinds=frozenset({"lookup"}))
    speculation.begin_ring(2)
    one = PlannedSlice(1, 9, 1, 1, (1,))
    speculation.sent(Plan(0, (one, PlannedSlice(2, 0, 64, 1, (1,) * 64, is_prompt=True)), ()), 0.0)
    speculation.returned(0, 5.0, 0.0, 1)
    assert not speculation.rounds.n_noted
    speculation.sent(Plan(1, (one,), ()), 5.0)
    speculation.returned(1, 6.0, 0.0, 1)
    assert speculation.rounds.of(1) == 1.0


# Losses


class Behind(LoopbackRing):
    """A ring of two nodes in this thread; it is lost when so many frames have come back."""

    def __init__(self, other: Remembering, capacity: int, n_left: int) -> None:
        super().__init__(capacity)
        self.n_nodes = 2
        self._other, self._n_left = other, n_left

    def send(self, frame: Frame) -> None:
        self._other.rearrange(frame.freed, frame.copies)
        if frame.n_rows:
            x = np.frombuffer(bytes(frame.payload), dtype=np.float32).reshape(frame.n_rows, -1)
            y = self._other(x[:, ::-1].copy(), frame.slices)  # the ids of the rows are in the second column
            wanted = [] if frame.is_replay else _wanted(frame.slices)
            y = y[wanted]
            frame = replace(frame, n_rows=len(y), n_cols=y.shape[1], payload=y.tobytes())
        super().send(frame)

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        self._n_left -= 1
        if self._n_left < 0:
            raise Broken
        return super().recv(timeout_s)


def _wanted(slices: SliceTable) -> list[int]:
    found, at = [], 0
    for one in slices:
        at += one.n_rows
        found += range(at - one.n_logits, at)
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    mode=st.sampled_from(sorted(MODES)), at_once=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    n_before=st.lists(st.integers(1, 25), min_size=1, max_size=8), seed=st.integers(0, 2**32), n_texts=st.integers(1, 2),
    window=st.none() | st.integers(1, 40), n_kept=st.sampled_from([10**5, 40, 70, 100]),
)  # fmt: skip
def test_caches_are_replayed_in_the_middle_of_guesses(
    mode: str, at_once: tuple[int, int], n_before: list[int], seed: int, n_texts: int, window: int | None, n_kept: int
) -> None:
    """The second node loses its caches again and again; the starter sends its rows again, and not those of wrong guesses."""

    def generate(source: Source | None, losses: Sequence[int]) -> list[object]:
        memory = None if window is None else memory_of(10**6, window)
        engine = StarterEngine(Remembering(window), Scheduler(3, 16, memory), MAX_LENGTH, ArrayRows())
        engine.sent, engine.speculation = SentRows(8 * n_kept), source  # type: ignore[assignment]
        prompts = [[random.Random(i).randrange(1, N_IDS) for _ in range(9 + 20 * i)] for i in range(n_texts)]
        requests = [engine.submit(ids, replace(PARAMS, seed=i)) for i, ids in enumerate(prompts)]
        for n_left in (*losses, 10**6):
            other = Remembering(window)
            try:
                engine.run(Behind(other, 6, n_left))
            except Broken:
                engine.kept, engine.fills_replays, engine.has_fresh = engine.sent.counts, True, True
        return [outcome(request) for request in requests]

    plain = generate(None, [])
    truth = {i: [t for tokens, _, _ in one for t in tokens] for i, one in enumerate(plain)}  # type: ignore[misc,attr-defined]
    assert generate(Source(truth, MODES[mode], at_once, random.Random(seed)), n_before) == plain


# Sources


def test_guesses_that_the_model_does_not_know_or_that_end_the_text_are_not_sent() -> None:
    """A model with another vocabulary would refuse the frame, and with it all texts."""
    for n_vocabulary, eos, n_expected in ((100, 7, 2), (100, 99, 3), (15, 99, 1)):
        speculation = Speculation(n_vocabulary=n_vocabulary)
        ids = [*range(20, 28), 14, 20, 7, *range(20, 28)]
        one = Text(1, tuple(ids), SamplingParams(eos_ids=frozenset({eos})), 1000)
        speculation.begin(one, None)
        assert speculation.propose(one, 3) == [14, 20, 7][:n_expected]


class Last:
    """The head and blocks of a small model whose logits are known: it remembers what its caches hold."""

    def __init__(self) -> None:
        self.stage = Remembering()
        self.caches = self
        self.n_computed = 0

    def last_logits(self, ids: np.ndarray, slices: SliceTable) -> np.ndarray:
        self.n_computed += len(ids)
        return self.stage.head(self.stage(self.stage.embed(ids), slices)[-1:])

    def free(self, seq_id: int) -> None:
        self.stage.rearrange((seq_id,), ())


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=12))
def test_a_small_model_guesses_the_same_whatever_was_guessed_before(steps: list[tuple[int, int, bool]]) -> None:
    """It computes each token that the text has once, however often its guesses were wrong."""
    stage = Last()
    one = Text(1, (3, 4, 5), PARAMS, 1000)
    draft = DraftModel(stage, ArrayRows(), 1000).of(one)
    for n_asked, n_right, is_wrong in steps:
        draft.learn(one.ids)
        found = draft.propose(list(one.ids), n_asked)
        fresh = DraftModel(Last(), ArrayRows(), 1000).of(one)
        assert fresh.propose(list(one.ids), n_asked) == found
        one.ids += found[:n_right]
        if is_wrong:
            one.ids.append(1 + one.ids[-1] % (N_IDS - 1))
    n_guessed = sum(n for n, _, _ in steps)
    assert stage.n_computed <= len(one.ids) + n_guessed


def test_a_small_model_forgets_its_own_guesses_where_others_were_sent() -> None:
    one = Text(1, (3, 4, 5), PARAMS, 1000)
    draft = DraftModel(Last(), ArrayRows(), 1000).of(one)
    draft.learn(one.ids)
    found = draft.propose(list(one.ids), 4)
    ids = [*one.ids, 1 + found[0] % (N_IDS - 1), *found[1:3]]
    assert draft.propose(ids, 4) == DraftModel(Last(), ArrayRows(), 1000).of(one).propose(ids, 4)


@pytest.mark.parametrize(("n_prompt", "n_found"), [(297, 3), (299, 1), (300, 0), (700, 0)])
def test_a_small_model_guesses_up_to_the_end_of_its_context(n_prompt: int, n_found: int) -> None:
    stage = Last()
    one = Text(1, tuple(1 + i % 30 for i in range(n_prompt)), PARAMS, 1000)
    draft = DraftModel(stage, ArrayRows(), 300).of(one)
    draft.learn(one.ids)
    found = draft.propose(list(one.ids), 4) or draft.propose(list(one.ids), 4)
    assert len(found) == n_found and bool(stage.n_computed) == bool(n_found)


class Failing:
    """A source that fails at one of the calls, from the fourth on; its guesses are right until then."""

    def __init__(self, where: str, text: Text, truth: list[int]) -> None:
        self._where, self._text, self._truth, self._n = where, text, truth, 0

    def _call(self, where: str) -> None:
        self._n += where == self._where
        if where == self._where and (self._n > 3 or where == "close"):
            raise EngineError("position 768 of sequence 1, but sequences of this run end at 512")

    def learn(self, ids: list[int]) -> bool:
        self._call("learn")
        return True

    def propose(self, ids: list[int], n: int) -> list[int]:
        self._call("propose")
        begin = len(ids) - self._text.n_prompt
        return self._truth[begin : begin + n]

    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize("where", ["learn", "propose", "close"])
def test_a_source_that_fails_pauses_and_all_texts_go_on(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, in one line, however many texts had guesses of it."""
    texts = [Wanted([3, 4, i], replace(PARAMS, seed=i)) for i in range(1, 4)]
    plain = generate(texts, None)[0]
    truth = {i: [token for tokens, _, _ in one for token in tokens] for i, one in enumerate(plain)}
    model: Any = SimpleNamespace(of=lambda text: Failing(where, text, truth[text.seq_id]))
    speculation: Any = Bold(draft=model, kinds=frozenset({"draft"}))
    found, engine, _ = generate(texts, speculation)
    assert found == plain and engine.scheduler.n_confirmed > 5
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "draft" in caplog.messages[0]
    assert "\n" not in caplog.messages[0] and not caplog.records[0].exc_info


def test_a_source_that_is_asked_before_frames_are_planned_pauses_too() -> None:
    speculation = Speculation(kinds=frozenset({"draft"}), draft=SimpleNamespace(of=lambda text: failing))  # type: ignore[arg-type]
    one = Text(1, (5,) * 30, SamplingParams(n_tokens=100), 1000)
    failing = Failing("learn", one, [])
    speculation.begin_ring(1)
    speculation.begin(one, None)
    speculation.limits(one, 1, 1)
    for i in range(N_ROUNDS + 1):
        speculation.sent(Plan(i, (PlannedSlice(1, i, 1, 1, (1,)),), ()), float(i))
        speculation.returned(i, i + 1.0, 0.0, 1)
    asked = [speculation.limits(one, 1, 1) for _ in range(6)]
    assert asked[0] != (1, 1) and asked[3:] == [(1, 1)] * 3


def test_the_tokens_of_a_round_are_counted() -> None:
    times = [1.0, 1.0, 2.0, 2.0, 2.0, 3.0]
    sample = SampleMetrics.from_times("", "", range(6), [1], "length", times, guessed=5, confirmed=3)
    run = RunMetrics.from_parts("model", [sample], [], 3.0)
    assert run.tokens_per_round == 2.0 and sample.tokens_per_s == pytest.approx(2.5)
    quiet = SampleMetrics.from_times("", "", range(4), [1], "length", [1.0, 2.0, 3.0, 4.0])
    told = RunMetrics.from_parts("model", [sample, quiet], [], 4.0).to_json()
    assert told["tokens_per_round"] == 10 / 7 and [one["tokens_per_round"] for one in told["samples"]] == [2.0, 1.0]
