"""Memory of the states of recurrent blocks; what is computed with them is tried in tests/references/test_delta_nets.py."""

from __future__ import annotations

import pytest

from mdi.errors import EngineError
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
    with pytest.raises(EngineError, match="no memory is left for states"):
        store.grow(entry, PAGE, 1)
    store.most_bytes = 2 * one - 1
    copy = store.copied(entry)
    with pytest.raises(EngineError, match="no memory is left for states"):
        store.grow(copy, PAGE - 1, 1)
    assert store.n_bytes == one
    store.most_bytes += 1
    store.grow(copy, PAGE - 1, 1)
    assert store.n_bytes == 2 * one == store.most_bytes
