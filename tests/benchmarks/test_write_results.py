"""The tables of RESULTS.md are those of the files in benchmarks/results."""

from __future__ import annotations

from pathlib import Path

import pytest

import write_results
from side_by_side.tables import fill

PAGE = Path(write_results.__file__).with_name("RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", write_results.TABLES)
def test_a_table_is_that_of_its_file(name: str) -> None:
    assert fill(PAGE, name, write_results.TABLES[name]()) == PAGE
