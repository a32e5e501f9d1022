"""How a form writes a call, as a grammar of llguidance's (Lark): an answer that must be a call has this form from the first
byte of its mark on, the form that the model was trained with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME, KEY, NUMBER = "\ue000", "\ue001", "\ue002"  # in what is written: the tool's, the argument's, any number
_PLACES = re.compile(f"([{NAME}{KEY}{NUMBER}])")
_AS_TRAINED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
# Beside these words, a schema's `properties` are not all that an object may have.
JOINED = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "unevaluatedProperties")

SHARED = ("$defs", "definitions")  # which the schema of each property gets, as it may refer to them
MOST_SHARED = 1 << 20  # characters of all these copies

Functions = Sequence[tuple[str, Mapping[str, Any]]]  # names of tools, and the schemas of their arguments
# The rules of a value that `name` stands for: of a schema, a text of any length in it ends before `end`.
Value = Callable[["Lark", str, Mapping[str, Any], str], str]


class Lark:
    """A grammar as it grows.

    Args:
        special: the special tokens of the tokenizer by their names: letters that read the same are others.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._any = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        self._rules: dict[str, str] = {}

    def rule(self, name: str, what: str, attributes: str = "") -> str:
        """A further one, unless there is one of this name."""
        self._rules.setdefault(name, f"{name}{attributes}: {what}")
        return name

    def text(self, written: str, filled: str = "") -> str:
        """What stands for a text with marks, in which NAME or KEY is filled in; "" for none."""
        found: list[str] = []
        for piece in _PLACES.split(written):
            if piece == NUMBER:
                found.append("/[0-9]{1,4}/")
            elif piece in (NAME, KEY):
                found.append(self.words(filled))
            else:
                parts = self._any.split(piece) if self._special else [piece]
                found += [
                    f"<[{self._special[one]}]>" if one in self._special else self.words(one) for one in parts if one
                ]
        return " ".join(found)

    @staticmethod
    def words(text: str) -> str:
        """Letters, whatever they read like."""
        return json.dumps(text, ensure_ascii=False)

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        return self.rule(name, f"%json {json.dumps({**schema, **_AS_TRAINED})}")

    def until(self, name: str, end: str) -> str:
        """Any text, and the end behind it."""
        words, *others = self._any.split(end) if self._special else [end]
        behind = self.text("".join(others))
        if not words:
            return f"{self.rule(name, '/(?s:.*)/')} {behind}"
        return f"{self.rule(name, '/(?s:.*)/', f'[suffix={self.words(words)}]')} {behind}".rstrip()

    def __str__(self) -> str:
        return "\n".join(self._rules.values()) + "\n"


@dataclass(frozen=True)
class Written:
    """One call.

    Attributes:
        before, after: what stands around the arguments.
        key, end: around each argument, whose value stands between them; "": the arguments are an object of JSON.
        between: two arguments.
        value: writes the rules of a value.
    """

    before: str
    after: str = ""
    key: str = ""
    end: str = ""
    between: str = ""
    value: Value | None = None

    def grammar(self, functions: Functions, special: Mapping[str, int]) -> str | None:
        """Of a call of one of the functions; None if their schemas do not say which arguments there are, or
        would make it too large.
        """
        lark = Lark(special)
        names = [f"call_{number}" for number in range(len(functions))]
        lark.rule("start", " | ".join(names))
        for rule, (name, schema) in zip(names, functions, strict=True):
            if self.key and (any(word in schema for word in JOINED) or _n_shared(schema) > MOST_SHARED):
                return None
            arguments = self._members(lark, rule, schema) if self.key else lark.json(f"{rule}_json", schema)
            parts = [lark.text(self.before, name), arguments, lark.text(self.after)]
            lark.rule(rule, " ".join(filter(None, parts)))
        return str(lark)

    def _members(self, lark: Lark, rule: str, schema: Mapping[str, Any]) -> str:
        """The arguments in the order of the schema. Of each there are two rules: without others before it, and behind some."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        shared = {word: schema[word] for word in SHARED if word in schema}
        value = self.value or raw_value
        for number, (key, kind) in enumerate(properties.items()):
            wanted = {**kind, **shared} if isinstance(kind, Mapping) else shared
            written = value(lark, f"{rule}_{number}", wanted, self.end)
            lark.rule(f"{rule}_pair_{number}", f"{lark.text(self.key, key)} {written}")
            for behind, between in (("", ""), ("_more", self.between)):
                one = " ".join(filter(None, [lark.text(between), f"{rule}_pair_{number} {rule}_at_{number + 1}_more"]))
                others = [] if key in required else [f"{rule}_at_{number + 1}{behind}"]
                lark.rule(f"{rule}_at_{number}{behind}", " | ".join([one, *others]))
        for behind in ("", "_more"):
            lark.rule(f"{rule}_at_{len(properties)}{behind}", '""')
        return f"{rule}_at_0"


def _n_shared(schema: Mapping[str, Any]) -> int:
    """Characters that the properties of a schema would get of what they share."""
    shared = [schema[word] for word in SHARED if word in schema]
    return len(json.dumps(shared)) * len(schema.get("properties") or {}) if shared else 0


def raw_value(lark: Lark, name: str, schema: Mapping[str, Any], end: str) -> str:
    """A text as it is, or else JSON."""
    if schema.get("type") != "string":
        return f"{lark.json(name, schema)} {lark.text(end)}"
    if (known := texts_of(schema)) is not None:
        return f"{lark.rule(name, ' | '.join(map(lark.words, known)))} {lark.text(end)}"
    return lark.until(name, end)


def texts_of(schema: Mapping[str, Any]) -> list[str] | None:
    """All that a text may be; None if it may be any."""
    given: Iterable[Any] | None = [schema["const"]] if "const" in schema else schema.get("enum")
    found = [one for one in given or () if isinstance(one, str) and one]
    return found or None
