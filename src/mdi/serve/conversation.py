"""A chat as one internal request, by whatever API it came: what was said, the tools, and how the model is to answer."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from mdi.errors import CheckpointError, Code, UsageError
from mdi.serve.api_errors import TOO_LONG, ApiError, invalid
from mdi.serve.models import LoadedModel
from mdi.serve.request import CommonFields, Opened, check_characters, check_prompt, checked_text, encoded
from mdi.serve.tools import ToolUse
from mdi.text.answers.calls import parsed_arguments
from mdi.text.answers.forms import WORDS, Form
from mdi.text.answers.stream import AnswerStream
from mdi.text.templates import PLAIN_STOPS, ChatTemplate

MOST_MESSAGES = 4096
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_ID_LETTERS = string.ascii_letters + string.digits


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


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a turn; the arguments are JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def messages_of(given: Any, roles: Sequence[str], least: int = 1) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The field `messages`: for each, where it stands, its role and itself. Raises ApiError."""
    if not isinstance(given, list) or not least <= len(given) <= MOST_MESSAGES:
        raise invalid("messages", f"expected a list of {least} to {MOST_MESSAGES} messages")
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role: Any = message.get("role") if isinstance(message, dict) else None
        if role not in roles:
            raise invalid(where, f"expected an object with one of the roles {', '.join(roles)}")
        yield where, role, message


@dataclass(frozen=True)
class Conversation:
    """Waits for an answer.

    Attributes:
        values: further ones for the template, such as `enable_thinking`.
        param: the field of the request that has the turns.
    """

    turns: Sequence[Turn]
    tools: ToolUse = ToolUse()
    values: Mapping[str, Any] = field(default_factory=dict)
    param: str = "messages"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [turn.message for turn in self.turns]

    async def opened(self, model: LoadedModel, fields: CommonFields, streams_calls: bool = False) -> Opened:
        """Raises ApiError: the template refuses it, or the model cannot continue it.

        Args:
            streams_calls: whether arguments of calls come in pieces.
        """
        # before anything looks through them; templates leave out what the assistant has said, and blanks at the ends
        given = (turn.content for turn in self.turns if turn.role != "assistant" and turn.content)
        check_characters(model, sum(len(content.strip()) for content in given), self.param)
        tools = self.tools.tools
        described = (tool["function"].get("description") or "" for tool in tools)  # few templates write whole schemas
        check_characters(model, sum(len(one.strip()) for one in described), "tools")
        template = model.template.for_chat(has_tools=bool(tools))
        form = model.form_of(template)
        has_grammar = fields.grammar is not None  # the form of such an answer holds from its first token on
        lark = form.demanded(self.tools.demanded, model.codec.special_ids) if self.tools.forced else None
        quotes = model.codec.quotes
        try:
            messages, said_tools, cut = quotes.quoted(self.messages, tools)
        except UsageError as e:
            raise invalid(self.param, str(e)) from None
        instructions = quotes.marked(self.tools.instructions, cut) if tools else ""
        text = await self._text(messages, said_tools, instructions, template, form, has_grammar)
        begins_in_reasoning = form.begins_in_reasoning(text)
        if has_grammar:
            text += form.thinks[1] if form.thinks is not None and begins_in_reasoning else "" if lark else form.quiet
        encode = partial(_encoded_in_parts, model, cut, form.is_plain)
        prompt = await encoded(model, text, encode, self.param)
        check_prompt(model, prompt, self.param)
        stop = (*fields.stop, *(PLAIN_STOPS if form.is_plain and not has_grammar else ()))
        answer = partial(
            AnswerStream, model.codec, WORDS if has_grammar and not lark else form, stop, tools,
            begins_in_reasoning and not has_grammar, bool(self.tools.forced), streams_calls=streams_calls,
        )  # fmt: skip
        return Opened([prompt], answer, stop, grammar=None if lark is None else {"type": "lark", "lark": lark})

    async def _text(
        self, messages: list[dict[str, Any]], tools: Sequence[Any], instructions: str, template: ChatTemplate, form: Form,
        has_grammar: bool,
    ) -> str:  # fmt: skip
        """Args:
        messages, tools, instructions: as they are quoted; the last describe the tools in words, if there are any.
        """
        in_words = None
        if not template.knows_tools and (tools or any(turn.role == "tool" for turn in self.turns)):
            in_words = _in_words(messages, instructions)
            messages = _with_instructions(messages, instructions) if instructions else messages
        values = {"enable_thinking": False, **self.values} if form.thinks and has_grammar else self.values
        return await self._rendered(template, form.messages(messages), in_words, form.tools(tools), values)

    async def _rendered(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], in_words: list[dict[str, Any]] | None,
        tools: Sequence[Any], values: Mapping[str, Any],
    ) -> str:  # fmt: skip
        """The chat in the model's template, in its other form if that refuses the first one. Raises ApiError."""
        try:
            return checked_text(self.param, await template.render(messages, tools, values))
        except CheckpointError as e:
            raise ApiError(500, str(e), e.code) from None
        except UsageError as e:
            if e.code is Code.TEMPLATE and in_words is not None:
                return await self._rendered(template, in_words, None, tools, values)
            if e.code is Code.REMOVED:
                raise ApiError(503, str(e), "engine_ended") from None
            code = {Code.LENGTH: TOO_LONG, Code.COSTLY: "chat_template"}.get(e.code)
            raise ApiError(400, f"{self.param}: {e}", code, self.param) from None


