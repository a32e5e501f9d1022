"""`mdi completion`: what it prints completes commands, options and their choices."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mdi.cli import COMMANDS, launch

TRIED = """
complete_of() {
  COMP_WORDS=("$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
  _shtab_mdi; echo "${COMPREPLY[@]}"
}
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


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("completion", ["bash"]) == 0
    path = tmp_path / "try.bash"
    path.write_text(capsys.readouterr().out + TRIED, encoding="utf-8")
    (tmp_path / "model.gguf").touch()
    done = subprocess.run(["bash", path], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "prepare-model", "--quantize --quantize-head", "latency", "q4_k q6_k", "--help --help-all", "model.gguf",
    ]  # fmt: skip
