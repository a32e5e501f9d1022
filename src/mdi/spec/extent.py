"""How much a run computes at the same time: what caches are reckoned by, and made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mdi.spec.decode import one_of
from mdi.spec.limits import ROW_VALUE_BYTES
from mdi.spec.options import KV_DTYPES, Frames, Length

N_TEXTS = 8  # at the same time, of a run that does not say how many


@dataclass(frozen=True)
class Extent:
    """Of a run, as it is asked for, or of one node's stage in it (`host.computing.Computing.extent`).

    Attributes:
        max_length: tokens that a sequence may reach.
        n_sequences: at the same time, at most: caches need hold no more.
        n_frames: in flight, at most; None: as many as nodes.
        kv_dtype: what caches hold, a name in model.caches.CACHE_TYPES; "auto" leaves it to each node.
    """

    max_length: Length = 1
    n_sequences: Length = N_TEXTS
    n_frames: Frames | None = None
    kv_dtype: Annotated[str, one_of(KV_DTYPES)] = "auto"

    def row_bytes(self, width: int, limit_bytes: int) -> int:
        """The most that kept rows can take: those of all positions of all sequences.

        Args:
            width: numbers of a row, where they are kept.
        """
        return min(limit_bytes, self.n_sequences * self.max_length * width * ROW_VALUE_BYTES)
