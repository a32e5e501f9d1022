"""A ring that is reckoned, not run: spans with a known answer."""

from __future__ import annotations

from collections.abc import Sequence

from mdi.engine.recorder import Activity, Span
from mdi.run.trace import NodeTrace, Trace

HEAD_MS = 0.5


def simulate(
    stage_ms: Sequence[float],
    link_ms: Sequence[float],
    service_ms: Sequence[float] | None = None,
    n_in_flight: int | None = None,
    n_frames: int = 60,
    running: int = 8,
    waiting: int = 0,
    put_out: int = 0,
    rows: int = 8,
    prompt_rows: int = 0,
    pause_ms: float = 0.0,
) -> Trace:
    """Frames go round in their order.

    Args:
        stage_ms: computing of each node for a frame; the starter has a head of HEAD_MS beside it.
        link_ms, service_ms: of the link behind each node: how long a frame is under way, and how long it keeps the link busy.
        n_in_flight: frames at a time; None is as many as nodes.
        pause_ms: after every frame there is none for so long; for one frame at a time.
    """
    n = len(stage_ms)
    n_in_flight = n if n_in_flight is None else n_in_flight
    service_ms = service_ms or [0.0] * n
    spans: list[list[Span]] = [[] for _ in range(n)]
    free = [0.0] * n  # when a node has computed what it has
    link_free = [0.0] * n
    back: dict[int, float] = {}  # when a frame is at the starter again

    def add(i: int, activity: Activity, begin: float, end: float, frame: int, *counts: int) -> None:
        spans[i].append(Span(activity, round(begin * 1e6), round(end * 1e6), frame, *counts))

    def compute(i: int, activity: Activity, ready: float, takes: float, frame: int) -> float:
        begin = max(free[i], ready)
        free[i] = begin + takes
        add(i, activity, begin, free[i], frame, rows, prompt_rows)
        return free[i]

    def travel(i: int, at: float, frame: int) -> float:
        if n == 1:
            return at
        begin = max(link_free[i], at)
        link_free[i] = begin + service_ms[i]
        arrival = link_free[i] + link_ms[i]
        add(i, Activity.SEND, at, at + 0.01, frame, 0, 0, 1000)
        add((i + 1) % n, Activity.ARRIVAL, arrival, arrival, frame, 0, 0, 1000)
        return arrival

    for frame in range(n_frames):
        ready = 0.0
        if frame >= n_in_flight:
            ready = compute(0, Activity.HEAD, back[frame - n_in_flight], HEAD_MS, frame - n_in_flight) + pause_ms
        at = compute(0, Activity.BLOCKS, ready, stage_ms[0], frame)
        add(0, Activity.TEXTS, at, at, frame, running, waiting, put_out)
        for i in range(1, n):
            at = compute(i, Activity.BLOCKS, travel(i - 1, at, frame), stage_ms[i], frame)
        back[frame] = travel(n - 1, at, frame)
    names = ["starter", *(f"secondary{i}" for i in range(n - 1))]
    nodes = [NodeTrace(name, (2 * i, 2 * i + 2), tuple(spans[i])) for i, name in enumerate(names)]
    return Trace("simulated", tuple(nodes), n_frames * rows)
