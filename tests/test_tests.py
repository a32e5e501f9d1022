"""Rules for the tests themselves."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PRIVATE = re.compile(r"\b_[a-zA-Z0-9]")
# How the tables of flags are written needs argparse's own way of showing a flag; a forked process ends by os._exit.
OF_PYTHON = {*dir(argparse.ArgumentParser()), *dir(argparse.HelpFormatter), "_exit"}
OF_ERROR = re.compile(r"\bstr\(\w+(\.value)?\)|\.(err|stderr)\b")  # what an error says
PROSE = re.compile(r"(?!(mdi|pip|apt) )[a-zA-Z,']+( [a-zA-Z,']+)+")  # no name, number, flag or command


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


def literal(node: ast.AST) -> str:
    """A string, with {} for each value that is put in; "" of anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def words_of_errors(code: str) -> Iterator[tuple[str, str]]:
    """What tests look for in errors, each with the name of its test."""
    for test in ast.walk(ast.parse(code)):
        for node in ast.walk(test) if isinstance(test, ast.FunctionDef) and test.name.startswith("test_") else ():
            if isinstance(node, ast.Call) and last_name(node.func) == "raises":
                yield from ((literal(given.value), test.name) for given in node.keywords if given.arg == "match")
            elif isinstance(node, ast.Compare) and OF_ERROR.search(ast.unparse(node.comparators[0])):
                yield literal(node.left), test.name


def twice_in(found: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Phrases that one test looks for, and another one as well, perhaps with more words around."""
    by_words: dict[str, set[str]] = {}
    for words, test in found:
        by_words.setdefault(words.strip(" ^$:."), set()).add(test)
    return {
        (phrase, words)
        for phrase in by_words
        if PROSE.fullmatch(phrase)
        for words, tests in by_words.items()
        if phrase in words and len(by_words[phrase] | tests) > 1
    }


def test_a_phrase_in_two_tests_is_found() -> None:
    tests = """
def test_one() -> None:
    with pytest.raises(ValueError, match="{one}"):
        fail()
def test_two() -> None:
    assert 1 and f"{two}" in {where}
"""
    for one, two, where, is_twice in (
        ("no memory", "no memory", "str(e.value)", True), ("no memory", "{name} has no memory", "str(caught.value)", True),
        ("no memory", "^no memory$", "capsys.readouterr().err", True), ("no memory", "no more memory", "done.stderr", False),
        ("no memory", "no memory", "words", False), ("block.3", "block.3", "str(e.value)", False),
        ("--flag x", "--flag x", "str(e.value)", False), ("mdi plan", "mdi plan", "str(e.value)", False),
    ):  # fmt: skip
        found = twice_in(words_of_errors(tests.format(one=one, two=two, where=where)))
        assert bool(found) is is_twice, (one, two, where)


def test_the_words_of_a_message_are_in_one_test() -> None:
    """The others know the error by its type and code, and by a name or number that it says."""
    found = [
        (words, f"{path.relative_to(TESTS)}: {test}")
        for path in TESTS.rglob("test_*.py")
        for words, test in words_of_errors(path.read_text(encoding="utf-8"))
    ]
    assert len(found) > 100 and not twice_in(found)
