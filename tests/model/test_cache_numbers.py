"""Kinds of cache as numbers: which blocks share a class, what a sequence takes at most, and how far back it can be cut."""

from __future__ import annotations

import mmap
from dataclasses import replace

from mdi.model.caches import (
    CHUNK_ROWS,
    PAGE,
    SLACK,
    UNKNOWN,
    PageClass,
    Paged,
    cache_classes,
    cut_to,
    kind_of,
    kinds_of,
    n_pages,
    places_of,
)
from mdi.model.plain import ModelConfig, spec_of
from mdi.model.spec import Attention

CONFIG = ModelConfig(
    n_layer=5, sliding_window_size=16, sliding_window_indices=(1, 0, 1, 1, 0), n_head=2, n_query_groups=2, head_size=20
)


def whole(n_bytes: int) -> int:
    """As so many pages of the system."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def test_classes_of_a_stage() -> None:
    classes, places = cache_classes(spec_of(CONFIG), 1, 5, "fp16")
    of_block = 2 * (20 + 32) * PAGE * 2
    assert classes == [PageClass(None, whole(2 * of_block)), PageClass(16, whole(2 * of_block))]
    assert places == [(0, 0), (1, 0), (1, 1), (0, 1)]
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 8, "v_head_dim": 8}
    latent = replace(CONFIG, latent_attention=ranks, sliding_window_size=None, sliding_window_indices=None)
    assert cache_classes(spec_of(latent), 0, 3, "float32")[0] == [PageClass(None, 3 * 96 * PAGE * 4)]


def test_blocks_of_other_sizes_have_classes_of_their_own() -> None:
    """As Gemma 4's: full attention has larger heads and fewer groups, and the last blocks read the caches of others."""
    spec = spec_of(CONFIG)
    near, far = spec.blocks[0], spec.blocks[1]
    assert isinstance(far.mixer, Attention)
    wide = replace(far, mixer=replace(far.mixer, head_size=64, n_groups=1))
    spec = replace(spec, blocks=(near, wide, far, replace(near, cache_of=0), replace(wide, cache_of=1), near))
    classes, places = cache_classes(spec, 0, 6, "float32")
    assert [c.window for c in classes] == [16, None, None]
    assert [c.page_bytes for c in classes] == [whole(n * PAGE * 4) for n in (2 * 2 * 52, 128, 2 * 52)]
    assert places == [(0, 0), (1, 0), (2, 0), (0, 0), (1, 0), (0, 1)]
    assert kinds_of(spec, 1, 3) == [kind_of(wide), kind_of(far)]
    assert kinds_of(spec, 2, 6) == [kind_of(far), kind_of(near), kind_of(wide), kind_of(near)], (
        "copies of what is in front"
    )
    assert places_of(kinds_of(spec, 2, 6))[1] == [(0, 0), (1, 0), (2, 0), (1, 1)]


def test_a_share_has_its_groups_and_latent_rows_as_they_are() -> None:
    assert Paged(8, 64, 64, 16).share(3) == Paged(3, 64, 64, 16)
    assert Paged(1, 576, 0).share(3) == Paged(1, 576, 0)


def test_a_window_takes_no_more_however_long_the_sequence() -> None:
    assert n_pages(100, 1000) == n_pages(100, 90_000) == -(-(100 + SLACK + CHUNK_ROWS + PAGE - 1) // PAGE)
    assert n_pages(100, 50) == n_pages(None, 50) == 2 and n_pages(None, 90_000) == 2813
    assert PageClass(100, 8).n_bytes(90_000) == 8 * n_pages(100, 90_000)
    assert PageClass(100, 64).read_bytes(1000) == PageClass(None, 64).read_bytes(100) == 200


class Snapshots:
    """A cache of which the beginning of each part of so many positions is kept, and what a slice may go back by."""

    def __init__(self, n: int) -> None:
        self._n = n

    def n_bytes(self, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
        return length // self._n

    def read_bytes(self, length: int) -> float:
        return 1.0

    def cut_to(self, end: int, n: int) -> int:
        return n if n >= end - SLACK else n // self._n * self._n


def test_a_sequence_is_cut_where_all_classes_can_be() -> None:
    full, near = PageClass(None, 1), PageClass(100, 1)
    assert cut_to([full], 1000, 3) == 3 and cut_to([], 1000, 3) == 3
    assert [cut_to([full, near], end, 40) for end in (100, 101, 104, 105)] == [40, 40, 40, 0]
    assert [cut_to([UNKNOWN], 100, n) for n in (0, 35, 36)] == [0, 0, 36]
    assert cut_to([full, Snapshots(50)], 1000, 199) == 150 and cut_to([Snapshots(50)], 1000, 940) == 940
    assert cut_to([Snapshots(50), Snapshots(60)], 1000, 599) == 300, "the last one that both have"
    assert cut_to([Snapshots(50), near], 1000, 599) == 0
