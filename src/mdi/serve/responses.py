"""/v1/responses: OpenAI's Responses API. Nothing is kept: a request has all that was said before."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from mdi.serve.api_errors import ApiError, checked_text, invalid, tell_ignored
from mdi.serve.conversation import (
    MOST_MESSAGES,
    ChatRequest,
    Conversation,
    Effort,
    Turn,
    call_of,
    effort_values,
    new_call_id,
    with_one_system,
)
from mdi.serve.endpoint import Answers
from mdi.serve.one_text import Growing, Said, Sent, surface
from mdi.serve.openai import PACE
from mdi.serve.parts import text_of, word_of
from mdi.serve.request import Limit, TextFields, grammar_of, one_text, read_fields
from mdi.serve.seals import sealed, unsealed
from mdi.serve.tools import flat_choice, flat_tools
from mdi.text.answers.calls import parsed_arguments
from mdi.text.answers.events import Call, CallBegun, Reasoning, Text

ROLES = ("system", "developer", "user", "assistant")
PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
KEPT = ("previous_response_id", "conversation", "prompt", "background")  # fields that need what a server has kept
OWN_TOOLS = "/v1/responses", ("function",), "parameters"  # see functions_of
SEALED = "reasoning.encrypted_content"  # what `include` may ask for
NO_LOGPROBS: dict[Said, dict[str, Any]] = {Text: {"logprobs": []}, Reasoning: {}}


class TextOptions(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    effort: Effort | None = None


class ResponseFields(TextFields, kw_only=True):
    input: Any = None
    instructions: str = ""
    max_output_tokens: Limit | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    include: list[str] = []
    metadata: dict[str, Any] = {}
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None


class ResponseRequest(ChatRequest):
    """A request, read from its body.

    Attributes:
        given: its fields.
    """

    streams_too_long = True  # agents do not look for its code in the body of a 400

    def __init__(self, body: Any) -> None:
        self.given = fields = read_fields(ResponseFields, body)
        for name in KEPT:
            if getattr(fields, name):
                raise invalid(name, "this server keeps no responses: send the whole conversation as input")
        tools = flat_tools(fields.tools, flat_choice(fields.tool_choice, *OWN_TOOLS), *OWN_TOOLS)
        form = fields.text.format or {}
        grammar = tools.grammar or grammar_of("text.format", form, form.get("schema"))
        self.fields = replace(one_text(fields, fields.max_output_tokens), grammar=grammar)
        turns = with_one_system("input", _turns(fields.input), checked_text("instructions", fields.instructions))
        self.conversation = Conversation(turns, tools, effort_values(fields.reasoning.effort), "input")


def _turns(given: Any) -> list[Turn]:
    """What `input` says. Reasoning, words and calls that follow each other are one turn of the assistant. Raises ApiError."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not 0 < len(items) <= MOST_MESSAGES:
        raise invalid("input", f"expected a text, or a list of 1 to {MOST_MESSAGES} items")
    turns: list[Turn] = []
    others = set()
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise invalid(where, "expected an object")
        kind = item.get("type") or "message"
        last = turns[-1] if turns and turns[-1].role == "assistant" else None
        if kind == "message":
            role = item.get("role")
            if role not in ROLES:
                raise invalid(where, f"expected one of the roles {', '.join(ROLES)}")
            text = text_of(where, item.get("content"), PARTS)
            if role == "assistant" and last is not None and last.content is None and not last.calls:
                turns[-1] = replace(last, content=text)
            else:
                turns.append(Turn(role, text))
        elif kind == "reasoning":
            turns.append(Turn("assistant", None, reasoning=_reasoning(where, item)))
        elif kind == "function_call":
            name, arguments, call_id = (word_of(where, item, key) for key in ("name", "arguments", "call_id"))
            call = call_of(call_id, name, arguments)
            if last is None:
                turns.append(Turn("assistant", None, [call]))
            else:
                turns[-1] = replace(last, calls=[*last.calls, call])
        elif kind == "function_call_output":
            result = text_of(where, item.get("output"), PARTS)
            turns.append(Turn("tool", result, others={"tool_call_id": word_of(where, item, "call_id")}))
        elif kind == "item_reference":
            raise invalid(where, "this server keeps no items: send the item itself")
        else:
            others.add(str(kind))
    if others:
        tell_ignored("items of /v1/responses", others)
    return [replace(turn, content="") if turn.content is None and not turn.calls else turn for turn in turns]


def _reasoning(where: str, item: Mapping[str, Any]) -> str:
    """Of an item: what was sealed here, or else its words."""
    if item.get("encrypted_content") is not None:
        return unsealed(where, item["encrypted_content"])
    said = text_of(where, item.get("content"), {"reasoning_text": "text", "text": "text"})
    return said or text_of(where, item.get("summary"), {"summary_text": "text"}, "\n\n")


