"""Frames as values. `codec` turns them into bytes, `link` uses sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from mdi.slices import Slice as Slice

SILENCE_S = 6.0  # a neighbour that is silent for so long counts as dead, unless the run has another limit
FRAME_ROWS = 1 << 13  # of one frame at most: prompt rows, and a row for each sequence that decodes


class FrameType(IntEnum):
    HELLO = 1  # first frame of a link, and its answer
    BATCH = 2  # rows of sequences
    STOP = 3  # the run is over; passed on in both directions
    ERROR = 4  # a node failed; the payload says which and how; passed on in both directions
    PING = 5  # sign of life of one link, in both directions, never passed on
    CHALLENGE = 6  # before the HELLO, where nodes have a cluster key, and its answer
    NOTICE = 7  # a node will leave; passed on in both directions, before queued frames, up to the starter


@dataclass(frozen=True)
class PayloadType:
    """The layout of a payload: all scales first, if there are some, then all values, row by row.

    Attributes:
        name: torch's name of the type, or our own for scaled types.
        value_bytes: of one value.
        scale_bytes: of one scale and what belongs to it; 0 if the values are not scaled.
        block: consecutive values of a row that share a scale; 0 is the whole row. The last block of a row may be short.
    """

    name: str
    value_bytes: int
    scale_bytes: int = 0
    block: int = 0

    def n_scales(self, n_cols: int) -> int:
        """Scales of one row."""
        if not self.scale_bytes:
            return 0
        return -(-n_cols // self.block) if self.block else 1

    def n_bytes(self, n_rows: int, n_cols: int) -> int:
        return n_rows * (self.n_scales(n_cols) * self.scale_bytes + n_cols * self.value_bytes)


PLAIN_BYTES = PayloadType("bytes", 1)
# float16 times a power of two in float32 for each row: hidden states may pass the largest float16, 65504.
ROW_FLOAT16 = PayloadType("row-scaled float16", 2, scale_bytes=4)
# 8 bits times a bfloat16 for every 64 values, the largest of which stands beside the scale, again as bfloat16: one large
# value must not take the precision of its neighbours. Its place holds -128, which stands for nothing else.
BLOCK_INT8 = PayloadType("block-scaled int8", 1, scale_bytes=4, block=64)

DTYPES: dict[int, PayloadType] = {
    0: PLAIN_BYTES,
    1: PayloadType("float32", 4),
    2: PayloadType("float16", 2),
    3: PayloadType("bfloat16", 2),
    4: PayloadType("float64", 8),
    5: ROW_FLOAT16,
    6: BLOCK_INT8,
}
DTYPE_CODES = {payload_type.name: code for code, payload_type in DTYPES.items()}

# What a run's rows travel as; "auto" is what each stage computes in. All nodes of a ring must agree (net.hello).
WIRE_DTYPES = ("auto", "fp16", "int8")
REDUCE_DTYPES = ("float32", *WIRE_DTYPES[1:])  # of partial sums, see tensor.numbers


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts; a frame beyond it is refused before its payload is allocated."""

    max_rows: int = FRAME_ROWS
    max_cols: int = 1 << 17
    max_slices: int = 1 << 16
    max_payload_bytes: int = 1 << 30


HANDSHAKE_LIMITS = Limits(max_rows=1, max_cols=4096, max_slices=0, max_payload_bytes=4096)


@dataclass(frozen=True)
class Frame:
    """One message of the ring.

    A node first frees the caches of `freed`, then copies those of each (sequence, new sequence) of `copies`, in order, and then
    computes the rows.

    Attributes:
        is_replay: rows that one node needs to have its caches again, and nobody else: they travel from the node before it to
            it, and between all others the frame has none (engine.secondary_loop).
        payload: a bytes-like object of n_rows * n_cols values of `dtype`, see PayloadType.
    """

    type: FrameType
    epoch: int
    number: int = 0
    dtype: str = "bytes"
    n_rows: int = 0
    n_cols: int = 0
    slices: tuple[Slice, ...] = ()
    freed: tuple[int, ...] = ()
    payload: bytes | bytearray | memoryview = field(default=b"", repr=False)
    copies: tuple[tuple[int, int], ...] = ()
    is_replay: bool = False

    @classmethod
    def message(cls, frame_type: FrameType, epoch: int, data: bytes = b"") -> Frame:
        """A frame that carries plain bytes instead of rows."""
        return cls(frame_type, epoch, n_rows=1 if data else 0, n_cols=len(data), payload=data)
