"""/v1/chat/completions: the answer to a chat, which may be a call of a tool."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mdi.errors import CheckpointError, Code, UsageError
from mdi.serve.api_errors import ApiError, invalid
from mdi.serve.endpoint import EndpointJob
from mdi.serve.models import LoadedModel
from mdi.serve.request import (
    RequestFields,
    TextPiece,
    TopLogprobs,
    chat_logprobs,
    check_prompt,
    checked_text,
    common_fields,
    encoded,
    read_fields,
)
from mdi.text import harmony, marked
from mdi.text.calls import CallParser, Part, ToolCall
from mdi.text.templates import PLAIN_STOPS, ChatTemplate
from mdi.text.texts import TextStream

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_ID_LETTERS = string.ascii_letters + string.digits
# Beside these words, a schema's `properties` are not all that an object may have.
_JOINED = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "unevaluatedProperties")
_OF_NAMES = ("properties", "$defs", "definitions")  # words whose values hold schemas by name
_VALUES = ("const", "enum", "default", "examples")  # words whose values are no schemas

INSTRUCTIONS = """\
You can call these functions:
{tools}
To call one, answer with nothing but a JSON object: {{"name": <name>, "arguments": <object>}}"""


@dataclass(frozen=True)
class ToolUse:
    """Tools that a chat may call.

    Attributes:
        tools: as the request has them; () are none.
        forced: names of which one must be called; () leaves that to the model.
    """

    tools: tuple[dict[str, Any], ...] = ()
    forced: tuple[str, ...] = ()

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The form of an answer that is a call."""
        if not self.forced:
            return None
        functions = [tool["function"] for tool in self.tools if tool["function"]["name"] in self.forced]
        calls = []
        for number, function in enumerate(functions):
            place = "#/properties/arguments" if len(functions) == 1 else f"#/anyOf/{number}/properties/arguments"
            arguments = _closed({"type": "object", "properties": {}, **(function.get("parameters") or {})})
            properties = {"name": {"const": function["name"]}, "arguments": _moved(arguments, place)}
            required = ["name", "arguments"]
            calls.append(
                {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
            )
        return {"type": "schema", "schema": calls[0] if len(calls) == 1 else {"anyOf": calls}}

    @property
    def instructions(self) -> str:
        return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"]) for tool in self.tools))


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


def _closed(schema: Any) -> Any:
    """A schema whose objects have the keys of `properties` only, unless it says so: a weak model invents others for ever."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        word: {name: _closed(one) for name, one in value.items()}
        if word in _OF_NAMES and isinstance(value, dict)
        else _closed(value)
        if word in ("items", "prefixItems", "additionalProperties")
        else value
        for word, value in schema.items()
    }
    if isinstance(closed.get("properties"), dict) and not any(word in closed for word in _JOINED):
        closed.setdefault("additionalProperties", False)
    return closed


def _moved(schema: Any, place: str) -> Any:
    """A schema that now stands at this place of another one: its references mean the same parts of it as before."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        word: place + value[1:]
        if word == "$ref" and isinstance(value, str) and value.startswith("#")
        else {name: _moved(one, place) for name, one in value.items()}
        if word in _OF_NAMES and isinstance(value, dict)
        else value
        if word in _VALUES
        else _moved(value, place)
        for word, value in schema.items()
    }


ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 4096


@dataclass
class ChatAnswer:
    """One choice as it grows.

    Attributes:
        parser: finds the calls in its text; None if there are no tools.
        has_begun: whether it has any text yet.
        shown: the text that was shown.
        reasoning: what comes before it, of models that answer in channels.
    """

    parser: CallParser | None = None
    has_begun: bool = False
    shown: str = ""
    reasoning: str = ""
    reason: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


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


