"""Answers in channels, as gpt-oss writes them in OpenAI's harmony format: reasoning, calls of tools, and what the user reads.

An answer is a sequence of messages, `<|channel|>NAME to=RECIPIENT <|constrain|>TYPE<|message|>TEXT<|end|><|start|>assistant`
and so on; `<|return|>` ends it, and so does `<|call|>` behind the arguments of a call. The marks are special tokens, which a
model writes as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mdi.text.templates import parsed_arguments
from mdi.text.texts import Detokenizer, TextCodec, TextStream

FINAL = "<|channel|>final<|message|>"  # where a prompt goes on with what the user reads, without reasoning
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TEXT, _REASONING, _CALL = "text", "reasoning", "call"
_BETWEEN = "\n\n"  # messages of one kind
_SHOWN_REASONING = re.compile(r"<think>.*?(</think>\s*|$)", re.DOTALL)


class ChannelStream(TextStream):
    """The text of one answer for the user, from ids as they come; all else is had from `others`.

    Args:
        codec: has `channel_marks`.
        stop: strings that end the user's text and are removed from it; in other channels they mean nothing.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str]) -> None:
        super().__init__(codec, stop, continues=False)
        self._codec = codec
        self._header: str | None = ""  # None within a message; the prompt ends where the first one's begins
        self._body = Detokenizer(codec)
        self._kind = ""  # of the message that was begun last
        self._begun: set[str] = set()
        self._reasoning = ""
        self._name, self._arguments = "", ""
        self._calls: list[tuple[str, str]] = []

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for i in ids:
            if self.is_stopped:
                break
            mark = self._codec.channel_marks.get(i)
            if mark is None and self._header is None:
                text += self._say(self._body.push([i]))
            elif mark is None:
                self._header = f"{self._header}{self._codec.decode([i], continues=True)}"
            elif mark == "<|message|>" and self._header is not None:
                text += self._open(self._header)
            elif mark in ("<|channel|>", "<|constrain|>"):
                text += self._close()
                self._header = f"{self._header or ''}{mark}"
            else:  # a message ends or begins
                text += self._close()
                self._header = ""
        return text

    def flush(self) -> str:
        text = ""
        if self._header and not self._begun and "<|" not in self._header:  # a model that does not write in channels
            text, self._kind = self._match(self._header), _TEXT
        text += self._close()
        return text if self.is_stopped else text + self._matcher.flush()

    def others(self) -> tuple[str, list[tuple[str, str]]]:
        reasoning, self._reasoning = self._reasoning, ""
        calls, self._calls = self._calls, []
        return reasoning, calls

    def _open(self, header: str) -> str:
        """Begin the message that a header announces; returns what stands before its text."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._header, self._body, self._arguments = None, Detokenizer(self._codec), ""
        self._kind = _TEXT
        if recipient is not None and recipient[1].startswith("functions."):
            self._kind, self._name = _CALL, recipient[1].removeprefix("functions.")
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._kind = _REASONING
        is_first = self._kind not in self._begun
        self._begun.add(self._kind)
        return "" if is_first or self._kind == _CALL else self._say(_BETWEEN)

    def _close(self) -> str:
        """End the message that is under way, if one is."""
        if self._header is not None:
            return ""
        text = self._say(self._body.flush())
        if self._kind == _CALL:
            self._calls.append((self._name, self._arguments))
        self._header = ""
        return text

    def _say(self, text: str) -> str:
        if self._kind == _TEXT:
            return self._match(text)
        if self._kind == _CALL:
            self._arguments += text
        else:
            self._reasoning += text
        return ""


class InlineStream(ChannelStream):
    """All of an answer as one text, in which reasoning and calls stand between the marks that other families write."""

    def __init__(self, codec: TextCodec, stop: Sequence[str]) -> None:
        super().__init__(codec, stop)
        self._is_open = False

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self._joined(super(InlineStream, self).push([i])) for i in ids)

    def flush(self) -> str:
        text = self._joined(super().flush())
        return text + self._end_of_reasoning()

    def _joined(self, text: str) -> str:
        reasoning, calls = self.others()
        before = ""
        if reasoning:
            before, self._is_open = ("" if self._is_open else "<think>") + reasoning, True
        if text or calls:
            before += self._end_of_reasoning()
        return before + text + "".join(f"<tool_call>{written_call(*call)}</tool_call>" for call in calls)

    def _end_of_reasoning(self) -> str:
        was_open, self._is_open = self._is_open, False
        return f"</think>{_BETWEEN}" if was_open else ""


def written_call(name: str, arguments: str) -> str:
    """As other families write a call, JSON."""
    return json.dumps({"name": name, "arguments": parsed_arguments(arguments)})


def without_reasoning(text: str) -> str:
    """The part of its own answer that the model is shown, see `InlineStream`."""
    return _SHOWN_REASONING.sub("", text)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat as the models' template wants them: reasoning as `thinking`, and one call in a message."""
    found = []
    for message in _one_call_each(messages):
        made = dict(message)
        reasoning = made.pop("reasoning_content", None) or made.pop("reasoning", None)
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
