"""/v1/chat/completions: the answer to a chat, which may be a call of a tool."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mdi.serve.api_errors import invalid
from mdi.serve.conversation import Conversation, ToolUse, Turn
from mdi.serve.endpoint import Answers
from mdi.serve.models import LoadedModel
from mdi.serve.openai import Choices, surface
from mdi.serve.request import (
    Opened,
    RequestFields,
    TextPiece,
    TopLogprobs,
    chat_logprobs,
    checked_text,
    common_fields,
    read_fields,
)
from mdi.text.answers.events import Call, Reasoning

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_ID_LETTERS = string.ascii_letters + string.digits
ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 4096


class ChatFields(RequestFields, kw_only=True):
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] = {}


class Chat:
    """A request, read from its body."""

    def __init__(self, body: Any) -> None:
        fields = read_fields(ChatFields, body)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise invalid("top_logprobs", "it needs logprobs: true")
        common = common_fields(fields, None, (fields.top_logprobs or 0) if fields.logprobs else None)
        tools = parse_tools(fields.tools, fields.tool_choice)
        self.fields = replace(common, grammar=tools.grammar or common.grammar)
        self.n_texts = common.n
        effort = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
        turns = _turns(fields.messages)
        self.conversation = Conversation(turns, tools, {**effort, **fields.chat_template_kwargs})
        if fields.functions or fields.function_call not in (None, "none", "auto"):
            raise invalid("functions", "this old form is not supported: give tools and tool_choice")

    async def opened(self, model: LoadedModel) -> Opened:
        return await self.conversation.opened(model, self.fields)


def parse_tools(given: Any, choice: Any) -> ToolUse:
    """The fields `tools` and `tool_choice`. Raises ApiError."""
    if given is None:
        given = []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise invalid("tools", f"expected a list of at most {MOST_TOOLS}")
    names = []
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise invalid("tools", 'expected objects {"type": "function", "function": {...}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid("tools", "a function's name has 1 to 64 letters, digits, dots, dashes and underscores")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid("tools", f"the parameters of {name} are no JSON schema")
        names.append(name)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed_tools(given, names, choice.get("allowed_tools"))
    if choice in (None, "auto"):
        return ToolUse(tuple(given))
    if choice == "none":
        return ToolUse()
    if choice == "required" and names:
        return ToolUse(tuple(given), tuple(names))
    function = choice.get("function") if isinstance(choice, dict) else None
    wanted = function.get("name") if isinstance(function, dict) else None
    if wanted in names:
        return ToolUse(tuple(given), (str(wanted),))
    raise invalid("tool_choice", "expected none, auto, required, or one of the tools")


def _allowed_tools(tools: list[dict[str, Any]], names: list[str], allowed: Any) -> ToolUse:
    """Of a `tool_choice` {"type": "allowed_tools", "allowed_tools": {"mode": auto or required, "tools": some of the tools}}."""
    mode, given = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    functions = [one.get("function") for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    wanted = [function.get("name") for function in functions if isinstance(function, dict)]
    if mode not in ("auto", "required") or not wanted or any(name not in names for name in wanted):
        raise invalid("tool_choice", "allowed_tools needs a mode, auto or required, and some of the tools")
    kept = [tool for tool in tools if tool["function"]["name"] in wanted]
    return parse_tools(kept, mode)


def _turns(given: Any) -> list[Turn]:
    """Raises ApiError."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise invalid("messages", f"expected a list of 1 to {MOST_MESSAGES} messages")
    turns = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise invalid(where, f"expected an object with one of the roles {', '.join(ROLES)}")
        # Clients send fields back that are empty; templates look whether one is there.
        others = {key: value for key, value in message.items() if value is not None}
        role, content, calls = others.pop("role"), others.pop("content", None), others.pop("tool_calls", [])
        reasoning = [others.pop(key, "") for key in ("reasoning_content", "reasoning")]
        text = None if content is None and calls else _content(where, content)
        if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise invalid(where, "tool_calls must be a list of objects")
        said = next((one for one in reasoning if isinstance(one, str) and one), "")
        turns.append(Turn(role, text, calls, checked_text(where, said), others))
    return turns


def _content(where: str, given: Any) -> str:
    """A text, or parts that are texts."""
    if given is None:
        return ""
    if isinstance(given, str):
        return checked_text(where, given)
    if not isinstance(given, list):
        raise invalid(where, "the content must be a text, or a list of parts")
    parts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):  # what the assistant said instead
            raise invalid(where, "this server reads parts of type text and refusal only")
        parts.append(checked_text(where, part[kind]))
    return "".join(parts)


@dataclass
class _Message:
    """One choice as it grows."""

    content: str = ""
    reasoning: str = ""
    reason: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


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
        if calls := [_call(one) for one in piece.events if isinstance(one, Call)]:
            delta["tool_calls"] = [{"index": len(message.calls) + i, **call} for i, call in enumerate(calls)]
        logprobs = chat_logprobs(self._codec, piece) if self._has_logprobs else []
        message.reasoning += reasoning
        message.content += content
        message.calls += calls
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


def _call(call: Call) -> dict[str, Any]:
    """As OpenAI writes it, but with an id that Mistral's templates take back, too: nine letters and digits."""
    return {
        "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(9)), "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }  # fmt: skip


def _chunk(
    index: int, delta: dict[str, Any], logprobs: Sequence[Any] = (), reason: str | None = None
) -> dict[str, Any]:
    shown = {"content": list(logprobs)} if logprobs else None
    return {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}


CHATS = surface(Chat, ChatChoices)
