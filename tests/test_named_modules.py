"""Modules and files that docstrings and comments name exist, and have the names that follow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
FILES = sorted([*SRC.glob("mdi*/**/*.py"), *SRC.glob("mdi/**/csrc/*.*")])
PACKAGES = "|".join(path.parent.name for path in SRC.glob("mdi/*/__init__.py"))
ENDINGS = "py|json|gguf"  # of files
MODULE = re.compile(
    rf"(?<![\w./\"-])(?:mdi\.(\w+(?:\.\w+)*)|((?:{PACKAGES})(?![\w.]*\.(?:{ENDINGS})\b)(?:\.\w+)+))(?![\w/(])"
)
FILE = re.compile(r"(?<![\w./<-])((?:\w+/)*\w+\.(?:py|h|cpp))\b")
TREE = "\n".join(
    f"/{path.as_posix()}\n" for top in ("src", "tests", "old", "benchmarks") for path in (ROOT / top).rglob("*.*")
)
CLASS = re.compile(r"(?<![\w./-])((?!torch|concurrent|asyncio|mdi)[a-z_]+\.[a-z_]+\.[A-Z]\w+)")
NO_FILES = {"llama.cpp", "transformer.h", "litgpt/lora.py"}  # a program, names of tensors, another package


def words_of(path: Path) -> str:
    """Docstrings and comments; of C++, everything."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, owners)]
    return "\n".join([*docs, *re.findall(r"#.*", text)])


def stale(words: str) -> Iterator[str]:
    for name in {*(found[1] or found[2] for found in MODULE.finditer(words)), *CLASS.findall(words)}:
        place, names = SRC / "mdi", name.split(".")
        while names and (place / names[0]).is_dir():
            place /= names.pop(0)
        module = (place / names.pop(0) if names else place / "__init__").with_suffix(".py")
        if not module.exists() or not all(re.search(rf"\b{one}\b", module.read_text()) for one in names):
            yield name
    for name in FILE.findall(words):
        if name not in NO_FILES and f"/{name}\n" not in TREE:
            yield name


@pytest.mark.parametrize(
    "words", ["mdi.engine.none", "stages.store.None_", "`mdi/run/none.py`", "see none.py", "model.stage.Stage"]
)
def test_stale_names_are_found(words: str) -> None:
    assert list(stale(words))


def test_other_names_are_left_alone() -> None:
    assert not list(stale("mdi.engine.worker.Backend, run/form.py, net.ring, stages.store.Supply, model.Q4.gguf"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_named_modules_exist(path: Path) -> None:
    assert not list(stale(words_of(path)))
