"""Reads fields of a JSON object from a file, a peer or a user. Each field is checked, and an error names it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from mdi.errors import MdiError

STRING_LIMIT = 1000  # characters

T = TypeVar("T")


class Fields:
    """Typed access to the fields of an object.

    Args:
        where: names the object in errors, such as "nodes.json: nodes.starter"; "nodes.json:" for all of a file.
        error: makes the error of a message: UsageError where a person wrote the file, ControlError for a peer.
        expected: the expected value, in words.

    Raises:
        MdiError: of type `error`, if it is not an object; in all methods, if the field is wrong.
    """

    def __init__(self, data: Any, where: str, error: Callable[[str], MdiError], expected: str = "an object") -> None:
        self.where = where
        self._error = error
        if not isinstance(data, Mapping):
            raise error(f"{where}: expected {expected}, found {shown(data)}")
        self.data = data

    def wrong(self, key: str, expected: str) -> MdiError:
        """The error of a field that is not as it should be."""
        return self._error(f"{self._at(key)}: expected {expected}, found {shown(self.data.get(key))}")

    def _at(self, key: str) -> str:
        return f"{self.where} {key}" if self.where.endswith(":") else f"{self.where}.{key}"

    def only(self, names: Collection[str]) -> None:
        """Refuse unknown fields, which are the user's mistakes."""
        for name in self.data:
            if name not in names:
                raise self._error(f"{self.where}: unknown field {shown(name)}; expected {', '.join(names)}")

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        """A field that may be missing or null, read by another method."""
        return None if self.data.get(key) is None else read(key)

    def typed(self, key: str, wanted: type | tuple[type, ...], expected: str) -> Any:
        if key not in self.data:
            raise self._error(f"{self.where.removesuffix(':')}: the field {key!r} is missing: expected {expected}")
        value = self.data[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise self.wrong(key, expected)
        return value

    def boolean(self, key: str) -> bool:
        value: bool = self.typed(key, bool, "true or false")
        return value

    def string(self, key: str, may_be_empty: bool = False) -> str:
        value: str = self.typed(key, str, "a string")
        if len(value) > STRING_LIMIT or not (value or may_be_empty):
            raise self.wrong(key, f"a string of {0 if may_be_empty else 1} to {STRING_LIMIT} characters")
        return value

    def text(self, key: str) -> str:
        """A string that may be empty."""
        return self.string(key, may_be_empty=True)

    def choice(self, key: str, allowed: Collection[str]) -> str:
        value = self.string(key)
        if value not in allowed:
            raise self.wrong(key, f"one of {', '.join(allowed)}")
        return value

    def hex(self, key: str, n_digits: int) -> str:
        value = self.string(key)
        if len(value) != n_digits or any(c not in "0123456789abcdef" for c in value):
            raise self.wrong(key, f"{n_digits} hex digits")
        return value

    def integer(self, key: str, low: int = 0, high: float = math.inf) -> int:
        value: int = self.typed(key, int, "a whole number")
        if not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low}" + (" on" if high == math.inf else f" to {high}"))
        return value

    def number(self, key: str, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number, as a float."""
        value: float = self.typed(key, (int, float), "a number")
        if not low <= value <= high or value > 1e300 or math.isinf(value):  # nan compares with nothing
            raise self.wrong(key, f"a number from {low:g}" + (" on" if high == math.inf else f" to {high:g}"))
        return float(value)

    def object(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = self.typed(key, dict, "an object")
        return value

    def fields(self, key: str, expected: str = "an object") -> Fields:
        """The fields of an object in this one."""
        return Fields(self.typed(key, dict, expected), self._at(key), self._error)

    def entries(self, key: str, expected: str = "a list") -> list[Any]:
        """Tuples count as lists: they become such when they are written."""
        return list(self.typed(key, (list, tuple), expected))

    def items(self, key: str, expected: str = "a list of objects") -> list[Fields]:
        """The fields of each object of a list."""
        values = self.entries(key, expected)
        return [Fields(value, f"{self._at(key)}[{i}]", self._error) for i, value in enumerate(values)]

    def strings(self, key: str) -> list[str]:
        values = self.entries(key, "a list of strings")
        if not all(isinstance(v, str) and len(v) <= STRING_LIMIT for v in values):
            raise self.wrong(key, "a list of strings")
        return values

    def span(self, key: str) -> tuple[int, int]:
        """[start, stop)"""
        values = self.entries(key, "[start, stop]")
        if len(values) != 2 or not all(type(v) is int for v in values) or not 0 <= values[0] <= values[1]:
            raise self.wrong(key, "[start, stop] with 0 <= start <= stop")
        return values[0], values[1]


def parse_object(text: str | bytes, where: str, error: Callable[[str], MdiError]) -> Fields:
    """The fields of an object in JSON. Raises `error` if it is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:  # also a number with thousands of digits, and brackets without end
        raise error(f"{where} is not valid JSON: {str(e)[:200]}") from None
    return Fields(data, where, error)


def shown(value: Any) -> str:
    """A JSON value for an error message. Nested values are shown without their content, which may be endless."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return str(list(value)) if 0 < len(value) <= 4 and all(type(v) in (int, float) for v in value) else "a list"
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "a number without bounds"  # to write it out may take long, and Python may refuse to
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
