"""/v1/chat/completions: the answer to a chat, which may be a call of a tool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mdi.serve.api_errors import invalid
from mdi.serve.conversation import ChatRequest, Conversation, Effort, Turn, effort_values, messages_of, new_call_id
from mdi.serve.endpoint import Answers
from mdi.serve.openai import Choices, surface
from mdi.serve.parts import text_of
from mdi.serve.request import (
    RequestFields,
    TextPiece,
    TopLogprobs,
    chat_logprobs,
    checked_text,
    common_fields,
    read_fields,
)
from mdi.serve.tools import parse_tools
from mdi.text.answers.events import Call, CallBegun, CallPiece, Event, Reasoning

ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = {"text": "text", "refusal": "refusal"}  # the second is what the assistant said instead


class ChatFields(RequestFields, kw_only=True):
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] = {}


class Chat(ChatRequest):
    """A request, read from its body."""

    def __init__(self, body: Any) -> None:
        fields = read_fields(ChatFields, body)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise invalid("top_logprobs", "it needs logprobs: true")
        common = common_fields(fields, None, (fields.top_logprobs or 0) if fields.logprobs else None)
        tools = parse_tools(fields.tools, fields.tool_choice)
        self.fields = replace(common, grammar=tools.grammar or common.grammar)
        self.n_texts = common.n
        values = {**effort_values(fields.reasoning_effort), **fields.chat_template_kwargs}
        self.conversation = Conversation(_turns(fields.messages), tools, values)
        if fields.functions or fields.function_call not in (None, "none", "auto"):
            raise invalid("functions", "this old form is not supported: give tools and tool_choice")


def _turns(given: Any) -> list[Turn]:
    """Raises ApiError."""
    turns = []
    for where, role, message in messages_of(given, ROLES):
        # Clients send fields back that are empty; templates look whether one is there.
        others = {key: value for key, value in message.items() if value is not None}
        del others["role"]
        content, calls = others.pop("content", None), others.pop("tool_calls", [])
        reasoning = [others.pop(key, "") for key in ("reasoning_content", "reasoning")]
        text = None if content is None and calls else text_of(where, content, PARTS)
        if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise invalid(where, "tool_calls must be a list of objects")
        said = next((one for one in reasoning if isinstance(one, str) and one), "")
        turns.append(Turn(role, text, calls, checked_text(where, said), others))
    return turns


@dataclass
class _Message:
    """One choice as it grows."""

    content: str = ""
    reasoning: str = ""
    reason: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    is_calling: bool = False  # the last of them comes in pieces
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def told_of(self, event: Event) -> Iterator[dict[str, Any]]:
        """What a stream says of a call."""
        if isinstance(event, CallBegun) or (isinstance(event, Call) and not self.is_calling):
            function = {"name": event.name, "arguments": event.arguments if isinstance(event, Call) else ""}
            self.calls.append({"id": event.id or new_call_id(), "type": "function", "function": function})
            self.is_calling = isinstance(event, CallBegun)
            yield {"index": len(self.calls) - 1, **self.calls[-1]}
        elif isinstance(event, CallPiece):
            yield {"index": len(self.calls) - 1, "function": {"arguments": event.text}}
        elif isinstance(event, Call):
            self.is_calling = False


def _joined(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each call: not every client looks for a second one of the same call in a chunk."""
    found: list[dict[str, Any]] = []
    for one in told:
        if found and found[-1]["index"] == one["index"]:
            function = found[-1]["function"]
            found[-1]["function"] = {**function, "arguments": function["arguments"] + one["function"]["arguments"]}
        else:
            found.append(one)
    return found


class ChatChoices(Choices):
    ID, OBJECT, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Chat, answers: Answers) -> None:
        self._codec = answers.model.codec
        self._has_logprobs = asked.fields.n_logprobs is not None
        self._messages = [_Message() for _ in range(asked.n_texts)]

    def begin(self) -> list[dict[str, Any]]:
        return [_chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._messages))]

    def piece(self, piece: TextPiece) -> dict[str, Any] | None:
        if piece.n_before is not None:
            self._messages[piece.index] = _Message()
        message = self._messages[piece.index]
        delta: dict[str, Any] = {}
        if reasoning := "".join(one.text for one in piece.events if isinstance(one, Reasoning)):
            delta["reasoning_content"] = reasoning
        if content := piece.text:
            delta["content"] = content
        if told := [one for event in piece.events for one in message.told_of(event)]:
            delta["tool_calls"] = _joined(told)
        logprobs = chat_logprobs(self._codec, piece) if self._has_logprobs else []
        message.reasoning += reasoning
        message.content += content
        message.logprobs += logprobs
        reason = "tool_calls" if message.calls and piece.finish_reason == "stop" else piece.finish_reason
        message.reason = reason
        return _chunk(piece.index, delta, logprobs, reason) if delta or logprobs or reason else None

    def choices(self) -> list[dict[str, Any]]:
        return [self._choice(index, message) for index, message in enumerate(self._messages)]

    def _choice(self, index: int, made: _Message) -> dict[str, Any]:
        content = None if made.calls and not made.content else made.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if made.reasoning:
            message["reasoning_content"] = made.reasoning
        if made.calls:
            message["tool_calls"] = made.calls
        logprobs = {"content": made.logprobs, "refusal": None} if self._has_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": made.reason}


def _chunk(
    index: int, delta: dict[str, Any], logprobs: Sequence[Any] = (), reason: str | None = None
) -> dict[str, Any]:
    shown = {"content": list(logprobs)} if logprobs else None
    return {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}


CHATS = surface(Chat, ChatChoices)
