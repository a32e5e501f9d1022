"""Memory of the states of recurrent blocks; what is computed with them is tried in tests/references/test_delta_nets.py."""

from __future__ import annotations

import pytest

from mdi.errors import EngineError
from mdi.kernels.stage_caches import StageCaches
from mdi.kernels.states import StateStore
from mdi.model.caches import PAGE, State


def test_memory_is_refused_before_it_is_more_than_the_limit() -> None:
    store = StateStore(State(2, 4, 4, 24, 4), 3)
    entry = store.begin()
    store.grow(entry, 0, PAGE)
    store.most_bytes = one = store.n_bytes
    store.free(entry)
    entry = store.begin()
    store.grow(entry, 0, PAGE)  # what it had before goes
    assert store.n_bytes == one
    with pytest.raises(EngineError, check=lambda e: e.code == "memory"):
        store.grow(entry, PAGE, 1)
    store.most_bytes = 2 * one - 1
    copy = store.copied(entry)
    with pytest.raises(EngineError, check=lambda e: e.code == "memory"):
        store.grow(copy, PAGE - 1, 1)
    assert store.n_bytes == one
    store.most_bytes += 1
    store.grow(copy, PAGE - 1, 1)
    assert store.n_bytes == 2 * one == store.most_bytes


def test_a_text_that_is_refused_leaves_no_memory_behind() -> None:
    kind = State(2, 4, 4, 24, 4)
    store = StateStore(kind, 3)
    caches = StageCaches([store], [(0, i) for i in range(3)], [0, 1, 2])
    caches.extend(1, 0, 8)
    taken = store.n_bytes
    store.most_bytes = taken
    for _ in range(2):
        with pytest.raises(EngineError, check=lambda e: e.code == "memory"):
            caches.extend(2, 0, 8)
        with pytest.raises(EngineError, match="its cache ends at 0"):
            caches.extend(3, 5, 8)
    assert store.n_bytes == taken
    entry = caches.entries(1)[0]
    caches.extend(1, 8, 20)
    with pytest.raises(EngineError, check=lambda e: e.code == "memory"):
        store.grow(entry, 300, 600)
    assert entry.first == 0, "as it was"
