"""Calls of tools as Gemma 4 writes them: <|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>

A VALUE is <|"|>a text as it is<|"|>, a number, true, false, null, a list [...] or an object {KEY:VALUE,...}. Behind its calls a
model goes on with what it expects as their results, so the mark of those ends an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mdi.text.answers.calls import CallForm, refused_constant
from mdi.text.answers.events import Call
from mdi.text.answers.written import KEY, NAME, Lark, Written, texts_of

CALL, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THOUGHT = ("<|channel>thought", "<channel|>")
RESULT = "<|tool_response>"
MARKS = (CALL, _END, _QUOTE, "<|channel>", THOUGHT[1])
MOST_LEVELS = 100  # of objects and lists in each other
_HEAD = re.compile(rf"{re.escape(CALL)}\s*call:\s*([\w.-]{{1,64}})\s*(?=\{{)", re.ASCII)
_KEY = re.compile(r'\s*(?:<\|"\|>(?P<quoted>.*?)<\|"\|>|(?P<bare>[^\s:,{}\[\]<>]+))\s*:', re.DOTALL)
_WORD = re.compile(r"\s*([^\s,{}\[\]<>]+)")
_BLANKS = re.compile(r"\s*")


class _Reader:
    """Reads one value behind the other. Raises ValueError if there is none."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self.at = text, at

    def value(self, level: int = 0) -> Any:
        if level > MOST_LEVELS:
            raise ValueError("nested too deeply")
        if self.takes(_QUOTE):
            end = self._text.index(_QUOTE, self.at)
            begin, self.at = self.at, end + len(_QUOTE)
            return self._text[begin:end]
        if self.takes("["):
            return self._listed("]", lambda: self.value(level + 1))
        if self.takes("{"):
            return dict(self._listed("}", lambda: (self._matched(_KEY), self.value(level + 1))))
        return json.loads(self._matched(_WORD), parse_constant=refused_constant)

    def _listed(self, end: str, read: Any) -> list[Any]:
        found: list[Any] = []
        while not self.takes(end):
            if found and not self.takes(","):
                raise ValueError("no comma")
            found.append(read())
        return found

    def _matched(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self.at)
        if found is None:
            raise ValueError("neither a key nor a value")
        self.at = found.end()
        return next(one for one in found.groups() if one is not None)

    def takes(self, mark: str) -> bool:
        """Whether it comes next, behind blanks; then it is taken."""
        blanks = _BLANKS.match(self._text, self.at)
        assert blanks is not None, "it may be empty"
        is_there = self._text.startswith(mark, blanks.end())
        self.at = blanks.end() + len(mark) if is_there else self.at
        return is_there


def gemma_calls(text: str, schemas: Mapping[str, Any]) -> list[Call]:
    """The call that a text is; [] if it is none, or one of no tool. Its last mark may be missing."""
    head = _HEAD.match(text)
    if head is None or head[1] not in schemas:
        return []
    reader = _Reader(text, head.end())
    try:
        arguments = reader.value()
    except (ValueError, RecursionError):
        return []
    reader.takes(_END)
    return [] if text[reader.at :].strip() else [Call(head[1], json.dumps(arguments))]


_ANY = {  # rules of a value whose schema says nothing that can be used here
    "any_value": 'any_text | any_list | any_object | "true" | "false" | "null" | any_number',
    "any_number": '%json {"type": "number"}',
    "any_list": '"[" (any_value ("," any_value)*)? "]"',
    "any_object": '"{" (any_pair ("," any_pair)*)? "}"',
    "any_pair": '/[A-Za-z0-9_.-]{1,64}/ ":" any_value',
}


def _value(lark: Lark, name: str, schema: Mapping[str, Any], end: str) -> str:
    """The rules of a value; see mdi.text.answers.written.Value."""
    kind = schema.get("type")
    if kind in ("integer", "number", "boolean", "null"):
        return lark.json(name, schema)
    if kind != "string":
        for rule, what in _ANY.items():
            lark.rule(rule, what)
        lark.rule("any_text", f"{lark.text(_QUOTE)} {lark.until('any_words', _QUOTE)}")
        return "any_object" if kind == "object" else "any_list" if kind == "array" else "any_value"
    if (known := texts_of(schema)) is not None:
        return lark.rule(
            name, " | ".join(f"{lark.text(_QUOTE)} {lark.words(one)} {lark.text(_QUOTE)}" for one in known)
        )
    return f"{lark.text(_QUOTE)} {lark.until(name, _QUOTE)}"


GEMMA_CALLS = CallForm(
    gemma_calls, {CALL: _END}, (_QUOTE, _QUOTE),
    written=Written(f"{CALL}call:{NAME}{{", f"}}{_END}", f"{KEY}:", "", ",", _value),
)  # fmt: skip
