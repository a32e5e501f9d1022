"""A release by tag: tag, version and changelog must fit each other."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import yaml

import mdi

ROOT = Path(__file__).parents[1]
notes = runpy.run_path(str(ROOT / ".ci" / "release"))["notes"]


def test_the_changelog_has_a_part_for_this_version() -> None:
    assert "ring of nodes" in notes(f"v{mdi.__version__}")


@pytest.mark.parametrize("tag", ["v0.0.1", mdi.__version__, "main"])
def test_another_tag_is_refused(tag: str) -> None:
    with pytest.raises(SystemExit) as caught:
        notes(tag)
    assert caught.value.code not in (0, None)


def test_every_python_of_the_project_is_tested_on_each_system() -> None:
    """The Makefile, .ci/resolve and the workflow name the same range."""
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    pythons = matrix["python"]
    assert f"for python in {' '.join(pythons)};" in (ROOT / ".ci/resolve").read_text()
    low, high = (tuple(map(int, version.split("."))) for version in (pythons[0], pythons[-1]))
    assert f"{low} <= v[:2] <= {high}" in (ROOT / "Makefile").read_text()
