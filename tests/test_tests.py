"""Rules for the tests themselves."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PRIVATE = re.compile(r"\b_[a-zA-Z0-9]")
# How the tables of flags are written needs argparse's own way of showing a flag; a forked process ends by os._exit.
OF_PYTHON = {*dir(argparse.ArgumentParser()), *dir(argparse.HelpFormatter), "_exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def last_name(node: ast.AST) -> str:
    """Of `a.b.name` or `name`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines itself: functions, classes, variables, and attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and last_name(node.value) == "self":
            found.add(node.attr)
    return found


def used_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Attributes, imported names, and what is named by a string in a call of `setattr` or the like; with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and last_name(node.func).endswith(("setattr", "getattr", "delattr")):
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from ((name.rpartition(".")[2], node.lineno) for name in named)


def strangers_in(code: str) -> list[tuple[str, int]]:
    """Private names that a file uses and does not define."""
    if not PRIVATE.search(code):  # to parse all files takes seconds
        return []
    tree = ast.parse(code)
    own = own_names(tree)
    return [(name, line) for name, line in used_names(tree) if is_private(name) and name not in own | OF_PYTHON]


@pytest.mark.parametrize(
    "code", ["node._runs", "from mdi.cli import _run", "patch.setattr(mdi, '_run', 1)", "patch.setattr('mdi.a._b', 1)"]
)
def test_private_names_are_found(code: str) -> None:
    assert strangers_in(code) and not strangers_in(code.replace("._", ".").replace(" _", " ").replace("'_", "'"))


def test_no_test_uses_a_private_name_of_the_project() -> None:
    """What a test has to look at, or to replace by a fault, gets a public name."""
    found = {
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in TESTS.rglob("*.py")
        for name, line in strangers_in(path.read_text(encoding="utf-8"))
    }
    assert not found
