"""Answers in channels, as gpt-oss writes them in OpenAI's harmony format: reasoning, calls of tools, and what the user reads.

An answer is a sequence of messages, `<|channel|>NAME to=RECIPIENT <|constrain|>TYPE<|message|>TEXT<|end|><|start|>assistant`
and so on; `<|return|>` ends it, and so does `<|call|>` behind the arguments of a call. The marks are special tokens, which a
model writes as such.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mdi.text.answers.calls import CallForm, written_call
from mdi.text.answers.events import Call, CallBegun, CallPiece, Event, Mark, Reasoning, Text, Tools
from mdi.text.answers.written import NAME, Written

ENDS = ("<|return|>", "<|call|>")
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", *ENDS)
FINAL = "<|channel|>final<|message|>"  # where a prompt goes on with what the user reads, without reasoning
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BETWEEN = "\n\n"  # messages of one kind
HARMONY_CALLS = CallForm(written=Written(f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>"))


class Channels:
    """Args:
    tools: those that may be called; a call of another one is text. None: any.
    streams_calls: whether arguments come in pieces.
    """

    def __init__(self, tools: Tools | None, streams_calls: bool = False) -> None:
        self._streams_calls = streams_calls
        self._names = None if tools is None else {tool["function"]["name"] for tool in tools}
        self._header: str | None = ""  # None within a message; the prompt ends where the first one's begins
        self._kind: type[Text | Reasoning | Call] = Text  # of the message that was begun last
        self._begun: set[type] = set()
        self._name, self._arguments = "", [""]

    def feed(self, text: str) -> list[Event]:
        if not isinstance(text, Mark):
            if self._header is None:
                return self._say(text)
            self._header += text
            return []
        if text == "<|message|>" and self._header is not None:
            return self._open(self._header)
        found = self._end()
        is_header = text in ("<|channel|>", "<|constrain|>")
        self._header = f"{self._header or ''}{text}" if is_header else ""  # else a message ends or begins
        return found

    def close(self, is_cut: bool) -> list[Event]:
        if self._header and not self._begun and "<|" not in self._header:  # a model that does not write in channels
            return [Text(self._header)]
        return [] if is_cut and self._kind is Call and not self._is_streamed else self._end()

    def _open(self, header: str) -> list[Event]:
        """Begin the message that a header announces; returns what stands before its text."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._header, self._kind, self._arguments = None, Text, []
        if recipient is not None and recipient[1].startswith("functions."):
            self._kind, self._name = Call, recipient[1].removeprefix("functions.")
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._kind = Reasoning
        is_first = self._kind not in self._begun
        self._begun.add(self._kind)
        if self._is_streamed:
            return [CallBegun(self._name)]
        return [] if is_first or self._kind is Call else self._say(_BETWEEN)

    @property
    def _is_streamed(self) -> bool:
        """Whether the message that was begun last is a call that comes in pieces."""
        return self._streams_calls and self._kind is Call and (self._names is None or self._name in self._names)

    def _end(self) -> list[Event]:
        """End the message that is under way, if one is."""
        if self._header is not None:
            return []
        self._header = ""
        if self._kind is not Call:
            return []
        call = Call(self._name, "".join(self._arguments))
        is_known = self._names is None or call.name in self._names
        return [call if is_known else Text(written_call(call.name, call.arguments))]

    def _say(self, text: str) -> list[Event]:
        if self._kind is Call:
            self._arguments.append(text)
            return [CallPiece(text)] if self._is_streamed else []
        return [Text(text) if self._kind is Text else Reasoning(text)]


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat as the models' template wants them: reasoning as `thinking`, and one call in a message."""
    found = []
    for message in _one_call_each(messages):
        made = dict(message)
        reasoning, _ = made.pop("reasoning", None), made.pop("reasoning_content", None)  # the same under both names
        is_whole = not (made.get("tool_calls") and made["content"])
        if made["role"] == "assistant" and isinstance(reasoning, str) and is_whole:
            made["thinking"] = reasoning
        found.append(made)
    return found


def _one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages with several calls in parts, each before the results of its call: the template writes the first call alone."""
    found: list[Mapping[str, Any]] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        n_results = next((i for i, one in enumerate(rest) if one["role"] != "tool"), len(rest))
        results, rest = rest[:n_results], rest[n_results:]
        for number, call in enumerate(calls):
            found.append(
                {**(message if number == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]}
            )
            own = [one for one in results if one.get("tool_call_id") == call.get("id")]
            is_last = number == len(calls) - 1
            found += results if is_last else own
            results = [one for one in results if one not in own]
    return found


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as the template wants them: it writes the description of each, also where there is none."""
    return [
        {**tool, "function": {**tool["function"], "description": tool["function"].get("description") or ""}}
        for tool in tools
    ]
