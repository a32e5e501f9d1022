"""Spans, clocks and the file of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import simulate

from mdi.engine.recorder import (
    N_SPANS,
    SERVE_SPANS,
    Activity,
    Recorder,
    Span,
    SpanBuffer,
    pack,
    recorder_of,
    unpack,
)
from mdi.errors import ControlError
from mdi.kernels.slices import SliceTable
from mdi.net.ring import LoopbackRing
from mdi.net.wire import Frame, FrameType, Slice
from mdi.run.trace import Clock, Reading, RunTrace, read_clock, read_trace, settled, write_trace
from mdi.spec.cluster import NodeConfig

counts = st.integers(0, (1 << 32) - 1)
moments = st.integers(-(1 << 62), 1 << 62)


@st.composite
def any_span(draw: st.DrawFn) -> Span:
    begin, end = sorted((draw(moments), draw(moments)))
    return Span(draw(st.sampled_from(Activity)), begin, end, draw(counts), draw(counts), draw(counts), draw(counts))


@given(st.lists(any_span(), max_size=20))
def test_spans_come_over_as_they_are(spans: list[Span]) -> None:
    assert unpack(pack(spans), "n") == spans


@pytest.mark.parametrize(
    "text", [None, 3, "?", "AAAA", pack([Span(9, 0, 0, 0)]), pack([Span(Activity.SEND, 2, 1, 0)]), pack([])[:-1] + "A"]
)
def test_other_bytes_are_refused(text: object) -> None:
    with pytest.raises(ControlError):
        unpack(text, "n")


def test_the_oldest_spans_make_place() -> None:
    buffer = SpanBuffer(3)
    for i in range(5):
        assert buffer.is_full == (i >= 3)
        buffer.add(Span(Activity.SEND, i, i, i))
    assert [span.frame for span in buffer.last()] == [2, 3, 4]
    assert [span.frame for span in buffer.last(1)] == [4]


def test_all_that_a_node_keeps_fits_into_an_answer() -> None:
    from mdi.net.message import ANSWER_LIMIT_BYTES

    assert len(pack([Span(Activity.SEND, 1, 2, 3)] * N_SPANS)) < ANSWER_LIMIT_BYTES * 0.9


def test_the_quickest_round_trip_counts() -> None:
    reading = read_clock(iter([5.0, 6.0, 7.0]).__next__, 3)
    assert reading.there_s in (5.0, 6.0, 7.0) and reading.error_s >= 0


def test_a_clock_that_is_ahead_and_drifts() -> None:
    ahead_s, rate = 1000.0, 1 + 5e-5
    clock = Clock([Reading(h, ahead_s + h * rate, 1e-4) for h in (10.0, 110.0)])
    for here_s in (10.0, 60.0, 110.0):
        assert clock.here_ns(round((ahead_s + here_s * rate) * 1e9)) == pytest.approx(here_s * 1e9, abs=1e4)


def test_a_slow_answer_is_not_taken_for_drift() -> None:
    clock = Clock([Reading(10.0, 1010.0, 1e-4), Reading(11.0, 1011.4, 0.5)])
    assert clock.here_ns(1_011_000_000_000) == pytest.approx(11e9, abs=1e3)
    assert clock.error_s == 0.5


def moved(delays: list[float], errors: list[float]) -> list[float]:
    moves = settled(delays, errors)
    n = len(delays)
    assert moves[0] == 0 and all(abs(move) <= error for move, error in zip(moves, errors, strict=True))
    return [delays[i] + moves[(i + 1) % n] - moves[i] for i in range(n)]


def test_clocks_that_may_be_wrong_make_no_link_odd() -> None:
    """Links of 1 ms, seen by clocks that are 2 ms and 1 ms off; a frame seems to come before it has left."""
    assert moved([-0.001, 0.002, 0.002], [0.0, 0.003, 0.003]) == pytest.approx([0.001] * 3, abs=1e-6)


def test_a_link_that_is_slower_than_any_error_stays_slow() -> None:
    assert moved([0.001, 0.040, 0.001], [0.0, 0.001, 0.001]) == pytest.approx([0.002, 0.038, 0.002], abs=1e-6)


def test_exact_clocks_stay_as_they_are() -> None:
    assert moved([0.001, 0.005, 0.002], [0.0, 0.0, 0.0]) == [0.001, 0.005, 0.002]


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    trace = simulate([4.0, 12.0], [0.1, 0.1])
    write_trace(tmp_path / "run.json", trace)
    back = read_trace(tmp_path / "run.json")
    assert (back.model, back.n_tokens) == (trace.model, trace.n_tokens)
    for node, was in zip(back.nodes, trace.nodes, strict=True):
        assert (node.name, node.blocks) == (was.name, was.blocks)
        for activity in (Activity.BLOCKS, Activity.HEAD, Activity.SEND, Activity.ARRIVAL):
            assert node.of(activity) == was.of(activity)


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    """Names of nodes, whole events with a duration, and an arrow for each frame on each link."""
    write_trace(tmp_path / "run.json", simulate([4.0, 12.0], [0.1, 0.1], n_frames=7))
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == ["starter (0-1)", "secondary0 (2-3)"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events if e["ph"] == "X")
    begun, ended = ({e["id"]: e["ts"] for e in events if e["ph"] == ph} for ph in "sf")
    assert begun.keys() == ended.keys() and len(begun) == 14
    assert all(begun[i] < ended[i] for i in begun)


def frame(number: int, n_rows: int) -> Frame:
    slices = (Slice(1, 0, n_rows - 1, 0), Slice(2, 5, 1, 1))
    return Frame(FrameType.BATCH, 1, number, "float32", n_rows, 1, slices, (), bytes(4 * n_rows))


def test_a_starters_calls_become_head_and_blocks() -> None:
    ring = LoopbackRing(2)
    recorder = Recorder(texts=lambda: (3, 2, 1))
    recorded = recorder.over(ring)
    recorded.send(frame(0, 4))
    back = recorded.recv()
    assert back is not None
    recorded.release(back)
    recorded.send(frame(1, 4))
    noted = [(Activity(s.activity), s.frame, s.n_rows, s.n_prompt_rows) for s in recorder.buffer.last()]
    assert noted == [
        (Activity.TEXTS, 0, 3, 2), (Activity.WAIT, 0, 0, 0), (Activity.HEAD, 0, 4, 3), (Activity.BLOCKS, 1, 4, 3),
        (Activity.TEXTS, 1, 3, 2),
    ]  # fmt: skip


def test_a_secondary_gives_a_frame_back_after_it_has_sent_it_on() -> None:
    ring = LoopbackRing(2)
    ring.send(frame(7, 3))
    recorder = Recorder()
    recorded = recorder.over(ring)
    got = recorded.recv()
    assert got is not None
    recorded.send(got)
    recorded.release(got)
    assert [(Activity(s.activity), s.frame) for s in recorder.buffer.last()] == [
        (Activity.WAIT, 7),
        (Activity.BLOCKS, 7),
    ]


def test_a_node_records_only_what_it_was_asked_for() -> None:
    assert recorder_of(0) is None
    kept = recorder_of(10 * N_SPANS)
    assert kept is not None
    for i in range(N_SPANS + 1):
        kept.buffer.add(Span(Activity.WAIT, i, i, i))
    assert kept.buffer.is_full and len(kept.buffer.last()) == N_SPANS


def test_what_is_a_prompt_is_known_to_the_starter() -> None:
    """Two rows of which one comes back may be the end of a prompt, or a token that was not drawn and the next one."""
    nodes = [NodeConfig(name, "127.0.0.1", 1, 1) for name in ("starter", "secondary0")]
    client: Any = SimpleNamespace(node=nodes[1], status=lambda timeout_s: {"name": "secondary0", "timer_s": 1.0})
    run = RunTrace(SERVE_SPANS + 1)
    run.read_clocks([client])
    far = Recorder()
    run.recorder.prompt_rows = {0: 2, 1: 0}.__getitem__
    for number in (0, 1):
        frame = Frame(FrameType.BATCH, 0, number, slices=SliceTable([Slice(1, 4, 2, 1)]))
        run.recorder.add(Activity.BLOCKS, 1, 2, frame)
        far.add(Activity.BLOCKS, 3, 4, frame)
        far.add(Activity.HEAD, 4, 5, frame)
    assert [span.n_prompt_rows for span in far.buffer.last()] == [2] * 4
    found = run.trace("m", nodes, [(0, 1), (1, 2)], [far.to_json()], 3).nodes
    assert [[span.n_prompt_rows for span in node.spans] for node in found] == [[2, 0], [2, 2, 0, 0]], "also of its head"
