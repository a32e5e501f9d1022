"""Why a ring is not faster: rings whose answer is known, because they were reckoned with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated import simulate

from mdi.cli import launch
from mdi.engine.recorder import Activity
from mdi.run.explain import Finding, Summary, explain, summarize
from mdi.run.trace import Trace, write_trace


def summary_of(trace: Trace) -> Summary:
    summary = summarize(trace)
    assert summary is not None
    return summary


def findings(trace: Trace) -> list[tuple[str, str]]:
    return [(finding.code, finding.node) for finding in explain(summary_of(trace)).findings]


@pytest.mark.parametrize("slowest", [0, 1, 2])
def test_the_slowest_stage_is_named(slowest: int) -> None:
    stages = [4.0, 4.0, 4.0]
    stages[slowest] = 12.0
    trace = simulate(stages, [0.1, 0.1, 0.1])
    assert findings(trace) == [("stage", trace.nodes[slowest].name)]


def test_a_link_that_frames_queue_on_is_named() -> None:
    trace = simulate([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], [0.1, 9.0, 0.1])
    assert findings(trace) == [("link", "secondary0")]


def test_a_link_that_only_takes_long_is_a_long_way_and_not_a_busy_link() -> None:
    trace = simulate([2.0, 2.0, 2.0], [0.5, 40.0, 0.5])
    assert findings(trace) == [("round trip", "secondary0")]


def test_fewer_texts_than_nodes() -> None:
    trace = simulate([5.0, 5.0, 5.0], [0.1, 0.1, 0.1], n_in_flight=1, running=1, rows=1)
    assert findings(trace) == [("texts", "")]


def test_one_node_is_its_own_limit() -> None:
    assert findings(simulate([5.0], [0.0])) == [("stage", "starter")]


def test_texts_that_wait_for_memory() -> None:
    trace = simulate([4.0, 12.0], [0.1, 0.1], waiting=3, put_out=2)
    assert findings(trace) == [("stage", "secondary0"), ("memory", "")]


def test_prompts() -> None:
    assert ("prompts", "starter") in findings(simulate([4.0, 4.0], [0.1, 0.1], rows=64, prompt_rows=60))


def test_frames_of_few_rows() -> None:
    trace = simulate([4.0, 12.0], [0.1, 0.1], rows=1)
    assert findings(trace) == [("stage", "secondary0"), ("rows", "")]


def test_nodes_that_share_a_machine() -> None:
    trace = simulate([4.0, 12.0, 4.0], [0.1, 0.1, 0.1])
    addresses = ("10.0.0.1", "10.0.0.2", "10.0.0.2")
    nodes = tuple(replace(node, addr=addr) for node, addr in zip(trace.nodes, addresses, strict=True))
    assert findings(replace(trace, nodes=nodes)) == [("stage", "secondary0"), ("machine", "secondary0")]


def test_nobody_asked_for_a_text() -> None:
    assert findings(simulate([4.0, 4.0], [0.1, 0.1], n_in_flight=1, pause_ms=30.0)) == [("idle", "")]


def test_the_figures_are_those_of_the_ring() -> None:
    summary = summary_of(simulate([4.0, 12.0, 4.0], [1.0, 2.0, 3.0]))
    assert [stage.frame_s for stage in summary.stages] == pytest.approx([0.0045, 0.012, 0.004], rel=0.02)
    assert [way.transit_s for way in summary.ways] == pytest.approx([0.001, 0.002, 0.003])
    assert [way.busy for way in summary.ways] == [0, 0, 0]
    assert summary.stages[1].busy > 0.95
    assert summary.in_flight == pytest.approx(3, rel=0.05)
    assert summary.path_s == pytest.approx(0.0045 + 0.012 + 0.004 + 0.006, rel=0.02)


def test_only_what_every_node_has_kept_counts() -> None:
    trace = simulate([4.0, 12.0], [0.1, 0.1])
    late = trace.nodes[1].spans[len(trace.nodes[1].spans) // 2 :]
    cut = replace(trace, nodes=(trace.nodes[0], replace(trace.nodes[1], spans=late, is_cut=True)))
    assert summary_of(cut).n_frames < 0.6 * summary_of(trace).n_frames
    assert findings(cut) == findings(trace)


def test_a_trace_without_a_round_explains_nothing() -> None:
    trace = simulate([4.0, 4.0], [0.1, 0.1])
    spans = tuple(s for s in trace.nodes[0].spans if s.activity != Activity.HEAD)
    assert summarize(replace(trace, nodes=(replace(trace.nodes[0], spans=spans), trace.nodes[1]))) is None


def test_the_command_tells_what_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    write_trace(path, simulate([4.0, 12.0], [0.1, 0.1]))
    assert launch("explain", [str(path), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["code"] == "stage" and told["findings"][0]["node"] == "secondary0"
    assert launch("explain", [str(path)]) == 0
    assert "secondary0" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"otherData": 3}', '{"otherData": {"format": "another"}}'])
def test_another_file_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").write_text(text)
    assert launch("explain", [str(tmp_path / "other")]) == 2
    assert launch("explain", [str(tmp_path / "none")]) == 2


def test_a_finding_is_a_sentence() -> None:
    for trace in (simulate([4.0, 12.0], [0.1, 0.1], waiting=1), simulate([2.0, 2.0], [0.5, 40.0])):
        for finding in explain(summary_of(trace)).findings:
            assert isinstance(finding, Finding) and finding.words and not finding.words.endswith(".")
