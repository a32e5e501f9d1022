"""Kinds of cache that no model here has yet, and a stage of numbers that computes with them and with pages.

A recurrent state cannot be taken apart: it has what all final rows made of it, and the rows since, so that guesses and replays
can cut it. These stay until real ones replace them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from loopback import hidden_rows
from mdi.engine.rows import ArrayRows
from mdi.errors import EngineError
from mdi.kernels.pages import PageStore, Pool
from mdi.kernels.slices import Slices
from mdi.kernels.stage_caches import Piece, StageCaches
from mdi.model.caches import CHUNK_ROWS, PAGE, SLACK, CacheClass, Paged, places_of

MOD = 8191  # numbers below it are exact in float32
STATE_BYTES, ROW_BYTES = 64, 8
N_IDS = 60


@dataclass(frozen=True)
class State:
    """The kind and the class: a state, the rows since, and with `every` what it was at each multiple of it."""

    every: int | None = None

    def n_bytes(self, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
        n_snapshots = 0 if self.every is None else length // self.every
        return STATE_BYTES * (1 + n_snapshots) + ROW_BYTES * min(length, SLACK + chunk_rows)

    def cut_to(self, end: int, n: int) -> int:
        if end <= SLACK or n >= end - SLACK:
            return n
        return 0 if self.every is None else n // self.every * self.every

    def read_bytes(self, length: int) -> float:
        return STATE_BYTES


def step(state: int, x: int) -> int:
    """The state behind one more row."""
    return (5 * state + x * x + 1) % MOD


@dataclass
class Summed:
    """Of one block: its state before position `Entry.first`, the rows from there on, and states at some positions."""

    state: int = 0
    rows: list[int] = field(default_factory=list)
    snapshots: dict[int, int] = field(default_factory=dict)


@dataclass
class Entry:
    first: int
    blocks: list[Summed]


class StateStore:
    """See kernels.stage_caches.Store."""

    def __init__(self, kind: State, n_blocks: int) -> None:
        self._kind, self._n_blocks = kind, n_blocks
        self.n_bytes, self.most_bytes = 0, 1 << 40

    def begin(self, first: int = 0) -> Entry:
        return Entry(first, [Summed() for _ in range(self._n_blocks)])

    def check(self, entry: Entry, start: int) -> None:
        if start < entry.first and start not in entry.blocks[0].snapshots:
            raise EngineError(f"a slice goes back to position {start}, but the state has the rows before {entry.first}")

    def cut(self, entry: Entry, end: int) -> None:
        for one in entry.blocks:
            if end < entry.first:
                one.state, one.rows = one.snapshots[end], []
            del one.rows[max(0, end - entry.first) :]
            one.snapshots = {at: state for at, state in one.snapshots.items() if at <= end}
        entry.first = min(entry.first, end)

    def grow(self, entry: Entry, start: int, n_rows: int) -> None:
        n_final = max(0, start - SLACK - entry.first)
        for one in entry.blocks:
            for at, x in enumerate(one.rows[:n_final], entry.first + 1):
                one.state = step(one.state, x)
                if self._kind.every and not at % self._kind.every:
                    one.snapshots[at] = one.state
            del one.rows[:n_final]
        entry.first += n_final

    def copied(self, entry: Entry) -> Entry:
        return Entry(entry.first, [replace(one, rows=[*one.rows], snapshots={**one.snapshots}) for one in entry.blocks])

    def free(self, entry: Entry) -> None:
        entry.blocks.clear()

    def read(self, entry: Entry, number: int, start: int, stop: int) -> Piece:
        if stop < entry.first:
            raise EngineError(f"a state before position {stop}, which has the rows before {entry.first}")
        one = entry.blocks[number]
        return Piece(entry.first, (np.array([one.state]), np.array(one.rows[: stop - entry.first], dtype=np.int64)))

    def write(self, entry: Entry, number: int, piece: Piece, stop: int) -> None:
        state, rows = piece.arrays
        entry.first, entry.blocks[number] = piece.first, Summed(int(state[0]), rows.tolist())


class Numbers:
    """One number a position and block, see kernels.pages.Layout."""

    def __init__(self, pool: Pool, n_blocks: int) -> None:
        self.view = pool.memory.view(np.int64)[:, : n_blocks * PAGE].reshape(-1, n_blocks, PAGE)

    def read(self, number: int, pages: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        return (self.view[pages, number, positions],)

    def write(self, number: int, pages: np.ndarray, positions: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        self.view[pages, number, positions] = arrays[0]


def paged(window: int | None = None) -> Paged:
    """Blocks of these have more room in a page than Numbers takes."""
    return Paged(1, 16, 16, window)


Kinds = Sequence[Paged | State | int]  # as kinds_of gives them: a number is that of the block whose cache is read


def caches_of(kinds: Kinds, start: int = 0, n_pages: int = 400) -> StageCaches[PageStore | StateStore]:
    counts, places = places_of(kinds)
    stores: list[PageStore | StateStore] = []
    for kind, n in counts.items():
        if isinstance(kind, State):
            stores.append(StateStore(kind, n))
        else:
            cache_class = kind.of_blocks(n, "float32")
            pool = Pool(cache_class.page_bytes, n_pages)
            stores.append(PageStore(cache_class, pool, Numbers(pool, n)))
    numbers = [start + (kind if isinstance(kind, int) else i) for i, kind in enumerate(kinds)]
    return StageCaches(stores, places, numbers)


def classes_of(kinds: Kinds) -> tuple[CacheClass, ...]:
    """As a node reports them."""
    return tuple(
        one if isinstance(one, State) else one.of_blocks(n, "float32") for one, n in places_of(kinds)[0].items()
    )


def output(kind: Paged | State, is_reader: bool, x: int, seen: Sequence[int]) -> int:
    """Of a block: a function of its row, and of all rows up to it that are in the cache it reads.

    Args:
        seen: those, from the first position on.
    """
    if isinstance(kind, State):
        state = 0
        for one in seen:
            state = step(state, one)
        return (3 * x + state) % MOD
    first = 0 if kind.window is None else max(0, len(seen) - kind.window)
    return ((7 if is_reader else 3) * x + sum((at + 1) * seen[at] for at in range(first, len(seen)))) % MOD


class MadeUpStage:
    """Blocks [start, stop) of a model, whose rows are a number each; with `embed` and `head` for the starter."""

    returned_width = 1
    row_in = row_out = hidden_rows(1)
    is_head_shared = False
    rows = ArrayRows()

    def __init__(self, kinds: Kinds, start: int, stop: int) -> None:
        self._kinds: Kinds = [one - start if isinstance(one, int) else one for one in kinds[start:stop]]
        self.caches, self._places = caches_of(self._kinds, start), places_of(self._kinds)[1]
        self.classes = classes_of(self._kinds)

    def embed(self, ids: np.ndarray, slices: object = None) -> np.ndarray:
        return (ids[:, None] + 1).astype(np.float32)

    def head(self, x: np.ndarray) -> np.ndarray:
        return (((np.arange(N_IDS)[None, :] * 37 + x * 101) % 307 - 153) / 40).astype(np.float32)

    def __call__(self, x: np.ndarray, slices: Slices, taps: Sequence[int] = ()) -> np.ndarray:
        out, at = x.astype(np.int64)[:, 0], 0
        for part in slices:
            entries = self.caches.extend(part.seq_id, part.start, part.n_rows)
            for position in range(part.start, part.start + part.n_rows):
                out[at] = self._row(entries, position, int(out[at]))
                at += 1
        return out[:, None].astype(np.float32)

    def _row(self, entries: Sequence[object], position: int, x: int) -> int:
        for kind, (c, number) in zip(self._kinds, self._places, strict=True):
            store, entry = self.caches.stores[c], entries[c]
            own = self._kinds[kind] if isinstance(kind, int) else kind
            assert not isinstance(own, int)
            if isinstance(store, StateStore):
                assert isinstance(entry, Entry)
                one = entry.blocks[number]
                one.rows.append(x)
                state = one.state
                for row in one.rows:
                    state = step(state, row)
                x = (3 * x + state) % MOD
                continue
            if own is kind:
                store.write(entry, number, Piece(position, (np.array([x]),)), position + 1)
            first, rows = store.read(entry, number, 0, position + 1)
            x = output(own, own is not kind, x, [*[0] * first, *rows[0].tolist()])
        return x


def plain_tokens(kinds: Kinds, prompt: Sequence[int], n: int) -> list[int]:
    """The best tokens behind a prompt, from all rows of each block in one list."""
    rows: list[list[int]] = [[] for _ in kinds]
    ids = [*prompt]
    for at in range(len(prompt) + n - 1):
        x = ids[at] + 1
        for block, kind in enumerate(kinds):
            rows[block].append(x)
            source = kind if isinstance(kind, int) else block
            own = kinds[source]
            assert not isinstance(own, int)
            x = output(own, source != block, x, rows[source])
        if at + 1 == len(ids):
            ids.append(int(np.argmax(MadeUpStage.head(MadeUpStage, np.array([[x]])))))  # type: ignore[arg-type]
    return ids[len(prompt) :]
