"""Calls of tools with marks around each argument, as GLM and MiniMax write them.

GLM's, with line breaks or without: <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>
MiniMax': <minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> ... </invoke> </minimax:tool_call>
A value is a text as it is, or else JSON; which of them, only the tool's schema tells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mdi.text.answers.calls import CallForm, typed_arguments
from mdi.text.answers.events import Call

MINIMAX = "<minimax:tool_call>"
_KEY, _VALUE = "<arg_key>", "<arg_value>"
_GLM_CALL, _GLM_PARTS = {"<tool_call>": "</tool_call>"}, {_KEY: "</arg_key>", _VALUE: "</arg_value>"}
_MINIMAX_CALL = {MINIMAX: "</minimax:tool_call>"}
_INVOKE, _PARAMETER = {"<invoke name=": "</invoke>"}, {"<parameter name=": "</parameter>"}
_BLANKS = re.compile(r"\s*")
MARKS = tuple(mark for pair in (*_GLM_PARTS.items(), *_MINIMAX_CALL.items()) for mark in pair)

Arguments = list[tuple[str, str]]  # as a model writes them


def glm_calls(text: str, schemas: Mapping[str, Any]) -> list[Call]:
    """The call that a text is; [] if it is none, or one of no tool."""
    try:
        ((_, inner),) = _pieces(text, _GLM_CALL)
        name, key, _ = inner.partition(_KEY)
        return _calls([(name.strip(), _glm_arguments(inner[len(name) :] if key else ""))], schemas)
    except ValueError:
        return []


def minimax_calls(text: str, schemas: Mapping[str, Any]) -> list[Call]:
    """The calls that a text consists of; [] if it has other text, or one of no tool."""
    try:
        ((_, inner),) = _pieces(text, _MINIMAX_CALL)
        return _calls([(name, [*_named(body, _PARAMETER)]) for name, body in _named(inner, _INVOKE)], schemas)
    except ValueError:
        return []


def _calls(found: list[tuple[str, Arguments]], schemas: Mapping[str, Any]) -> list[Call]:
    if not all(name in schemas for name, _ in found):
        return []
    return [Call(name, json.dumps(typed_arguments(given, schemas[name]))) for name, given in found]


def _glm_arguments(text: str) -> Arguments:
    parts = list(_pieces(text, _GLM_PARTS))
    if [mark for mark, _ in parts] != [_KEY, _VALUE] * (len(parts) // 2):
        raise ValueError("a key without a value")
    return [(key.strip(), value) for (_, key), (_, value) in zip(parts[::2], parts[1::2], strict=True)]


def _named(text: str, ends: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Of pieces like NAME">TEXT</end>: name and text. Raises ValueError if there is anything else."""
    for _, inner in _pieces(text, ends):
        head, _, body = inner.partition(">")
        if len(head) == len(inner):
            raise ValueError("a mark without an end")
        yield head.removeprefix('"').removesuffix('"').strip(), body


def _pieces(text: str, ends: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Marks, and what stands between each and the next end that belongs to it. Looks at each character once or twice, however
    many marks a model writes. Raises ValueError if the text has anything else but blanks.

    Args:
        ends: by the marks.
    """
    at = _behind_blanks(text, 0)
    while at < len(text):
        mark = next((mark for mark in ends if text.startswith(mark, at)), "")
        begin = at + len(mark)
        end = text.find(ends[mark], begin) if mark else -1
        if end < 0:
            raise ValueError("text beside the marks")
        yield mark, text[begin:end]
        at = _behind_blanks(text, end + len(ends[mark]))


def _behind_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None, "it may be empty"
    return found.end()


GLM_CALLS = CallForm(glm_calls)
MINIMAX_CALLS = CallForm(minimax_calls, _MINIMAX_CALL)
