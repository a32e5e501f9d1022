"""No module of src imports itself through others, also not for types alone."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"


def files() -> dict[str, Path]:
    """By the names of their modules."""
    paths = sorted(SRC.glob("mdi*/**/*.py"))
    return {".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(tree: ast.Module) -> list[str]:
    """What a module imports outside of its functions."""
    found: list[str] = []
    rest: list[ast.AST] = [tree]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            rest += ast.iter_child_nodes(node)
    return found


def test_no_circles() -> None:
    known = files()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        whole = [one if one in known else one.rpartition(".")[0] for one in imported(ast.parse(path.read_text()))]
        graph[name] = {one for one in whole if one in known and one != name}
    assert len(graph) > 200 and any(graph.values())
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
