"""Every kind of cache against plain lists: whatever is appended, made final, cut, copied, freed, exported and filled, a
sequence has what was written to it, and can be cut as far back as its kind says.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from made_up_caches import Entry, Kinds, State, StateStore, caches_of, classes_of, paged, step
from mdi.errors import EngineError
from mdi.kernels.cache_rows import KernelLayout
from mdi.kernels.pages import CachePages, Pool
from mdi.kernels.stage_caches import CacheRun, Piece
from mdi.model.caches import CACHE_TYPES, PAGE, Paged, cut_to, places_of

KINDS: dict[str, Kinds] = {
    "pages": [paged(), paged()],
    "window": [paged(20), paged(20)],
    "state": [State(), State()],
    "snapshots": [State(30)],
    "shared": [paged(), 0, paged(40), 2],
    "all": [paged(), State(50), paged(7), 2, 0, State(50)],
}


class World:
    """Two nodes with the same blocks, and what sequences wrote on the first, as lists."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, self.classes = kinds, classes_of(kinds)
        self.places = places_of(kinds)[1]
        self.caches, self.other = caches_of(kinds, 3), caches_of(kinds, 3)
        self.texts: dict[int, list[int]] = {}
        self.far: dict[int, int] = {}  # the last start of a slice
        self.last = 0

    def append(self, seq_id: int, start: int, n: int) -> None:
        text, new = self.texts.get(seq_id, []), list(range(self.last + 1, self.last + n + 1))
        far = self.far.get(seq_id, 0)
        try:
            entries = self.caches.extend(seq_id, start, n)
        except EngineError:
            assert start > len(text) or cut_to(self.classes, far, start) < start, (
                "its kind says that it can be cut there"
            )
            return
        assert start <= len(text)
        self.last += n
        self.texts[seq_id], self.far[seq_id] = text[:start] + new, max(start, far)
        for block, (kind, (c, number)) in enumerate(zip(self.kinds, self.places, strict=True)):
            store, rows = self.caches.stores[c], np.array(new) + 1000 * block
            if isinstance(kind, int):
                continue
            if isinstance(store, StateStore):
                entries[c].blocks[number].rows += rows.tolist()
            else:
                store.write(entries[c], number, Piece(start, (rows,)), start + n)

    def back(self, seq_id: int, n: int) -> None:
        """Go back as the engine does: to `n`, or to where the kinds say that all of them can be cut."""
        if text := self.texts.get(seq_id):
            at = cut_to(self.classes, self.far[seq_id], min(n, len(text) - 1)) if n > 0 else 0
            if at:
                self.append(seq_id, at, 3)
                assert self.texts[seq_id][at : at + 3] == list(range(self.last - 2, self.last + 1))

    def copy(self, seq_id: int, new_id: int) -> None:
        if seq_id in self.texts:
            self.caches.rearrange((), [(seq_id, new_id)])
            self.texts[new_id], self.far[new_id] = [*self.texts[seq_id]], self.far[seq_id]

    def free(self, seq_id: int) -> None:
        self.caches.free(seq_id)
        self.texts.pop(seq_id, None)
        self.far.pop(seq_id, None)

    def move(self, seq_id: int, start: int) -> None:
        """To the other node, in one or two runs; and from there to a new sequence of this one."""
        if not (text := self.texts.get(seq_id)):
            return
        end, new_id = len(text), 9
        self.other.free(seq_id)
        has_states = any(isinstance(one, State) for one in self.kinds)
        is_cut = 0 < start < end and not has_states and cut_to(self.classes, self.far[seq_id], start) == start
        for first, stop in [(0, start), (start, end)] if is_cut else [(0, end)]:
            run = self.caches.export(seq_id, first, stop)
            assert [*run.blocks] == [3 + block for block, kind in enumerate(self.kinds) if not isinstance(kind, int)]
            self.other.fill(seq_id, run)
        self.caches.free(new_id)
        self.caches.fill(new_id, self.other.export(seq_id, 0, end))
        self.texts[new_id], self.far[new_id] = [*text], self.far[seq_id]

    def check(self) -> None:
        assert len(self.caches) == len(self.texts)
        for seq_id, text in self.texts.items():
            assert self.caches.end(seq_id) == len(text)
            entries = self.caches.entries(seq_id)
            for block, (kind, (c, number)) in enumerate(zip(self.kinds, self.places, strict=True)):
                source = kind if isinstance(kind, int) else block
                own, store, entry = self.kinds[source], self.caches.stores[c], entries[c]
                expected = [one + 1000 * source for one in text]
                if isinstance(store, StateStore):
                    assert isinstance(entry, Entry)
                    state = 0
                    for x in expected[: entry.first]:
                        state = step(state, x)
                    assert entry.blocks[number].state == state and entry.blocks[number].rows == expected[entry.first :]
                else:
                    assert isinstance(own, Paged)
                    first, (rows,) = store.read(entry, number, 0, len(text))
                    assert rows.tolist() == expected[first:]
                    lowest = 0 if own.window is None else max(0, self.far[seq_id] - own.window + 1)
                    assert first <= lowest, "rows that the next one sees"


