"""Ranges of blocks are written one way for people, by one function."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mdi.block_ranges import block_span, span
from mdi.metrics import NodeMetrics, RunMetrics
from mdi.run.report import format_report

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "blocks, short, long",
    [
        ((0, 4), "0-3", "blocks 0-3"),
        ((4, 6), "4-5", "blocks 4-5"),
        ((0, 1), "0", "block 0"),
        ((7, 8), "7", "block 7"),
        ((0, 0), "none", "no blocks"),
        ((5, 5), "none", "no blocks"),
    ],
)
def test_ranges_are_inclusive(blocks: tuple[int, int], short: str, long: str) -> None:
    assert span(*blocks) == short
    assert block_span(*blocks) == long


def test_the_table_of_a_run_writes_them_so() -> None:
    nodes = [
        NodeMetrics(f"node{i}", blocks, 1, 1.0, 1.0, 1.0, 1, 1) for i, blocks in enumerate([(0, 0), (0, 1), (1, 9)])
    ]
    report = format_report(RunMetrics.from_parts("m", [], nodes, 1.0))
    assert [line.split()[1] for line in report.splitlines()[-3:]] == ["none", "0", "1-8"]


def test_nobody_else_writes_a_range_by_hand() -> None:
    half_open = re.compile(r"\[(\{[^{}]*\}|%d), ?(\{[^{}]*\}|%d)\)")  # [{start}, {stop})
    inclusive = re.compile(r"\b(\{[^{}]*\}|%d)( to |-)(\{[^{}]*\}|%d).*\b(stop|last)\b.*- 1\b")
    for folder in ("src", "old", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "blocks.py":
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                assert not half_open.search(line) and not inclusive.search(line), (
                    f"{path}:{number}: use mdi.block_ranges"
                )
