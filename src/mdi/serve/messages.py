"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mdi.serve.api_errors import TYPES, ApiError, invalid, tell_ignored
from mdi.serve.conversation import (
    ChatRequest,
    Conversation,
    Turn,
    call_of,
    effort_values,
    messages_of,
    new_call_id,
    with_one_system,
)
from mdi.serve.endpoint import Answers, Exchange, Surface
from mdi.serve.one_text import Growing, Said, Sent, surface
from mdi.serve.openai import PACE
from mdi.serve.parts import LANGUAGE_ALONE, SEEN, parts_of, text_of, word_of
from mdi.serve.request import LONGEST_STOP, MOST_STOPS, Limit, TextFields, grammar_of, one_text, read_fields
from mdi.serve.seals import signature_of, signed
from mdi.serve.tools import flat_tools
from mdi.text.answers.calls import parsed_arguments
from mdi.text.answers.events import Call, CallBegun, Reasoning

ROLES = ("user", "assistant", "system")
TEXTS = {"text": "text"}
OF_USERS = ("image", "document", "search_result", "container_upload")  # blocks that say what cannot be left out
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # types of a tool_choice as chats have them
OWN_TOOLS = "/v1/messages", (None, "custom"), "input_schema"  # see functions_of
BILLING = "x-anthropic-billing-header:"  # begins a block that is another one in each request: no prefix would be kept
OWN_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class MessageFields(TextFields, kw_only=True):
    messages: Any = None
    system: Any = None
    max_tokens: Limit | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MOST_STOPS)] = []
    tools: Any = None
    tool_choice: Any = None
    thinking: dict[str, Any] = {}
    output_config: OutputConfig = OutputConfig()


class MessageRequest(ChatRequest):
    """A request, read from its body.

    Args:
        is_counted: nothing is to be answered.
    """

    def __init__(self, body: Any, is_counted: bool = False) -> None:
        fields = read_fields(MessageFields, body)
        if fields.max_tokens is None and not is_counted:
            raise invalid("max_tokens", "the field is required")
        tools = flat_tools(fields.tools, _choice(fields.tool_choice), *OWN_TOOLS)
        form = fields.output_config.format or {}
        grammar = tools.grammar or grammar_of("output_config.format", form, form.get("schema"))
        self.fields = replace(one_text(fields, fields.max_tokens, fields.stop_sequences), grammar=grammar)
        turns = with_one_system("messages", _turns(fields.messages), _system(fields.system))
        thinks = fields.thinking.get("type", "disabled") != "disabled" and grammar is None
        values = {"enable_thinking": thinks, **effort_values(fields.output_config.effort)}
        self.conversation = Conversation(turns, tools, values)


def _choice(given: Any) -> Any:
    """A `tool_choice` as chats have it."""
    kind = given.get("type") if isinstance(given, dict) else given
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    if kind is not None and kind not in (*CHOICES,):
        raise invalid("tool_choice", f"expected an object with the type tool, {', '.join(CHOICES)}")
    return kind and CHOICES[kind]


def _system(given: Any) -> str:
    first = given[0] if isinstance(given, list) and given and isinstance(given[0], dict) else {}
    is_left_out = isinstance(first.get("text"), str) and first["text"].startswith(BILLING)
    return text_of("system", given[1:] if is_left_out else given, TEXTS, "\n\n")


def _turns(given: Any) -> list[Turn]:
    """What `messages` say. Words of the user that follow each other are one turn. Raises ApiError."""
    turns: list[Turn] = []
    words: list[str] = []  # of the user
    others: set[str] = set()

    def end_words() -> None:
        if words:
            turns.append(Turn("user", "\n\n".join(words)))
            words.clear()

    for where, role, message in messages_of(given, ROLES):
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        said: list[str] = words if role == "user" else []
        calls, thoughts = list[dict[str, Any]](), list[str]()
        for block in blocks:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "text":
                said.append(word_of(where, block, "text"))
            elif kind == "thinking" and role == "assistant":
                thoughts.append(signed(where, word_of(where, block, "thinking"), block.get("signature")))
            elif kind == "tool_use" and role == "assistant":
                calls.append(_call(where, block))
            elif kind == "tool_result" and role == "user":
                end_words()
                result = text_of(where, parts_of(block.get("content"), (*TEXTS, *OF_USERS), others), TEXTS, "\n\n")
                turns.append(Turn("tool", result, others={"tool_call_id": word_of(where, block, "tool_use_id")}))
            elif not isinstance(kind, str) or kind in OF_USERS or kind in ("thinking", "tool_use", "tool_result"):
                why = f": {LANGUAGE_ALONE}" if kind in SEEN else ""
                raise invalid(where, f"this server reads no {str(kind)[:40]} in a message of the {role}{why}")
            else:
                others.add(kind)
        if role == "assistant":
            end_words()
            turns.append(Turn(role, "".join(said) or (None if calls else ""), calls, "\n\n".join(thoughts)))
        elif role == "system":
            turns.append(Turn(role, "\n\n".join(said)))
    end_words()
    if others:
        tell_ignored("blocks of /v1/messages", others)
    return turns


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        raise invalid(where, "the input of a tool_use must be an object")
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return call_of(word_of(where, block, "id"), word_of(where, block, "name"), arguments)


