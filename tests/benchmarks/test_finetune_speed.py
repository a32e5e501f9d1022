"""Each part of the benchmark of fine-tuning writes a file and prints a table; a tiny model, and no rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import finetune_speed

FLAGS = {
    "passes": ("--method", "lora", "--method", "prefix", "--rows", "2", "--texts", "2", "--nodes", "2"),
    "epochs": ("--nodes", "1", "--examples", "4", "--batch", "2", "--width", "8", "--keep-logits"),
    "adapters": ("--nodes", "1", "--adapters", "2", "--texts", "2", "--repeat", "1", "--rank", "2"),
}

SHOWN = {
    "passes": [["2", "lora", "2", "0"], ["2", "prefix", "2", "2"]],
    "epochs": [["1", "classes", "8", "2"], ["1", "lm, kept logits", "8", "2"]],
    "adapters": [["2", "no adapters"], ["2", "0 of 2"], ["2", "2 of 2"]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "tiny"


@pytest.mark.parametrize("what", finetune_speed.WAYS)
def test_what_was_measured_is_a_table(
    what: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"{finetune_speed.WAYS[what].file}.json"
    given = [what, "tiny-1m", "--folder", str(folder), "--tokens", "6", *FLAGS[what], "--json", str(file)]
    finetune_speed.main(given)
    record = json.loads(file.read_text(encoding="utf-8"))
    lines = record["lines"]
    shown = SHOWN[what]
    assert (record["what"], record["shape"], len(lines)) == (what, "tiny-1m", len(shown))
    table = finetune_speed.WAYS[what].table(lines)
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.split("\n") if line[:1] == "|"]
    assert [row[: len(shown[0])] for row in cells[2:]] == shown
    assert {len(row) for row in cells} == {len(cells[0])} and table.split("\n")[0] in capsys.readouterr().out


def test_each_part_has_a_file_of_its_own() -> None:
    paths = {finetune_speed.parsed([what, "tiny-1m", "--folder", "x"]).json for what in finetune_speed.WAYS}
    assert len(paths) == len(finetune_speed.WAYS)