def _encoded_in_parts(model: LoadedModel, cut: str, is_plain: bool, text: str) -> list[int]:
    """Ids of a text, in which no special token goes over a `cut`."""
    first, *others = text.split(cut) if cut else [text]
    ids = list(model.codec.encode(first) if is_plain else model.tokenizer.encode_rendered(first))
    for part in others:
        ids += model.tokenizer.encode_rendered(part, is_within=True)
    return ids


class ChatRequest:
    """A request for the answer to a conversation.

    Attributes:
        streams_calls: whether a stream of its API has arguments of calls in pieces.
        streams_too_long: whether a stream tells by itself that a prompt is too long, where else an error has its own status.
    """

    streams_calls = True
    streams_too_long = False
    fields: CommonFields
    conversation: Conversation
    n_texts = 1

    async def opened(self, model: LoadedModel) -> Opened:
        """Raises ApiError: the template refuses it, or the model cannot continue it."""
        is_streamed = self.fields.is_streamed
        try:
            return await self.conversation.opened(model, self.fields, self.streams_calls and is_streamed)
        except ApiError as e:
            if not (self.streams_too_long and is_streamed and e.is_too_long):
                raise
            return Opened((), partial(AnswerStream, model.codec, WORDS), failure=e)


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
        written = [
            json.dumps(
                {"name": str(one.get("name")), "arguments": parsed_arguments(str(one.get("arguments") or ""))},
                ensure_ascii=False,
            )
            for one in calls
        ]
        content = message["content"] or ""
        text = f"Result: {content}" if message["role"] == "tool" else "\n".join(filter(None, [content, *written]))
        role = "assistant" if message["role"] == "assistant" else "user"
        if turns[-1]["role"] == role:
            turns[-1]["content"] = "\n\n".join(filter(None, [turns[-1]["content"], text]))
        else:
            turns.append({"role": role, "content": text})
    return turns


def new_call_id() -> str:
    """Of a call that the model gives none; one that Mistral's templates accept, too: nine letters and digits."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def effort_values(effort: str | None) -> dict[str, Any]:
    """Values for the template that say how much is to be thought."""
    return {} if effort is None else {"reasoning_effort": effort}


def with_one_system(param: str, turns: Sequence[Turn], before: str = "") -> list[Turn]:
    """Turns with all that system and developers say as the first one, `before` at its beginning: many templates refuse it
    elsewhere. Raises ApiError if there are too many, or none.
    """
    said = [turn.content for turn in turns if turn.role in ("system", "developer")]
    system = "\n\n".join(filter(None, [before, *said]))
    found = [turn for turn in turns if turn.role not in ("system", "developer")]
    if not 0 < len(found) + bool(system) <= MOST_MESSAGES:
        raise invalid(param, f"expected 1 to {MOST_MESSAGES} messages")
    return [Turn("system", system), *found] if system else found
