"""Cache pages against plain lists: whatever is extended, cut, copied and freed, each sequence keeps what it wrote."""

from __future__ import annotations

import mmap
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi.errors import EngineError
from mdi.kernels import pages as pages_module
from mdi.kernels.pages import CachePages, Pool, capacity_of
from mdi.model.caches import PAGE, SLACK, PageClass, n_pages

BYTES = mmap.PAGESIZE


def caches_of(windows: tuple[int | None, ...], capacity: int) -> CachePages:
    """One class for each window; a page has one uint64 for each position, and more."""
    classes = [PageClass(window, BYTES) for window in windows]
    return CachePages(classes, [Pool(BYTES, capacity) for _ in classes])


def numbers_of(pool: Pool) -> np.ndarray:
    """(capacity, PAGE): the number that stands for each position."""
    return pool.memory.view(np.uint64)[:, :PAGE]


class Model:
    """What sequences wrote, as lists, beside the pages that they wrote it to."""

    def __init__(self, windows: tuple[int | None, ...], capacity: int) -> None:
        self.caches = caches_of(windows, capacity)
        self.texts: dict[int, list[int]] = {}
        self.lowest: dict[
            int, list[int]
        ] = {}  # by sequence and class: the farthest start so far decides what may be gone
        self.last = 0

    def extend(self, seq_id: int, start: int, n: int) -> None:
        text = self.texts.get(seq_id, [])
        farthest = self.lowest.get(seq_id, [0] * len(self.caches.classes))
        try:
            tables = self.caches.extend(seq_id, start, n)
        except EngineError as e:
            self._refused(seq_id, start, n, str(e))
            return
        assert start <= len(text)
        new = list(range(self.last + 1, self.last + n + 1))
        self.last += n
        self.texts[seq_id] = text[:start] + new
        self.lowest[seq_id] = [max(lowest, start) for lowest in farthest]
        for pool, table in zip(self.caches.pools, tables, strict=True):
            assert isinstance(pool, Pool)
            for p, number in enumerate(new, start):
                numbers_of(pool)[table.ids[p // PAGE - table.first], p % PAGE] = number

    def _refused(self, seq_id: int, start: int, n: int, why: str) -> None:
        text = self.texts.get(seq_id, [])
        if start > len(text):
            assert "its cache ends at" in why
        elif "the window kept" in why:
            farthest, gone = self.lowest[seq_id], False
            for c, at in zip(self.caches.classes, farthest, strict=True):
                gone |= c.window is not None and start < at - SLACK and at > c.window + SLACK
            assert gone and start < len(text)
        else:
            assert any(pool.n_free < -(-n // PAGE) + 1 for pool in self.caches.pools)
            if seq_id in self.texts:
                self.texts[seq_id] = text[:start]

    def copy(self, seq_id: int, new_id: int) -> None:
        if seq_id not in self.texts:
            with pytest.raises(EngineError):
                self.caches.rearrange((), [(seq_id, new_id)])
            return
        self.caches.rearrange((), [(seq_id, new_id)])
        self.texts[new_id], self.lowest[new_id] = list(self.texts[seq_id]), list(self.lowest[seq_id])

    def exchange(self, seq_id: int, other_id: int) -> None:
        """Both continue from the other one, or, where that is the same, from a text that is freed with it."""
        if {seq_id, other_id} <= self.texts.keys():
            self.caches.rearrange([seq_id], [(seq_id, other_id), (other_id, seq_id)][: 1 + (seq_id != other_id)])
            for of in (self.texts, self.lowest):
                of[seq_id], of[other_id] = list(of[other_id]), list(of[seq_id])

    def free(self, seq_id: int) -> None:
        self.caches.free(seq_id)
        self.texts.pop(seq_id, None)
        self.lowest.pop(seq_id, None)

    def check(self) -> None:
        caches = self.caches
        assert len(caches) == len(self.texts)
        for c, (cache_class, pool) in enumerate(zip(caches.classes, caches.pools, strict=True)):
            assert isinstance(pool, Pool)
            users: Counter[int] = Counter()
            for seq_id, text in self.texts.items():
                table = caches.entries(seq_id)[c]
                users.update(table.ids.tolist())
                assert caches.end(seq_id) == len(text)
                assert table.n == max(0, -(-len(text) // PAGE) - table.first)
                if cache_class.window is None:
                    assert table.first == 0
                else:
                    farthest = self.lowest[seq_id][c]
                    assert table.first * PAGE <= max(0, farthest - cache_class.window - SLACK)
                for p in range(table.first * PAGE, len(text)):
                    assert numbers_of(pool)[table.ids[p // PAGE - table.first], p % PAGE] == text[p], (seq_id, p)
            assert pool.n_used == len(users) and pool.n_free == pool.capacity - len(users)
            assert {page: pool.references[page] for page in users} == dict(users)
            assert not users.keys() & set(pool.unused) and len(set(pool.unused)) == len(pool.unused)
        assert caches.n_bytes == sum(pool.n_used for pool in caches.pools) * BYTES


IDS = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("more"), IDS, st.integers(1, 100)),
    st.tuples(st.just("back"), IDS, st.integers(1, 90)),
    st.tuples(st.just("at"), IDS, st.integers(0, 300)),
    st.tuples(st.just("copy"), IDS, IDS),
    st.tuples(st.just("exchange"), IDS, IDS),
    st.tuples(st.just("free"), IDS, st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(
    windows=st.lists(st.none() | st.integers(1, 90), max_size=2, unique=True),
    capacity=st.integers(1, 24),
    kept=st.sampled_from([0, 2 * BYTES, 1 << 20]),
    steps=st.lists(STEPS, max_size=25),
)
def test_every_sequence_keeps_what_it_wrote(
    windows: list[int | None], capacity: int, kept: int, steps: list[tuple[Any, ...]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages_module, "KEPT_FREE_BYTES", kept)
        model = Model((None, *(w for w in windows if w is not None)), capacity)
        for what, seq_id, n in steps:
            end = len(model.texts.get(seq_id, []))
            if what == "more":
                model.extend(seq_id, end, n)
            elif what == "back":
                model.extend(seq_id, max(0, end - n), 1 + n // 3)
            elif what == "at":
                model.extend(seq_id, n, 5)
            elif what == "copy":
                model.copy(seq_id, n)
            elif what == "exchange":
                model.exchange(seq_id, n)
            else:
                model.free(seq_id)
            model.check()


@settings(max_examples=100)
@given(window=st.none() | st.integers(1, 200), chunk_rows=st.integers(1, 100), data=st.data())
def test_a_sequence_never_has_more_pages_than_were_reckoned(
    window: int | None, chunk_rows: int, data: st.DataObject
) -> None:
    caches = caches_of((window,), 64)
    end = 0
    while end < 600:
        n = data.draw(st.integers(1, chunk_rows))
        caches.extend(5, end, n)
        end += n
        assert caches.pools[0].n_used <= n_pages(window, end, chunk_rows) <= -(-end // PAGE)


def test_when_pages_run_out_a_sequence_ends_where_it_was_to_go_on() -> None:
    caches = caches_of((None, 10), 3)
    caches.extend(0, 0, 40)
    for _ in range(2):
        for seq_id, start, n in ((0, 35, 100), (1, 0, 70)):
            with pytest.raises(EngineError) as caught:
                caches.extend(seq_id, start, n)
            assert caught.value.code == "memory"
        assert caches.end(0) == 35 and len(caches) == 1
        assert [pool.n_used for pool in caches.pools] == [2, 2]
    caches.extend(0, 35, 61)
    assert caches.end(0) == 96


def test_a_copy_shares_pages_until_one_of_the_two_writes() -> None:
    caches = caches_of((None,), 10)
    caches.extend(0, 0, 70)
    caches.rearrange((), [(0, 1)])
    assert caches.pools[0].n_used == 3
    own, other = (list(caches.extend(i, 70, 1)[0].ids) for i in (0, 1))
    assert own[:2] == other[:2] and own[2] != other[2] and caches.pools[0].n_used == 4
    caches.free(0)
    assert caches.pools[0].n_used == 3
    caches.extend(1, 64, 1)  # at a page's begin nothing of it is kept, so nothing is copied
    assert caches.pools[0].n_used == 3


def test_free_pages_hold_no_memory_beyond_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "KEPT_FREE_BYTES", 2 * BYTES)
    pool = Pool(BYTES, 8)
    taken = [pool.take() for _ in range(6)]
    pool.memory[:6] = 7
    pool.release(taken[:5])
    assert int(pool.memory[taken[5]].min()) == 7
    assert sum(int(pool.memory[page].max()) == 7 for page in taken[:5]) == 2
    again = [pool.take() for _ in range(7)]
    assert sorted(again) == sorted({*range(8)} - {taken[5]}) and pool.n_free == 0


def test_what_is_only_reserved_takes_no_memory() -> None:
    """A stage prepares its caches anew for every run, and reserves as many pages as the machine's memory could hold."""
    tracemalloc.start()
    try:
        pool = Pool(BYTES, 1 << 24)
        page = pool.take()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert pool.n_used == 1 and pool.n_free == (1 << 24) - 1
    pool.release([page])
    assert pool.n_used == 0 and pool.take() == page


class StingyMmap:
    """An mmap module of a system that grants so many bytes at once."""

    def __init__(self, granted: int) -> None:
        self._granted = granted

    def __getattr__(self, name: str) -> Any:
        return getattr(mmap, name)

    def mmap(self, fileno: int, length: int, flags: int) -> mmap.mmap:
        if length > self._granted:
            raise OSError(12, "Cannot allocate memory")
        return mmap.mmap(fileno, length, flags=flags)


def test_a_system_that_refuses_a_reservation_gets_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "mmap", StingyMmap(10 * BYTES))
    caches = CachePages([PageClass(None, BYTES)], [Pool(BYTES, 64)])
    assert caches.pools[0].capacity == 4 and caches.most_bytes == 4 * BYTES
    caches.extend(0, 0, 4 * PAGE)
    with pytest.raises(EngineError):
        caches.extend(0, 4 * PAGE, 1)
    monkeypatch.setattr(pages_module, "mmap", StingyMmap(BYTES - 1))
    with pytest.raises(EngineError) as caught:
        Pool(BYTES, 64)
    assert caught.value.code == "memory"


def test_a_known_limit_bounds_what_is_reserved() -> None:
    cache_class = PageClass(None, 100)
    assert capacity_of(cache_class, 64, 1000) == 10
    assert capacity_of(cache_class, 64, 0) == 1  # nobody will be let in
    assert capacity_of(cache_class, 10**15) >= 10**15 // PAGE
    assert capacity_of(PageClass(None, 1 << 20), 64) > 64
    assert CachePages([], []).most_bytes is None


def test_a_page_larger_than_all_memory_kept_free_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "KEPT_FREE_BYTES", BYTES - 1)
    pool = Pool(BYTES, 2)
    page = pool.take()
    pool.memory[page] = 1
    pool.release([page])
    assert not pool.memory[page].any() and pool.take() == page
