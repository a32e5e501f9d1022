"""What benchmarks import of the program, often only when they run, is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_the_program_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mdi":
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                is_module = (
                    hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}") is not None
                )
                assert hasattr(module, name) or is_module, f"line {node.lineno}: {node.module} has no {name}"
