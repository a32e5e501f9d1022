"""What a ring brought, in words that do not flatter it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mdi.cli.output import report
from mdi.metrics import NodeMetrics, RunMetrics, SampleMetrics
from mdi.run.report import format_comparison
from mdi.spec.options import Options


def run_of(n_nodes: int, duration_s: float, ids: list[list[int]]) -> RunMetrics:
    samples = [SampleMetrics.from_times("p", "t", i, [1], "length", [0.1] * len(i)) for i in ids]
    ends = [(8 * i // n_nodes, 8 * (i + 1) // n_nodes) for i in range(n_nodes)]
    nodes = [NodeMetrics(f"node{i}", blocks, 1, 0.0, 0.0, 0.0, 1, 1) for i, blocks in enumerate(ends)]
    return RunMetrics.from_parts("m", samples, nodes, duration_s)


@pytest.mark.parametrize(
    ("ring_s", "n_cores", "words"),
    [
        (4.0, 2, "2.0 times slower: 3 nodes share 2 cores"),
        (4.0, 8, "2.0 times slower: all nodes share one memory"),
        (1.0, 8, "2.00 times as fast"),
    ],
)
def test_the_comparison_says_which_is_faster_and_why(ring_s: float, n_cores: int, words: str) -> None:
    ids = [[1, 2], [3, 4]]
    told = format_comparison(run_of(3, ring_s, ids), run_of(1, 2.0, ids), n_cores)
    assert words in told and "at most 3 of 8 blocks" in told and "the same texts" in told
    assert max(map(len, told.splitlines())) <= 100


def test_the_comparison_tells_texts_that_differ() -> None:
    told = format_comparison(run_of(2, 1.0, [[1, 2], [3]]), run_of(1, 1.0, [[1, 2], [4]]), 2)
    assert "1 of 2 texts the same" in told


def test_nothing_to_compare() -> None:
    assert "Too few" in format_comparison(run_of(2, 1.0, [[]]), run_of(1, 1.0, [[]]), 2)


def test_a_run_that_was_interrupted_shows_the_texts_that_were_begun(capsys: pytest.CaptureFixture[str]) -> None:
    args = Options(seed=1)
    for ids, wanted in (
        ([[1, 2], []], "what each sample had reached:\n--- sample 0 (2 tokens)\npt"),
        ([[], []], "no sample had a token yet"),
    ):
        node: Any = SimpleNamespace(metrics=lambda ids=ids: run_of(1, 1.0, ids))
        report(args, node, KeyboardInterrupt(), was_streamed=True)
        assert capsys.readouterr().out.strip() == wanted
