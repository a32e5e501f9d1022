"""Who reads the beginning of a class sees what its objects hold."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "mdi"
BIRTH = ("__init__", "__new__", "__post_init__")


def stored(node: ast.AST) -> set[str]:
    """Attributes of `self` that are assigned to."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {n.attr for n in found if isinstance(n.value, ast.Name) and n.value.id == "self"}


def declared(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """What the body of a class and its first methods say, with those of its bases."""
    found: set[str] = set()
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            found |= {child.name} | (stored(child) if child.name in BIRTH else set())
        found |= {n.id for n in ast.walk(child) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(base, ast.Name) and base.id in classes:
            found |= declared(classes[base.id], classes)
    return found


def strays(text: str, others: dict[str, ast.ClassDef]) -> list[str]:
    own = {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)}
    found = []
    for node in own.values():
        known = declared(node, {**others, **own})
        methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name not in BIRTH]
        found += [f"{node.name}.{name}" for method in methods for name in sorted(stored(method) - known)]
    return found


def test_no_attribute_is_born_outside_init() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SRC.rglob("*.py"))}
    classes = {n.name: n for text in texts.values() for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)}
    assert len(classes) > 300
    assert [f"{path.name}: {name}" for path, text in texts.items() for name in strays(text, classes)] == []


def test_a_stray_attribute_is_found() -> None:
    text = """
class A:
    x: int
    def __init__(self):
        self.y = 1
    def f(self):
        self.x = self.y = self.z = 2
"""
    assert strays(text, {}) == ["A.z"]
