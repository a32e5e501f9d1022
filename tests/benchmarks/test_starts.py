"""Every script starts as the documents call it: by a bare interpreter, from the root, with flags that it has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHILDREN = {"window_peer.py"}  # started by another script, which gives it numbers
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "benchmarks").glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8") and path.name not in CHILDREN
)
DOCUMENTS = (ROOT / "benchmarks" / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
COMMAND = re.compile(r"(benchmarks/[\w/]+\.py)((?:\\\n|[^`\n#])*)")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of one process")


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help text of each script."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "tests/benchmarks/start_each.py", *SCRIPTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_every_script_starts(helps: dict[str, str]) -> None:
    wrong = {script: text for script, text in helps.items() if not text.startswith("usage:")}
    assert not wrong and helps.keys() == set(SCRIPTS)


def test_commands_of_the_documents_exist(helps: dict[str, str]) -> None:
    missing, n_flags = [], 0
    for document in DOCUMENTS:
        for script, rest in COMMAND.findall(document.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{document.name}: {script}"
            text = helps.get(script, "")
            if not text or "{" in text.partition("\n\n")[0].replace("\n", " ").split("...")[0] and " ..." in text:
                continue  # a worker, or a script whose commands have flags of their own
            flags = re.findall(r"(?<!\S)--[a-z][\w-]*", rest)
            n_flags += len(flags)
            missing += [f"{document.name}: {script} {flag}" for flag in flags if not re.search(rf"{flag}\b", text)]
    assert not missing and n_flags > 30


def test_what_imports_the_program_later_puts_it_on_the_path() -> None:
    """--help does not see imports of a measurement; modules of side_by_side and ring are started with the path."""
    imports = re.compile(r"^\s*(?:from|import) mdi\b", re.MULTILINE)
    has_path = re.compile(r"^import on_path|sys\.path", re.MULTILINE)
    for script in SCRIPTS:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert not imports.search(text) or has_path.search(text), script
