"""The rows that a frame asks for, as frames, stages and kernels all name them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

RECORD = struct.Struct(
    "<QIII"
)  # of a slice, its fields in order, on the wire (net.wire) and in memory (kernels/csrc/model.h)


class Slice(NamedTuple):
    """Rows of one sequence in a frame, which holds at most one slice of a sequence.

    The row of position p in a sequence whose prompt has n tokens gives its new token number p + 1 - n, from 0 on.

    Attributes:
        seq_id: the sequence. Its upper 16 bits are the number of the adapter that it is computed with; 0 is none.
        start: position of the first row in the sequence; a start before the end of the cache truncates the cache.
        n_rows: how many consecutive positions.
        n_logits: how many of the last rows come back to the starter for logits: each may give a token. Stages need not know.
    """

    seq_id: int
    start: int
    n_rows: int
    n_logits: int = 0


def with_adapter(number: int, seq_id: int) -> int:
    """The id of a sequence that is computed with an adapter."""
    return number << 48 | seq_id


def adapter_of(seq_id: int) -> int:
    """The number of the adapter that a sequence is computed with; 0 is none."""
    return seq_id >> 48


Slices = Sequence[Slice]  # in row order


class SliceTable(tuple[Slice, ...]):
    """The slices of a frame, whose records lie side by side in memory: the table on the wire, and the kernels' argument.

    Attributes:
        records: RECORD.size bytes for each slice.
        n_rows, n_logits: of all slices.
    """

    records: bytes
    n_rows: int
    n_logits: int

    def __new__(cls, slices: Iterable[Slice] = (), records: bytes | None = None) -> SliceTable:
        table = super().__new__(cls, slices)
        table.records = b"".join([RECORD.pack(*one) for one in table]) if records is None else records
        table.n_rows = table.n_logits = 0
        for one in table:
            table.n_rows += one[2]
            table.n_logits += one[3]
        return table

    @classmethod
    def of(cls, slices: Slices) -> SliceTable:
        """The table of these slices; the same object if it is one."""
        return slices if type(slices) is cls else cls([Slice(*one) for one in slices])

    @classmethod
    def read(cls, records: bytes) -> SliceTable:
        """From the records themselves."""
        return cls(map(Slice._make, RECORD.iter_unpack(records)), records)


def only_logits(slices: Slices) -> list[Slice]:
    """Slices of the rows that need logits alone."""
    return [Slice(one[0], one[1] + one[2] - one[3], one[3], one[3]) for one in slices if one[3]]


NO_SLICES = SliceTable()
