"""Answers of GLM and MiniMax: reasoning in <think> and </think>, calls of tools with marks around each argument, and the text.

GLM's, with line breaks or without: <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>
MiniMax': <minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> ... </invoke> </minimax:tool_call>
A value is a text as it is, or else JSON; which of them, only the tool's schema tells. A prompt may end with <think>: then an
answer begins with reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mdi.text.texts import Detokenizer, TextCodec, TextStream

THINK, END_OF_THINK = "<think>", "</think>"
_ENDS = {"<tool_call>": "</tool_call>", "<minimax:tool_call>": "</minimax:tool_call>"}
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>|<minimax:tool_call>(.*?)</minimax:tool_call>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_INVOKE = re.compile(r'<invoke name="?([^">]+)"?>(.*?)</invoke>', re.DOTALL)
_PARAMETER = re.compile(r'<parameter name="?([^">]+)"?>(.*?)</parameter>', re.DOTALL)

Call = dict[str, Any]  # "name" and "arguments"
Tools = Sequence[Mapping[str, Any]]  # as a request has them


class MarkedStream(TextStream):
    """The text of one answer for the user, from ids as they come; all else is had from `others`.

    Args:
        stop: strings that end the user's text and are removed from it; in reasoning and calls they mean nothing.
        begins_in_reasoning: whether the prompt ends with <think>.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], tools: Tools, begins_in_reasoning: bool) -> None:
        super().__init__(codec, stop, continues=False)
        self._body, self._tools = Detokenizer(codec), tools
        self._held = ""  # what may be the beginning of a mark, or is one of a call
        self._mark = THINK if begins_in_reasoning else ""  # that was opened last
        self._is_empty = True  # no text, and no blank lines
        self._reasoning, self._has_reasoned = "", False
        self._blank = ""  # at the end of what was said: it belongs to the mark, if one follows
        self._is_behind_call = False
        self._calls: list[tuple[str, str]] = []

    def push(self, ids: Sequence[int]) -> str:
        self._held += self._body.push(ids)
        return self._taken()

    def flush(self) -> str:
        self._held += self._body.flush()
        text = self._taken()
        text += self._say(self._held)  # cut off within a mark or a call
        self._held = ""
        blank, self._blank = self._blank, ""
        if self._mark == THINK:
            self._reasoning += blank
        elif not self._is_behind_call:
            text += self._match(blank)
        return text if self.is_stopped else text + self._matcher.flush()

    def others(self) -> tuple[str, list[tuple[str, str]]]:
        reasoning, self._reasoning = self._reasoning, ""
        calls, self._calls = self._calls, []
        return reasoning, calls

    def _taken(self) -> str:
        """The text in what is held, but for what the next characters may change."""
        text = ""
        while not self.is_stopped:
            if self._mark in _ENDS:
                before, end, after = self._held.partition(_ENDS[self._mark])
                if not end:
                    return text
                text += self._called(before + end)
                self._mark, self._held = "", after
                continue
            marks = (END_OF_THINK,) if self._mark == THINK else (*_ENDS, *self._first_marks())
            at = min(_place(self._held, mark) for mark in marks)
            before, self._held = self._held[:at], self._held[at:]
            text += self._say(before)
            found = next((mark for mark in marks if self._held.startswith(mark)), None)
            if found is None:
                return text
            self._mark = "" if found == END_OF_THINK else found
            if found == END_OF_THINK:
                self._blank = ""
            if found not in _ENDS:
                self._held = self._held.removeprefix(found)
        return text

    def _first_marks(self) -> tuple[str, ...]:
        is_first = self._is_empty and not self._held[: _place(self._held, THINK)].strip()
        return (THINK,) if is_first else ()

    def _called(self, written: str) -> str:
        """Take a call; returns what is none, which is text."""
        calls = marked_calls(written, self._tools)
        self._calls += [(call["name"], json.dumps(call["arguments"])) for call in calls]
        self._mark = ""
        if not calls:
            return self._say(written)
        self._blank, self._is_behind_call = "", True
        return ""

    def _say(self, text: str) -> str:
        if self._mark == THINK:
            text = text if self._has_reasoned else text.lstrip()
            self._has_reasoned = self._has_reasoned or bool(text)
            self._reasoning += self._without_end(text)
            return ""
        if self._is_empty:
            text = text.lstrip()
        self._is_empty = self._is_empty and not text
        if self._tools:
            text = self._without_end(text)
        self._is_behind_call = self._is_behind_call and not text
        return self._match(text)

    def _without_end(self, text: str) -> str:
        """A text without the blanks at its end, which wait for what follows."""
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        return said


def _place(text: str, mark: str) -> int:
    """Where a mark is, or a beginning of one at the end; the length if there is neither."""
    at = text.find(mark)
    if at >= 0:
        return at
    longest = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    return len(text) - longest


def marked_calls(text: str, tools: Tools) -> list[Call]:
    """The calls that a text consists of, in either form; [] if it has other text, or one of no tool's."""
    names = {tool["function"]["name"] for tool in tools}
    if _CALLS.sub("", text).strip():
        return []
    calls = []
    for glm, minimax in _CALLS.findall(text):
        if _INVOKE.sub("", minimax).strip():
            return []
        calls += [_call(name, _PARAMETER, body, tools) for name, body in _INVOKE.findall(minimax)]
        if glm:
            at = glm.find("<arg_key>")
            name, body = (glm, "") if at < 0 else (glm[:at], glm[at:])
            calls.append(_call(name, _ARGUMENT, body, tools))
    return calls if all(call["name"] in names for call in calls) else []


def _call(name: str, argument: re.Pattern[str], body: str, tools: Tools) -> Call:
    """A call whose name is empty if its arguments are not all that it has."""
    name = "" if argument.sub("", body).strip() else name.strip()
    schema = next((t["function"].get("parameters") for t in tools if t["function"]["name"] == name), None)
    kinds = schema.get("properties") if isinstance(schema, Mapping) else None
    found = kinds if isinstance(kinds, Mapping) else {}
    arguments = {key.strip(): typed_value(value, found.get(key.strip())) for key, value in argument.findall(body)}
    return {"name": name, "arguments": arguments}


def typed_value(text: str, schema: Any) -> Any:
    """The value that a tool's schema means by what was written for an argument."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
