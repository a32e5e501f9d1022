"""A model that no family here has yet, and a stage of numbers that computes it: rows have more columns than hidden.

The embedding gives one that blocks add to hidden; a block gives one that blocks behind it make their caches of, so that rows
without logits skip these blocks; and blocks read the cache of another one. These stay until real ones replace them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from made_up_caches import MOD, N_IDS, Kinds, caches_of, classes_of, output, paged
from mdi.engine.rows import ArrayRows
from mdi.kernels.pages import PageStore
from mdi.kernels.slices import Slices
from mdi.kernels.stage_caches import Piece
from mdi.model.rows import HIDDEN, Column
from mdi.model.spec import Attention, BlockSpec, Dense, Ends, ModelSpec

TEXT, SHARED = Column("text", 2), Column("shared", 3, is_cached=True)


def block(cache_of: int | None = None, gives: tuple[Column, ...] = (), reads: tuple[str, ...] = ()) -> BlockSpec:
    mixer, mlp = Attention(1, 1, 1, 1.0), Dense(1, "relu", False)
    return BlockSpec(mixer, mlp, "sequential", None, None, cache_of=cache_of, gives=gives, reads=reads)


BLOCKS = (
    block(),
    block(gives=(SHARED,)),
    block(cache_of=1),
    block(reads=("text",)),
    block(reads=("shared",)),  # from here on, rows without logits are skipped
    block(reads=("shared", "text")),
    block(cache_of=5),
    block(reads=("shared",)),
)
SPEC = ModelSpec("made up", 2, N_IDS, N_IDS, 1000, Ends(gives=(TEXT,)), BLOCKS)
KINDS: Kinds = [paged() if one.cache_of is None else one.cache_of for one in BLOCKS]

Row = dict[str, list[int]]  # the numbers of each column


def embedded(token: int) -> Row:
    return {HIDDEN: [token + 1, 3 * token % 7], "text": [2 * token + 1, token * token % MOD]}


def cached(number: int, row: Row) -> int:
    """What block `number` puts into its cache of a row, which need not have hidden if it makes that of another column."""
    if "shared" in BLOCKS[number].reads:
        a, b, c = row["shared"]
        return (a + 3 * b + 7 * c + number) % MOD
    return entering(number, row)


def entering(number: int, row: Row) -> int:
    a, b = row[HIDDEN]
    more = row["text"] if "text" in BLOCKS[number].reads else [0, 0]
    return (a + 5 * b + more[0] + 2 * more[1]) % MOD


def computed(number: int, row: Row, seen: Sequence[int]) -> Row:
    """The row behind a block, of all rows up to it that are in the cache that the block reads."""
    of, x = BLOCKS[number], entering(number, row)
    y = output(paged(), of.cache_of is not None, x, seen)
    given = {"shared": [y, x, x * y % MOD]} if of.gives else {}
    return {**row, HIDDEN: [y, row[HIDDEN][0]], **given}


class ColumnStage:
    """Blocks [start, stop) of it; with `embed` and `head` for the starter."""

    returned_width = SPEC.width
    is_head_shared = False
    rows = ArrayRows()

    def __init__(self, start: int, stop: int) -> None:
        kinds: Kinds = [one - start if isinstance(one, int) else one for one in KINDS[start:stop]]
        self.start, self.stop = start, stop
        self.row_in, self.row_out = SPEC.row_at(start), SPEC.row_at(stop)
        self.caches, self.classes = caches_of(kinds, start), classes_of(kinds)
        self.n_computed = 0  # rows of all blocks

    def embed(self, ids: np.ndarray, slices: object = None) -> np.ndarray:
        rows = [embedded(int(token)) for token in ids]
        return np.array([[*row[HIDDEN], *row["text"]] for row in rows], dtype=np.float32)

    def head(self, x: np.ndarray) -> np.ndarray:
        mixed = x[:, :1] * 101 + x[:, 1:] * 37
        return (((np.arange(N_IDS)[None, :] * 37 + mixed) % 307 - 153) / 40).astype(np.float32)

    def __call__(self, x: np.ndarray, slices: Slices, taps: Sequence[int] = ()) -> np.ndarray:
        assert x.shape == (sum(one.n_rows for one in slices), self.row_in.width)
        if self.start == self.stop:
            return x
        # What a row does not carry, no one may read: it is no number.
        out, at = np.full((len(x), self.row_out.width), np.nan, dtype=np.float32), 0
        for part in slices:
            entries = self.caches.extend(part.seq_id, part.start, part.n_rows)
            for i in range(part.n_rows):
                row = {one.name: x[at, self.row_in.place(one.name)].tolist() for one in self.row_in.columns}
                row = {name: [int(n) for n in numbers] for name, numbers in row.items()}
                row = self._row(entries, part.start + i, row, i >= part.n_rows - part.n_logits)
                for one in self.row_out.columns:
                    if one.name in row:
                        out[at, self.row_out.place(one.name)] = row[one.name]
                at += 1
        return out

    def _row(self, entries: Sequence[object], position: int, row: Row, gives_logits: bool) -> Row:
        (store,), (entry,) = self.caches.stores, entries
        assert isinstance(store, PageStore)
        numbers = {at: n for n, at in enumerate(i for i in range(self.start, self.stop) if BLOCKS[i].cache_of is None)}
        for at in range(self.start, self.stop):
            if at in numbers:
                store.write(entry, numbers[at], Piece(position, (np.array([cached(at, row)]),)), position + 1)
            if at >= SPEC.skipped_from and not gives_logits:
                row = {name: own for name, own in row.items() if name == "shared"}
                continue
            source = BLOCKS[at].cache_of
            first, rows = store.read(entry, numbers[at if source is None else source], 0, position + 1)
            row = computed(at, row, [*[0] * first, *rows[0].tolist()])
            self.n_computed += 1
        return row


def plain_tokens(prompt: Sequence[int], n: int) -> list[int]:
    """The best tokens behind a prompt, from all rows of each block in one list; no row skips a block."""
    rows: list[list[int]] = [[] for _ in BLOCKS]
    ids = [*prompt]
    for at in range(len(prompt) + n - 1):
        row = embedded(ids[at])
        for i, of in enumerate(BLOCKS):
            rows[i].append(cached(i, row))
            row = computed(i, row, rows[i if of.cache_of is None else of.cache_of])
        if at + 1 == len(ids):
            ids.append(int(np.argmax(ColumnStage.head(ColumnStage, np.array([row[HIDDEN]])))))  # type: ignore[arg-type]
    return ids[len(prompt) :]
