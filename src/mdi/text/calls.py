"""Calls of tools in what a model writes, of the families that have no stream of their own (mdi.text.marked, harmony).

Hermes, Qwen 2.5 and 3: <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
Qwen 3 Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>, VALUE as in mdi.text.marked
Mistral: [TOOL_CALLS][{"name": NAME, "arguments": {...}}], newer [TOOL_CALLS]NAME[ARGS]{...}, for each call
Llama 3: {"name": NAME, "parameters": {...}}, maybe behind <|python_tag|>; several have "; " between them

Words, reasoning or other calls may stand before a call; only JSON without a mark must be the first of an answer, or follow
another call. What has the form of a call, but is one of no tool, is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mdi.text.marked import END_OF_THINK, THINK, Tools, typed_value

_ENDS = {f"<{name}>": f"</{name}>" for name in ("tool_call", "function_call", "minimax:tool_call")}
_MISTRAL = "[TOOL_CALLS]"
_MARKS = (*_ENDS, _MISTRAL, "<|python_tag|>")
_NO_MARK = ""  # of JSON alone
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_BLANKS = re.compile(r"\s*")
# What stands between a mark and the JSON of a call, and what may become that.
_BEFORE_JSON = re.compile(r"\s*(?=[{\[])"), re.compile(r"\s*")
_HEADS = {
    _NO_MARK: (re.compile(r'(?=\[?\s*\{\s*")'), re.compile(r"\[?\s*(\{\s*)?")),
    _MISTRAL: (
        re.compile(
            r"\s*(?:(?P<name>[\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?\s*(?:\[ARGS\])?\s*(?=\{)|(?=[{\[]))", re.ASCII
        ),
        re.compile(r"\s*(?:[\w.-]{1,64}\s*(?:\[[A-Z_]{0,8}(?:\]\w{0,64})?\s*){0,2})?", re.ASCII),
    ),
}
_LONGEST_HEAD = 256  # characters
_BEGUN = re.compile(r'\s*(?:\[\s*)?\{\s*"name"\s*:\s*"([^"]*)')
_FUNCTION = re.compile(r"\s*<function=([^<>]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>]+)>")
_END_OF_PARAMETER = "</parameter>"
_BEHIND_PARAMETER = re.compile(r"\s*(?:<parameter=|</function>)")
_END_OF_FUNCTION = re.compile(r"\s*</function>\s*")


class ToolCall(NamedTuple):
    """A call: the name of a tool, and its arguments as JSON, or as the model wrote them if they are none."""

    name: str
    arguments: str


Part = str | ToolCall  # of an answer


class CallParser:
    """Takes an answer apart as it comes. Each character is looked at a bounded number of times.

    Args:
        tools: those that may be called.
        begins_in_reasoning: whether the prompt ends with <think>.
    """

    def __init__(self, tools: Tools, begins_in_reasoning: bool = False) -> None:
        self._parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._step = self._in_reasoning if begins_in_reasoning else self._in_words
        self._text, self._at = "", 0  # what came last, and how far it has been taken
        self._parts: list[Part] = []
        self._blanks: list[str] = []  # behind what was said: they are left out where a call follows
        self._has_said = False
        self._is_first = True  # nothing but blanks stands before, or reasoning
        self._mark, self._name = _NO_MARK, ""  # of the call that is under way
        self._written: list[str] = []  # of it: its mark, what stands behind that, and the rest in pieces
        self._value = _JsonValue()

    def feed(self, text: str) -> list[Part]:
        """Take the next text; returns what is decided now."""
        self._text, self._at = self._text[self._at :] + text, 0
        while self._step():
            pass
        return self._taken()

    def end(self, is_cut: bool) -> list[Part]:
        """The rest, because no more text comes.

        Args:
            is_cut: the model has not ended it: a call that is not complete is left out, because nobody can use it.
        """
        rest = self._text[self._at :]
        self._text, self._at = "", 0
        if self._step == self._behind_call:
            self._blanks = []
        elif self._step in (self._in_head, self._in_json, self._in_marks):
            self._written.append(rest)
            if self._step == self._in_marks and (call := self._call_of_function()) is not None:
                self._add([call])
            elif is_cut and self._is_begun():
                self._blanks = []
            else:
                self._say("".join(self._written))
        else:
            self._say(rest)
        self._parts += self._blanks
        return self._taken()

    def _taken(self) -> list[Part]:
        parts: list[Part] = []
        words: list[str] = []
        for part in self._parts:
            if isinstance(part, str):
                words.append(part)
                continue
            parts += ["".join(words), part] if words else [part]
            words = []
        self._parts = []
        return [*parts, "".join(words)] if words else parts

    # Each step takes a part of the text, and says whether it is worth going on: else it waits for more.

    def _in_reasoning(self) -> bool:
        at = self._text.find(END_OF_THINK, self._at)
        if at < 0:
            self._say_until(len(self._text) - self._n_begun((END_OF_THINK,)))
            return False
        self._say_until(at + len(END_OF_THINK))
        self._is_first, self._step = True, self._in_words
        return True

    def _in_words(self) -> bool:
        if self._is_first:
            self._take_blanks()
            if self._is_at(THINK):
                self._say_until(self._at + len(THINK))
                self._step = self._in_reasoning
                return True
            if self._n_begun((THINK, *_MARKS)) == len(self._text) - self._at:  # or there is nothing yet
                return False
            if self._text[self._at] in "{[" and not _MARK.match(self._text, self._at):
                return self._open(_NO_MARK)
        found = _MARK.search(self._text, self._at)
        if found is None:
            self._say_until(len(self._text) - self._n_begun(_MARKS))
            return False
        self._say_until(found.start())
        return self._open(found[0])

    def _open(self, mark: str) -> bool:
        self._mark, self._name, self._written, self._value = mark, "", [mark], _JsonValue()
        self._at += len(mark)
        self._step = self._in_head
        return True

    def _in_head(self) -> bool:
        head = self._text[self._at : self._at + _LONGEST_HEAD]
        whole, begun = _HEADS.get(self._mark, _BEFORE_JSON)
        found = whole.match(head)
        if found is not None:
            self._name = found.groupdict().get("name") or ""
            self._take(self._at + found.end())
            self._step = self._in_json
            return True
        if len(head) < _LONGEST_HEAD and begun.fullmatch(head):
            return False
        if self._mark not in _ENDS:
            return self._is_no_call()
        self._step = self._in_marks
        return True

    def _in_json(self) -> bool:
        at = self._value.end_in(self._text, self._at)
        self._take(len(self._text) if at < 0 else at)
        if at < 0:
            return False
        calls = self._calls_of(_parsed("".join(self._written[2:])))
        return self._add(calls) if calls else self._is_no_call()

    def _in_marks(self) -> bool:
        """Between two marks, but no JSON."""
        end = _ENDS[self._mark]
        at = self._text.find(end, self._at)
        self._take(at if at >= 0 else len(self._text) - self._n_begun((end,)))
        if at < 0:
            return False
        call = self._call_of_function()
        return self._is_no_call() if call is None else self._add([call])

    def _behind_call(self) -> bool:
        self._take_blanks()
        for end in _ENDS.values():
            if self._is_at(end):
                self._at += len(end)
                self._blanks = []
                return True
        if self._n_begun(tuple(_ENDS.values())) == len(self._text) - self._at:
            return False
        if self._text[self._at] in ";,":
            self._blanks.append(self._text[self._at])
            self._at += 1
            return True
        self._step = self._in_words
        return self._open(_NO_MARK) if self._is_at("{") else True

    def _add(self, calls: list[ToolCall]) -> bool:
        self._parts += calls
        self._blanks, self._step, self._is_first = [], self._behind_call, False
        return True

    def _is_no_call(self) -> bool:
        self._say("".join(self._written))
        self._step, self._is_first = self._in_words, False
        return True

    def _say(self, text: str) -> None:
        said = text.rstrip()
        if said:
            self._parts += [*self._blanks, said]
            self._blanks, self._is_first, self._has_said = [], False, True
        if len(said) < len(text):
            self._blanks.append(text[len(said) :])

    def _say_until(self, at: int) -> None:
        self._say(self._text[self._at : at])
        self._at = at

    def _take(self, at: int) -> None:
        self._written.append(self._text[self._at : at])
        self._at = at

    def _take_blanks(self) -> None:
        found = _BLANKS.match(self._text, self._at)
        assert found is not None, "it matches nothing, too"
        if found[0] and (self._has_said or self._step != self._behind_call):
            self._blanks.append(found[0])
        self._at = found.end()

    def _is_at(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def _n_begun(self, marks: tuple[str, ...]) -> int:
        """Characters at the end that are the beginning of a mark."""
        longest = min(max(map(len, marks)) - 1, len(self._text) - self._at)
        ends = (self._text[len(self._text) - n :] for n in range(longest, 0, -1))
        return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)

    def _is_begun(self) -> bool:
        """Whether what is under way would have become a call."""
        begun = _BEGUN.match("".join(self._written))
        return bool(self._mark) or (begun is not None and any(name.startswith(begun[1]) for name in self._parameters))

    def _calls_of(self, value: Any) -> list[ToolCall]:
        """The calls that a value of JSON means; [] if it is not all calls of tools."""
        if self._name:
            value = {"name": self._name, "arguments": value}
        calls = []
        for one in value if isinstance(value, list) else [value]:
            name = one.get("name") if isinstance(one, dict) else None
            arguments = one.get("arguments", one.get("parameters", {})) if isinstance(one, dict) else None
            if not isinstance(name, str) or name not in self._parameters or not isinstance(arguments, dict | str):
                return []
            calls.append(ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
        return calls

    def _call_of_function(self) -> ToolCall | None:
        """What stands between the marks as Qwen 3 Coder writes a call."""
        text = "".join(self._written[1:])
        function = _FUNCTION.match(text)
        if function is None or function[1] not in self._parameters:
            return None
        schema = self._parameters[function[1]]
        kinds = schema.get("properties") if isinstance(schema, Mapping) else None
        found, arguments, at = kinds if isinstance(kinds, Mapping) else {}, {}, function.end()
        while (parameter := _PARAMETER.match(text, at)) is not None:
            end = text.find(_END_OF_PARAMETER, parameter.end())
            while end >= 0 and not _BEHIND_PARAMETER.match(text, end + len(_END_OF_PARAMETER)):
                end = text.find(_END_OF_PARAMETER, end + 1)  # that one is a part of the value
            if end < 0:
                return None
            value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[parameter[1]] = typed_value(value, found.get(parameter[1]))
            at = end + len(_END_OF_PARAMETER)
        is_whole = _END_OF_FUNCTION.fullmatch(text, at) is not None
        return ToolCall(function[1], json.dumps(arguments)) if is_whole else None


class _JsonValue:
    """Finds where an object or a list ends that comes in pieces."""

    _OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

    def __init__(self) -> None:
        self._n_open = 0
        self._is_string = False
        self._is_escaped = False  # the next character

    def end_in(self, text: str, at: int) -> int:
        """The place behind the value, if it ends in the text from `at` on; else -1."""
        if self._is_escaped and at < len(text):
            at, self._is_escaped = at + 1, False
        while (found := (self._INSIDE if self._is_string else self._OUTSIDE).search(text, at)) is not None:
            at = found.end()
            if found[0] == "\\":
                self._is_escaped = at == len(text)
                at += 1
            elif found[0] == '"':
                self._is_string = not self._is_string
            else:
                self._n_open += 1 if found[0] in "{[" else -1
                if self._n_open == 0:
                    return at
        return -1


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
