"""Keys and values that are written into pages have the bytes that the kernels write."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_models import tensors_of

from families import random_gpt
from mdi.errors import EngineError
from mdi.kernels import library
from mdi.kernels.blocks import Blocks, Context
from mdi.kernels.cache_rows import piece_of
from mdi.kernels.pages import CachePages, Pool
from mdi.kernels.slices import Slice
from mdi.kernels.stage_caches import CacheRun, Piece
from mdi.model.caches import CACHE_TYPES, PAGE
from mdi.model.plain import ModelConfig, spec_of
from tiny_checkpoint import tiny_config

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")

N = 75  # positions: two pages and a part
SIZE, WIDE, GROUPS = 20, 32, 2  # of a head, and of its values in whole vectors


def blocks_with(cache_type: str) -> Blocks:
    config = tiny_config(n_layer=1, n_head=4, n_query_groups=GROUPS, head_size=SIZE)
    gpt = random_gpt(config, 3)
    blocks = Blocks(
        spec_of(ModelConfig.from_litgpt(config)), 0, 1, lambda i: tensors_of(gpt, i, "float32"), cache_type, Context(1)
    )
    blocks.prepare(2 * N, [8])
    return blocks


def bytes_of(caches: CachePages, seq_id: int) -> list[bytes]:
    """Of the pages of a sequence, which has the only class of a stage."""
    (table,), (pool,) = caches.entries(seq_id), caches.pools
    assert isinstance(pool, Pool)
    return [pool.memory[page].tobytes() for page in table.ids]


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_they_are_those_of_the_kernels(cache_type: str) -> None:
    x = np.random.default_rng(1).standard_normal((N, tiny_config().n_embd)).astype(np.float32)
    plain, blocks = blocks_with("float32"), blocks_with(cache_type)
    plain.forward(x.copy(), [Slice(0, 0, N)])
    blocks.forward(x.copy(), [Slice(0, 0, N)])
    pages = [np.frombuffer(page, np.float32) for page in bytes_of(plain.caches, 0)]
    slot = (SIZE + WIDE) * PAGE
    slots = np.stack([page[: GROUPS * slot].reshape(GROUPS, slot) for page in pages], axis=1)  # (GROUPS, pages, slot)
    keys = slots[:, :, : SIZE * PAGE].reshape(GROUPS, -1, SIZE, PAGE).transpose(1, 3, 0, 2).reshape(-1, GROUPS, SIZE)
    values = slots[:, :, SIZE * PAGE :].reshape(GROUPS, -1, PAGE, WIDE).transpose(1, 2, 0, 3).reshape(-1, GROUPS, WIDE)
    assert np.abs(keys[:N]).min() > 0 and np.abs(values[:N, :, :SIZE]).min() > 0
    rows = CacheRun(0, N, cache_type, {0: piece_of(keys[:N], values[:N, :, :SIZE], cache_type)})
    blocks.caches.extend(1, 0, 3)
    for start, n in ((0, 1), (1, 40), (30, N - 30)):  # the last ones again
        blocks.caches.fill(1, rows.part(start, start + n))
    assert blocks.caches.end(1) == N
    assert bytes_of(blocks.caches, 1) == bytes_of(blocks.caches, 0)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_those_of_another_type_are_refused(cache_type: str) -> None:
    blocks = blocks_with(cache_type)
    keys, values = np.zeros((2, N, GROUPS, SIZE), np.float32)
    piece = piece_of(keys, values, cache_type)
    blocks.caches.extend(1, 0, 3)
    blocks.caches.fill(1, CacheRun(0, N, cache_type, {0: piece}))
    for i in range(len(piece.arrays)):
        other = Piece(0, tuple(one.astype(np.float64) if i == j else one for j, one in enumerate(piece.arrays)))
        with pytest.raises(EngineError, match="float64"):
            blocks.caches.fill(1, CacheRun(0, N, cache_type, {0: other}))
