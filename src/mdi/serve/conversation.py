"""A chat as one internal request, by whatever API it came: what was said, the tools, and how the model is to answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mdi.errors import CheckpointError, Code, UsageError
from mdi.serve.api_errors import ApiError
from mdi.serve.models import LoadedModel
from mdi.serve.request import CommonFields, Opened, check_prompt, checked_text, encoded
from mdi.text.answers.calls import written_call
from mdi.text.answers.forms import WORDS, Form, form_of
from mdi.text.answers.stream import AnswerStream
from mdi.text.answers.think import END_OF_THINK, THINK
from mdi.text.templates import PLAIN_STOPS, ChatTemplate

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


@dataclass(frozen=True)
class Turn:
    """What one side said.

    Attributes:
        content: None beside calls if nothing was said.
        calls: {"id": ..., "function": {"name": ..., "arguments": JSON}}, as templates take them.
        others: further fields for the template, such as the `tool_call_id` of a result.
    """

    role: str
    content: str | None = ""
    calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any]:
        """For a template, which may ask whether a field is there."""
        made = {"role": self.role, "content": self.content, **self.others}
        if self.role == "assistant" and self.reasoning:  # templates have either name for it
            made |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        return made | ({"tool_calls": list(self.calls)} if self.calls else {})


@dataclass(frozen=True)
class Conversation:
    """Waits for an answer.

    Attributes:
        values: further ones for the template, such as `enable_thinking`.
    """

    turns: Sequence[Turn]
    tools: ToolUse = ToolUse()
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [turn.message for turn in self.turns]

    async def opened(self, model: LoadedModel, fields: CommonFields) -> Opened:
        """Raises ApiError: the template refuses it, or the model cannot continue it."""
        tools = self.tools.tools
        template = model.template.for_chat(has_tools=bool(tools))
        form = form_of(template.source, model.codec.special_marks.values())
        has_grammar = fields.grammar is not None  # the form of such an answer holds from its first token on
        text = await self._text(template, form, has_grammar)
        begins_in_reasoning = form.thinks and text.rstrip().endswith(THINK)
        if has_grammar:
            text += END_OF_THINK if begins_in_reasoning else form.quiet
        encode = model.codec.encode if form.is_plain else model.tokenizer.encode_rendered
        prompt = await encoded(model, text, encode, "messages")
        check_prompt(model, prompt, "messages")
        stop = (*fields.stop, *(PLAIN_STOPS if form.is_plain and not has_grammar else ()))
        answer = partial(
            AnswerStream, model.codec, WORDS if has_grammar else form, stop, tools, begins_in_reasoning,
            bool(self.tools.forced),
        )  # fmt: skip
        return Opened([prompt], answer, stop)

    async def _text(self, template: ChatTemplate, form: Form, has_grammar: bool) -> str:
        messages, in_words = self.messages, None
        if not template.knows_tools and (self.tools.tools or any(turn.role == "tool" for turn in self.turns)):
            instructions = self.tools.instructions if self.tools.tools else ""
            in_words = _in_words(messages, instructions)
            messages = _with_instructions(messages, instructions) if instructions else messages
        values = {"enable_thinking": False, **self.values} if form.thinks and has_grammar else self.values
        return await _rendered(template, form.messages(messages), in_words, form.tools(self.tools.tools), values)


async def _rendered(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], in_words: list[dict[str, Any]] | None, tools: Sequence[Any],
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
        written = [written_call(str(one.get("name")), str(one.get("arguments") or "")) for one in calls]
        content = message["content"] or ""
        text = f"Result: {content}" if message["role"] == "tool" else "\n".join(filter(None, [content, *written]))
        role = "assistant" if message["role"] == "assistant" else "user"
        if turns[-1]["role"] == role:
            turns[-1]["content"] = "\n\n".join(filter(None, [turns[-1]["content"], text]))
        else:
            turns.append({"role": role, "content": text})
    return turns


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