N_SEEDS, N_STEPS = 25, 60
STEPS = ["more"] * 4 + ["back"] * 3 + ["at", "copy", "copy", "move", "free"]


@pytest.mark.parametrize("name", KINDS)
def test_a_sequence_has_what_was_written_to_it(name: str) -> None:
    for seed in range(N_SEEDS):
        world, rng = World(KINDS[name]), random.Random(seed)
        for _ in range(N_STEPS):
            seq_id = rng.randrange(3)
            end = len(world.texts.get(seq_id, []))
            match rng.choice(STEPS):
                case "more":
                    world.append(seq_id, end, rng.choice([1, 1, 5, 20, 90]))
                case "back":
                    world.back(seq_id, end - rng.choice([1, 5, 60, 200]))
                case "at":
                    world.append(seq_id, rng.randrange(300), 5)
                case "copy":
                    world.copy(seq_id, rng.randrange(3))
                case "move":
                    world.move(seq_id, rng.randrange(200))
                case "free" if rng.random() < 0.3:
                    world.free(seq_id)
            world.check()


def kernel_caches(kind: Paged, cache_type: str) -> CachePages:
    cache_class = kind.of_blocks(2, cache_type)
    pool = Pool(cache_class.page_bytes, 8)
    layout = KernelLayout(kind, 2, cache_type, pool)
    return CachePages([cache_class], [pool], [layout], [(0, 0), (0, 1)], [5, 6], cache_type)


def rows_of(kind: Paged, cache_type: str, n: int, seed: int) -> tuple[np.ndarray, ...]:
    """Of one block, any bits. Rows without values, which are latent, have two scales as well."""
    rng = np.random.default_rng(seed)
    dtype = {"float32": np.float32, "bf16": np.uint16, "fp16": np.float16, "int8": np.int8}[cache_type]
    sizes = [size for size in (kind.k_size, kind.v_size) if size]
    rows = [rng.integers(-100, 100, (n, kind.n_groups, size)).astype(dtype) for size in sizes]
    scales = [rng.random((n, kind.n_groups), dtype=np.float32) for _ in range(2)]
    return (*rows, *(scales if cache_type == "int8" else []))


def bytes_of(run: CacheRun) -> dict[int, tuple[int, list[bytes]]]:
    return {i: (piece.first, [one.tobytes() for one in piece.arrays]) for i, piece in run.blocks.items()}


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("kind", [Paged(3, 20, 12), Paged(1, 24, 0)])
def test_what_was_filled_is_exported_bit_by_bit(kind: Paged, cache_type: str) -> None:
    caches, n = kernel_caches(kind, cache_type), 2 * PAGE + 7
    run = CacheRun(0, n, cache_type, {i: Piece(0, rows_of(kind, cache_type, n, i)) for i in (4, 5, 6, 7)})
    caches.fill(1, run)

    def own(run: CacheRun) -> dict[int, tuple[int, list[bytes]]]:
        return {i: piece for i, piece in bytes_of(run).items() if i in (5, 6)}

    assert bytes_of(caches.export(1, 0, n)) == own(run)
    again = caches.export(1, 40, 50)
    assert bytes_of(again) == own(run.part(40, 50)) and again.blocks[5].first == 40
    caches.fill(1, again)
    assert caches.end(1) == 50 and bytes_of(caches.export(1, 0, 50)) == own(run.part(0, 50))


def test_a_share_of_a_group_has_the_rows_of_its_groups() -> None:
    kind = Paged(3, 20, 12)
    run = CacheRun(0, 40, "int8", {i: Piece(0, rows_of(kind, "int8", 40, i)) for i in (5, 6)})
    caches = kernel_caches(kind.share(2), "int8")
    caches.fill(1, run.share(1, 3))
    assert bytes_of(caches.export(1, 0, 40)) == {
        i: (0, [one[:, 1:].tobytes() for one in piece.arrays]) for i, piece in run.blocks.items()
    }


def test_runs_that_do_not_fit_are_refused() -> None:
    kind = Paged(2, 16, 16)
    run = CacheRun(0, 40, "fp16", {i: Piece(0, rows_of(kind, "fp16", 40, i)) for i in (5, 6)})
    caches, part = kernel_caches(kind, "fp16"), run.part(30, 40)
    caches.fill(1, run)
    for change in ({"cache_type": "bf16"}, {"blocks": {5: part.blocks[5]}}, {"start": 50, "stop": 60}):
        with pytest.raises(EngineError):
            caches.fill(1, replace(part, **change))
    assert bytes_of(caches.export(1, 0, 40)) == bytes_of(run)
    with pytest.raises(EngineError):
        caches.export(1, 0, 41)
    narrow = {i: Piece(30, rows_of(Paged(2, 8, 16), "fp16", 10, i)) for i in (5, 6)}
    with pytest.raises(EngineError):
        caches.fill(1, replace(part, blocks=narrow))
    assert not len(caches) and not caches.n_bytes, "a sequence that is half written is no sequence"
