"""The scheduler's results: the rows of a frame, and what happened to each sequence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from mdi.engine.sequence import Sequence


@dataclass(frozen=True)
class PlannedSlice:
    """Rows of one sequence that go into a frame: a `slices.Slice`, which all nodes see, with what only the starter needs: the
    ids, and the `life` of the sequence.
    """

    seq_id: int
    start: int
    n_rows: int
    n_logits: int
    ids: tuple[int, ...]
    life: int = 0


@dataclass(frozen=True)
class Plan:
    """One frame to send: its number, its slices, the sequences whose caches are to be freed before, and then those that
    begin with a copy of another one's (sequence, new sequence).

    A replay has rows that only the nodes need which have lost their caches (net.wire.Frame).
    """

    number: int
    slices: tuple[PlannedSlice, ...]
    freed: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()
    is_replay: bool = False


@dataclass(frozen=True)
class Event:
    """What happened to a sequence: its text has grown, it has ended, or both.

    Attributes:
        tokens: new ones; tokens that may become a stop sequence come together, once they cannot any more.
        finish_reason: set in the last event of a sequence: "eos", "stop", "length", or the reason given to end it.
        time_s: time.perf_counter() when it happened; the scheduler, which has no clock, leaves it 0.
        logprobs: of each token, if its sequence asks for them: its own, and those of the best tokens.
    """

    seq_id: int
    tokens: tuple[int, ...]
    finish_reason: str | None
    time_s: float = field(default=0.0, compare=False)
    logprobs: tuple[tuple[float, list[tuple[int, float]]], ...] = ()


def next_share(n_decoding: int, flying: Collection[int], n_frames: int) -> int:
    """How many decoding sequences the next frame takes, so that all frames get the same number or one more.

    With few sequences some frames stay away: a round takes as long as the fullest one, whether the others are there or
    not, and the weights are read less often.

    Args:
        flying: those of each frame that is under way.
    """
    if not n_decoding:
        return 0
    fullest = -(-n_decoding // n_frames)
    n_used = -(-n_decoding // fullest)
    if len(flying) >= n_used:
        return 0  # one frame too many is under way: ready sequences join the next one
    size, n_larger = divmod(n_decoding, n_used)
    return size + 1 if sum(n > size for n in flying) < n_larger else size


def next_slice(sequence: Sequence, n_rows: int) -> PlannedSlice:
    """The next rows of a sequence, which count as sent from now on."""
    start = sequence.n_sent
    sequence.n_sent += n_rows
    ids = tuple(sequence.ids[start : start + n_rows])
    return PlannedSlice(sequence.seq_id, start, n_rows, 0 if sequence.in_prefill else 1, ids, sequence.life)
