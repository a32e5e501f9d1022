"""Texts whose next tokens are guessed are the same as without guesses, whoever guesses, and whatever else happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guessing import Bold
from loopback import hidden_rows
from mdi.engine.memory import CacheMemory, Kept, NodeCaches, Prefixes
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import MOST_GUESSES, Scheduler
from mdi.engine.sequence import Event, Request, SamplingParams
from mdi.engine.sequence import Sequence as Text
from mdi.engine.starter import StarterEngine
from mdi.errors import EngineError
from mdi.kernels.slices import Slices
from mdi.model.caches import PAGE, SLACK, PageClass
from mdi.net.ring import LoopbackRing
from mdi.net.wire import Frame

N_IDS = 40
EOS = 0
MAX_LENGTH = 120


class Remembering:
    """A stage whose rows follow from the last ids in its caches: a wrong one there gives other tokens."""

    returned_width = 2
    row_in = row_out = hidden_rows(2)
    is_head_shared = False

    def __init__(self, window: int | None = None) -> None:
        self.caches = self
        self._texts: dict[int, list[int]] = {}
        self._first: dict[int, int] = {}  # position from which on the window has kept pages
        self._window = window
        self.n_logit_rows = 0
        self.not_finite: set[int] = set()

    def __len__(self) -> int:
        return len(self._texts)

    def rearrange(self, freed: tuple[int, ...], copies: tuple[tuple[int, int], ...]) -> None:
        made = {new_id: (list(self._texts[seq_id]), self._first.get(seq_id, 0)) for seq_id, new_id in copies}
        for seq_id in freed:
            self._texts.pop(seq_id, None)
            self._first.pop(seq_id, None)
        for new_id, (ids, first) in made.items():
            self._texts[new_id], self._first[new_id] = ids, first

    def clear(self) -> None:
        self._texts.clear()
        self._first.clear()

    @property
    def n_positions(self) -> int:
        return sum(map(len, self._texts.values()))

    def embed(self, ids: np.ndarray, slices: object = None) -> np.ndarray:
        return np.stack([ids, ids], axis=1).astype(np.float32)

    def __call__(self, x: np.ndarray, slices: Slices) -> np.ndarray:
        out = np.empty_like(x)
        at = 0
        assert len({one.seq_id for one in slices}) == len(slices)
        for one in slices:
            cache = self._texts.setdefault(one.seq_id, [])
            assert one.start <= len(cache), "a gap"
            if self._window is not None:
                assert max(0, one.start - self._window + 1) >= self._first.get(one.seq_id, 0), "the window has moved on"
                kept = (one.start - self._window - SLACK) // PAGE * PAGE
                self._first[one.seq_id] = max(self._first.get(one.seq_id, 0), kept)
            del cache[one.start :]
            for i in range(at, at + one.n_rows):
                cache.append(int(x[i, 0]))
                out[i] = self.row_of(cache)
            at += one.n_rows
        return out

    def row_of(self, ids: list[int]) -> tuple[int, int]:
        return hash((*ids[-3:], len(ids) // 7)) % 1009, ids[-1]

    def head(self, x: np.ndarray) -> np.ndarray:
        self.n_logit_rows += len(x)
        logits = (((np.arange(N_IDS)[None, :] * 37 + x[:, :1] * 101) % 307 - 153) / 40).astype(np.float32)
        for i, last in enumerate(x[:, 1]):
            if int(last) in self.not_finite:
                logits[i] = np.inf
        return logits


@dataclass
class Source:
    """Guesses with the true tokens in mind.

    Attributes:
        truth: the tokens of each text, by its number.
        is_right: whether to give the true token, by the random generator and how far the guess is from the last known one.
        at_once: frames of a text, and rows of a frame.
    """

    truth: dict[int, list[int]]
    is_right: Callable[[random.Random, int], bool]
    at_once: tuple[int, int]
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    most: int = 0
    pending: dict[int, list[bool]] = field(default_factory=dict)

    def limits(self, sequence: Text, n_places: int, n_texts: int, n_beside: int = 0) -> tuple[int, int]:
        return min(self.at_once[0], n_places), self.at_once[1]

    def propose(self, sequence: Text, n: int) -> list[int]:
        assert len(sequence.ids) + len(sequence.guessed) + n <= sequence.n_positions
        self.most = max(self.most, n + len(sequence.guessed))
        begin = len(sequence.ids) - sequence.n_prompt + len(sequence.guessed)
        true = self.truth.get(sequence.seq_id, [])[begin : begin + n]
        found = [
            t if self.is_right(self.rng, len(sequence.guessed) + i) else (t + 1) % N_IDS for i, t in enumerate(true)
        ]
        return [token if token != EOS else 1 for token in found] + [1] * (n - len(found))  # also behind the text's end

    def judge(self, sequence: Text, n_right: int, is_wrong: bool) -> None:
        assert n_right >= 0 and not (is_wrong and sequence.guessed)

    begin_ring = begin = sent = returned = forget = is_watching = lambda self, *_: None
    under_way: Sequence[int] = ()


MODES: dict[str, Callable[[random.Random, int], bool]] = {
    "wrong": lambda rng, at: False,
    "right": lambda rng, at: True,
    "random": lambda rng, at: rng.random() < 0.7,
    "wrong at the end": lambda rng, at: at % 4 != 3,
}


class Even:
    """A constraint: even ids, sometimes a single one, and `n_tokens` at most; it fails if it is asked for more."""

    def __init__(self, n_tokens: int) -> None:
        self._n_left = n_tokens

    def allowed(self) -> np.ndarray:
        if not self._n_left:
            raise EngineError("nothing may follow")
        return np.array([self._may_follow(token, self._n_left) for token in range(N_IDS)])

    @staticmethod
    def _may_follow(token: int, n_left: int) -> bool:
        if n_left % 8 == 6:
            return token in (2, 6)
        return token == n_left % N_IDS if n_left % 8 in (2, 4) else token % 2 == 0

    def take(self, token: int) -> bool:
        assert self._n_left and self._may_follow(token, self._n_left), "a token that may not be there"
        self._n_left -= 1
        return not self._n_left

    def copy(self) -> Even:
        return Even(self._n_left)

    def n_valid(self, tokens: list[int]) -> int:
        n = next((i for i, token in enumerate(tokens) if not self._may_follow(token, self._n_left - i)), len(tokens))
        return min(n, self._n_left)

    def forced(self) -> list[int]:
        return [2, 4, 6]


@dataclass
class Wanted:
    """A text to be generated; `stop` is an id with which its reader ends it."""

    prompt: list[int]
    params: SamplingParams
    stop: int | None = None
    n_constrained: int | None = None
    owner: str | None = None


Outcome = list[tuple[tuple[int, ...], str | None, Any]]


def outcome(request: Request) -> Outcome:
    found: list[Event] = []
    while not request.events.empty():
        found.append(request.events.get())
    return [(event.tokens, event.finish_reason, event.logprobs) for event in found]


def generate(
    texts: Sequence[Wanted], source: Source | None, n_frames: int = 1, memory: CacheMemory | None = None,
    chunk_rows: int = 16, breaks: random.Random | None = None, window: int | None = None,
) -> tuple[list[Outcome], StarterEngine, Remembering]:  # fmt: skip
    """All texts over one ring, or over several that break at random."""
    stage = Remembering(window)
    engine = StarterEngine(stage, Scheduler(n_frames, chunk_rows, memory), MAX_LENGTH, ArrayRows())
    engine.speculation = source  # type: ignore[assignment]
    requests = []
    for one in texts:
        ends = None if one.stop is None else lambda token, stop=one.stop: token == stop
        constraint = None if one.n_constrained is None else Even(one.n_constrained)
        requests.append(engine.submit(one.prompt, one.params, ends, constraint=constraint, owner=one.owner))
    ring: LoopbackRing | Breaking = LoopbackRing(n_frames)
    while breaks is not None and engine.scheduler.has_work | bool(engine.n_known or not ring.inbox.closed):
        ring = Breaking(n_frames, breaks.randint(1, 12))
        try:
            engine.run(ring)
            break
        except Broken:
            if breaks.random() < 0.5:
                engine.kept = {seq_id: 10**6 for seq_id in engine.n_known}
                engine.has_fresh = breaks.random() < 0.5
    else:
        engine.run(ring)
    assert not stage.n_positions or any(one.owner for one in texts)
    return [outcome(request) for request in requests], engine, stage


class Broken(Exception):
    """The ring is lost."""


class Breaking(LoopbackRing):
    """Is lost when so many frames have come back."""

    def __init__(self, capacity: int, n_frames: int) -> None:
        super().__init__(capacity)
        self._n_left = n_frames

    def recv(self, timeout_s: float | None = None) -> Frame | None:
        self._n_left -= 1
        if self._n_left < 0:
            raise Broken
        return super().recv(timeout_s)


@st.composite
def wanted_texts(draw: st.DrawFn) -> list[Wanted]:
    texts = []
    for i in range(draw(st.integers(1, 4))):
        params = SamplingParams(
            n_tokens=draw(st.integers(1, 60)), temperature=draw(st.sampled_from([0.0, 0.9])), top_k=20, seed=i,
            eos_ids=draw(st.sampled_from([frozenset[int](), frozenset({EOS})])),
            stop_sequences=draw(st.sampled_from([(), ((5, 6), (7,)), ((8,), (3, 4, 5))])),
            presence_penalty=draw(st.sampled_from([0.0, 0.7])), n_logprobs=draw(st.sampled_from([None, 2])),
        )  # fmt: skip
        prompt = draw(st.lists(st.integers(1, N_IDS - 1), min_size=1, max_size=90))
        stop, n_constrained = draw(st.none() | st.integers(1, N_IDS - 1)), draw(st.none() | st.integers(1, 20))
        texts.append(Wanted(prompt, params, stop, n_constrained, draw(st.sampled_from([None, "me"]))))
    return texts


def truth_of(outcomes: Sequence[Outcome]) -> dict[int, list[int]]:
    return {i: [token for tokens, _, _ in one for token in tokens] for i, one in enumerate(outcomes)}


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=40)
@given(
    texts=wanted_texts(),
    n_frames=st.integers(1, 9),
    at_once=st.tuples(st.integers(1, 9), st.integers(1, 6)),
    limit=st.none() | st.integers(4, 40),
    seed=st.integers(0, 2**32),
    has_breaks=st.booleans(),
    window=st.none() | st.integers(3, 40),
)
def test_guesses_change_no_text(
    mode: str, texts: list[Wanted], n_frames: int, at_once: tuple[int, int], limit: int | None, seed: int,
    has_breaks: bool, window: int | None,
) -> None:  # fmt: skip
    plain = [generate([replace(one, owner=None)], None)[0][0] for one in texts]
    memory = None if limit is None else memory_of(limit, window)
    source = Source(truth_of(plain), MODES[mode], at_once, random.Random(seed))
    breaks = random.Random(seed) if has_breaks else None
    params = [replace(one.params, seed=i) for i, one in enumerate(texts)]
    texts = [replace(one, params=own) for one, own in zip(texts, params, strict=True)]
    found, engine, _ = generate(texts, source, n_frames, memory, breaks=breaks, window=window)
    assert found == plain
    assert source.most <= MOST_GUESSES
    scheduler = engine.scheduler
    assert not scheduler.n_in_flight and not any(scheduler.used)
    assert 0 <= scheduler.n_confirmed <= scheduler.n_guessed
    has_certain = any(one.n_constrained for one in texts)  # tokens, which count as right guesses
    assert mode != "wrong" or has_certain or not scheduler.n_confirmed


def memory_of(n_pages: int, window: int | None) -> CacheMemory:
    """One node that holds so many pages, but always one text of full length."""
    node = NodeCaches("starter", 0, (PageClass(None, 1), *([] if window is None else [PageClass(window, 1)])))
    return CacheMemory((replace(node, limit_bytes=max(n_pages, node.n_bytes(MAX_LENGTH))),))


ONE = Wanted([3, 4, 5], SamplingParams(n_tokens=60, temperature=0.9, top_k=20, seed=6))  # draws no end token


@pytest.mark.parametrize(("n_frames", "at_once", "n_rounds"), [(1, (1, 1), 60), (1, (1, 4), 16), (4, (4, 1), 60)])
def test_right_guesses_save_rounds_where_a_frame_has_several(
    n_frames: int, at_once: tuple[int, int], n_rounds: int
) -> None:
    plain = generate([ONE], None)[0]
    found, engine, _ = generate([ONE], Source(truth_of(plain), MODES["right"], at_once), n_frames)
    assert found == plain
    assert engine.scheduler.n_plans == n_rounds + 1, "and one that frees the cache"


def test_an_end_by_the_reader_in_the_middle_of_a_frame_ends_that_text_alone() -> None:
    texts = [Wanted([3, 4, i], SamplingParams(n_tokens=30, temperature=0.9, top_k=20, seed=i)) for i in range(1, 4)]
    begun = generate(texts, None)[0]
    texts[0].stop = truth_of(begun)[0][13]
    plain = generate(texts, None)[0]
    assert plain[0][-1][1] == "stop"
    assert generate(texts, Source(truth_of(begun), MODES["right"], (1, 20)))[0] == plain


def test_void_rows_are_left_out_before_the_head() -> None:
    plain, _, before = generate([ONE], None)
    _, engine, stage = generate([ONE], Source(truth_of(plain), MODES["wrong"], (4, 1)), 4)
    assert engine.scheduler.n_guessed > 100 and stage.n_logit_rows == before.n_logit_rows


@pytest.mark.parametrize("at_once", [(1, 3), (4, 1), (4, 2)])
def test_a_wrong_guess_with_numbers_that_are_not_finite_ends_nothing(at_once: tuple[int, int]) -> None:
    plain = generate([ONE], None)[0]
    truth = truth_of(plain)
    never = next(token for token in range(1, N_IDS) if token not in truth[0] and token not in ONE.prompt)
    source = Source(truth, MODES["right"], at_once)
    stage = Remembering()
    stage.not_finite = {never}
    engine = StarterEngine(stage, Scheduler(4), MAX_LENGTH, ArrayRows())
    right = source.propose
    source.propose = lambda sequence, n: [*right(sequence, n)[:-1], never][:n]  # type: ignore[method-assign]
    engine.speculation = source  # type: ignore[assignment]
    request = engine.submit(ONE.prompt, ONE.params)
    engine.run(LoopbackRing(4))
    assert outcome(request) == plain[0] and engine.scheduler.n_guessed


def test_a_prefix_is_not_cut_where_its_windows_have_moved_on() -> None:
    memory = CacheMemory((NodeCaches("node", 1 << 20, (PageClass(None, 1), PageClass(16, 1))),))
    prefixes = Prefixes(memory)
    ids = tuple(range(200))
    prefixes.add(Kept(1, "me", ids, (1,), len(ids) + MOST_GUESSES))
    behind = len(ids) + MOST_GUESSES - SLACK
    assert prefixes.find("me", [*ids[: behind - 1], 999, 999]) is None
    assert prefixes.find("me", [*ids[:behind], 999, 999]) == (1, behind)


@pytest.mark.parametrize("n_frames", [1, 5])
@pytest.mark.parametrize("n_constrained", [None, 20])
def test_the_sources_change_no_text(n_frames: int, n_constrained: int | None) -> None:
    prompts = [[1, 2, 3] * 5, list(range(1, 30)), [2, 4, 6, 8] * 4]
    texts = [
        Wanted(
            ids, SamplingParams(n_tokens=60, temperature=t, top_k=4, seed=i), n_constrained=n_constrained, owner="me"
        )
        for i, ids in enumerate(prompts)
        for t in (0.0, 0.7)
    ]
    plain = generate(texts, None, n_frames)[0]
    speculation = Bold()
    found, engine, _ = generate(texts, speculation, n_frames)  # type: ignore[arg-type]
    assert found == plain
    assert n_constrained is None or engine.scheduler.n_guessed > 20
    for prediction in ((), truth_of(plain)[2]):  # the second time, the same text of this owner is known
        n_before = engine.scheduler.n_confirmed
        again = engine.submit(prompts[1], texts[2].params, owner="me", prediction=prediction)
        engine.run(LoopbackRing(n_frames))
        if n_constrained is None:
            assert [token for got, _, _ in outcome(again) for token in got] == truth_of(plain)[2]
            assert engine.scheduler.n_confirmed > n_before + 30
            assert not prediction or again.sequence.n_accepted > 30


@pytest.mark.parametrize(("n_logprobs", "n_certain"), [(None, 5), (1, 0)])
def test_tokens_that_nothing_else_may_follow_are_not_waited_for(n_logprobs: int | None, n_certain: int) -> None:
    """Of 20 tokens five have no choice: no frame is sent for them alone, unless their logarithms are wanted."""
    params = SamplingParams(n_tokens=60, temperature=0.9, top_k=20, seed=6, n_logprobs=n_logprobs)
    one = Wanted([3, 4, 5], params, n_constrained=20)
    plain, engine, stage = generate([one], None)
    n_plans, n_rows = engine.scheduler.n_plans, stage.n_logit_rows
    found, engine, stage = generate([one], Source({}, MODES["wrong"], (1, 1)))
    assert found == plain
    assert (n_plans - engine.scheduler.n_plans, n_rows - stage.n_logit_rows) == (n_certain, n_certain)
    assert engine.guesses == (n_certain, n_certain)


class Count:
    """Token n is n, up to 9."""

    def __init__(self, n: int = 0) -> None:
        self._n = n

    def allowed(self) -> np.ndarray:
        return np.arange(N_IDS) == self._n

    def take(self, token: int) -> bool:
        assert token == self._n, "a token that may not be there"
        self._n += 1
        return self._n == 10

    def copy(self) -> Count:
        return Count(self._n)

    def n_valid(self, tokens: list[int]) -> int:
        n = next((i for i, token in enumerate(tokens) if token != self._n + i), len(tokens))
        return min(n, 10 - self._n)

    def forced(self) -> list[int]:
        return list(range(self._n, 10))


@pytest.mark.parametrize("stop", [(3, 39), (9, 39), (7, 8, 9, 1)])
@pytest.mark.parametrize("source", ["none", "bold", "wrong"])
def test_a_constraint_gets_tokens_that_are_held_back(stop: tuple[int, ...], source: str) -> None:
    """They may become a stop sequence, and are tokens of the text in the end."""
    engine = StarterEngine(Remembering(), Scheduler(1), MAX_LENGTH, ArrayRows())
    sources = {"none": None, "bold": Bold(), "wrong": Source({}, MODES["wrong"], (1, 3))}
    engine.speculation = sources[source]  # type: ignore[assignment]
    params = SamplingParams(40, temperature=0, stop_sequences=(stop,), n_logprobs=1)
    requests = [engine.submit([3, 4], params, constraint=Count()), engine.submit([3, 5], params)]
    engine.run(LoopbackRing(1))
    events = outcome(requests[0])
    assert [token for tokens, _, _ in events for token in tokens] == list(range(10))
    assert events[-1][1] == "stop" and all(tokens for tokens, _, _ in events)
    assert sum(len(logprobs) for _, _, logprobs in events) == 10
    assert outcome(requests[1])[-1][1] == "length"


def test_a_frame_has_no_more_certain_rows_than_it_may_have() -> None:
    scheduler = Scheduler(1, decode_rows=8)
    texts = [Text(i, (1, 2), SamplingParams(n_tokens=99), 100) for i in range(6)]
    for text in texts:
        scheduler.submit(text)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan.number, {i: [9] for i in range(6)})
    for text in texts:
        scheduler.accept_certain(text.seq_id, 7)
        scheduler.accept_certain(text.seq_id, 8)
    sizes = []
    while (plan := scheduler.schedule()) is not None:
        sizes.append([(part.n_rows, part.n_logits) for part in plan.slices])
        scheduler.update(plan.number, {part.seq_id: [1] for part in plan.slices})
        if len(sizes) == 2:
            break
    assert sizes == [[(3, 1)] * 3] * 2


def test_rows_that_gave_no_token_are_sent_again() -> None:
    scheduler = Scheduler(1)
    scheduler.guesser = Source({7: [11, 12, 13, 14, 15, 16]}, MODES["right"], (1, 3))
    scheduler.submit(Text(7, (1, 2), SamplingParams(n_tokens=9), 100))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan.number, {7: [11]})
    plan = scheduler.schedule()
    assert plan is not None and plan.slices[0][1:5] == (2, 3, 3, (11, 12, 13))
    scheduler.update(plan.number, {7: [12]})
    plan = scheduler.schedule()
    assert plan is not None and plan.slices[0][1:5] == (3, 3, 3, (12, 13, 14))