class _Message(Growing):
    def __init__(self, asked: MessageRequest, answers: Answers) -> None:
        super().__init__()
        self._asked, self._answers = asked, answers
        named = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        self._fixed = {**named, "model": answers.model.asked_name}
        self._blocks: list[dict[str, Any]] = []
        self._call: dict[str, Any] = {}  # that is under way

    def begin(self) -> Iterator[Sent]:
        yield {"type": "message_start", "message": {**self.whole(), "stop_reason": None}}

    def sign(self) -> Sent:
        return {"type": "ping"}

    def opened(self, kind: Said) -> Iterator[Sent]:
        empty = {"thinking": "", "signature": ""} if kind is Reasoning else {"text": ""}
        yield self._sent("start", content_block={"type": next(iter(empty)), **empty})

    def more(self, kind: Said, text: str) -> Sent:
        name = "thinking" if kind is Reasoning else "text"
        return self._sent("delta", delta={"type": f"{name}_delta", name: text})

    def closed(self, kind: Said, text: str) -> Iterator[Sent]:
        block = {"type": "text", "text": text}
        if kind is Reasoning:
            block = {"type": "thinking", "thinking": text, "signature": signature_of(text)}
            yield self._sent("delta", delta={"type": "signature_delta", "signature": block["signature"]})
        yield self._stopped(block)

    def calling(self, call: CallBegun) -> Iterator[Sent]:
        self._call = {"type": "tool_use", "id": call.id or new_call_id(), "name": call.name, "input": {}}
        yield self._sent("start", content_block=self._call)

    def arguing(self, piece: str) -> Iterator[Sent]:
        yield self._sent("delta", delta={"type": "input_json_delta", "partial_json": piece})

    def called(self, call: Call) -> Iterator[Sent]:
        yield self._stopped({**self._call, "input": self._input(call)})

    def arguments_of(self, call: Call) -> str:
        return json.dumps(self._input(call))

    def _input(self, call: Call) -> dict[str, Any]:
        found = parsed_arguments(call.arguments)
        return found if isinstance(found, dict) else {"arguments": found}  # the client will say what is wrong

    def end(self) -> Iterator[Sent]:
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Iterator[Sent]:
        yield error_of(error)

    def whole(self) -> dict[str, Any]:
        return {**self._fixed, "content": self._blocks, **self._ending(), "usage": self._usage()}

    def _ending(self) -> dict[str, Any]:
        reason, stop = self.ending or ("stop", "")
        fields = self._asked.fields
        own = stop if stop in fields.stop else None
        if reason == "length":
            is_full = self._answers.usage.n_completion < (fields.n_tokens or 0)
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        else:
            reason = "end_turn" if own is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": own if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        usage = self._answers.usage
        cached = {"cache_read_input_tokens": usage.n_cached, "cache_creation_input_tokens": 0}
        counts = {"input_tokens": usage.n_prompt - usage.n_cached, "output_tokens": usage.n_completion}
        return {**counts, **cached, PACE: usage.pace}

    def _sent(self, what: str, **data: Any) -> Sent:
        return {"type": f"content_block_{what}", "index": len(self._blocks), **data}

    def _stopped(self, block: dict[str, Any]) -> Sent:
        sent = self._sent("stop")
        self._blocks.append(block)
        return sent


def error_of(error: ApiError) -> dict[str, Any]:
    kind = OWN_TYPES.get(error.status) or TYPES.get(error.status, "api_error")
    message = f"prompt is too long: {error}" if error.is_too_long else str(error)  # words that agents look for
    return {"type": "error", "error": {"type": kind, "message": message}}


async def _count(asked: MessageRequest, answers: Answers, exchange: Exchange) -> None:
    await exchange.answer({"input_tokens": answers.usage.n_prompt})


MESSAGES = surface(MessageRequest, _Message, error_of)
TOKEN_COUNTS = Surface(partial(MessageRequest, is_counted=True), _count, error_of)
