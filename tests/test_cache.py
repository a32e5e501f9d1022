"""Caches against what is reserved for them: whatever comes in whatever slices, never a byte more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopback import CPU
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.model.cache import BlockCache, CacheShape, CacheStore
from mdi.model.room import CacheKind, largest_room, room_for


@pytest.mark.parametrize(
    ("n", "room"),
    [(0, 64), (1, 64), (64, 64), (65, 96), (97, 128), (129, 192), (193, 256), (257, 512), (513, 768), (10_000, 10_240)],
)
def test_room_grows_in_steps(n: int, room: int) -> None:
    assert room_for(n) == room


@settings(max_examples=150)
@given(
    window=st.none() | st.integers(1, 300),
    chunk_rows=st.integers(1, 130),
    max_length=st.integers(1, 1500),
    data=st.data(),
)
def test_a_cache_never_takes_more_than_was_reckoned(
    window: int | None, chunk_rows: int, max_length: int, data: st.DataObject
) -> None:
    """Keys are their own positions, so that what is read back shows that growing and forgetting lost nothing."""
    length = data.draw(st.integers(1, max_length))
    shape = CacheShape(2, 3, 1, window)
    cache = BlockCache(shape, max_length, CPU, torch.float32)
    limit = shape.kind(4).n_bytes(length, chunk_rows, max_length)
    assert limit == 2 * 4 * 4 * largest_room(length, window, chunk_rows, max_length)
    at = 0
    while at < length:
        n = min(data.draw(st.integers(1, chunk_rows)), length - at)
        positions = torch.arange(at, at + n, dtype=torch.float32)
        keys, values, first = cache.append(at, positions.view(1, n, 1).expand(2, n, 3), positions.view(1, n, 1))
        assert cache.n_bytes <= limit
        earliest = 0 if window is None else max(0, at - window + 1)
        assert first <= earliest or window is None
        expected = torch.arange(first, at + n, dtype=torch.float32)
        assert torch.equal(keys[1, :, 2], expected) and torch.equal(values[0, :, 0], expected)
        at += n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_store_holds_what_it_is_told_to(dtype: torch.dtype) -> None:
    shapes = [CacheShape(2, 4, 4), CacheShape(2, 4, 4, window=8)]
    store = CacheStore(shapes, 500, CPU, dtype)
    for cache in store.of(7):
        keys, _, _ = cache.append(0, torch.randn(2, 5, 4), torch.randn(2, 5, 4))
        assert keys.dtype == dtype
    assert (
        store.n_bytes == 2 * 64 * 16 * dtype.itemsize == sum(s.kind(dtype.itemsize).n_bytes(5, 64, 500) for s in shapes)
    )


def test_a_window_takes_no_more_however_long_the_sequence() -> None:
    kind = CacheKind(100, 10)
    assert kind.n_bytes(1000, 64, 100_000) == kind.n_bytes(90_000, 64, 100_000) == 10 * 512
    assert kind.n_bytes(50, 64, 100_000) == 640


def test_the_smallest_node_decides() -> None:
    nodes = (
        NodeCaches("starter", 100_000, (CacheKind(None, 100),), 1000, 64),
        NodeCaches("secondary0", 80_000, (CacheKind(None, 100), CacheKind(10, 100)), 1000, 64),
        NodeCaches("secondary1", 0, (), 1000, 64),  # a starter without blocks keeps nothing
    )
    memory = CacheMemory(nodes)
    assert memory.needs(200) == (25_600, 25_600 + 19_200, 0)
    assert memory.n_sequences(200) == 1 and CacheMemory(nodes[2:]).n_sequences(200) is None
    assert memory.refusal(500) is None
    assert "up to 600 tokens needs 0.1 MB of cache on secondary0, which has 0.1 MB" in str(memory.refusal(600))
    assert "--kv-memory" in str(memory.refusal(600))
    assert memory.admits((0, 0, 0), (100_000, 80_000, 0)) and not memory.admits((0, 1, 0), (100_000, 80_000, 0))
