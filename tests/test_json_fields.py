"""Fields of objects that others wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdi.errors import ControlError, UsageError
from mdi.json_fields import STRING_LIMIT, Fields, parse_object, shown

DATA = {
    "text": "a", "empty": "", "long": "x" * (STRING_LIMIT + 1), "whole": 3, "below": -1, "real": 1.5, "nan": float("nan"),
    "huge": 10**400, "truth": True, "nothing": None, "span": [1, 3], "back": [3, 1], "object": {"a": 1}, "list": [1, "x"],
    "objects": [{"a": 1}, 7], "words": ["a", "b"], "hex": "0aff",
}  # fmt: skip


def get() -> Fields:
    return Fields(DATA, "file", UsageError)


def test_what_is_as_it_should_be() -> None:
    fields = get()
    assert (fields.string("text"), fields.text("empty"), fields.hex("hex", 4)) == ("a", "", "0aff")
    assert (fields.integer("whole"), fields.integer("below", -1), fields.number("whole")) == (3, -1, 3.0)
    assert fields.boolean("truth") and fields.span("span") == (1, 3) and fields.strings("words") == ["a", "b"]
    assert fields.choice("text", ("a", "b")) == "a" and fields.object("object") == {"a": 1}
    assert fields.fields("object").integer("a") == 1 and fields.entries("list") == [1, "x"]
    assert fields.optional("nothing", fields.string) is None is fields.optional("missing", fields.string)
    assert fields.optional("text", fields.string) == "a"


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda f: f.string("missing"), r"^file: the field 'missing' is missing: expected a string$"),
        (lambda f: f.string("empty"), r"^file\.empty: expected a string of 1 to 1000 characters, found ''$"),
        (lambda f: f.string("long"), r"^file\.long: .* found 'x+\.\.\.$"),
        (lambda f: f.string("nothing"), "found null"),
        (lambda f: f.integer("truth"), "expected a whole number, found True"),
        (lambda f: f.integer("below"), "expected a whole number from 0 on, found -1"),
        (lambda f: f.integer("whole", 4, 5), "expected a whole number from 4 to 5, found 3"),
        (lambda f: f.integer("huge", 0, 9), "found a number without bounds"),
        (lambda f: f.integer("real"), "expected a whole number, found 1.5"),
        (lambda f: f.number("nan"), "found nan"),
        (lambda f: f.number("huge"), "expected a number from 0 on"),
        (lambda f: f.number("real", 0, 1), "expected a number from 0 to 1, found 1.5"),
        (lambda f: f.boolean("whole"), "expected true or false, found 3"),
        (lambda f: f.span("back"), r"expected \[start, stop\].* found \[3, 1\]"),
        (lambda f: f.span("list"), r"expected \[start, stop\].* found a list"),
        (lambda f: f.choice("text", ("b", "c")), "expected one of b, c, found 'a'"),
        (lambda f: f.hex("hex", 5), "expected 5 hex digits"),
        (lambda f: f.strings("list"), "expected a list of strings, found a list"),
        (lambda f: f.fields("object").integer("b"), r"^file\.object: the field 'b' is missing"),
        (lambda f: f.items("objects"), r"^file\.objects\[1\]: expected an object, found 7$"),
        (lambda f: f.entries("object"), "expected a list, found an object"),
        (lambda f: f.only(["text"]), "unknown field 'empty'; expected text"),
    ],
)
def test_a_mistake_is_named(read: Callable[[Fields], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(get())


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[1]", "null", b"\xff", '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_object(text: str | bytes) -> None:
    try:
        fields = parse_object(text, "the answer", ControlError)
    except ControlError as e:
        assert str(e).startswith("the answer") and len(str(e)) < 300 and "\n" not in str(e)
    else:
        with pytest.raises(ControlError, match=r"^the answer\.a: expected"):
            fields.string("a")


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_anything_is_shown_in_one_short_line(value: Any) -> None:
    assert len(shown(value)) < 120 and "\n" not in shown(value)
    json.dumps(shown(value))
