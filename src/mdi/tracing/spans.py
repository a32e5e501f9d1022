"""What a node did with each frame, and when: spans in a bounded buffer, and their form as bytes."""

from __future__ import annotations

import base64
import binascii
import struct
from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from mdi.errors import ControlError

# Spans that a node keeps; the oldest make place. As text they stay well below what an answer may hold (control.exchange).
N_SPANS = 60_000
_PACKED = struct.Struct("<BqqIIII")
_UINT32 = (1 << 32) - 1


class Activity(IntEnum):
    WAIT = 0  # for the next frame
    BLOCKS = 1  # computing; on the starter the embedding, too
    HEAD = 2  # on the starter: final norm, head, drawing
    SEND = 3  # writing to the socket
    ARRIVAL = 4  # a moment: the frame is here, whole
    TEXTS = 5  # a moment: how many texts run and wait


class Span(NamedTuple):
    """One activity with one frame.

    Attributes:
        begin_ns, end_ns: of a timer, which each node has its own of; equal for a moment.
        frame: its number; the same on all nodes.
        n_rows: of the frame, where it is computed. Of TEXTS: how many run.
        n_prompt_rows: those of prompts among them. Of TEXTS: how many wait for memory.
        n_bytes: of the payload on a link. For TEXTS: how often one was evicted so far.
    """

    activity: int
    begin_ns: int
    end_ns: int
    frame: int
    n_rows: int = 0
    n_prompt_rows: int = 0
    n_bytes: int = 0

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


class SpanBuffer:
    """The last spans of a node. Several threads may add."""

    def __init__(self, n_spans: int = N_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=n_spans)

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def last(self, n: int | None = None) -> list[Span]:
        """A copy of all, or of the last `n`, in the order in which they were added."""
        spans = list(self._spans.copy())
        return spans if n is None else spans[-n:]

    @property
    def is_full(self) -> bool:
        """Whether older ones may have made place."""
        return len(self._spans) == self._spans.maxlen


def pack(spans: Iterable[Span]) -> str:
    """Spans as text, for JSON."""
    packed = bytearray()
    for span in spans:
        counts = (min(n, _UINT32) for n in span[4:])
        packed += _PACKED.pack(span.activity, span.begin_ns, span.end_ns, span.frame & _UINT32, *counts)
    return base64.b64encode(packed).decode("ascii")


def unpack(text: object, where: str) -> list[Span]:
    """Read what another node sent.

    Raises:
        ControlError: it is not what `pack` makes; names `where`.
    """
    wrong = ControlError(f"{where}: its spans cannot be read")
    if not isinstance(text, str):
        raise wrong
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise wrong from None
    if len(packed) % _PACKED.size:
        raise wrong
    spans = [Span(*fields) for fields in _PACKED.iter_unpack(packed)]
    if any(span.activity > max(Activity) or span.begin_ns > span.end_ns for span in spans):
        raise wrong
    return spans


def ways_ns(source: Iterable[Span], target: Iterable[Span]) -> list[int]:
    """How long each frame took from the socket of one node to that of the next, both on one time axis."""
    arrived = {s.frame: s.begin_ns for s in target if s.activity == Activity.ARRIVAL}
    return [arrived[s.frame] - s.begin_ns for s in source if s.activity == Activity.SEND and s.frame in arrived]
