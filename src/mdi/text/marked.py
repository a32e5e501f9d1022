"""Answers of GLM and MiniMax: reasoning in <think> and </think>, calls of tools with marks around each argument, and the text.

GLM's, with line breaks or without: <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>
MiniMax': <minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> ... </invoke> </minimax:tool_call>
A value is a text as it is, or else JSON; which of them, only the tool's schema tells. A prompt may end with <think>: then an
answer begins with reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mdi.text.texts import Detokenizer, TextCodec, TextStream

THINK, END_OF_THINK = "<think>", "</think>"
GLM, MINIMAX = "<tool_call>", "<minimax:tool_call>"
_ENDS = {GLM: "</tool_call>", MINIMAX: "</minimax:tool_call>"}
_KEY, _VALUE = "<arg_key>", "<arg_value>"
_GLM_PARTS = {_KEY: "</arg_key>", _VALUE: "</arg_value>"}
_INVOKE, _PARAMETER = {"<invoke name=": "</invoke>"}, {"<parameter name=": "</parameter>"}
_BLANKS = re.compile(r"\s*")
LONGEST_CALL = 1 << 17  # characters; a longer one is text

Call = dict[str, Any]  # "name" and "arguments"
Tools = Sequence[Mapping[str, Any]]  # as a request has them
Arguments = list[tuple[str, str]]  # as a model writes them


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
        self._n_seen = 0  # characters of a call in which its end is not
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
                mark = _ENDS[self._mark]
                at = self._held.find(mark, self._n_seen, LONGEST_CALL)
                if at < 0 and len(self._held) < LONGEST_CALL:
                    self._n_seen = max(0, len(self._held) - len(mark))
                    return text
                end = LONGEST_CALL if at < 0 else at + len(mark)
                written, self._held, self._n_seen = self._held[:end], self._held[end:], 0
                text += self._called(written)
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
    found: list[tuple[str, Arguments]] = []
    try:
        for mark, inner in _pieces(text, _ENDS):
            if mark == GLM:
                name, key, _ = inner.partition(_KEY)
                found.append((name.strip(), _glm_arguments(inner[len(name) :] if key else "")))
            else:
                found += [(name, _minimax_arguments(body)) for name, body in _named_pieces(inner, _INVOKE)]
    except ValueError:
        return []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return [_call(*one, schemas[one[0]]) for one in found] if all(name in schemas for name, _ in found) else []


def _glm_arguments(text: str) -> Arguments:
    parts = list(_pieces(text, _GLM_PARTS))
    if [mark for mark, _ in parts] != [_KEY, _VALUE] * (len(parts) // 2):
        raise ValueError("a key without a value")
    return [(key.strip(), value) for (_, key), (_, value) in zip(parts[::2], parts[1::2], strict=True)]


def _minimax_arguments(text: str) -> Arguments:
    return list(_named_pieces(text, _PARAMETER))


def _named_pieces(text: str, ends: Mapping[str, str]) -> Iterator[tuple[str, str]]:
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


def _call(name: str, arguments: Arguments, schema: Any) -> Call:
    kinds = schema.get("properties") if isinstance(schema, Mapping) else None
    known = kinds if isinstance(kinds, Mapping) else {}
    return {"name": name, "arguments": {key: typed_value(value, known.get(key)) for key, value in arguments}}


def typed_value(text: str, schema: Any) -> Any:
    """The value that a tool's schema means by what was written for an argument."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