class Chat(EndpointJob):
    ID, OBJECT, CHUNK, continues = "chatcmpl", "chat.completion", "chat.completion.chunk", False

    def __init__(self, body: Any) -> None:
        fields = read_fields(ChatFields, body)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise invalid("top_logprobs", "it needs logprobs: true")
        common = common_fields(fields, None, (fields.top_logprobs or 0) if fields.logprobs else None)
        self.tools = parse_tools(fields.tools, fields.tool_choice)
        self.fields = replace(common, grammar=self.tools.grammar or common.grammar)
        self.n_texts = common.n
        self.messages = _messages(fields.messages)
        effort = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
        self.template_values = {**effort, **fields.chat_template_kwargs}
        self._is_reasoning = False  # the answer begins so; and it is a part of the content
        self._is_reasoning_said = False
        if fields.functions or fields.function_call not in (None, "none", "auto"):
            raise invalid("functions", "this old form is not supported: give tools and tool_choice")

    async def prompts(self, model: LoadedModel) -> list[list[int]]:
        messages, template = self.messages, self._template(model)
        in_words = None
        if not template.knows_tools and (self.tools.tools or any(one["role"] == "tool" for one in messages)):
            instructions = self.tools.instructions if self.tools.tools else ""
            in_words = _in_words(messages, instructions)
            messages = _with_instructions(messages, instructions) if instructions else messages
        tools: Sequence[Mapping[str, Any]] = self.tools.tools
        if in_channels := _answers_in_channels(template, model):
            messages, tools = harmony.template_messages(messages), harmony.template_tools(tools)
        values = self.template_values
        if template.is_marked and self.fields.grammar is not None:
            values = {"enable_thinking": False, **values}  # the form of an answer holds from its first token on
        text = await _rendered(template, messages, in_words, tools, values)
        if in_channels and self.fields.grammar is not None:
            text += harmony.FINAL
        self._is_reasoning = text.rstrip().endswith(marked.THINK)
        if self._is_reasoning and self.fields.grammar is not None:
            text += marked.END_OF_THINK
            self._is_reasoning = False
        self._is_reasoning_said = self._is_reasoning and not template.is_marked
        encode = model.codec.encode if template.is_plain else model.tokenizer.encode_rendered
        prompt = await encoded(model, text, encode, "messages")
        check_prompt(model, prompt, "messages")
        return [prompt]

    def _template(self, model: LoadedModel) -> ChatTemplate:
        return model.template.for_chat(has_tools=bool(self.tools.tools))

    def stops(self, model: LoadedModel) -> tuple[str, ...]:
        return PLAIN_STOPS if self._template(model).is_plain and self.fields.grammar is None else ()

    def stream(self, model: LoadedModel, stop: tuple[str, ...]) -> TextStream:
        template = self._template(model)
        if _answers_in_channels(template, model) and self.fields.grammar is None:
            return harmony.ChannelStream(model.codec, stop)
        if template.is_marked and self.fields.grammar is None:
            return marked.MarkedStream(model.codec, stop, self.tools.tools, self._is_reasoning)
        return super().stream(model, stop)

    def begin(self, model: LoadedModel, prompts: list[list[int]]) -> list[dict[str, Any]]:
        self._answers = [self.new_answer() for _ in range(self.fields.n)]
        return [_chunk(index, {"role": "assistant", "content": ""}) for index in range(self.fields.n)]

    def piece(self, model: LoadedModel, piece: TextPiece) -> dict[str, Any] | None:
        if piece.n_before is not None:
            self._answers[piece.index] = self.new_answer()
        answer = self._answers[piece.index]
        new = chat_logprobs(model.codec, piece) if self.fields.n_logprobs is not None else []
        answer.logprobs += new
        delta = self.delta(answer, piece, self._template(model).is_plain)
        return _chunk(piece.index, delta, new, answer.reason) if delta or new or piece.finish_reason else None

    def choices(self) -> list[dict[str, Any]]:
        with_logprobs = self.fields.n_logprobs is not None
        return [_choice(i, answer, with_logprobs) for i, answer in enumerate(self._answers)]

    def new_answer(self) -> ChatAnswer:
        return ChatAnswer(CallParser(self.tools.tools, self._is_reasoning_said) if self.tools.tools else None)

    def delta(self, answer: ChatAnswer, piece: TextPiece, is_plain: bool = False) -> dict[str, Any]:
        """The part of a piece that can be shown now."""
        # The plain template ends without a blank, which the model's own first token brings.
        text = piece.text.removeprefix(" ") if is_plain and not answer.has_begun else piece.text
        answer.has_begun = answer.has_begun or bool(text)
        is_cut = piece.finish_reason == "length"
        parts: list[Part] = [] if is_cut else [*map(self._of_stream, piece.calls)]  # or the last one was cut off
        if answer.parser is None:
            parts.append(text)
        else:
            parts += answer.parser.feed(text)
            if piece.finish_reason is not None:
                rest = answer.parser.end(is_cut)
                parts += [] if is_cut and self.tools.forced else rest
        new = [_call(one) for one in parts if isinstance(one, ToolCall)]
        content = "".join(one for one in parts if isinstance(one, str))
        delta: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if content:
            delta["content"] = content
        if new:
            first = len(answer.calls)
            delta["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(new)]
        answer.reasoning += piece.reasoning
        answer.shown += content
        answer.calls += new
        answer.reason = "tool_calls" if answer.calls and piece.finish_reason == "stop" else piece.finish_reason
        return delta

    def _of_stream(self, call: tuple[str, str]) -> Part:
        """A call that the stream has told from the text; one of no tool is text, as other families write it."""
        written = ToolCall(*call)
        is_known = any(tool["function"]["name"] == written.name for tool in self.tools.tools)
        return written if is_known else harmony.written_call(*written)


def _call(call: ToolCall) -> dict[str, Any]:
    """As OpenAI writes it, but with an id that Mistral's templates take back, too: nine letters and digits."""
    return {
        "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(9)), "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }  # fmt: skip


def _answers_in_channels(template: ChatTemplate, model: LoadedModel) -> bool:
    return template.is_in_channels and bool(model.codec.channel_marks)


def _chunk(
    index: int, delta: dict[str, Any], logprobs: Sequence[Any] = (), reason: str | None = None
) -> dict[str, Any]:
    shown = {"content": list(logprobs)} if logprobs else None
    return {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}


def _choice(index: int, answer: ChatAnswer, with_logprobs: bool) -> dict[str, Any]:
    content = None if answer.calls and not answer.shown else answer.shown
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = answer.calls
    logprobs = {"content": answer.logprobs, "refusal": None} if with_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.reason}


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages whose contents are texts, or None beside calls. Raises ApiError."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise invalid("messages", f"expected a list of 1 to {MOST_MESSAGES} messages")
    messages = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise invalid(where, f"expected an object with one of the roles {', '.join(ROLES)}")
        calls = message.get("tool_calls")
        # Clients send fields back that are empty; templates look whether one is there.
        kept = {key: value for key, value in message.items() if value is not None and (key != "tool_calls" or calls)}
        content = message.get("content")
        kept["content"] = None if content is None and calls else _content(where, content)
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise invalid(where, "tool_calls must be a list of objects")
        if not kept["content"] and not calls and message["role"] in ("user", "tool", "system", "developer"):
            kept["content"] = ""
        messages.append(kept)
    return messages


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


