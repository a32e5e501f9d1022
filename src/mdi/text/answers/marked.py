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
from mdi.text.answers.written import KEY, NAME, Written

MINIMAX = "<minimax:tool_call>"
_KEY, _VALUE = "<arg_key>", "<arg_value>"
_GLM_CALL, _GLM_PARTS = {"<tool_call>": "</tool_call>"}, {_KEY: "</arg_key>", _VALUE: "</arg_value>"}
_MINIMAX_CALL = {MINIMAX: "</minimax:tool_call>"}
_PARAMETER, _END_OF_PARAMETER, _END_OF_INVOKE = "<parameter name=", "</parameter>", "</invoke>"
_INVOKE_HEAD, _PARAMETER_HEAD = re.compile("<invoke name=([^<>]*)>"), re.compile(f"{_PARAMETER}([^<>]*)>")
_BLANKS = re.compile(r"\s*")
MARKS = tuple(mark for pair in (*_GLM_PARTS.items(), *_MINIMAX_CALL.items()) for mark in pair)

Arguments = list[tuple[str, str]]  # as a model writes them


def glm_calls(text: str, schemas: Mapping[str, Any]) -> list[Call]:
    """The call that a text is; [] if it is none, or one of no tool."""
    try:
        inner = _between(text, _GLM_CALL)
        name, key, _ = inner.partition(_KEY)
        return _calls([(name.strip(), _glm_arguments(inner[len(name) :] if key else ""))], schemas)
    except ValueError:
        return []


def minimax_calls(text: str, schemas: Mapping[str, Any]) -> list[Call]:
    """The calls that a text consists of; [] if it has other text, or one of no tool."""
    try:
        return _calls(_invoked(_between(text, _MINIMAX_CALL)), schemas)
    except ValueError:
        return []


def _between(text: str, ends: Mapping[str, str]) -> str:
    """What stands between the first mark and the last one. Raises ValueError if these are others."""
    ((mark, end),) = ends.items()
    if not (text.startswith(mark) and text.endswith(end)):
        raise ValueError("another mark, or no end")
    return text[len(mark) : -len(end)]


def _calls(found: list[tuple[str, Arguments]], schemas: Mapping[str, Any]) -> list[Call]:
    if not all(name in schemas for name, _ in found):
        return []
    return [Call(name, json.dumps(typed_arguments(given, schemas[name]))) for name, given in found]


def _glm_arguments(text: str) -> Arguments:
    parts = list(_pieces(text, _GLM_PARTS))
    if [mark for mark, _ in parts] != [_KEY, _VALUE] * (len(parts) // 2):
        raise ValueError("a key without a value")
    return [(key.strip(), value) for (_, key), (_, value) in zip(parts[::2], parts[1::2], strict=True)]


def _invoked(text: str) -> list[tuple[str, Arguments]]:
    """MiniMax' calls: names, and arguments. Raises ValueError if there is anything else."""
    found: list[tuple[str, Arguments]] = []
    at, is_open = _behind_blanks(text, 0), False
    while at < len(text):
        if is_open and text.startswith(_END_OF_INVOKE, at):
            at, is_open = at + len(_END_OF_INVOKE), False
        else:
            head = (_PARAMETER_HEAD if is_open else _INVOKE_HEAD).match(text, at)
            if head is None:
                raise ValueError("text beside the marks")
            at, name = head.end(), head[1].removeprefix('"').removesuffix('"').strip()
            if is_open:
                end = text.index(_END_OF_PARAMETER, at)
                found[-1][1].append((name, text[at:end]))
                at = end + len(_END_OF_PARAMETER)
            else:
                found.append((name, []))
                is_open = True
        at = _behind_blanks(text, at)
    if is_open:
        raise ValueError("a mark without an end")
    return found


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


GLM_CALLS = CallForm(
    glm_calls, value=(_VALUE, _GLM_PARTS[_VALUE]),
    written=Written(f"<tool_call>{NAME}\n", "</tool_call>", f"{_KEY}{KEY}</arg_key>\n{_VALUE}", "</arg_value>\n"),
)  # fmt: skip
MINIMAX_CALLS = CallForm(
    minimax_calls, _MINIMAX_CALL, value=(_PARAMETER, _END_OF_PARAMETER),
    written=Written(
        f'{MINIMAX}\n<invoke name="{NAME}">\n', f"</invoke>\n{_MINIMAX_CALL[MINIMAX]}",
        f'<parameter name="{KEY}">', "</parameter>\n",
    ),
)  # fmt: skip
