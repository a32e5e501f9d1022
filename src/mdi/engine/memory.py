"""The nodes' memory for caches: whether sequences fit, and which caches of ended ones are kept.

A new sequence that begins with the same tokens as an ended one continues from a copy of its caches. Pages are shared and not
copied (kernels.pages), so kept caches only cost memory that is not needed at that moment.

Pure: from the nodes' reports to numbers; which caches exist, which one fits best, and which one to drop.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mdi.model.caches import CHUNK_ROWS, PAGE, CacheClass, cut_to
from mdi.units import size

_PAGE_IDS = struct.Struct(f"<{PAGE}Q")

KEPT_SHARE = 0.25  # share of a node's memory for caches; the rest is for growing texts


@dataclass(frozen=True)
class NodeCaches:
    """Cache memory of one node.

    Attributes:
        name: of the node.
        limit_bytes: what all caches together may take there.
        classes: of its blocks.
        chunk_rows: rows that a slice has at most.
    """

    name: str
    limit_bytes: int
    classes: tuple[CacheClass, ...]
    chunk_rows: int = CHUNK_ROWS

    def n_bytes(self, length: int) -> int:
        """Most bytes of a sequence of `length` positions, from its first token to its last."""
        return sum([one.n_bytes(length, self.chunk_rows) for one in self.classes])


@dataclass(frozen=True)
class CacheMemory:
    """The cache memory of a whole ring."""

    nodes: tuple[NodeCaches, ...]
    _by_pages: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def needs(self, length: int) -> tuple[int, ...]:
        """Bytes on each node that a sequence of `length` positions takes at most; positions count in whole pages."""
        whole = -(-length // PAGE)
        found = self._by_pages.get(whole)
        if found is None:
            found = self._by_pages[whole] = tuple(node.n_bytes(whole * PAGE) for node in self.nodes)
        return found

    def holds(self, n_bytes: Sequence[int]) -> bool:
        """Whether every node can hold its share of `n_bytes`."""
        return all(n <= node.limit_bytes for n, node in zip(n_bytes, self.nodes, strict=True))

    def refusal(self, length: int, n_together: int = 1) -> str | None:
        """Why sequences of `length` positions, so many that run together, can never enter; None if they can."""
        for node, each in zip(self.nodes, self.needs(length), strict=True):
            if (needed := n_together * each) > node.limit_bytes:
                who = "a sequence" if n_together == 1 else f"{n_together} beams"
                return (
                    f"{who} of up to {length} tokens needs {size(needed)} of cache on {node.name}, which has "
                    f"{size(node.limit_bytes)} for caches: ask for fewer tokens, give it more (--kv-memory), store less "
                    "per token (--kv-dtype bf16), or give it fewer blocks (--layers)"
                )
        return None

    def cut_to(self, end: int, n: int) -> int:
        """The last position, `n` at most, to which all nodes can cut a sequence; see `CacheClass.cut_to`."""
        return cut_to([one for node in self.nodes for one in node.classes], end, n)

    def n_sequences(self, length: int) -> int | None:
        """How many sequences of `length` positions fit at once; None if any number does."""
        fits = [node.limit_bytes // n for node, n in zip(self.nodes, self.needs(length), strict=True) if n]
        return min(fits) if fits else None


@dataclass(frozen=True)
class Kept:
    """The caches of a sequence that has ended.

    Attributes:
        ids: whose rows they hold.
        owner: only sequences of the same owner, with the same adapter, may continue from them (`Sequence.kept_for`).
        n_bytes: on each node.
        n_reached: position behind the furthest row that the nodes had; behind those of `ids` there may be void ones.
        keys: of its whole pages.
    """

    seq_id: int
    owner: str
    ids: tuple[int, ...]
    n_bytes: tuple[int, ...]
    n_reached: int = 0
    keys: tuple[bytes, ...] = ()


class Prefixes:
    """All that are kept, the one used longest ago first.

    Args:
        memory: of the ring that has them; says where they can be cut.
        share: of each node's memory, that they may take.
        seed: of their pages' keys.

    Attributes:
        total: bytes of all on each node.
        n_on_disk: of each, pages that the nodes were asked to keep.
        wanted: of sequences that wait, by their ids, the one that each begins with.
    """

    def __init__(self, memory: CacheMemory, share: float = KEPT_SHARE, seed: str = "") -> None:
        self._seed = seed
        self._memory = memory
        self._kept: dict[int, Kept] = {}
        self._by_pages: dict[bytes, list[int]] = {}  # those that begin with the pages of this key
        self._limits = [share * node.limit_bytes for node in memory.nodes]
        self.n_on_disk: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.total = [0] * len(memory.nodes)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: Kept) -> list[int]:
        """Keep one more; those that are given up for it: its own beginnings, where it can be cut to them, and the oldest where
        the share is full. It is given up itself where it is such a beginning of another one.
        """
        kept = replace(kept, keys=tuple(self.keys(kept.owner, kept.ids)))
        if (whole := self._longer(kept)) is not None:
            self._kept[whole] = self._kept.pop(whole)  # used just now
            return [kept.seq_id]
        needless = [
            other
            for key in kept.keys
            for other in self._by_pages.get(key, ())
            if (ids := self._kept[other].ids) == kept.ids[: len(ids)] and self._cut_to(kept, len(ids)) == len(ids)
        ]
        gone = list(dict.fromkeys(needless))
        for seq_id in gone:
            self.drop(seq_id)
        self.wanted |= {waiting: kept.seq_id for waiting, begin in self.wanted.items() if begin in gone}
        self._kept[kept.seq_id] = kept
        for key in kept.keys:
            self._by_pages.setdefault(key, []).append(kept.seq_id)
        self._count(kept, 1)
        while any(n > limit for n, limit in zip(self.total, self._limits, strict=True)):
            gone.append(self.drop_oldest())
        return gone

    def _longer(self, kept: Kept) -> int | None:
        """One that has the same tokens, or more behind them, and can be cut to them."""
        n = len(kept.ids)
        for seq_id in self._by_pages.get(kept.keys[-1], ()) if kept.keys else ():
            other = self._kept[seq_id]
            if other.ids[:n] == kept.ids and self._cut_to(other, n) == n:
                return seq_id
        return None

    def find(self, owner: str, ids: Sequence[int]) -> tuple[int, int] | None:
        """The sequence whose caches to continue from, and after how many tokens; None if none help.

        The last token is never among them: its row gives the first new one.
        """
        by_pages: list[list[int]] = []
        for key in self.keys(owner, ids):
            if not (found := self._by_pages.get(key)):
                break
            by_pages.append(found)
        seen: set[int] = set()
        for candidates in reversed(by_pages):  # those that have most in common come first
            best, most = None, PAGE - 1
            for seq_id in candidates:
                kept = self._kept[seq_id]
                if seq_id not in seen and (n := self._cut_to(kept, min(_n_common(kept.ids, ids), len(ids) - 1))) > most:
                    best, most = seq_id, n
            if best is not None:
                self._kept[best] = self._kept.pop(best)  # used just now
                return best, most
            seen.update(candidates)
        return None

    def _cut_to(self, kept: Kept, n: int) -> int:
        return self._memory.cut_to(max(len(kept.ids), kept.n_reached), n)

    def keys(self, owner: str, ids: Sequence[int]) -> list[bytes]:
        """Of the whole pages of a text."""
        return page_keys(f"{self._seed}/{owner}", ids)

    def unwritten(self, least_pages: int) -> tuple[Kept, int] | None:
        """One of so many pages at least that is not on the nodes' disks as a whole, and how many of its pages are; of these
        the one used last.
        """
        missing = (
            (kept, n)
            for kept in reversed(self._kept.values())
            if len(kept.keys) >= least_pages and (n := self.n_on_disk.get(kept.seq_id, 0)) < len(kept.keys)
        )
        return next(missing, None)

    def note_written(self, seq_id: int, n_pages: int) -> None:
        """The nodes were asked to keep so many pages of one that may have been dropped meanwhile."""
        if seq_id in self._kept:
            self.n_on_disk[seq_id] = n_pages

    def drop(self, seq_id: int) -> None:
        kept = self._kept.pop(seq_id)
        self.n_on_disk.pop(seq_id, None)
        for key in kept.keys:
            self._by_pages[key].remove(seq_id)
            if not self._by_pages[key]:
                del self._by_pages[key]
        self._count(kept, -1)

    def drop_oldest(self) -> int:
        """Drop the least recently used one, and return it; those that an owner used last go when there are no others, so that
        nobody loses a conversation to one who has many. What a waiting sequence begins with goes last of all.
        """
        newest, wanted = {kept.owner: seq_id for seq_id, kept in self._kept.items()}, set(self.wanted.values())
        seq_id = min(self._kept, key=lambda one: (one in wanted, newest[self._kept[one].owner] == one))
        self.drop(seq_id)
        return seq_id

    def _count(self, kept: Kept, sign: int) -> None:
        for node, n_bytes in enumerate(kept.n_bytes):
            self.total[node] += sign * n_bytes


def page_keys(seed: str, ids: Sequence[int]) -> list[bytes]:
    """For each whole page, 16 bytes that stand for the seed and all ids up to its end: the same in every process."""
    keys, key = [], hashlib.blake2b(seed.encode(), digest_size=16).digest()
    for end in range(PAGE, len(ids) + 1, PAGE):
        key = hashlib.blake2b(key + _PAGE_IDS.pack(*ids[end - PAGE : end]), digest_size=16).digest()
        keys.append(key)
    return keys


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
