"""The caches of all sequences of one stage, whatever their kinds: a `Store` for each class of its blocks (`mdi.model.caches`).

A slice of a frame is all that a cache hears of. One that starts before the end of a sequence cuts it there, and one that starts
at `start` makes all rows before start - SLACK final: a window may drop them, and a state may take them in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from mdi.errors import EngineError
from mdi.model.caches import CacheClass, Place

Entry = TypeVar("Entry")  # of one sequence in one store
S = TypeVar("S", bound="Store[Any]")


class Piece(NamedTuple):
    """What the cache of one block has of a sequence from position `first` on, in plain order.

    Of pages: keys (n, groups, size) and, where they are stored, values, in the caches' type (bfloat16 as its bits), then for
    int8 the scales of both (n, groups).
    """

    first: int
    arrays: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class CacheRun:
    """Positions [start, stop) of one sequence as a node's caches have them: for another node, or to be kept.

    Attributes:
        cache_type: of the numbers. Who goes on from them gets the bits of the node that computed them.
        blocks: by their numbers in the model; without those that read the cache of another block. A piece begins behind `start`
            where its cache has dropped what no later row needs.
    """

    start: int
    stop: int
    cache_type: str
    blocks: Mapping[int, Piece]

    def part(self, start: int, stop: int) -> CacheRun:
        """Positions of it, of blocks that have all of them."""
        at = {block: slice(start - piece.first, stop - piece.first) for block, piece in self.blocks.items()}
        blocks = {i: Piece(start, tuple(one[at[i]] for one in piece.arrays)) for i, piece in self.blocks.items()}
        return CacheRun(start, stop, self.cache_type, blocks)

    def share(self, first: int, end: int) -> CacheRun:
        """For a node that has the groups [first, end) of each block."""
        shares = {
            block: Piece(piece.first, tuple(one[:, first:end] for one in piece.arrays))
            for block, piece in self.blocks.items()
        }
        return replace(self, blocks=shares)


class Store(Protocol[Entry]):
    """The caches of all sequences in the blocks of one class."""

    @property
    def cache_class(self) -> CacheClass: ...

    @property
    def n_bytes(self) -> int:
        """That sequences take."""

    @property
    def most_bytes(self) -> int:
        """That they can take."""

    def begin(self, first: int = 0) -> Entry:
        """Of a sequence that has nothing yet, and will have nothing before position `first`."""

    def check(self, entry: Entry, start: int) -> None:
        """Raises EngineError if it cannot be cut to `start`."""

    def cut(self, entry: Entry, end: int) -> None:
        """Forget what is behind `end`."""

    def grow(self, entry: Entry, start: int, n_rows: int) -> None:
        """Make room for the rows [start, start + n_rows) of a sequence that ends at `start`, as its own.

        Raises:
            EngineError: there is no memory; `cut` to `start` makes the entry what it was.
        """

    def copied(self, entry: Entry) -> Entry:
        """The same for another sequence; what both have is copied when one of them writes it."""

    def free(self, entry: Entry) -> None:
        """Nobody has it any more."""

    def read(self, entry: Entry, number: int, start: int, stop: int) -> Piece:
        """Positions [start, stop) of block `number` of the class, or those that a row at `stop` may need."""

    def write(self, entry: Entry, number: int, piece: Piece, stop: int) -> None:
        """The same up to `stop`, for which there is room. Raises EngineError for what does not fit the class."""


class _Sequence:
    def __init__(self, entries: list[Any]) -> None:
        self.end = 0  # position after the last row
        self.entries = entries


class StageCaches(Generic[S]):
    """See the module.

    Args:
        stores: of each class.
        places: of each block; blocks that read the cache of another one have its place.
        numbers: of each block, the one in the model that writes this cache (`mdi.model.caches.cache_numbers`).
        cache_type: what the caches hold, as in CacheRun.

    Attributes:
        shares: of blocks of which this node has a share, by their numbers in the model, what it is, in words.
    """

    def __init__(
        self,
        stores: Sequence[S],
        places: Sequence[Place] = (),
        numbers: Sequence[int] = (),
        cache_type: str = "float32",
    ) -> None:
        self.stores = list(stores)
        self._writers: dict[Place, int] = dict(zip(places, numbers, strict=True))
        self.cache_type = cache_type
        self.shares: Mapping[int, str] = {}
        self._sequences: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def n_bytes(self) -> int:
        """That sequences take."""
        return sum(store.n_bytes for store in self.stores)

    @property
    def most_bytes(self) -> int | None:
        """As long as all sequences together take no more, every class has memory; None without blocks."""
        return min((store.most_bytes for store in self.stores), default=None)

    def entries(self, seq_id: int) -> list[Any]:
        """Of a sequence, in the order of the stores."""
        return self._sequences[seq_id].entries

    def extend(self, seq_id: int, start: int, n_rows: int) -> list[Any]:
        """Make room for the positions [start, start + n_rows), which the caller then writes; what was there from `start` on is
        cut off. Returns the sequence's entries.

        Raises:
            EngineError: `start` is beyond the end, or a cache cannot go back so far: nothing has changed. Or there is no
                memory: the sequence ends at `start`.
        """
        sequence = self._sequences.get(seq_id) or self._begun()
        try:
            if start != sequence.end:
                self._go_back(sequence, start)
            try:
                for store, entry in zip(self.stores, sequence.entries, strict=True):
                    store.grow(entry, start, n_rows)
            except EngineError:
                self._cut(sequence, start)
                raise
        except EngineError:
            self._forget_new(seq_id, sequence)
            raise
        sequence.end = start + n_rows
        self._sequences[seq_id] = sequence
        return sequence.entries

    def _begun(self) -> _Sequence:
        return _Sequence([store.begin() for store in self.stores])

    def _forget_new(self, seq_id: int, sequence: _Sequence) -> None:
        """One that was begun in vain has no memory any more."""
        if seq_id not in self._sequences:
            for store, entry in zip(self.stores, sequence.entries, strict=True):
                store.free(entry)

    def _go_back(self, sequence: _Sequence, start: int) -> None:
        if start > sequence.end:
            raise EngineError(f"a slice starts at position {start}, but its cache ends at {sequence.end}")
        for store, entry in zip(self.stores, sequence.entries, strict=True):
            store.check(entry, start)
        self._cut(sequence, start)

    def _cut(self, sequence: _Sequence, end: int) -> None:
        for store, entry in zip(self.stores, sequence.entries, strict=True):
            store.cut(entry, end)
        sequence.end = end

    def classes_of_blocks(self) -> dict[int, CacheClass]:
        """Of each block that writes a cache, by its number in the model."""
        return {i: self.stores[c].cache_class for (c, _), i in self._writers.items()}

    def end(self, seq_id: int) -> int:
        """Positions that a sequence has; 0 if it is not known."""
        sequence = self._sequences.get(seq_id)
        return 0 if sequence is None else sequence.end

    def export(self, seq_id: int, start: int, stop: int, wanted: Collection[int] | None = None) -> CacheRun:
        """A copy of what a sequence has of the positions [start, stop), so that it can go on at `stop`.

        Args:
            wanted: blocks, by their numbers in the model; None: all. Others are not looked at.

        Raises:
            EngineError: it does not reach so far, or a cache cannot go back so far.
        """
        if not 0 <= start < stop <= self.end(seq_id):
            raise EngineError(f"positions {start} to {stop} of sequence {seq_id}, whose cache has {self.end(seq_id)}")
        entries = self.entries(seq_id)
        places = {i: place for place, i in self._writers.items() if wanted is None or i in wanted}
        for c in {c for c, _ in places.values()}:
            self.stores[c].check(entries[c], stop)
        blocks = {i: self.stores[c].read(entries[c], number, start, stop) for i, (c, number) in places.items()}
        return CacheRun(start, stop, self.cache_type, blocks)

    def fill(self, seq_id: int, run: CacheRun) -> None:
        """Have the positions of a run, which may have more blocks; what was there from its start on is cut off.

        Raises:
            EngineError: the run lacks something, or does not follow what is here: nothing has changed. Or there is no memory,
                or it has other shapes: the sequence has no cache any more.
        """
        if run.cache_type != self.cache_type or not run.blocks.keys() >= set(self._writers.values()):
            raise EngineError(
                f"caches of {run.cache_type} numbers of the blocks {sorted(run.blocks)}, where those of {self.cache_type} of "
                f"{sorted(self._writers.values())} are needed"
            )
        sequence = self._sequences.get(seq_id) or self._begun()
        try:
            self._go_back(sequence, run.start)
        except EngineError:
            self._forget_new(seq_id, sequence)
            raise
        self._sequences[seq_id] = sequence
        try:
            for (c, number), i in self._writers.items():
                piece = run.blocks[i]  # it may be read only now
                if not number:
                    self._make_room(sequence, c, run, piece.first)
                self.stores[c].write(sequence.entries[c], number, piece, run.stop)
        except EngineError:
            self.free(seq_id)
            raise
        sequence.end = run.stop

    def _make_room(self, sequence: _Sequence, c: int, run: CacheRun, first: int) -> None:
        """In one class, whose rows begin at `first`."""
        store = self.stores[c]
        if first > run.start:
            store.free(sequence.entries[c])
            sequence.entries[c] = store.begin(first)
        store.grow(sequence.entries[c], max(first, run.start), run.stop - max(first, run.start))

    def rows_of(self, seq_id: int, block: int, start: int, stop: int) -> Piece:
        """What the cache of a block, by its number in the model, has of positions that were written last."""
        (c, number), entries = self._place(block), self.entries(seq_id)
        return self.stores[c].read(entries[c], number, start, stop)

    def put_rows(self, seq_id: int, block: int, piece: Piece, stop: int) -> None:
        """Have them in the copy of another node's cache, which has room up to `stop`."""
        (c, number), entries = self._place(block), self.entries(seq_id)
        self.stores[c].write(entries[c], number, piece, stop)

    def _place(self, block: int) -> Place:
        return next(place for place, number in self._writers.items() if number == block)

    def rearrange(self, freed: Iterable[int], copies: Iterable[tuple[int, int]]) -> None:
        """Free sequences, and let others, (sequence, new sequence), continue from the same prefix; all at once.

        What is copied is what was there before, also of a sequence that is freed, or that continues from another one itself.

        Raises:
            EngineError: a prefix does not exist; nothing has changed.
        """
        sources: dict[int, _Sequence] = {}
        for seq_id, new_id in copies if self.stores else ():  # a stage without blocks has nothing of any sequence
            if (source := self._sequences.get(seq_id)) is None:
                raise EngineError(f"sequence {seq_id} has no cache to continue from")
            sources[new_id] = source
        made: dict[int, _Sequence] = {}
        for new_id, source in sources.items():  # before anything is freed, so that nothing in use is given away
            other = made[new_id] = _Sequence(
                [store.copied(entry) for store, entry in zip(self.stores, source.entries, strict=True)]
            )
            other.end = source.end
        for seq_id in (*freed, *made):
            self.free(seq_id)
        self._sequences.update(made)

    def free(self, seq_id: int) -> None:
        """Forget a sequence. It is not an error if this stage has never seen it (because it was cancelled early)."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            for store, entry in zip(self.stores, sequence.entries, strict=True):
                store.free(entry)

    def clear(self) -> None:
        for seq_id in list(self._sequences):
            self.free(seq_id)
