"""What a running ring measures from one moment to the next: shares, rates, delays. Pure: two looks at it go in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mdi.tracing.clocks import Reading
from mdi.tracing.explain import BUSY
from mdi.tracing.spans import Activity, Span


@dataclass(frozen=True)
class NodeLook:
    """One look at a node.

    Attributes:
        measured: compute_s, wait_s, send_s, bytes_sent and frames of the run so far; {} if it does not say.
        spans: the last ones, of its own timer.
        reading: how its timer stands to this process's; None if it did not answer.
    """

    name: str
    at_s: float
    measured: Mapping[str, Any]
    spans: Sequence[Span] = ()
    reading: Reading | None = None


@dataclass
class Delays:
    """The time that frames take from one node to the next, of the last looks.

    Two timers are compared by round trips of requests, which take longer than a frame: the quickest of the last ones counts.
    """

    n_kept: int = 20
    readings: dict[str, list[Reading]] = field(default_factory=dict)

    def note(self, look: NodeLook) -> None:
        if look.reading is not None:
            kept = self.readings.setdefault(look.name, [])
            kept.append(look.reading)
            del kept[: -self.n_kept]

    def of(self, source: NodeLook, target: NodeLook) -> tuple[float, float] | None:
        """Seconds of a frame's way, and by how much they may be wrong; None if nothing is known."""
        from_here, to_here = self._best(source.name), self._best(target.name)
        if from_here is None or to_here is None:
            return None
        arrived = {s.frame: s.begin_ns for s in target.spans if s.activity == Activity.ARRIVAL}
        ways = [
            (arrived[s.frame] - s.begin_ns) / 1e9 for s in source.spans if s.activity == Activity.SEND and s.frame in arrived
        ]  # fmt: skip
        if not ways:
            return None
        offset = (to_here.here_s - to_here.there_s) - (from_here.here_s - from_here.there_s)
        return max(0.0, median(ways) + offset), from_here.error_s + to_here.error_s

    def _best(self, name: str) -> Reading | None:
        return min(self.readings.get(name, ()), key=lambda reading: reading.error_s, default=None)


def shares(before: NodeLook | None, now: NodeLook) -> dict[str, float | None]:
    """What part of the time between two looks a node computed, waited and sent, and what it sent per second."""
    names = {"busy": "compute_s", "waiting": "wait_s", "sending": "send_s", "bytes_s": "bytes_sent"}
    known = before is not None and before.measured and now.measured and now.at_s > before.at_s
    if not known or now.measured["frames"] < before.measured["frames"]:  # type: ignore[union-attr]
        return dict.fromkeys(names)
    assert before is not None
    gone = now.at_s - before.at_s
    rates = {name: max(0.0, now.measured[key] - before.measured[key]) / gone for name, key in names.items()}
    return {name: rate if name == "bytes_s" else min(1.0, rate) for name, rate in rates.items()}


def waited_for(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """The node that the others wait for: the busiest, if it computes for most of the time."""
    busiest = max(nodes, key=lambda node: node.get("busy") or 0.0, default=None)
    if busiest is None or len(nodes) < 2 or (busiest.get("busy") or 0.0) < BUSY:
        return None
    return str(busiest["name"])