async def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], in_words: list[dict[str, Any]] | None, tools: Sequence[Any],
    values: Mapping[str, Any],
) -> str:  # fmt: skip
    """The chat in the model's template, in its other form if that refuses the first one. Raises ApiError."""
    try:
        return checked_text("messages", await template.render(messages, tools, values))
    except CheckpointError as e:
        raise ApiError(500, str(e), e.code) from None
    except UsageError as e:
        if e.code is Code.TEMPLATE and in_words is not None:
            return await _rendered(template, in_words, None, tools, values)
        if e.code is Code.REMOVED:
            raise ApiError(503, str(e), "engine_ended") from None
        code = {Code.LENGTH: "context_length_exceeded", Code.COSTLY: "chat_template"}.get(e.code)
        raise ApiError(400, f"messages: {e}", code, "messages") from None


def _with_instructions(messages: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """Describes the tools in words, for a model whose template has no place for them."""
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _in_words(messages: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """The chat as turns of user and assistant alone, for a template that knows no others: what the system says and the
    instructions stand before the first question, calls are written as the instructions say, and results are the user's."""
    before = [*(one["content"] for one in messages if one["role"] in ("system", "developer")), instructions]
    turns: list[dict[str, Any]] = [{"role": "user", "content": "\n\n".join(filter(None, before))}]
    for message in messages:
        if message["role"] in ("system", "developer"):
            continue
        calls = [call["function"] for call in message.get("tool_calls") or () if isinstance(call.get("function"), dict)]
        written = [harmony.written_call(str(one.get("name")), str(one.get("arguments") or "")) for one in calls]
        content = message["content"] or ""
        text = f"Result: {content}" if message["role"] == "tool" else "\n".join(filter(None, [content, *written]))
        role = "assistant" if message["role"] == "assistant" else "user"
        if turns[-1]["role"] == role:
            turns[-1]["content"] = "\n\n".join(filter(None, [turns[-1]["content"], text]))
        else:
            turns.append({"role": role, "content": text})
    return turns
