"""Messages, docstrings and documents use the words of the glossary (CONTRIBUTING.md), and none that stand there as others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Words of the papers stand in seeds.md, older ones in log.md.
DOCUMENTS = [ROOT / "README.md", *(p for p in (ROOT / "docs").glob("*.md") if p.name not in ("seeds.md", "log.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")


def glossary() -> list[list[str]]:
    """Rows of the table: word, meaning, other words that are not used."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == ["word", "meaning", "not"]
    return rows[1:]


def prose() -> Iterator[tuple[str, str]]:
    """Where it stands, and the text without code: lines of documents; strings of the program that are more than a name."""
    for path in DOCUMENTS:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.name}:{number}", CODE.sub("", line)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", CODE.sub("", node.value)


def test_no_other_word_is_used_for_the_same_thing() -> None:
    others = [word for row in glossary() for word in row[2].split(", ") if word]
    assert len(others) > 20
    pattern = re.compile(rf"(?i)(?<![\w./-])(?:{'|'.join(map(re.escape, others))})s?(?![\w/])")
    found = [f"{where}: {match[0]}" for where, text in prose() if (match := pattern.search(text))]
    assert not found


def test_each_word_is_used() -> None:
    everything = " ".join(text for _, text in prose())
    words = [word for row in glossary() for word in row[0].split(", ")]
    assert not [word for word in words if not re.search(rf"(?i)\b{re.escape(word)}", everything)]
