"""The present state of the ring for the page and for /metrics: one object of plain values."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from mdi.block_ranges import block_span
from mdi.control.client import FanOut
from mdi.engine.recorder import LIVE_SPANS, Span, unpack, ways_ns
from mdi.errors import ControlError
from mdi.host.resources import device_free_bytes
from mdi.metrics import NodeMetrics, tokens_per_round
from mdi.run.explain import BUSY
from mdi.run.trace import Reading, settled, timer_of
from mdi.units import counted

if TYPE_CHECKING:
    from mdi.control.client import ControlClient
    from mdi.run.run import Run
    from mdi.serve.host import ModelHost

Answer = tuple[dict[str, Any] | None, Reading | None]  # a node's status, and its timer compared with ours
STEP_S, N_STEPS = 5.0, 120  # of the history: ten minutes
ANSWER_S = 0.7  # the page shows a node that is silent for so long as gone


class Snapshots:
    """Looks at the rings of a server again and again; what has changed since the last look becomes shares and rates.

    Belongs to one thread.

    Attributes:
        latest: the last snapshots, by the name of the ring's model.
    """

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._watches: dict[str, _Watch] = {}  # by run
        self.latest: dict[str, dict[str, Any]] = {}

    def take(self) -> dict[str, dict[str, Any]]:
        """A snapshot of the rings. Takes milliseconds, or ANSWER_S for a ring of which a node does not answer."""
        nodes = {name: loaded.run for name, loaded in list(self._host.loaded.items())}
        measured = {name: own for name, node in nodes.items() if (own := node.measured()) is not None}
        self._watches = {nodes[name].run_id: self._watches.get(nodes[name].run_id) or _Watch() for name in measured}
        self.latest = {name: self._watches[nodes[name].run_id].look(nodes[name], own) for name, own in measured.items()}
        return self.latest


class _Watch:
    """Of one run."""

    def __init__(self) -> None:
        self._looks: dict[str, NodeLook] = {}
        self._tokens = (0.0, 0)
        self._delays = Delays()
        self._history = History()
        self._trouble_at: float | None = None

    def look(self, node: Run, own: NodeMetrics) -> dict[str, Any]:
        statuses = _ask_all(node.clients, node.run_id)
        looks = [_own_look(node, own), *(_look_at(name, *found) for name, found in statuses.items())]
        for look in looks:
            self._delays.note(look)
        nodes = self._nodes(node, looks, statuses)
        running, waiting, put_out = node.engine.texts()
        n_guessed, n_confirmed = node.engine.guesses
        found = {
            "time_s": time.time(),
            "nodes": nodes,
            "links": self._links(looks, nodes),
            "texts": {"running": running, "waiting": waiting, "put_out": put_out},
            "n_tokens": node.engine.n_tokens,
            "n_reused": node.engine.n_reused,
            "n_guessed": n_guessed,
            "n_confirmed": n_confirmed,
            "tokens_per_round": tokens_per_round(node.engine.n_tokens, n_confirmed),
            "n_recoveries": node.n_recoveries,
            "tokens_s": self._tokens_s(node.engine.n_tokens),
            "waits_for": waited_for(nodes),
        }
        found["state"], found["words"] = ring_words(found, node.trouble)
        if not node.trouble:
            self._trouble_at = None
        elif self._trouble_at is None:
            self._trouble_at = time.monotonic()
        found["trouble"], found["last_loss"] = node.trouble, node.loop.policy.last_loss
        found["trouble_s"] = 0.0 if self._trouble_at is None else time.monotonic() - self._trouble_at
        frames = {one["name"]: one["frames"] for one in nodes if one["is_here"] and one["frames"] is not None}
        found["history"] = self._history.after(time.monotonic(), node.engine.n_tokens, frames)
        self._looks = {look.name: look for look in looks}
        return found

    def _tokens_s(self, n_tokens: int) -> float:
        (before_s, before), now = self._tokens, time.perf_counter()
        self._tokens = (now, n_tokens)
        return (n_tokens - before) / (now - before_s) if before_s and n_tokens >= before else 0.0

    def _nodes(self, node: Run, looks: list[NodeLook], statuses: dict[str, Any]) -> list[dict[str, Any]]:
        caches = {name: {"used": used, "limit": limit} for name, used, limit in node.engine.cache_use}
        found = []
        for config, look, blocks in zip(node.cluster.nodes, looks, node.model.weights.blocks, strict=False):
            status = statuses[look.name][0] if look.name in statuses else _own_status(node)
            found.append(
                {
                    "name": look.name,
                    "addr": config.addr,
                    "blocks": list(blocks),
                    "blocks_text": block_span(*blocks),
                    "is_here": status is not None,
                    "state": node_state(str((status or {}).get("state", "")), node.trouble),
                    "device": (status or {}).get("device"),
                    "memory": (status or {}).get("memory"),
                    "cache": caches.get(look.name),
                    **{
                        key: look.measured.get(key) for key in ("compute_s", "wait_s", "send_s", "frames", "bytes_sent")
                    },
                    **shares(self._looks.get(look.name), look),
                }
            )
        return found

    def _links(self, looks: list[NodeLook], nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(looks) < 2:
            return []
        found = []
        ways = zip(looks, looks[1:] + looks[:1], nodes, self._delays.of(looks), strict=False)
        for source, target, node, delay in ways:
            found.append(
                {
                    "source": source.name,
                    "target": target.name,
                    "delay_s": None if delay is None else delay[0],
                    "error_s": None if delay is None else delay[1],
                    "bytes_s": node["bytes_s"],
                    "bytes": node["bytes_sent"],
                }
            )
        return found


def _own_look(node: Run, own: NodeMetrics) -> NodeLook:
    recorder = None if node.run_trace is None else node.run_trace.recorder
    spans = [] if recorder is None else recorder.buffer.last(LIVE_SPANS)
    now = time.perf_counter()
    return NodeLook(node.names[0], now, own.to_json(), spans, Reading(now, now, 0.0))


def _own_status(node: Run) -> dict[str, Any]:
    memory = {"rss_bytes": psutil.Process().memory_info().rss, "available_bytes": device_free_bytes(node.model.device)}
    return {"state": "RUNNING", "device": node.model.device, "memory": memory}


def _look_at(name: str, status: dict[str, Any] | None, reading: Reading | None) -> NodeLook:
    now = time.perf_counter()
    measured = (status or {}).get("measured")
    if not isinstance(measured, dict):
        return NodeLook(name, now, {}, (), reading)
    try:
        checked = NodeMetrics.from_json({**measured, "name": name, "layers": [0, 0]})
        return NodeLook(name, now, checked.to_json(), unpack(measured.get("spans", ""), name), reading)
    except ControlError:  # of another version
        return NodeLook(name, now, {}, (), reading)


def _ask_all(clients: list[ControlClient], run: str) -> dict[str, Answer]:
    """Status and clock of each secondary, all at once; None of one that does not answer."""
    asked = FanOut({client.node.name: lambda client=client: _ask(client, run) for client in clients})  # type: ignore[misc]
    asked.join(2 * ANSWER_S)
    return {client.node.name: asked.results.get(client.node.name, (None, None)) for client in clients}


def _ask(client: ControlClient, run: str) -> Answer:
    begin = time.perf_counter()
    try:
        status = client.status(run, ANSWER_S)
        end = time.perf_counter()
        return status, Reading((begin + end) / 2, timer_of(status), (end - begin) / 2)
    except ControlError:
        return None, None


class History:
    """Tokens per second of the last ten minutes, in total and through each node, in steps of STEP_S."""

    def __init__(self) -> None:
        self._begun: tuple[float, int, Mapping[str, int]] | None = None
        self._steps: deque[tuple[float, dict[str, float]]] = deque(maxlen=N_STEPS)

    def after(self, now_s: float, n_tokens: int, frames: Mapping[str, int]) -> dict[str, Any]:
        """All steps, oldest first; of a node, null where it did not answer.

        Args:
            n_tokens: of the ring, so far.
            frames: of each node that answers, so far. The tokens of a step went through the nodes whose frames rose.
        """
        if self._begun is None or n_tokens < self._begun[1]:
            self._begun = now_s, n_tokens, frames
        begin_s, before, had = self._begun
        if now_s - begin_s >= STEP_S:
            rate = round((n_tokens - before) / (now_s - begin_s), 1)
            through = {name: rate if n != had.get(name, 0) else 0.0 for name, n in frames.items()}
            self._steps.append((rate, through))
            self._begun = now_s, n_tokens, frames
        names = dict.fromkeys(name for _, through in self._steps for name in through)
        nodes = {name: [through.get(name) for _, through in self._steps] for name in names}
        return {"step_s": STEP_S, "n_steps": N_STEPS, "total": [rate for rate, _ in self._steps], "nodes": nodes}


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
    """State of a node of a ring, in the words of page and doctor.

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
        return state, "Ready: no request at the moment."
    slowest = next((node for node in ring["nodes"] if node["name"] == ring["waits_for"]), None)
    if slowest is not None:
        return state, f"Limited by {slowest['name']}, which computes {slowest['busy']:.0%} of the time."
    if not ring["tokens_s"]:
        return state, "No token has come in the last second."
    n_nodes, running = len(ring["nodes"]), ring["texts"]["running"]
    busy = sum(node.get("busy") or 0.0 for node in ring["nodes"])
    if running < n_nodes and busy >= running / 2:
        texts = counted(running, "text") + (" has its token" if running == 1 else " have their tokens")
        return state, f"{texts} on one node after the other: {n_nodes} or more keep all nodes busy."
    return state, "Network-bound: frames spend most of their time on links."
