"""Rows that are kept and sent again: the same rows, in bounded memory, and no token is lost or drawn twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopback import hidden_rows
from mdi.engine.cohort import Beams, Cohort
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.engine.replay import FILL, SentRows
from mdi.engine.rows import ArrayRows
from mdi.engine.scheduler import Scheduler
from mdi.engine.sequence import Plan, PlannedSlice, SamplingParams, Sequence
from mdi.engine.worker import SecondaryLoop
from mdi.errors import EngineError, RingEndedError
from mdi.kernels.pages import CachePages, Pages
from mdi.kernels.slices import SliceTable
from mdi.model.caches import CHUNK_ROWS, PAGE, PageClass
from mdi.net.wire import DTYPE_CODES, DTYPES, PLAIN, Frame, FrameCodec, FrameType, Limits, Slice

EPOCH = 9
N_LONG = 80


def frame_of(dtype: str, n_cols: int, slices: list[Slice], first: int, **fields: object) -> Frame:
    """Rows whose bytes say which row they are: scales count from `first` on, values from `first` + 100."""
    form, n_rows = DTYPES[DTYPE_CODES[dtype]], sum(s.n_rows for s in slices)
    scale, value = form.n_scales(n_cols) * form.scale_bytes, n_cols * form.value_bytes
    payload = b"".join(bytes([first + r]) * scale for r in range(n_rows))
    payload += b"".join(bytes([first + 100 + r]) * value for r in range(n_rows))
    return Frame(FrameType.BATCH, EPOCH, 0, dtype, n_rows, n_cols, tuple(slices), payload=payload, **fields)  # type: ignore[arg-type]


def filled(sent: SentRows, *slices: Slice) -> Frame:
    return sent.fill(Frame(FrameType.BATCH, EPOCH, slices=SliceTable(slices)))


@pytest.mark.parametrize("dtype", ["float32", "row-scaled float16", "block-scaled int8"])
def test_rows_come_back_byte_for_byte(dtype: str) -> None:
    sent = SentRows(1 << 20)
    sent.add(frame_of(dtype, 70, [Slice(1, 0, 3, 1), Slice(2, 0, 2, 1)], 0))
    sent.add(frame_of(dtype, 70, [Slice(2, 2, 1, 1), Slice(1, 3, 1, 1)], 10))
    assert sent.counts == {1: 4, 2: 3}
    parts = [Slice(1, 1, 3, 0), Slice(2, 0, 3, 0)]
    expected = frame_of(dtype, 70, parts, 0)
    form = DTYPES[DTYPE_CODES[dtype]]
    rows = [1, 2, 11, 3, 4, 10]  # where they were: in the first frame, and from 10 on in the second
    scale, value = form.n_scales(70) * form.scale_bytes, 70 * form.value_bytes
    payload = b"".join(bytes([r]) * scale for r in rows) + b"".join(bytes([r + 100]) * value for r in rows)
    found = filled(sent, *parts)
    assert (found.dtype, found.n_rows, found.n_cols, found.payload) == (dtype, 6, 70, payload)
    assert len(payload) == len(expected.payload)


def test_a_slice_that_starts_earlier_replaces_what_is_behind_it() -> None:
    sent = SentRows(1 << 20)
    sent.add(frame_of("float32", 1, [Slice(1, 0, 4, 1)], 0))
    sent.add(frame_of("float32", 1, [Slice(1, 2, 1, 1)], 50))
    assert sent.counts == {1: 3} and filled(sent, Slice(1, 0, 3, 0)).payload == bytes([100] * 4 + [101] * 4 + [150] * 4)


def test_the_oldest_text_is_forgotten_first_and_as_a_whole() -> None:
    sent = SentRows(40)
    for seq_id in (1, 2, 3):
        sent.add(frame_of("float32", 1, [Slice(seq_id, 0, 4, 1)], 0))
    assert sent.counts == {2: 4, 3: 4} and sent.n_bytes == 32
    sent.add(frame_of("float32", 1, [Slice(1, 4, 1, 1)], 0))
    assert 1 not in sent.counts, "its beginning is gone"
    with pytest.raises(EngineError):
        filled(sent, Slice(1, 0, 1, 0))
    with pytest.raises(EngineError):
        filled(sent, Slice(2, 2, 3, 0))
    sent.add(frame_of("float32", 1, [Slice(3, 4, 1, 1)], 0, freed=(2,), copies=((3, 8),)))
    assert sent.counts == {3: 5, 8: 4}
    sent.clear()
    assert (sent.counts, sent.n_bytes) == ({}, 0)


def test_rows_after_a_gap_are_not_kept_and_what_was_there_is_forgotten() -> None:
    """Rows that were never sent from here cannot be sent again: a text with a gap cannot be replayed."""
    sent = SentRows(1 << 20)
    sent.add(frame_of("float32", 1, [Slice(1, 0, 4, 1), Slice(2, 0, 2, 1)], 0))
    sent.add(frame_of("float32", 1, [Slice(1, 5, 1, 1), Slice(2, 2, 1, 1)], 50))
    assert sent.counts == {2: 3} and sent.n_bytes == 12
    with pytest.raises(EngineError):
        filled(sent, Slice(1, 0, 4, 0))


def test_a_copy_grows_apart_from_its_source() -> None:
    sent = SentRows(1 << 20)
    sent.add(frame_of("float32", 1, [Slice(1, 0, 2, 1)], 0))
    sent.add(frame_of("float32", 1, [Slice(2, 2, 1, 1)], 50, copies=((1, 2),)))
    sent.add(frame_of("float32", 1, [Slice(1, 2, 1, 1)], 70))
    assert filled(sent, Slice(1, 0, 3, 0)).payload == bytes([100] * 4 + [101] * 4 + [170] * 4)
    assert filled(sent, Slice(2, 0, 3, 0)).payload == bytes([100] * 4 + [101] * 4 + [150] * 4)
    assert sent.n_bytes == 24
    sent.add(frame_of("float32", 1, [], 0, freed=(1,), copies=((2, 3),)))
    assert (sent.counts, sent.n_bytes) == ({2: 3, 3: 3}, 24)


def test_texts_that_wait_for_a_replay_are_not_forgotten_for_others() -> None:
    sent = SentRows(40)
    sent.add(frame_of("float32", 1, [Slice(1, 0, 4, 1)], 0))
    sent.add(frame_of("float32", 1, [Slice(2, 0, 4, 1)], 20))
    sent.hold()
    for end in (4, 8):
        sent.add(frame_of("float32", 1, [Slice(3, end - 4, 4, 1)], 40))
        sent.add(Frame(FrameType.BATCH, EPOCH, 0, slices=(Slice(1, 0, end // 2, 0),), is_replay=True))
        assert sent.counts == {1: 4, 2: 4}, "there was no memory for text 3"
    assert filled(sent, Slice(1, 2, 2, 0), Slice(2, 0, 1, 0)).payload == bytes([102] * 4 + [103] * 4 + [120] * 4)
    sent.add(frame_of("float32", 1, [Slice(1, 4, 2, 1)], 60))
    assert sent.counts == {1: 6, 2: 4}
    sent.add(frame_of("float32", 1, [Slice(4, 0, 1, 1)], 80))
    assert sent.counts == {2: 4, 4: 1}, "text 1 goes on, and can be forgotten"
    sent.add(frame_of("float32", 1, [Slice(3, 0, 7, 1)], 80, freed=(2,)))
    assert sent.counts == {4: 1, 3: 7}


class Feeding:
    """A ring that gives these frames, and has what was sent."""

    def __init__(self, *frames: Frame) -> None:
        self.frames, self.sent = list(frames), list[Frame]()

    def recv(self) -> Frame:
        if not self.frames:
            raise RingEndedError
        return self.frames.pop(0)

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def release(self, frame: Frame) -> None:
        """Nothing is used again."""


class Idle:
    """A stage without blocks."""

    row_in = row_out = hidden_rows(1)
    caches = SimpleNamespace(rearrange=lambda freed, copies: None)

    def __call__(self, x: np.ndarray, slices: object) -> np.ndarray:
        return x


def test_a_node_that_fills_replays_keeps_their_rows_while_others_come() -> None:
    sent = SentRows(32)
    sent.add(frame_of("float32", 1, [Slice(1, 0, 8, 1)], 0))
    replays = [
        Frame(FrameType.BATCH, EPOCH, 0, slices=SliceTable([Slice(1, at, 4, 0)]), is_replay=True) for at in (0, 4)
    ]
    slices = SliceTable([Slice(2, 0, 4, 1)])
    other = Frame(FrameType.BATCH, EPOCH, 0, "float32", 4, 1, slices, payload=bytearray(16))
    ring = Feeding(replays[0], other, replays[1])
    anything: Any = (Idle(), ArrayRows(), ring, False)
    SecondaryLoop(*anything, sent=sent, replay=FILL).run()
    rows = frame_of("float32", 1, [Slice(1, 0, 8, 1)], 0).payload
    assert [bytes(frame.payload) for frame in ring.sent] == [rows[:16], bytes(16), rows[16:]]


def test_without_memory_nothing_is_kept() -> None:
    sent = SentRows(0)
    sent.add(frame_of("float32", 1, [Slice(1, 0, 4, 1)], 0))
    assert sent.counts == {}


def test_a_replay_travels_with_and_without_its_rows() -> None:
    codec = FrameCodec(Limits())
    full = frame_of("float32", 3, [Slice(1, 0, 4, 0)], 0, is_replay=True)
    empty = Frame(FrameType.BATCH, EPOCH, 1, slices=full.slices, is_replay=True)
    for frame in (full, empty):
        data = bytearray(PLAIN.head(frame)) + frame.payload
        header = codec.header(data[:72])
        n_tables = header.tables_bytes
        read = codec.frame(header, data[72 : 72 + n_tables], data[72 + n_tables :])
        assert (read.is_replay, read.n_rows, read.slices) == (True, frame.n_rows, frame.slices)


# A ring of two nodes in numbers: what each has of every sequence, position by position.


class Paper(Pages):
    """Pages without memory."""

    def copy(self, page: int) -> int:
        return self.take()


class Node:
    """The ids whose rows its caches hold, and the pages that they would take: a window drops those that it has passed."""

    def __init__(self, classes: Collection[PageClass]) -> None:
        self.ids: dict[int, list[int]] = {}
        self._pages = CachePages([*classes], [Paper(1, 10**6) for _ in classes])

    def rearrange(self, plan: Plan) -> None:
        self._pages.rearrange(plan.freed, plan.copies)
        made = {new_id: list(self.ids[source]) for source, new_id in plan.copies}
        for seq_id in (*plan.freed, *made):
            self.ids.pop(seq_id, None)
        self.ids.update(made)

    def compute(self, part: PlannedSlice, ids: Collection[int]) -> None:
        self._pages.extend(part.seq_id, part.start, part.n_rows)
        self.ids.setdefault(part.seq_id, [])[part.start :] = ids


class World:
    """The scheduler drives two nodes; the first keeps what it sent, the second can be lost.

    Tokens are a function of the prompt and the position, so that a wrong position or a lost row would show.

    Args:
        window: of some blocks of each node, if there are any.
        n_kept: rows that the first node has memory for, of all texts together.
    """

    def __init__(self, n_frames: int, chunk_rows: int, window: int | None = None, n_kept: int = 10**6) -> None:
        self.classes = (PageClass(None, 1), *([] if window is None else [PageClass(window, 1)]))
        self.memory = None if window is None else CacheMemory((NodeCaches("node", 1 << 40, self.classes),))
        self.scheduler = Scheduler(n_frames, chunk_rows, self.memory)
        self.nodes = [Node(self.classes), Node(self.classes)]
        self.sent = SentRows(4 * n_kept)
        self.flying: list[tuple[Plan, int, list[list[int]]]] = []  # with how many nodes have computed it, and its rows
        self.texts: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.cohorts: dict[int, Cohort] = {}
        self.n_replayed = 0

    def submit(self, seq_id: int, n_prompt: int, n_tokens: int, is_own: bool = False) -> None:
        """Texts with long prompts have the same one, which they share, unless they are to have their own."""
        self.texts[seq_id] = []
        first = 9000 if n_prompt > PAGE and not is_own else 1000 * seq_id
        prompt = tuple(first + k for k in range(n_prompt))
        self.scheduler.submit(Sequence(seq_id, prompt, SamplingParams(n_tokens), 1000))

    def submit_beams(self, n_prompt: int, n_tokens: int, n: int) -> None:
        first = len(self.texts)
        prompt = tuple(5000 + k for k in range(n_prompt))
        texts = [Sequence(first + i, prompt, SamplingParams(n_tokens, eos_ids=frozenset({0})), 1000) for i in range(n)]
        cohort = Cohort(texts, Beams(n))
        for text in texts:
            text.cohort = tuple(texts)
            self.texts[text.seq_id], self.cohorts[text.seq_id] = [], cohort
            self.scheduler.submit(text)

    def leave(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.flying.append((plan, 0, [list(part.ids) for part in plan.slices]))
        return plan is not None

    def compute(self, which: int) -> None:
        """The oldest frame that node `which` has not computed yet."""
        for k, (plan, n, rows) in enumerate(self.flying):
            if n == which:
                self.flying[k] = (plan, n + 1, self._rows(plan, which, rows))
                return

    def _rows(self, plan: Plan, which: int, rows: list[list[int]]) -> list[list[int]]:
        """The rows of each slice, for the next node."""
        node = self.nodes[which]
        node.rearrange(plan)
        if which or not plan.is_replay:
            for part, ids in zip(plan.slices, rows, strict=True):
                node.compute(part, ids)
        if not which:
            slices = SliceTable([Slice(part.seq_id, part.start, part.n_rows, part.n_logits) for part in plan.slices])
            self._keep(plan, slices, np.array([] if plan.is_replay else sum(rows, []), dtype=np.float32))
            if plan.is_replay:
                self.n_replayed += slices.n_rows
                ids = np.frombuffer(filled(self.sent, *slices).payload, dtype=np.float32).astype(int)
                ends = np.cumsum([part.n_rows for part in plan.slices])
                rows = [part.tolist() for part in np.split(ids, ends[:-1])]
        return rows

    def _keep(self, plan: Plan, slices: SliceTable, ids: np.ndarray) -> None:
        frame = Frame(
            FrameType.BATCH, EPOCH, plan.number, "float32", len(ids), 1, slices, plan.freed, ids.tobytes(), plan.copies,
            plan.is_replay,
        )  # fmt: skip
        self.sent.add(frame)
        assert self.sent.n_bytes == sum(4 * n for n in self.sent.counts.values())

    def back(self) -> None:
        if not self.flying or self.flying[0][1] < 2:
            return
        plan, _, _ = self.flying.pop(0)
        tokens, complete = {}, []
        for part, is_live in zip(plan.slices, self.scheduler.due(plan.number)[1], strict=True):
            if part.n_logits and (cohort := self.cohorts.get(part.seq_id)) is not None:
                tokens[part.seq_id] = []
                ids = self.nodes[1].ids[part.seq_id][: part.start + part.n_rows]
                logits = np.random.default_rng(ids).normal(size=9).astype(np.float32)
                if is_live and cohort.take(part.seq_id, logits):
                    complete.append(cohort)
            elif part.n_logits:
                ids = self.nodes[1].ids[part.seq_id]
                tokens[part.seq_id] = [(sum(ids[: part.start + part.n_rows]) + part.seq_id) % 997]
        for event in self.scheduler.update(plan.number, tokens):
            self.texts[event.seq_id] += event.tokens
            if event.finish_reason:
                self.ended.add(event.seq_id)
        for cohort in complete:
            if choices := cohort.choose():
                self.scheduler.regroup(cohort.texts, [(choice.parent, choice.token) for choice in choices])
                continue
            for text, ended in zip(cohort.texts, cohort.ended, strict=True):
                self.texts[text.seq_id] += ended.tokens
                self.ended.add(text.seq_id)
                self.scheduler.cancel(text.seq_id, ended.reason)

    def lose(self, n_kept: int) -> None:
        """The second node is replaced by one without caches; the rows of `n_kept` texts can be replayed."""
        self.nodes[1] = Node(self.classes)
        self._resume(dict(list(self.sent.counts.items())[:n_kept]), True)

    def form_again(self) -> None:
        """The ring is left in the middle of its frames, and formed again; both nodes have their caches."""
        self._resume(dict.fromkeys(self.texts, 10**6), False)

    def _resume(self, kept: dict[int, int], has_fresh: bool) -> None:
        self.flying.clear()
        for cohort in self.cohorts.values():
            cohort.forget()
        self.scheduler.resume(self.scheduler.n_frames, self.memory, kept, has_fresh)
        self.sent.hold()

    def run(self) -> dict[int, list[int]]:
        while len(self.ended) < len(self.texts):
            while self.leave():
                pass
            self.compute(0)
            self.compute(1)
            self.back()
        return self.texts


# Few losses beside the other steps: else no token is back before the next one, and nothing is ever replayed.
STEPS: list[str | int] = [*["leave", "first", "second", "back"] * 4, 0, 2, 3, "again"]
Steps = st.lists(st.sampled_from(STEPS), max_size=60)


def disturb(world: World, steps: Collection[str | int]) -> dict[int, list[int]]:
    """The texts of a world after these steps; a number is a loss, and how many texts can be replayed then."""
    actions: dict[str, Callable[[], object]] = {
        "leave": world.leave, "back": world.back, "again": world.form_again,
        "first": lambda: world.compute(0), "second": lambda: world.compute(1),
    }  # fmt: skip
    for step in steps:
        if isinstance(step, int):
            world.lose(step)
        else:
            actions[step]()
    return world.run()


@given(
    st.lists(st.tuples(st.integers(1, 9) | st.just(PAGE + 3), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 5) | st.just(PAGE),
    st.none() | st.tuples(st.sampled_from([2, PAGE + 3]), st.integers(1, 6), st.integers(1, 4)),
    st.none() | st.integers(1, 9),
    st.sampled_from([10**6, 10, 40]),
    Steps,
)
def test_texts_are_those_of_an_undisturbed_ring(
    texts: list[tuple[int, int]], n_frames: int, chunk_rows: int, beams: tuple[int, int, int] | None, window: int | None,
    n_kept: int, steps: list[str | int],
) -> None:  # fmt: skip
    worlds = [World(n_frames, chunk_rows), World(n_frames, chunk_rows, window, n_kept)]
    for world in worlds:
        for seq_id, (n_prompt, n_tokens) in enumerate(texts):
            world.submit(seq_id, n_prompt, n_tokens)
        if beams is not None:
            world.submit_beams(*beams)
    undisturbed, disturbed = worlds
    assert disturb(disturbed, steps) == undisturbed.run()


def test_long_texts_go_on_behind_many_losses_with_windows_and_little_memory() -> None:
    """Prompts of many frames, and texts longer than a window and its slack: nodes drop what the window has passed."""
    n_replayed = 0
    for seed in range(N_LONG):
        rng = random.Random(seed)
        n_frames, chunk_rows = rng.randint(1, 6), rng.choice([8, PAGE, CHUNK_ROWS])
        window, n_kept = rng.choice([None, 1, 8, 40]), rng.choice([100, 250, 500, 10**6])
        texts = [
            (rng.choice([3, 90, 200, 400]), rng.randint(1, 60), rng.random() < 0.5) for _ in range(rng.randint(1, 4))
        ]
        worlds = [World(n_frames, chunk_rows), World(n_frames, chunk_rows, window, n_kept)]
        for world in worlds:
            for seq_id, (n_prompt, n_tokens, is_own) in enumerate(texts):
                world.submit(seq_id, n_prompt, n_tokens, is_own)
        steps: list[str | int] = []
        for _ in range(rng.randint(1, 4)):
            steps += rng.choices(["leave", "first", "second", "back"], k=rng.randint(1, 150))
            steps.append(rng.choice([1, 2, 4, 4, "again"]))
        assert disturb(worlds[1], steps) == worlds[0].run(), seed
        n_replayed += worlds[1].n_replayed
    assert n_replayed > 1000


@pytest.mark.parametrize("chunk_rows", [1, PAGE])
@pytest.mark.parametrize("n_prompt", [2, PAGE + 3])
def test_a_search_goes_on_after_a_loss_behind_any_frame(chunk_rows: int, n_prompt: int) -> None:
    """Where rows of some of its texts were back, and others were not."""
    worlds = []
    while not worlds or len(worlds[-1].ended) < 3:
        world = World(1, chunk_rows)
        world.submit_beams(n_prompt, 4, 3)
        for action in (world.leave, lambda w=world: w.compute(0), lambda w=world: w.compute(1), world.back) * len(
            worlds
        ):
            action()
        worlds.append(world)
    wanted = worlds[-1].texts
    assert any(wanted.values()) and len(worlds) > 4
    for world in worlds[:-1]:
        world.lose(3)
        assert world.run() == wanted