class _Response(Growing):
    def __init__(self, asked: ResponseRequest, answers: Answers) -> None:
        super().__init__()
        self._given, self._answers = asked.given, answers
        self._has_seals = SEALED in asked.given.include
        self._fixed = {"id": _id("resp"), "object": "response", "created_at": int(time.time())}
        self._n_sent = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}  # the item that is under way

    def begin(self) -> Iterator[Sent]:
        yield self._sent("created", response=self._told("in_progress"))
        yield self.sign()

    def sign(self) -> Sent:
        return self._sent("in_progress", response=self._told("in_progress"))

    def opened(self, kind: Said) -> Iterator[Sent]:
        fixed = {"type": "reasoning", "summary": []} if kind is Reasoning else {"type": "message", "role": "assistant"}
        self._open = {"id": _id("rs" if kind is Reasoning else "msg"), **fixed}
        yield self._added({**self._open, "status": "in_progress", "content": []})
        yield self._of_open("content_part.added", content_index=0, part=_part(kind, ""))

    def more(self, kind: Said, text: str) -> Sent:
        return self._of_open(f"{_part(kind, '')['type']}.delta", content_index=0, delta=text, **NO_LOGPROBS[kind])

    def closed(self, kind: Said, text: str) -> Iterator[Sent]:
        part = _part(kind, text)
        yield self._of_open(f"{part['type']}.done", content_index=0, text=text, **NO_LOGPROBS[kind])
        yield self._of_open("content_part.done", content_index=0, part=part)
        seal = {"encrypted_content": sealed(text)} if kind is Reasoning and self._has_seals else {}
        is_cut = self.ending is not None and self.ending.reason == "length"
        yield self._done({**self._open, "status": "incomplete" if is_cut else "completed", "content": [part], **seal})

    def calling(self, call: CallBegun) -> Iterator[Sent]:
        self._open = {"id": _id("fc"), "type": "function_call", "call_id": call.id or new_call_id(), "name": call.name}
        yield self._added({**self._open, "status": "in_progress", "arguments": ""})

    def arguing(self, piece: str) -> Iterator[Sent]:
        yield self._of_open("function_call_arguments.delta", delta=piece)

    def called(self, call: Call) -> Iterator[Sent]:
        yield self._of_open("function_call_arguments.done", name=call.name, arguments=call.arguments)
        is_whole = isinstance(parsed_arguments(call.arguments), dict)
        yield self._done(
            {**self._open, "status": "completed" if is_whole else "incomplete", "arguments": call.arguments}
        )

    def end(self) -> Iterator[Sent]:
        whole = self.whole()
        yield self._sent(whole["status"], response=whole)

    def failed(self, error: ApiError) -> Iterator[Sent]:
        told = {"code": error.body["error"]["code"] or "server_error", "message": str(error)}
        yield self._sent("failed", response=self._told("failed", error=told))

    def whole(self) -> dict[str, Any]:
        usage = self._answers.usage
        counts = {
            "input_tokens": usage.n_prompt, "input_tokens_details": {"cached_tokens": usage.n_cached},
            "output_tokens": usage.n_completion, "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
            "total_tokens": usage.n_prompt + usage.n_completion, PACE: usage.pace,
        }  # fmt: skip
        if self.ending is not None and self.ending.reason == "length":
            return self._told("incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=counts)
        return self._told("completed", usage=counts)

    def _told(self, status: str, **others: Any) -> dict[str, Any]:
        given = self._given
        asked = {
            "instructions": given.instructions or None, "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata, "parallel_tool_calls": given.parallel_tool_calls, "temperature": given.temperature,
            "tool_choice": given.tool_choice or "auto", "tools": given.tools or [], "top_p": given.top_p,
        }  # fmt: skip
        nothing = {"error": None, "incomplete_details": None, "previous_response_id": None, "usage": None}
        made = {"status": status, "model": self._answers.model.asked_name, "output": list(self._items), "store": False}
        return {**self._fixed, **made, **asked, **nothing, **others}

    def _sent(self, kind: str, **data: Any) -> Sent:
        self._n_sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._n_sent - 1, **data}

    def _of_open(self, kind: str, **data: Any) -> Sent:
        return self._sent(kind, item_id=self._open["id"], output_index=len(self._items), **data)

    def _added(self, item: dict[str, Any]) -> Sent:
        return self._sent("output_item.added", output_index=len(self._items), item=item)

    def _done(self, item: dict[str, Any]) -> Sent:
        self._items.append(item)
        return self._sent("output_item.done", output_index=len(self._items) - 1, item=item)


def _part(kind: Said, text: str) -> dict[str, Any]:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


RESPONSES = surface(ResponseRequest, _Response, lambda error: error.body)
