"""Typed access to JSON that came from a peer: whatever is missing or of another type is refused by its name. Stdlib only."""

from __future__ import annotations

import json
from typing import Any

from mdi.errors import ControlError


def parse_json(body: bytes) -> Any:
    """JSON from a peer; ControlError (400) if it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as e:
        raise ControlError(f"the body is not JSON: {str(e)[:200]}", 400) from None


def shown(value: Any) -> str:
    """A JSON value in an error message; what is nested, without its content, which may be nested without end."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:100]


class Fields:
    """Typed access to the fields of an object that came from a peer."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    @classmethod
    def of(cls, data: Any) -> Fields:
        if not isinstance(data, dict):
            raise ControlError(f"expected a JSON object, got {shown(data)}", 400)
        return cls(data)

    def _get(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        if key not in self._data:
            raise ControlError(f"field {key!r} is missing: expected {what}", 400)
        value = self._data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ControlError(f"field {key!r}: expected {what}, got {shown(value)}", 400)
        return value

    def boolean(self, key: str) -> bool:
        return self._get(key, bool, "true or false")

    def string(self, key: str) -> str:
        value: str = self._get(key, str, "a string")
        if len(value) > 1000:
            raise ControlError(f"field {key!r}: a string of {len(value)} characters", 400)
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.string(key)
        if value not in allowed:
            raise ControlError(f"field {key!r}: expected one of {', '.join(allowed)}, got {shown(value)}", 400)
        return value

    def strings(self, key: str) -> list[str]:
        values = self._get(key, list, "a list of strings")
        if not values or not all(isinstance(v, str) and len(v) <= 1000 for v in values):
            raise ControlError(f"field {key!r}: expected a list of strings", 400)
        return values

    def integer(self, key: str, low: int, high: int) -> int:
        value: int = self._get(key, int, "a whole number")
        if not low <= value <= high:
            raise ControlError(f"field {key!r}: {value} is not from {low} to {high}", 400)
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self._get(key, (int, float), "a number")
        if not low <= value <= high:
            raise ControlError(f"field {key!r}: {value} is not from {low} to {high}", 400)
        return float(value)

    def hex(self, key: str, n_digits: int) -> str:
        value = self.string(key)
        if len(value) != n_digits or any(c not in "0123456789abcdef" for c in value):
            raise ControlError(f"field {key!r}: expected {n_digits} hex digits", 400)
        return value

    def pair(self, key: str) -> tuple[int, int]:
        values = self._get(key, list, "[start, stop]")
        if len(values) != 2 or not all(type(v) is int for v in values):
            raise ControlError(f"field {key!r}: expected [start, stop]", 400)
        return values[0], values[1]

    def object(self, key: str) -> dict[str, Any]:
        return self._get(key, dict, "an object")

    def objects(self, key: str) -> list[Fields]:
        return [Fields.of(entry) for entry in self._get(key, list, "a list of objects")]
