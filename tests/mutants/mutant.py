"""One mutant: a small change of one expression, found by the function that contains it, so that files can move."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mutants

PROJECT = Path(__file__).resolve().parents[2]
CSRC = Path("src/mdi/kernels/csrc")


class NotFoundError(Exception):
    """The code no longer has what a mutant changes: correct or remove the mutant."""


@dataclass(frozen=True)
class Mutant:
    """A change that breaks the code.

    Attributes:
        what: what is broken then, in plain words.
        function: its qualified name in src ("Class.method", "function", "outer.inner"; a class or constant too), with
            "module.path:" before it if several have that name. "csrc:name" is a C++ function, "files/name.js:name" a
            function or constant of the page.
        old: the expression. It occurs once there. In C++ it has a value, because both expressions are compiled.
        new: what stands there instead.
        tests: arguments of pytest, separated by blanks: the tests that must fail.
    """

    what: str
    function: str
    old: str
    new: str
    tests: str

    @property
    def is_cpp(self) -> bool:
        return self.function.startswith("csrc:")

    def place(self) -> tuple[Path, int]:
        """The file, relative to the project, and the offset of `old` in it. Raises NotFoundError."""
        found = list(self._functions())
        if len(found) != 1:
            raise NotFoundError(f"{self.function}: {len(found)} functions have this name")
        path, begin, end = found[0]
        body = _text(path)[begin:end]
        if body.count(self.old) != 1:
            raise NotFoundError(f"{self.function} has {self.old!r} {body.count(self.old)} times")
        return path, begin + body.index(self.old)

    def _functions(self) -> Iterator[tuple[Path, int, int]]:
        """File, begin and end of each function that has the name."""
        where, _, name = self.function.rpartition(":")
        if self.is_cpp:
            for path in _files(CSRC, "*.h", "*.cpp"):
                for begin, end in _braced(_text(path), rf"\b{re.escape(name)}\s*\([^;{{}}]*\)[^;{{}}()]*\{{"):
                    if self.old in _text(path)[begin:end]:  # C++ has overloads: the one with the expression
                        yield path, begin, end
        elif where.endswith(".js"):
            (path,) = _files(Path("src/mdi/serve/page"), where)
            for begin, end in _braced(_text(path), rf"\bfunction\s*\*?\s*{re.escape(name)}\s*\([^{{]*\)\s*\{{"):
                yield path, begin, end
            for constant in re.finditer(rf"^(?:export )?const {re.escape(name)} = .*?;$", _text(path), re.M | re.S):
                yield path, *constant.span()
        else:
            ending = where.replace(".", "/") + ".py"
            for path, names in _python_functions():
                if name in names and (not where or path.as_posix().endswith("/" + ending)):
                    yield path, *names[name]


def all_mutants() -> list[Mutant]:
    """Those of every table in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(mutants.__path__))
    modules = [importlib.import_module(f"mutants.{name}") for name in names if not name.startswith("test_")]
    return [mutant for module in modules for mutant in getattr(module, "MUTANTS", ())]


def _files(folder: Path, *patterns: str) -> list[Path]:
    return sorted(p.relative_to(PROJECT) for pattern in patterns for p in (PROJECT / folder).glob(pattern))


@cache
def _text(path: Path) -> str:
    return (PROJECT / path).read_text(encoding="utf-8")


@cache
def _python_functions() -> list[tuple[Path, dict[str, tuple[int, int]]]]:
    """Per file: each function's qualified name, and where its source begins and ends."""
    found = []
    for path in _files(Path("src"), "mdi*/**/*.py"):
        text = _text(path)
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        spans: dict[str, tuple[int, int]] = {}
        _collect(ast.parse(text), "", starts, spans)
        found.append((path, spans))
    return found


def _collect(node: ast.AST, prefix: str, starts: list[int], spans: dict[str, tuple[int, int]]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = prefix + child.name
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            assert child.end_lineno
            spans[name] = (starts[first - 1], starts[child.end_lineno])
            _collect(child, name + ".", starts, spans)
        elif isinstance(child, (ast.Assign, ast.AnnAssign)) and isinstance(node, (ast.Module, ast.ClassDef)):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                assert child.end_lineno
                spans[prefix + ast.unparse(target)] = (starts[child.lineno - 1], starts[child.end_lineno])
        else:
            _collect(child, prefix, starts, spans)


def _braced(text: str, head: str) -> Iterator[tuple[int, int]]:
    """Where each function that begins with `head` begins and ends: at the brace that closes its first one."""
    for match in re.finditer(head, text):
        depth, at = 1, match.end()
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        yield match.start(), at
