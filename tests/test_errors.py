"""Codes of errors: one list of those that travel between nodes, one of those that stay in a command."""

from __future__ import annotations

import ast
from pathlib import Path

import mdi.errors
from mdi.control.messages import CODES
from mdi.errors import REASONS

ROOT = Path(__file__).resolve().parents[1]
# The kinds that have no code of their own but the two lists'.
LISTED = {name for name in vars(mdi.errors) if name.endswith("Error")} - {"ControlError", "NodeLostError"}


def codes_given(path: Path) -> set[str]:
    """Codes that the errors of a file are raised with, where they are written out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LISTED:
            found |= {k.value.value for k in node.keywords if k.arg == "code" and isinstance(k.value, ast.Constant)}
    return found


def test_every_code_is_in_a_list_and_every_reason_is_used() -> None:
    files = [path for folder in ("src", "old") for path in (ROOT / folder).rglob("*.py")]
    given = set().union(*map(codes_given, files))
    assert given - CODES.keys() - REASONS.keys() == set()
    assert REASONS.keys() - given == set() and not REASONS.keys() & CODES.keys()
