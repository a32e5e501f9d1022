"""The trace of a run: the starter's spans, those of the other nodes, and the comparison of their clocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mdi.config import NodeConfig
from mdi.control.client import ControlClient
from mdi.errors import ControlError
from mdi.tracing.clocks import Clock, Reading, read_clock, settled
from mdi.tracing.recorder import SERVE_SPANS, Recorder, unpack, ways_ns
from mdi.tracing.trace import NodeTrace, Trace

ANSWER_S = 2.0  # a node that is silent for so long may be lost

logger = logging.getLogger("mdi")


class RunTrace:
    """See the module. Clocks are read before the ring is closed and after the run: between the two they may drift.

    Args:
        n_spans: that each node keeps at most.
    """

    def __init__(self, n_spans: int) -> None:
        self.recorder = Recorder(n_spans)
        self._n_spans = n_spans
        self._readings: dict[str, list[Reading]] = {}

    def read_clocks(self, clients: Sequence[ControlClient]) -> None:
        """Compare the clocks of all nodes with this one's, if there will be a trace; nodes that do not answer are left out."""
        if self._n_spans <= SERVE_SPANS:
            return
        for client in clients:
            try:
                reading = read_clock(lambda client=client: timer_of(client.status(timeout_s=ANSWER_S)))  # type: ignore[misc]
            except ControlError as e:
                logger.warning("the clock of %s cannot be read: %s", client.node.name, e)
            else:
                self._readings.setdefault(client.node.name, []).append(reading)

    def trace(
        self, model: str, configs: Sequence[NodeConfig], blocks: Sequence[tuple[int, int]],
        measured: Sequence[Mapping[str, Any]], n_tokens: int,
    ) -> Trace:  # fmt: skip
        """Everything on the starter's time axis.

        Args:
            configs, blocks: of all nodes, the starter first.
            measured: the metrics of each secondary; one without has no spans.
        """
        own, starter = self.recorder.buffer, configs[0]
        nodes = [NodeTrace(starter.name, blocks[0], tuple(own.last()), is_cut=own.is_full, addr=starter.addr)]
        for config, held, values in zip(configs[1:], blocks[1:], measured, strict=False):  # a lost node says nothing
            nodes.append(replace(self._node(config.name, held, values), addr=config.addr))
        return Trace(model, tuple(_with_settled_clocks(nodes)), n_tokens)

    def _node(self, name: str, blocks: tuple[int, int], values: Mapping[str, Any]) -> NodeTrace:
        readings = self._readings.get(name)
        try:
            spans = unpack(values["spans"], name) if readings and "spans" in values else []
        except ControlError as e:  # a trace without one node is still of use
            logger.warning("%s", e)
            spans = []
        if not readings or not spans:
            return NodeTrace(name, blocks, ())
        clock = Clock(readings)
        moved = (s._replace(begin_ns=clock.here_ns(s.begin_ns), end_ns=clock.here_ns(s.end_ns)) for s in spans)
        return NodeTrace(name, blocks, tuple(moved), clock.error_s, values.get("spans_cut") is True)


def _with_settled_clocks(nodes: list[NodeTrace]) -> list[NodeTrace]:
    """Nodes whose links are as alike as what is known of their clocks allows."""
    delays = [_quickest_s(node, following) for node, following in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
    known = [delay for delay in delays if delay is not None]
    if len(nodes) < 2 or len(known) < len(nodes):
        return nodes
    moves = settled(known, [node.clock_error_s for node in nodes])
    return [_moved(node, round(move * 1e9)) for node, move in zip(nodes, moves, strict=True)]


def _quickest_s(source: NodeTrace, target: NodeTrace) -> float | None:
    ways = ways_ns(source.spans, target.spans)
    return min(ways) / 1e9 if ways else None


def _moved(node: NodeTrace, move_ns: int) -> NodeTrace:
    spans = (s._replace(begin_ns=s.begin_ns + move_ns, end_ns=s.end_ns + move_ns) for s in node.spans)
    return replace(node, spans=tuple(spans))


def timer_of(status: Mapping[str, Any]) -> float:
    """Read a node's timer from its status. Raises ControlError if it does not say."""
    timer = status.get("timer_s")
    if isinstance(timer, bool) or not isinstance(timer, int | float) or not abs(timer) < 1e12:
        raise ControlError(f"{status.get('name')!r:.40} does not report its timer")
    return float(timer)
