"""Codes of errors: one table, in which each code is used, and which a node of another version may not share."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
from pathlib import Path

import pytest

from mdi.errors import Code, ControlError, NodeLostError
from mdi.net.hello import Fault

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(\| code \| what happened \|\n\|---\|---\|\n).*?(?=\n\n)", re.DOTALL)


def names_in(path: Path) -> set[str]:
    """Codes that a file has."""
    text = path.read_text(encoding="utf-8")
    if "Code." not in text:  # to parse all takes seconds
        return set()
    found = ast.walk(ast.parse(text))
    return {
        n.attr for n in found if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "Code"
    }


def test_every_code_is_used() -> None:
    used = set().union(*(names_in(path) for folder in ("src", "old") for path in (ROOT / folder).rglob("*.py")))
    assert {code.name for code in Code} - used == set()
    assert all(code.value == code.name.lower() for code in Code)


def test_the_protocol_names_the_codes_that_travel() -> None:
    """REWRITE=1 writes them."""
    path = ROOT / "docs" / "protocol.md"
    found = path.read_text(encoding="utf-8")
    rows = "\n".join(f"| `{code}` | {code.meaning} |" for code in Code if code.travels)
    made = TABLE.sub(lambda table: table[1] + rows, found)
    if os.environ.get("REWRITE"):
        path.write_text(made, encoding="utf-8")
    assert len(TABLE.findall(found)) == 1 and (found == made or os.environ.get("REWRITE"))


@pytest.mark.parametrize("word", ["a_later_code", "", None, 7, ["memory"], {"memory": 1}, "MEMORY"])
def test_a_code_that_is_not_known_asks_for_nothing(word: object) -> None:
    found = Fault.from_bytes(json.dumps({"node": "a", "message": "b", "reporter": "c", "code": word}).encode())
    assert Code.of(word) is found.code is Code.FAILED and found.node == "a"
    assert not (found.code.unfit or found.code.ended or found.code.again or found.code.leaves or found.code.less_fits)


@pytest.mark.parametrize("code", Code)
def test_a_code_travels_as_its_word(code: Code) -> None:
    assert Fault.from_bytes(Fault("a", "b", "c", code).to_bytes()).code is code is Code.of(str(code))
    assert json.loads(json.dumps({"code": code})) == {"code": code.value} and f"{code}" == code.value
    assert pickle.loads(pickle.dumps(code)) is code
    assert NodeLostError("a", "b", code).code is ControlError("b", code=code).code is code


def test_what_is_asked_of_codes() -> None:
    def having(name: str) -> set[str]:
        return {code.value for code in Code if getattr(code, name)}

    assert having("ended") == {"left", "leaving", "disk"} and having("leaves") == {"left", "leaving"}
    assert having("again") == {"busy"} and having("less_fits") == {"memory"}
    assert having("unfit") == {
        "memory", "disk", "usage", "version", "role", "weights", "key", "leaving", "control", "stuck",
    }  # fmt: skip
