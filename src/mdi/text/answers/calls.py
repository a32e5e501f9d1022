"""Calls of tools in what a model writes.

Hermes, Qwen 2.5 and 3: <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
Qwen 3 Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>, VALUE as in `marked`
Mistral: [TOOL_CALLS][{"name": NAME, "arguments": {...}}], newer [TOOL_CALLS]NAME[ARGS]{...}, for each call
Llama 3: {"name": NAME, "parameters": {...}}, maybe behind <|python_tag|>; several have "; " between them

All forms read these; what a form has besides, and how it writes a call that is demanded, its CallForm says.
Words, reasoning or other calls may stand before a call; only JSON without a mark must be the first of an answer, or follow
another call. What has the form of a call, but is one of no tool, is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from mdi.text.answers.events import Call, CallBegun, CallPiece, Event, Text, Tools, n_begun
from mdi.text.answers.think import END_OF_THINK, THINK
from mdi.text.answers.written import KEY, NAME, Written

_ENDS = {f"<{name}>": f"</{name}>" for name in ("tool_call", "function_call")}
_MISTRAL = "[TOOL_CALLS]"
_OPEN = (_MISTRAL, "<|python_tag|>")  # marks without an end
_NO_MARK = ""  # of JSON alone
_BLANKS = re.compile(r"\s*")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}", re.ASCII)
Head = tuple[
    re.Pattern[str], re.Pattern[str]
]  # what stands between a mark and the JSON of a call, and what may become that
_BEFORE_JSON: Head = re.compile(r"\s*(?=[{\[])"), re.compile(r"\s*")
_HEADS: dict[str, Head] = {
    _NO_MARK: (re.compile(r'(?=\[?\s*\{\s*")'), re.compile(r"\[?\s*(\{\s*)?")),
    _MISTRAL: (
        re.compile(
            r"\s*(?:(?P<name>[\w.-]{1,64})(?:\[CALL_ID\](?P<id>\w{1,64}))?\s*(?:\[ARGS\])?\s*(?=\{)|(?=[{\[]))",
            re.ASCII,
        ),
        re.compile(r"\s*(?:[\w.-]{1,64}\s*(?:\[[A-Z_]{0,8}(?:\]\w{0,64})?\s*){0,2})?", re.ASCII),
    ),
}
_LONGEST_HEAD = 256  # characters
_BEGUN = re.compile(r'\s*(?:\[\s*)?\{\s*"name"\s*:\s*"([^"]*)')
_OPENING = re.compile(r'\{\s*"name"\s*:\s*"([\w.-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII)
_OPENING_BEGUN = re.compile(
    r'\{("\w{0,4}("(:("[\w.-]{0,64}("(,("\w{0,10}("(:)?)?)?)?)?)?)?)?)?', re.ASCII
)  # without blanks
_FUNCTION = re.compile(r"<\w+>\s*<function=([^<>]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>]+)>")
_END_OF_PARAMETER = "</parameter>"
_BEHIND_PARAMETER = re.compile(r"\s*(?:<parameter=|</function>)")
_END_OF_FUNCTION = re.compile(r"\s*</function>\s*(</\w+>)?")
LONGEST_CALL = 1 << 17  # characters of one that is no JSON; a longer one is text
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")

# The calls that the text from a mark to its end means, with the parameters of the tools by name; [] if there is another one.
ReadCalls = Callable[[str, Mapping[str, Any]], list[Call]]


def coder_calls(text: str, schemas: Mapping[str, Any]) -> list[Call]:
    """As Qwen 3 Coder writes a call; the last mark may be missing."""
    function = _FUNCTION.match(text)
    if function is None or function[1] not in schemas:
        return []
    arguments, at = [], function.end()
    while (parameter := _PARAMETER.match(text, at)) is not None:
        end = text.find(_END_OF_PARAMETER, parameter.end())
        while end >= 0 and not _BEHIND_PARAMETER.match(text, end + len(_END_OF_PARAMETER)):
            end = text.find(_END_OF_PARAMETER, end + 1)  # that one is a part of the value
        if end < 0:
            return []
        value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        arguments.append((parameter[1], value))
        at = end + len(_END_OF_PARAMETER)
    is_whole = _END_OF_FUNCTION.fullmatch(text, at) is not None
    return [Call(function[1], json.dumps(typed_arguments(arguments, schemas[function[1]])))] if is_whole else []


@dataclass(frozen=True)
class CallForm:
    """How a form writes calls, besides what all forms may write.

    Attributes:
        read: reads what stands between marks and is no JSON.
        ends: by marks of its own, the ends that belong to them.
        value: how a mark begins behind which a value stands, and the one that ends it: within, no other mark is one.
        heads: by marks of its own without an end, what stands before the JSON of the arguments; "name" is the tool's, and
            "id" the call's.
        behind: what may stand behind such JSON, and means nothing.
        written: how a call is written that is demanded; None: as INSTRUCTIONS say, JSON alone.
    """

    read: ReadCalls = coder_calls
    ends: Mapping[str, str] = field(default_factory=dict)
    value: tuple[str, str] = ("<parameter=", _END_OF_PARAMETER)
    heads: Mapping[str, Head] = field(default_factory=dict)
    behind: tuple[str, ...] = ()
    written: Written | None = None


class Calls:
    """Tells calls from the text of an answer.

    Args:
        tools: those that may be called.
        is_call: whether the answer is nothing but calls: of one that is cut off, nothing is text.
        streams_calls: whether arguments that are JSON come in pieces, once it is known of which tool; then it is a call,
            whatever follows.
    """

    def __init__(
        self, tools: Tools, form: CallForm = CallForm(), is_call: bool = False, streams_calls: bool = False
    ) -> None:  # fmt: skip
        self._streams_calls = streams_calls
        self._ends = {**_ENDS, **form.ends}
        self._heads = {**_HEADS, **form.heads}
        self._behind = (*self._ends.values(), *form.behind)
        self._marks = (*self._ends, *_OPEN, *form.heads)
        self._any_mark = re.compile("|".join(map(re.escape, self._marks)))
        self._value_marks = form.value
        self._ends_or_values = {
            end: re.compile(f"{re.escape(end)}|{re.escape(form.value[0])}") for end in self._ends.values()
        }
        self._any_value = re.compile(re.escape(form.value[1]))
        self._ids: set[str] = set()  # that the model has given, each of which means one call
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._read, self._is_call = form.read, is_call
        self._step = self._in_words
        self._text, self._at = "", 0  # what came last, and how far it has been taken
        self._events: list[Event] = []
        self._blanks: list[str] = []  # behind what was said: they are left out where a call follows
        self._has_said = False
        self._is_first = True  # nothing but blanks stands before, or reasoning
        self._mark, self._name, self._id = _NO_MARK, "", ""  # of the call that is under way
        self._is_value = False  # whether a value of it has begun, between marks
        self._written: list[str] = []  # of it: its mark, what stands behind that, and the rest in pieces
        self._n_written = 0  # characters
        self._value = _JsonValue()
        self._may_begin = False  # whether what came of the JSON may become a call that comes in pieces
        self._begun: CallBegun | None = None  # the call that comes in pieces
        self._arguments: _JsonValue | None = None  # its arguments, until their end
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[Event]:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._step():
            pass
        return self._taken()

    def close(self, is_cut: bool) -> list[Event]:
        rest = self._text[self._at :]
        self._text, self._at = "", 0
        if self._step == self._behind_call:
            self._blanks = []
        elif self._begun is not None:
            self._end_call()
        elif self._step in (self._in_head, self._in_json, self._in_marks):
            self._written.append(rest)
            if self._step == self._in_marks and (calls := self._read("".join(self._written), self._schemas)):
                self._add(calls)
            elif is_cut and self._is_begun():
                self._blanks = []
            else:
                self._say("".join(self._written))
        else:
            self._say(rest)
        self._events += map(Text, self._blanks)
        found = self._taken()
        return [one for one in found if isinstance(one, Call)] if is_cut and self._is_call else found

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # Each step takes a part of the text, and says whether it is worth going on: else it waits for more.

    def _in_reasoning(self) -> bool:
        at = self._text.find(END_OF_THINK, self._at)
        if at < 0:
            self._say_until(len(self._text) - n_begun(self._text, (END_OF_THINK,), self._at))
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
            if (
                n_begun(self._text, (THINK, *self._marks), self._at) == len(self._text) - self._at
            ):  # or there is nothing yet
                return False
            if self._text[self._at] in "{[" and not self._any_mark.match(self._text, self._at):
                return self._open(_NO_MARK)
        found = self._any_mark.search(self._text, self._at)
        if found is None:
            self._say_until(len(self._text) - n_begun(self._text, self._marks, self._at))
            return False
        self._say_until(found.start())
        return self._open(found[0])

    def _open(self, mark: str) -> bool:
        self._mark, self._name, self._id, self._written, self._value = mark, "", "", [mark], _JsonValue()
        self._n_written, self._is_value = len(mark), False
        self._at += len(mark)
        self._step = self._in_head
        return True

    def _in_head(self) -> bool:
        head = self._text[self._at : self._at + _LONGEST_HEAD]
        whole, begun = self._heads.get(self._mark, _BEFORE_JSON)
        found = whole.match(head)
        if found is not None:
            self._name, self._id = (found.groupdict().get(what) or "" for what in ("name", "id"))
            self._take(self._at + found.end())
            self._step, self._may_begin = self._in_json, self._streams_calls
            if self._name and self._may_begin:
                self._begin_call(self._name)
            return True
        if len(head) < _LONGEST_HEAD and begun.fullmatch(head):
            return False
        if self._mark not in self._ends:
            return self._is_no_call()
        self._step = self._in_marks
        return True

    def _in_json(self) -> bool:
        if self._may_begin and not self._is_opened():
            return False
        at = self._value.end_in(self._text, self._at)
        to = len(self._text) if at < 0 else at
        if self._arguments is not None:
            end = self._arguments.end_in(self._text[:to], self._at)
            self._pieces.append(self._text[self._at : to if end < 0 else end])
            self._events.append(CallPiece(self._pieces[-1]))
            self._arguments = None if end >= 0 else self._arguments
        self._take(to)
        if at < 0:
            return False
        if self._begun is not None:
            return self._end_call()
        calls = self._calls_of(_parsed("".join(self._written[2:])))
        return self._add(calls) if calls else self._is_no_call()

    def _is_opened(self) -> bool:
        """Whether it is decided if what begins here is a call that comes in pieces; such a call is begun."""
        begun = self._text[self._at : self._at + _LONGEST_HEAD]
        found = _OPENING.match(begun)
        if found is None and len(begun) < _LONGEST_HEAD and _OPENING_BEGUN.fullmatch(_BLANKS.sub("", begun)):
            return False
        self._may_begin = False
        if found is not None and found[1] in self._schemas:
            self._value.end_in(found[0], 0)
            self._take(self._at + found.end())
            self._begin_call(found[1])
        return True

    def _begin_call(self, name: str) -> None:
        self._may_begin = False
        if name in self._schemas:
            self._begun, self._arguments, self._pieces = CallBegun(name, self._own_id()), _JsonValue(), []
            self._events.append(self._begun)

    def _end_call(self) -> bool:
        assert self._begun is not None
        call, self._begun, self._arguments = self._begun, None, None
        return self._add([Call(call.name, "".join(self._pieces), call.id)])

    def _own_id(self) -> str:
        """What the model calls the call, unless it has called another one so."""
        own = "" if self._id in self._ids else self._id
        self._ids.add(own)
        return own

    def _in_marks(self) -> bool:
        """Between two marks, but no JSON."""
        end = self._ends[self._mark]
        outside = self._ends_or_values[end]
        longest = self._at + LONGEST_CALL - self._n_written
        while found := (self._any_value if self._is_value else outside).search(self._text, self._at, longest):
            self._take(found.end())
            if found[0] == end and not self._is_value:
                calls = self._read("".join(self._written), self._schemas)
                return self._add(calls) if calls else self._is_no_call()
            self._is_value = not self._is_value
        if len(self._text) >= longest:
            self._take(longest)
            return self._is_no_call()
        self._take(len(self._text) - n_begun(self._text, (end, *self._value_marks), self._at))
        return False

    def _behind_call(self) -> bool:
        self._take_blanks()
        for end in self._behind:
            if self._is_at(end):
                self._at += len(end)
                self._blanks = []
                return True
        if n_begun(self._text, self._behind, self._at) == len(self._text) - self._at:
            return False
        if self._text[self._at] in ";,":
            self._blanks.append(self._text[self._at])
            self._at += 1
            return True
        self._step = self._in_words
        return self._open(_NO_MARK) if self._is_at("{") else True

    def _add(self, calls: list[Call]) -> bool:
        self._events += calls
        self._blanks, self._step, self._is_first = [], self._behind_call, False
        return True

    def _is_no_call(self) -> bool:
        self._say("".join(self._written))
        self._step, self._is_first = self._in_words, False
        return True

    def _say(self, text: str) -> None:
        said = text.rstrip()
        if said:
            self._events.append(Text("".join([*self._blanks, said])))
            self._blanks, self._is_first, self._has_said = [], False, True
        if len(said) < len(text):
            self._blanks.append(text[len(said) :])

    def _say_until(self, at: int) -> None:
        self._say(self._text[self._at : at])
        self._at = at

    def _take(self, at: int) -> None:
        self._written.append(self._text[self._at : at])
        self._n_written += at - self._at
        self._at = at

    def _take_blanks(self) -> None:
        found = _BLANKS.match(self._text, self._at)
        assert found is not None, "it matches nothing, too"
        if found[0] and (self._has_said or self._step != self._behind_call):
            self._blanks.append(found[0])
        self._at = found.end()

    def _is_at(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def _is_begun(self) -> bool:
        """Whether what is under way would have become a call."""
        begun = _BEGUN.match("".join(self._written))
        return bool(self._mark) or (begun is not None and any(name.startswith(begun[1]) for name in self._schemas))

    def _calls_of(self, value: Any) -> list[Call]:
        """The calls that a value of JSON means; [] if it is not all calls of tools."""
        if self._name:
            value = {"name": self._name, "arguments": value}
        calls = []
        for one in value if isinstance(value, list) else [value]:
            name = one.get("name") if isinstance(one, dict) else None
            arguments = one.get("arguments", one.get("parameters", {})) if isinstance(one, dict) else None
            if not isinstance(name, str) or name not in self._schemas or not isinstance(arguments, dict | str):
                return []
            written = arguments if isinstance(arguments, str) else json.dumps(arguments)
            calls.append(Call(name, written, self._own_id()))
        return calls


def _written(begin: str, end: str, arguments: str = "arguments") -> Written:
    """A call that is one object of JSON."""
    return Written(f'{begin}{{"name": "{NAME}", "{arguments}": ', "}" + end)


HERMES_CALLS = CallForm(written=_written("<tool_call>\n", "\n</tool_call>"))
CODER_CALLS = CallForm(
    written=Written(
        f"<tool_call>\n<function={NAME}>\n", "</function>\n</tool_call>", f"<parameter={KEY}>\n", "\n</parameter>\n"
    )
)
MISTRAL_CALLS = CallForm(written=Written(f"{_MISTRAL}{NAME}[ARGS]"))
MISTRAL_LISTS = CallForm(written=_written(f"{_MISTRAL}[", "]"))
LLAMA_CALLS = CallForm(written=_written("", "", "parameters"))


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


def written_call(name: str, arguments: str) -> str:
    """As most families write a call, JSON."""
    return json.dumps({"name": name, "arguments": parsed_arguments(arguments)})


def parsed_arguments(arguments: str) -> Any:
    """The object that they are, without any an empty one; the text itself if they are none."""
    found = _parsed(arguments) if arguments.strip() else {}
    return found if isinstance(found, dict) else arguments


def typed_arguments(given: Iterable[tuple[str, str]], schema: Any) -> dict[str, Any]:
    """The values that a tool's schema means by what was written for each argument."""
    kinds = schema.get("properties") if isinstance(schema, Mapping) else None
    known = kinds if isinstance(kinds, Mapping) else {}
    return {key: _typed(value, known.get(key)) for key, value in given}


def refused_constant(name: str) -> Any:
    """For NaN and Infinity, which are no JSON."""
    raise ValueError(f"{name} is no JSON")


def _typed(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=refused_constant)
    except (ValueError, RecursionError):
        return text


def mistral_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages of a chat as Mistral's templates want them: they refuse ids of calls that do not have nine letters and digits,
    such as another service has given.
    """
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = _short_id(made["tool_call_id"])
    if "tool_calls" in made:
        made["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in made["tool_calls"]]
    return made


def _short_id(given: Any) -> str:
    """The same one for the same id."""
    return (
        given if isinstance(given, str) and _SHORT_ID.fullmatch(given) else sha256(str(given).encode()).hexdigest()[:9]
    )
