"""Kinds of cache, as numbers, for all code that counts cache memory or asks how far back a text can go: stages, admission,
recovery, prefixes, nodes, plans.

A block's kind follows from its spec (`kind_of`). Blocks of a stage that have the same kind form a class, whose memory is
counted, copied and cut together. The engine knows classes alone, and asks them two things: `n_bytes` and `cut_to`.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from mdi.model.spec import Attention, BlockSpec, DeltaNet, ModelSpec

PAGE = 32  # positions
CHUNK_ROWS = 64  # prompt rows that a frame takes at most: few enough that stages overlap while prompts are computed

# A slice that begins at `start` makes the rows before start - SLACK final: every cache can be cut to the others, and may drop
# what they do not need.
SLACK = 64

CACHE_TYPES = {"float32": 4, "bf16": 2, "fp16": 2, "int8": 1}  # what caches can hold: bytes of a number
ALIASES = {"fp32": "float32", "bfloat16": "bf16", "float16": "fp16"}  # as types to compute in are called


def cache_type_named(name: str) -> str:
    """The name in CACHE_TYPES of a type that may be called as one to compute in; any other name as it is."""
    return ALIASES.get(name.lower(), name.lower())


class CacheClass(Protocol):
    """The caches of a node's blocks that have the same kind, of one sequence."""

    def n_bytes(self, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
        """Most bytes of a sequence of `length` positions, from its first token to its last.

        Args:
            chunk_rows: rows that come at once, at most.
        """

    def cut_to(self, end: int, n: int) -> int:
        """The last position, `n` at most, to which a sequence can be cut, or a copy of it, once slices have begun at `end`, and
        nowhere behind it; 0 if only its beginning is left. It is `n` itself where that is `end` - SLACK or more.
        """

    def read_bytes(self, length: int) -> float:
        """Bytes that are read for one row at the end of a sequence of `length` positions."""


def cut_to(classes: Iterable[CacheClass], end: int, n: int) -> int:
    """The last position to which a sequence can be cut in all of these classes, see `CacheClass.cut_to`."""
    classes = tuple(classes)
    while (found := min([one.cut_to(end, n) for one in classes], default=n)) < n:
        n = found
    return n


@functools.lru_cache(maxsize=1024)  # running texts ask for every node and class
def n_pages(window: int | None, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
    """Pages that a sequence of `length` positions has at most, from its first token to its last.

    Args:
        window: positions that a row sees, itself included; None is all of them.
        chunk_rows: rows that come at once, at most.
    """
    pages = -(-length // PAGE)
    if window is None:
        return pages
    # The first page that is kept may begin up to PAGE - 1 positions before the first one that is still needed.
    return min(pages, -(-(window + SLACK + chunk_rows + PAGE - 1) // PAGE))


@dataclass(frozen=True)
class PageClass:
    """Blocks of one stage that share their pages: their window, and the bytes of a page of all of them."""

    window: int | None
    page_bytes: int

    def n_pages(self, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
        return n_pages(self.window, length, chunk_rows)

    def n_bytes(self, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
        return n_pages(self.window, length, chunk_rows) * self.page_bytes

    def cut_to(self, end: int, n: int) -> int:
        return n if self.window is None or end <= self.window or n >= end - SLACK else 0

    def read_bytes(self, length: int) -> float:
        return min(length, self.window or length) * self.page_bytes / PAGE


UNKNOWN = PageClass(0, 0)  # can be cut as far as any, and no farther


def slot_bytes(k_size: int, v_size: int, cache_type: str) -> int:
    """Bytes of one block and group in a page: keys of k_size and values of v_size numbers, the latter in whole vectors."""
    numbers = (k_size + -(-v_size // 16) * 16) * PAGE
    scales = 2 * PAGE * 4 if cache_type == "int8" else 0
    return -(-(numbers * CACHE_TYPES[cache_type] + scales) // 64) * 64


@dataclass(frozen=True)
class Paged:
    """Keys and values of all positions, or of those that a window sees, in pages of 32 positions.

    Attributes:
        n_groups: of heads, each with keys of `k_size` numbers and values of `v_size`. With `v_size` 0 values are not stored:
            they are part of the keys (latent attention).
        window: positions that a row sees, itself included; None is all of them.
    """

    n_groups: int
    k_size: int
    v_size: int
    window: int | None = None

    def block_bytes(self, cache_type: str) -> int:
        """Of one block in a page."""
        return self.n_groups * slot_bytes(self.k_size, self.v_size, cache_type)

    def of_blocks(self, n: int, cache_type: str, unit: int = mmap.PAGESIZE) -> PageClass:
        """The class of so many blocks. A page is a whole number of the system's, so that a free one can be given back.

        Args:
            unit: bytes of one of the system's.
        """
        return PageClass(self.window, -(-n * self.block_bytes(cache_type) // unit) * unit)

    def share(self, n_groups: int) -> Paged:
        """Of a node that has so many of the groups. Latent rows are read by all heads, so that each node has all of them."""
        return replace(self, n_groups=n_groups) if self.v_size else self


@dataclass(frozen=True)
class StateClass:
    """Blocks of one stage that have states.

    A state cannot be taken apart, so what a sequence may be cut to must be made again: there is the state before the rows that
    are not final, these rows, as the state takes them in, and the state behind them. Rows become final when more than SLACK and
    a chunk are kept. Numbers are float32.

    With a state of s numbers and rows of r, that is 2 s + 128 r. The other way, a state of every position that may be cut to,
    takes 65 s: for s = 32 * 128 * 128 and r = 8256 (Qwen3.5-35B-A3B) 2.1 million numbers of a block, and not 34. Every 64th
    state alone would not do: rows between could not be cut exactly. To keep the first state and the rows alone would halve
    that, but each token would compute 64 rows and more.

    Attributes:
        state_bytes, row_bytes: of one state of all blocks, and of what is kept of a row.
        n_before: rows that are kept before those.
    """

    state_bytes: int
    row_bytes: int
    n_before: int

    def n_bytes(self, length: int, chunk_rows: int = CHUNK_ROWS) -> int:
        n_rows = min(-(-length // PAGE) * PAGE, SLACK + chunk_rows)
        return 2 * self.state_bytes + self.row_bytes * (self.n_before + n_rows)

    def cut_to(self, end: int, n: int) -> int:
        return n if end <= SLACK or n >= end - SLACK else 0

    def read_bytes(self, length: int) -> float:
        """Reading and writing it."""
        return 2 * self.state_bytes


@dataclass(frozen=True)
class State:
    """The state of a gated delta net. Before the first row that is kept, the convolution still needs some others.

    Attributes:
        n_heads: each with a matrix of `k_size` times `v_size` numbers.
        n_channels, n_taps: of the convolution.
    """

    n_heads: int
    k_size: int
    v_size: int
    n_channels: int
    n_taps: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n_heads, self.k_size, self.v_size

    @property
    def row_size(self) -> int:
        """Numbers of a row that are kept: what goes into the convolution, and two for each head."""
        return self.n_channels + 2 * self.n_heads

    def of_blocks(self, n: int, cache_type: str, unit: int = 1) -> StateClass:
        """The class of so many blocks; its numbers are float32 whatever other caches hold."""
        return StateClass(4 * n * self.n_heads * self.k_size * self.v_size, 4 * n * self.row_size, self.n_taps - 1)


Kind = Paged | State


def kind_of(block: BlockSpec) -> Kind:
    """The cache that a block writes, or that of another one which it reads (`BlockSpec.cache_of`)."""
    mixer = block.mixer
    if isinstance(mixer, Attention):
        return Paged(mixer.n_groups, mixer.head_size, mixer.head_size, mixer.window)
    if isinstance(mixer, DeltaNet):
        return State(mixer.n_head, mixer.k_size, mixer.v_size, mixer.n_channels, mixer.n_taps)
    return Paged(1, mixer.kv_rank + mixer.rope_size, 0, mixer.window)


def kinds_of(spec: ModelSpec, start: int, stop: int) -> list[Kind | int]:
    """Of the blocks [start, stop) of a model: their own, or the number here of the block whose cache they read. Of a cache that
    is in front of them, the first that reads it has a copy.
    """
    written = cache_numbers(spec, start, stop)
    return [kind_of(spec.blocks[start + i]) if (at := written.index(one)) == i else at for i, one in enumerate(written)]


def cache_numbers(spec: ModelSpec, start: int, stop: int) -> list[int]:
    """Of the blocks [start, stop) of a model: the block, by its number in the model, whose cache they write or read."""
    return [i if (of := spec.blocks[i].cache_of) is None else of for i in range(start, stop)]


Place = tuple[int, int]  # of a block: its class, and its number there
K = TypeVar("K")


def places_of(kinds: Sequence[K | int]) -> tuple[dict[K, int], list[Place]]:
    """The different kinds of a stage's blocks, each with the number of its blocks, and each block's place.

    Args:
        kinds: as of `kinds_of`.
    """
    counts: dict[K, int] = {kind: 0 for kind in _pages_first(kinds)}
    places: list[Place] = []
    for kind in kinds:
        if isinstance(kind, int):
            assert kind >= 0, (
                "a model is cut only where no block reads the cache of one before it (ModelSpec.allowed_cuts)"
            )
            places.append(places[kind])
        else:
            counts[kind] += 1
            places.append((list(counts).index(kind), counts[kind] - 1))
    return counts, places


def stage_places(spec: ModelSpec, start: int, stop: int) -> tuple[dict[Kind, int], list[Place]]:
    """`places_of` the blocks [start, stop) of a model."""
    return places_of(kinds_of(spec, start, stop))


def _pages_first(kinds: Sequence[K | int]) -> list[K]:
    """The different ones; states come last."""
    own = dict.fromkeys(kind for kind in kinds if not isinstance(kind, int))
    return sorted(own, key=lambda kind: isinstance(kind, State))


def cache_classes(
    spec: ModelSpec, start: int, stop: int, cache_type: str
) -> tuple[list[PageClass | StateClass], list[Place]]:
    """The classes of the blocks [start, stop) of a model, and each block's place."""
    counts, places = stage_places(spec, start, stop)
    return [kind.of_blocks(n, cache_type) for kind, n in counts.items()], places
