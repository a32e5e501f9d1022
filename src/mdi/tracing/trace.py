"""A run's frames on all nodes and one time axis. Values only; `chrome` writes them to a file."""

from __future__ import annotations

from dataclasses import dataclass

from mdi.tracing.spans import Activity, Span


@dataclass(frozen=True)
class NodeTrace:
    """What one node did.

    Attributes:
        blocks: [start, stop) with global numbers.
        spans: on the time axis of the trace.
        clock_error_s: by so much its times may be wrong against the starter's.
        is_cut: the oldest spans were not kept.
        addr: of its machine; "" is one of its own.
    """

    name: str
    blocks: tuple[int, int]
    spans: tuple[Span, ...]
    clock_error_s: float = 0.0
    is_cut: bool = False
    addr: str = ""

    def of(self, *activities: Activity) -> list[Span]:
        """The spans of some activities, in the order of time."""
        return sorted((s for s in self.spans if s.activity in activities), key=lambda s: s.begin_ns)


@dataclass(frozen=True)
class Trace:
    """A run.

    Attributes:
        nodes: in ring order, the starter first.
        n_tokens: generated, of all texts.
    """

    model: str
    nodes: tuple[NodeTrace, ...]
    n_tokens: int
