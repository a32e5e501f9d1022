"""Keys and values that blocks on another node read than the one that makes them, as columns of rows.

They are what the one node's caches hold, so that the other one's copies hold the same: to the bit where rows travel as they are
computed and caches are no int8, whose scales may differ in their last bit.
"""

from __future__ import annotations

import numpy as np

from mdi.kernels.cache_rows import decoded, encoded
from mdi.kernels.slices import Slices
from mdi.kernels.stage_caches import Piece, StageCaches
from mdi.model.caches import Paged, cache_numbers, kind_of
from mdi.model.spec import ModelSpec, cache_column


class CacheColumns:
    """Those that the blocks [start, stop) of a model need of nodes before, and those that they make for nodes behind."""

    def __init__(self, spec: ModelSpec, start: int, stop: int, cache_type: str) -> None:
        self._cache_type, row = cache_type, spec.row_at(start)
        self._read: list[tuple[int, Paged, slice]] = []  # block, kind of its cache, place behind hidden
        for of in sorted({one for one in cache_numbers(spec, start, stop) if one < start}):
            place, kind = row.place(cache_column(of, spec.blocks[of].mixer).name), kind_of(spec.blocks[of])
            assert isinstance(kind, Paged)
            self._read.append((of, kind, slice(place.start - spec.width, place.stop - spec.width)))
        made = [of for of in spec.caches_before(stop) if of >= start]
        self._made = {cache_column(of, spec.blocks[of].mixer).name: of for of in made}

    @property
    def reads(self) -> bool:
        return bool(self._read)

    def put(self, caches: StageCaches, slices: Slices, columns: np.ndarray) -> None:
        """Write the rows of a frame, for which there is room, into the copies.

        Args:
            columns: float32 (N, all columns behind hidden).
        """
        for of, kind, place in self._read:
            at = 0
            for seq_id, start, n, *_ in slices:
                rows = columns[at : at + n, place].reshape(n, 2, kind.n_groups, kind.k_size)
                found = [encoded(np.ascontiguousarray(rows[:, half]), self._cache_type) for half in (0, 1)]
                arrays = *(one for one, _ in found), *(scales for _, scales in found if scales is not None)
                caches.put_rows(seq_id, of, Piece(start, arrays), start + n)
                at += n

    def made(self, caches: StageCaches, slices: Slices) -> dict[str, np.ndarray]:
        """By name, float32 (N, width) of the rows of a frame that has been computed."""
        return {
            name: np.concatenate([self._rows(caches, of, *one[:3]) for one in slices])
            for name, of in self._made.items()
        }

    def _rows(self, caches: StageCaches, of: int, seq_id: int, start: int, n: int) -> np.ndarray:
        piece = caches.rows_of(seq_id, of, start, start + n)
        assert piece.first == start
        keys, values, *scales = piece.arrays
        halves = [
            decoded(rows, own, self._cache_type)
            for rows, own in zip((keys, values), scales or (None, None), strict=True)
        ]
        return np.stack(halves, axis=1).reshape(n, -1)
