"""Caches of the torch path against plain lists, and what is reckoned for all nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopback import CPU
from mdi.engine.memory import CacheMemory, NodeCaches
from mdi.errors import EngineError
from mdi.model.caches import PAGE, PageClass
from mdi.model.plain import ModelConfig, spec_of
from mdi.stages import torch_cache as cache_module
from mdi.stages.torch_cache import BlockRows, DevicePages, Memory, TorchCaches

HEADS = ModelConfig(
    n_layer=3, sliding_window_size=20, sliding_window_indices=(0, 1, 0), n_head=2, n_query_groups=2, head_size=5,
)  # fmt: skip
_RANKS = {"q_lora_rank": 4, "kv_lora_rank": 5, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 5}
LATENT = replace(HEADS, latent_attention=_RANKS)


def caches_of(config: ModelConfig, is_device: bool, dtype: torch.dtype = torch.float32) -> TorchCaches:
    """On the CPU; with `is_device` in slabs of two pages, as on a GPU."""
    caches = TorchCaches(spec_of(config), 0, 3, 640, CPU, dtype, 64 * 8192)
    if is_device:
        for c, pool in enumerate(caches.pools):
            slabs = DevicePages(pool.page_bytes, pool.capacity, dtype, CPU)
            slabs.slab_pages = 2
            caches.stores[c].pool = slabs
        for block in caches.blocks:
            block.pool = caches.pools[block.cache_class]
    return caches


@settings(max_examples=40, deadline=None)
@given(
    is_device=st.booleans(), config=st.sampled_from([HEADS, LATENT]),
    slices=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(0, 5)), min_size=1, max_size=12),
)  # fmt: skip
def test_a_block_reads_what_was_written(
    is_device: bool, config: ModelConfig, slices: list[tuple[int, int, int]]
) -> None:
    caches = caches_of(config, is_device)
    memory = Memory(CPU)
    texts: dict[int, torch.Tensor] = {}
    n_halves = 1 if config is LATENT else 2
    groups, size = (1, 7) if config is LATENT else (2, 5)
    for seq_id, n, back in slices:
        old = texts.get(seq_id, torch.zeros(3, 2, 0, groups, size))
        start = max(0, old.size(2) - back)
        tables = caches.extend(seq_id, start, n)
        new = torch.randn(3, 2, n, groups, size)
        texts[seq_id] = torch.cat((old[:, :, :start], new), dim=2)
        positions = np.arange(start, start + n)
        for layer, block in enumerate(caches.blocks):
            table = tables[block.cache_class]
            ids = table.ids[positions // PAGE - table.first]
            block.write(caches.select(block.cache_class, ids, positions % PAGE), *new[layer, :n_halves])
        for other, text in texts.items():
            for layer, block in enumerate(caches.blocks):
                table = caches.entries(other)[block.cache_class]
                pages = caches.select(block.cache_class, table.ids)
                for half in range(n_halves):
                    found = block.gather(half, pages, memory)
                    expected = text[layer, half, table.first * PAGE :]
                    assert torch.equal(found[: len(expected)], expected)
                    assert found.isfinite().all()


@pytest.mark.parametrize("is_device", [False, True])
def test_a_copied_sequence_writes_to_pages_of_its_own(is_device: bool) -> None:
    caches = caches_of(HEADS, is_device)
    block, memory = caches.blocks[0], Memory(CPU)
    kv = torch.randn(2, 40, 2, 5)

    def write(seq_id: int, start: int, kv: torch.Tensor) -> None:
        ids = caches.extend(seq_id, start, kv.size(1))[0].ids
        positions = np.arange(start, start + kv.size(1))
        block.write(caches.select(0, ids[positions // PAGE], positions % PAGE), *kv)

    write(0, 0, kv)
    caches.rearrange((), [(0, 1)])
    write(1, 36, torch.zeros(2, 1, 2, 5))
    for seq_id, n in ((0, 40), (1, 36)):
        found = block.gather(1, caches.select(0, caches.entries(seq_id)[0].ids), memory)
        assert torch.equal(found[:n], kv[1, :n])
    assert not found[36].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_caches_hold_what_they_are_told_to(dtype: torch.dtype) -> None:
    caches = caches_of(HEADS, False, dtype)
    positions = np.arange(5)
    ids = caches.extend(7, 0, 5)[0].ids
    caches.blocks[0].write(caches.select(0, ids[positions // PAGE], positions), *torch.randn(2, 5, 2, 5))
    found = caches.blocks[0].gather(0, caches.select(0, ids), Memory(CPU))
    assert found.dtype == dtype and found.shape == (PAGE, 2, 5)
    assert caches.n_bytes == sum(c.page_bytes for c in caches.classes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_another_type_do_not_fill_them(dtype: torch.dtype) -> None:
    caches = caches_of(HEADS, False, dtype)
    positions = np.arange(5)
    pages = caches.extend(7, 0, 5)[0].ids[positions // PAGE]
    rows = BlockRows(caches, 0)
    found = rows.read(0, pages, positions)
    rows.write(0, pages, positions, found)
    with pytest.raises(EngineError, match="float64"):
        rows.write(0, pages, positions, tuple(one.astype(np.float64) for one in found))


def test_memory_of_a_gpu_is_given_back_when_nobody_uses_it() -> None:
    pool = DevicePages(4096, 10, torch.float32, CPU, slab_bytes=3 * 4096)
    taken = [pool.take() for _ in range(4)]
    assert [slab.shape for slab in pool.slabs] == [(3, 1024)] * 2
    pool.release(taken[1:])
    pool.slabs[0][taken[0]] = 5
    other = pool.copy(taken[0])
    assert float(pool.slabs[other // 3][other % 3].sum()) == 5 * 1024 and len(pool.slabs) == 2
    pool.release([taken[0], other])
    assert not pool.slabs and pool.n_free == 10
    assert pool.take() == 0


def test_a_gpu_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    pool = DevicePages(4096, 10, torch.float32, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module.torch, "empty", refuse)
        with pytest.raises(EngineError) as caught:
            pool.take()
    assert caught.value.code == "memory"
    assert pool.n_free == 10 and pool.take() == 0


def test_the_smallest_node_decides() -> None:
    nodes = (
        NodeCaches("starter", 100_000, (PageClass(None, 4000),)),
        NodeCaches("secondary0", 80_000, (PageClass(None, 4000), PageClass(10, 2000))),
        NodeCaches("secondary1", 0, ()),  # a starter without blocks keeps nothing
    )
    memory = CacheMemory(nodes)
    assert memory.needs(200) == (7 * 4000, 7 * 4000 + 6 * 2000, 0)
    assert memory.needs(33) == (2 * 4000, 2 * 6000, 0)
    assert memory.n_sequences(200) == 2 and CacheMemory(nodes[2:]).n_sequences(200) is None
    assert memory.refusal(500) is None
    assert "kB of cache on secondary0, which has 80.0 kB" in str(memory.refusal(600))
    assert "--kv-memory" in str(memory.refusal(600))
    assert memory.holds((100_000, 80_000, 0)) and not memory.holds((100_000, 80_001, 0))
