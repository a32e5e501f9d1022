"""What a model is stays: shapes, hashes, packed parts, caches, shares, plans and names of every model that the tests know.

    REWRITE=1 python -m pytest tests/golden

writes the hashes again. A difference means that what users have on their disks, or nodes of another version, no longer fits:
so they are only written again for what is new.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import pytest

from golden.golden_values import HERE, of_files, of_large, of_small, of_source, written_references

IS_REWRITING = bool(os.environ.get("REWRITE"))
Hashes = dict[str, dict[str, str]]


def check(group: str, found: Hashes) -> None:
    path = HERE / f"{group}.json"
    if IS_REWRITING:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in found)
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    wanted: Hashes = json.loads(path.read_text(encoding="utf-8"))
    skipped = () if mmap.PAGESIZE == 4096 else ("caches",)  # which are whole pages of the system
    differing = [
        f"{name}: {aspect}"
        for name in {**wanted, **found}
        for aspect in {**wanted.get(name, {}), **found.get(name, {})}
        if aspect not in skipped and wanted.get(name, {}).get(aspect) != found.get(name, {}).get(aspect)
    ]
    shown = "\n".join(differing[:40])
    assert not differing, f"{len(differing)} differ from {path.name}, the first of them:\n{shown}"


@pytest.mark.parametrize("group", ["litgpt", "real", "published"])
def test_models_are_what_they_were(group: str) -> None:
    check(group, of_large(group))


def test_tiny_models_are_what_they_were(tmp_path: Path) -> None:
    check("tiny", of_small(tmp_path))


def test_files_of_others_are_read_as_they_were(tmp_path: Path) -> None:
    check("files", of_files(tmp_path))


@pytest.mark.skipif(not written_references(), reason="no models of transformers: make references")
def test_files_of_transformers_are_read_as_they_were(tmp_path: Path) -> None:
    check("transformers", {name: {"parts": of_source(path, tmp_path)} for name, path in written_references().items()})
