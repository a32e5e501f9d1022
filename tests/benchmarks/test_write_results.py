"""The tables of RESULTS.md and docs/seeds.md are those of the files in benchmarks/results."""

from __future__ import annotations

from pathlib import Path

import pytest

import write_results
from side_by_side.tables import fill

PAGES = [path.read_text(encoding="utf-8") for path in write_results.PAGES]


@pytest.mark.parametrize("name", write_results.TABLES)
def test_a_table_is_that_of_its_file(name: str) -> None:
    (page,) = [page for page in PAGES if name in write_results.names_in(page)]
    assert fill(page, name, write_results.table(name)) == page


def test_a_table_whose_file_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_results, "RESULTS", tmp_path / "benchmarks" / "results")
    assert {write_results.table(name) for name in write_results.TABLES} == {write_results.UNMEASURED}
