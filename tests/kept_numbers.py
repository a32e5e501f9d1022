"""Texts and caches whose numbers follow from the texts' keys, and what a ring does with them: so a wrong one is seen wherever
it comes from. Without torch: processes that are killed begin fast.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mdi.engine.kept_prefixes import KeptFiles
from mdi.engine.memory import page_keys
from mdi.engine.prefix_tasks import FETCH, FILL, FIND, KEEP, PrefixTask
from mdi.errors import EngineError
from mdi.kernels.stage_caches import CacheRun, Piece
from mdi.model.caches import PAGE, CacheClass, PageClass

OWNER = f"{'0' * 16}-{'1' * 16}"
LIMIT_BYTES = 20_000  # less than all texts take
N_TEXTS, N_PAGES, RUN = 4, 5, 2
HANG_S = 60.0


class Numbers:
    """Caches of blocks with and without a window, whose rows follow from the keys of their text."""

    cache_type = "float32"
    shares: Mapping[int, str] = {}

    def __init__(self, blocks: Collection[int]) -> None:
        self._blocks = blocks
        self.texts: dict[int, list[bytes]] = {}

    def classes_of_blocks(self) -> dict[int, CacheClass]:
        return {i: PageClass(3 if i % 2 else None, 1024) for i in self._blocks}

    def rows(self, seq_id: int, block: int, start: int, stop: int) -> np.ndarray:
        keys = self.texts[seq_id]
        seeds = [int.from_bytes(keys[i // PAGE][:3], "little") for i in range(start, stop)]
        return np.array([[seed, block, i] for i, seed in enumerate(seeds, start)], np.float32)

    def export(self, seq_id: int, start: int, stop: int, wanted: Collection[int] | None = None) -> CacheRun:
        pieces = {}
        for i in wanted or ():
            first = max(start, stop - 3) if i % 2 else start
            pieces[i] = Piece(first, (self.rows(seq_id, i, first, stop),))
        return CacheRun(start, stop, self.cache_type, pieces)

    def fill(self, seq_id: int, run: CacheRun) -> None:
        for i in self._blocks:
            piece = run.blocks[i]
            right = self.rows(seq_id, i, piece.first, run.stop)
            if i % 2 and piece.first != run.stop - 3:
                raise EngineError("another end")
            assert len(piece.arrays) == 1 and np.array_equal(piece.arrays[0], right), "wrong numbers"

    def free(self, seq_id: int) -> None: ...


def text(number: int) -> list[bytes]:
    """Keys of a text; some have the beginning of another one."""
    ids = [7 * (number // 2)] * (2 * PAGE) + [number] * ((N_PAGES - 2) * PAGE)
    return page_keys("seed", ids)


def task(kind: str, number: int, n: int, begin: int = 0, **of: Any) -> PrefixTask:
    keys = b"".join(text(number)[: n if kind in (KEEP,) else N_PAGES]).hex()
    return PrefixTask(kind, number, 0, OWNER, keys, RUN, PAGE * begin, PAGE * n, is_end=n == N_PAGES, **of)


def use(rng: random.Random, nodes: list[KeptFiles], caches: list[Numbers]) -> int:
    """What a ring of two nodes does with a text: keep some of it, or look for it and read it. Returns pages that were read."""
    number = rng.randrange(N_TEXTS)
    for one in caches:
        one.texts[number] = text(number)

    def ask(asked: PrefixTask) -> PrefixTask:
        for files, one in zip(nodes, caches, strict=True):
            asked = PrefixTask.of(files.answer(asked, one).frame(0, 0))
        return asked

    if rng.random() < 0.4:
        for begin in range(0, N_PAGES, RUN):
            ask(task(KEEP, number, min(begin + RUN, N_PAGES), begin))
        assert all(files.flush(HANG_S) for files in nodes), "it hangs"
        return 0
    asked = task(FIND, number, N_PAGES, ends=f"{(1 << N_PAGES) - 1:x}")
    found = ask(asked)
    if int(found.some, 16) > found.possible:
        fetch = replace(found, kind=FETCH, stop=PAGE * int(found.some, 16).bit_length(), is_end=True)
        for _ in range(4):
            fetch = ask(fetch)
        found = ask(asked)
    if not found.possible:
        return 0
    stop = found.possible.bit_length()
    return stop * ask(replace(found, kind=FILL, start=0, stop=PAGE * stop)).is_done
