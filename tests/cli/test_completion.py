"""`mdi completion`: what it prints completes commands, options and their choices."""

from __future__ import annotations

import importlib
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from mdi.cli import COMMANDS, launch, parser_of
from mdi.errors import UsageError
from mdi.kernels.weight_formats import AUTO, MIXTURES, OWN, PACKED

BEGIN = """
complete_of() {
  COMP_WORDS=("$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
  _shtab_mdi; echo "${COMPREPLY[@]}"
}
"""
TRIED = """
complete_of mdi prepare-m
complete_of mdi run --quant
complete_of mdi plan --placement l
complete_of mdi run --quantize q
complete_of mdi run --help
complete_of mdi serve mod
"""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_knows_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("completion", [shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS) and "quantize-head" in script


def completed(tried: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert launch("completion", ["bash"]) == 0
    path = folder / "try.bash"
    path.write_text(capsys.readouterr().out + BEGIN + tried, encoding="utf-8")
    done = subprocess.run(["bash", path], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").touch()
    assert completed(TRIED, tmp_path, capsys) == [
        "prepare-model", "--quantize --quantize-head", "latency", "q4_k q6_k", "--help --help-all", "model.gguf",
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_only_formats_that_a_command_takes_are_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parsers = {
        name: parser_of(importlib.import_module(module), f"mdi {name}") for name, (module, _) in COMMANDS.items()
    }
    having = [name for name, parser in parsers.items() if "quantize" in parser.declared]
    found = completed("".join(f"complete_of mdi {name} --quantize ''\n" for name in having), tmp_path, capsys)
    offered = {name: line.split() for name, line in zip(having, found, strict=True)}
    assert {"run", "secondary", "join", "job", "prepare-model", "pull", "finetune", "plan"} <= offered.keys()
    assert set(offered["run"]) == {*PACKED, *MIXTURES, AUTO, OWN} and set(offered["join"]) == set(PACKED)
    for name, form in itertools.product(having, offered["run"]):
        try:
            parsers[name].declared["quantize"].value(form)
        except UsageError:
            assert form not in offered[name], name
        else:
            assert form in offered[name], name
    (of_head,) = completed("complete_of mdi run --quantize-head ''\n", tmp_path, capsys)
    assert set(of_head.split()) == {*PACKED, AUTO, OWN}, "a mixture is one of a whole model"
    assert AUTO not in offered["finetune"] + offered["prepare-model"]
