"""`make demo` on a fresh machine: what it says before gigabytes are fetched, and what it runs. Python is a stub here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# It prints its arguments; as `-m venv FOLDER` it puts a copy of itself there.
STUB = """#!/bin/sh
echo "ran: $*"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""
CPU = "--extra-index-url https://download.pytorch.org/whl/cpu"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def demo(folder: Path, *flags: str, machine: str = "Linux x86_64") -> list[str]:
    """Lines that `make demo` prints on a machine where `uname -sm` says so."""
    (folder / "bin").mkdir()
    for path, text in ((folder / "stub", STUB), (folder / "bin" / "uname", f"#!/bin/sh\necho {machine}\n")):
        path.write_text(text)
        path.chmod(0o755)
    command = ["make", "demo", f"PYTHON={folder / 'stub'}", f"VENV={folder / 'venv'}", *flags]
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(command, cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def index_of(lines: list[str], words: str) -> int:
    return next(i for i, line in enumerate(lines) if words in line)


def test_it_says_how_much_it_will_fetch(tmp_path: Path) -> None:
    lines = demo(tmp_path)
    size, install, ring = (
        index_of(lines, words) for words in ("2.7 GB", "ran: -m pip install", "ran: src/local_ring.py")
    )
    assert size < install < ring
    assert CPU in "".join(lines[:install])


@pytest.mark.parametrize(("flags", "machine"), [([f"PIP_FLAGS={CPU}"], "Linux x86_64"), ([], "Darwin arm64")])
def test_it_does_not_warn_of_what_is_not_fetched(tmp_path: Path, flags: list[str], machine: str) -> None:
    assert "2.7 GB" not in "".join(demo(tmp_path, *flags, machine=machine))
