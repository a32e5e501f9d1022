"""Declared values of what others wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdi.errors import ControlError, UsageError
from mdi.spec.decode import Meta, Name, Number, RunId, Span, Text, Whole, decode, decode_text, only_fields_of, shown


@dataclass(frozen=True)
class Inner:
    a: Whole


@dataclass(frozen=True)
class Declared:
    whole: Whole = 0
    real: Number = 0.0
    text: Text = ""
    name: Name = "x"
    truth: bool = False
    run: RunId = ""
    span: Span = (0, 0)
    few: Annotated[tuple[Inner, ...], Meta(max_length=2)] = ()
    maybe: Text | None = None
    free: dict[str, int] | None = None


def test_values_are_read() -> None:
    data = {"whole": 3, "real": 3, "run": "0" * 16, "span": [1, 3], "few": [{"a": 1}], "maybe": None, "more": 1}
    found = decode(Declared, data, "file", UsageError)
    assert found == Declared(3, 3.0, run="0" * 16, span=(1, 3), few=(Inner(1),)) and type(found.real) is float


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("whole", True, "file.whole: expected a whole number, found True"),
        ("whole", -1, "file.whole: expected a whole number >= 0, found -1"),
        ("whole", 1.0, "file.whole: expected a whole number, found 1.0"),
        ("whole", -(10**400), "file.whole: expected a whole number >= 0, found a number without bounds"),
        ("real", float("nan"), "file.real: expected a number >= 0.0, found nan"),
        ("real", float("inf"), "file.real: expected a number <= 1e+300, found inf"),
        ("text", None, "file.text: expected a string, found null"),
        ("text", "x" * 1001, "file.text: expected a string of length <= 1000, found '" + "x" * 56 + "..."),
        ("name", "", "file.name: expected a string of length >= 1, found ''"),
        ("truth", 1, "file.truth: expected true or false, found 1"),
        ("span", [1], "file.span: expected a list of length 2, found [1]"),
        ("few", [{"a": 1}, {"b": 1}], "file.few[1]: the field 'a' is missing"),
        ("few", [{"a": 1}] * 3, "file.few: expected a list of length <= 2, found a list"),
        ("few", {"a": 1}, "file.few: expected a list, found an object"),
        ("maybe", 3, "file.maybe: expected a string or null, found 3"),
        ("free", {"x y": "z"}, "file.free[...]: expected a whole number"),
    ],
)
def test_a_mistake_is_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        decode(Declared, {field: value}, "file", UsageError)
    assert str(caught.value) == words


def test_half_a_character_is_no_defect() -> None:
    with pytest.raises(ControlError):
        decode(Declared, json.loads('{"\\ud800": 1}'), "the answer", ControlError)


def test_the_fields_of_a_file() -> None:
    with pytest.raises(UsageError) as caught:
        decode(Declared, {"few": [{}]}, "nodes.json:", UsageError)
    assert str(caught.value) == "nodes.json: few[0]: the field 'a' is missing"
    with pytest.raises(UsageError) as caught:
        decode(Declared, 3, "nodes.json:", UsageError)
    assert str(caught.value) == "nodes.json: expected an object, found 3"


def test_unknown_fields_are_a_persons_mistakes() -> None:
    only_fields_of(Inner, {"a": 1}, "file", UsageError)
    with pytest.raises(UsageError) as caught:
        only_fields_of(Inner, {"b": 1}, "file", UsageError)
    assert str(caught.value) == "file: unknown field 'b'; expected a"


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[1]", "null", b"\xff", '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_object(text: str | bytes) -> None:
    with pytest.raises(ControlError) as caught:
        decode_text(Inner, text, "the answer", ControlError)
    said = str(caught.value)
    assert said.startswith("the answer") and len(said) < 300 and "\n" not in said


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_anything_is_shown_in_one_short_line(value: Any) -> None:
    assert len(shown(value)) < 120 and "\n" not in shown(value)
    json.dumps(shown(value))


FIRST_OF_MANY = """
import dataclasses, sys, threading
from mdi.spec.decode import converted

sys.setswitchinterval(1e-6)
fields = [(f"field{k}", "int") for k in range(16)]
data = {"inner": [{name: 1 for name, _ in fields}], **{name: 1 for name, _ in fields}}
for _ in range(100):
    inner = dataclasses.make_dataclass("Inner", fields)
    outer = dataclasses.make_dataclass("Outer", [("inner", list[inner]), *fields])
    begin = threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (begin.wait(), converted(data, outer))) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
"""


def test_several_threads_may_be_the_first_to_read_a_type() -> None:
    """In a process of their own: msgspec would end it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FIRST_OF_MANY], env=environment, check=True)
