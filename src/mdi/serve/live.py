"""Shares, rates and delays of a running ring between two moments. Pure: computed from two snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mdi.tracing.clocks import Reading, settled
from mdi.tracing.explain import BUSY
from mdi.tracing.recorder import Span, ways_ns


@dataclass(frozen=True)
class NodeLook:
    """One look at a node.

    Attributes:
        measured: compute_s, wait_s, send_s, bytes_sent and frames of the run so far; {} if it does not say.
        spans: the last ones, by its own timer.
        reading: its timer compared with this process's; None if it did not answer.
    """

    name: str
    at_s: float
    measured: Mapping[str, Any]
    spans: Sequence[Span] = ()
    reading: Reading | None = None


@dataclass
class Delays:
    """The time that frames take from one node to the next, of the last looks.

    Two timers are compared by round trips of requests, which take longer than a frame: the quickest of the last ones counts,
    and what it leaves open is settled by the frames themselves.
    """

    n_kept: int = 20
    readings: dict[str, list[Reading]] = field(default_factory=dict)

    def note(self, look: NodeLook) -> None:
        if look.reading is not None:
            kept = self.readings.setdefault(look.name, [])
            kept.append(look.reading)
            del kept[: -self.n_kept]

    def of(self, looks: Sequence[NodeLook]) -> list[tuple[float, float] | None]:
        """For each node's link to the next one: seconds of a frame's way, and by how much they may be wrong; None if unknown.

        Args:
            looks: at all nodes in ring order, this process's own first.
        """
        clocks = [self._best(look.name) for look in looks]
        ways = [self._ways_s(looks, clocks, i) for i in range(len(looks))]
        errors = [clock.error_s if clock is not None else 0.0 for clock in clocks]
        moves = [0.0] * len(looks)
        if all(ways):
            moves = settled([min(way) for way in ways], errors)
        found: list[tuple[float, float] | None] = []
        for i, way in enumerate(ways):
            following = (i + 1) % len(looks)
            delay = median(way) + moves[following] - moves[i] if way else 0.0
            found.append((max(0.0, delay), errors[i] + errors[following]) if way else None)
        return found

    def _ways_s(self, looks: Sequence[NodeLook], clocks: Sequence[Reading | None], i: int) -> list[float]:
        following = (i + 1) % len(looks)
        from_here, to_here = clocks[i], clocks[following]
        if from_here is None or to_here is None:
            return []
        offset = (to_here.here_s - to_here.there_s) - (from_here.here_s - from_here.there_s)
        return [way / 1e9 + offset for way in ways_ns(looks[i].spans, looks[following].spans)]

    def _best(self, name: str) -> Reading | None:
        return min(self.readings.get(name, ()), key=lambda reading: reading.error_s, default=None)


def shares(before: NodeLook | None, now: NodeLook) -> dict[str, float | None]:
    """Shares of the time between two snapshots in which a node computed, waited and sent, and its bytes per second."""
    names = {"busy": "compute_s", "waiting": "wait_s", "sending": "send_s", "bytes_s": "bytes_sent"}
    known = before is not None and before.measured and now.measured and now.at_s > before.at_s
    if not known or now.measured["frames"] < before.measured["frames"]:  # type: ignore[union-attr]
        return dict.fromkeys(names)
    assert before is not None
    gone = now.at_s - before.at_s
    rates = {name: max(0.0, now.measured[key] - before.measured[key]) / gone for name, key in names.items()}
    found = {name: rate if name == "bytes_s" else min(1.0, rate) for name, rate in rates.items()}
    # A wait is measured when it ends, and may have begun long before: what it had outside of this time would count, too.
    found["waiting"] = max(0.0, min(found["waiting"], 1.0 - found["busy"] - found["sending"]))
    return found


def waited_for(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """The node that limits the others: the busiest one, if it computes most of the time."""
    busiest = max(nodes, key=lambda node: node.get("busy") or 0.0, default=None)
    if busiest is None or len(nodes) < 2 or (busiest.get("busy") or 0.0) < BUSY:
        return None
    return str(busiest["name"])


def node_state(own: str, trouble: str) -> str:
    """What a node of a ring does, in the words of page and doctor.

    Args:
        own: the state that it tells; "" if it does not answer.
        trouble: why no text goes on; "" while the ring is closed.
    """
    if trouble and own:
        return "WAITING"
    return "SERVING" if own == "RUNNING" else own


def ring_words(ring: Mapping[str, Any], trouble: str) -> tuple[str, str]:
    """State of a ring ("recovering", "working" or "idle"), and what holds it up, in a sentence.

    Args:
        ring: its nodes, texts, tokens_s and waits_for, as in a snapshot.
        trouble: why no text goes on; "" while the ring is closed.
    """
    state = "recovering" if trouble else "working" if ring["texts"]["running"] else "idle"
    silent = [node["name"] for node in ring["nodes"] if not node["is_here"]]
    if trouble:
        return state, f"{trouble}."
    if silent:
        return state, f"No answer from {', '.join(silent)}."
    if state == "idle":
        return state, "Idle: all nodes wait for a text."
    slowest = next((node for node in ring["nodes"] if node["name"] == ring["waits_for"]), None)
    if slowest is not None:
        return state, f"{slowest['name']} limits the ring: it computes {slowest['busy']:.0%} of the time."
    if not ring["tokens_s"]:
        return state, "No token has come in the last second."
    return state, "No node limits the ring: frames spend most of their time on links."
