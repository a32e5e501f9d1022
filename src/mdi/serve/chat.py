"""/v1/chat/completions: the answer to a chat, which may be a call of a tool."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mdi.serve import sse
from mdi.serve.api_errors import invalid
from mdi.serve.api_state import ApiState
from mdi.serve.asgi_exchange import Exchange
from mdi.serve.endpoint import EndpointJob
from mdi.serve.logprobs import chat_logprobs
from mdi.serve.models import LoadedModel
from mdi.serve.parameters import MOST_TOP_LOGPROBS, RequestFields, checked_text, common_fields
from mdi.serve.request_texts import TextPiece, Usage, check_prompt, encoded, write_texts
from mdi.serve.templates import PLAIN_STOPS
from mdi.serve.tools import parse_tools

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 4096


@dataclass
class ChatAnswer:
    """One choice as it grows.

    Attributes:
        held: text that may become a call, and is not shown yet.
        shown: the text that was shown.
    """

    held: str = ""
    shown: str = ""
    reason: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Chat(EndpointJob):
    def __init__(self, body: Any) -> None:
        fields = RequestFields(body)
        n_top = fields.integer("top_logprobs", None, 0, MOST_TOP_LOGPROBS)
        wants = fields.flag("logprobs")
        if n_top is not None and not wants:
            raise invalid("top_logprobs", "it needs logprobs: true")
        common = common_fields(fields, None, (n_top or 0) if wants else None)
        self.tools = parse_tools(fields.raw("tools"), fields.raw("tool_choice"))
        self.fields = replace(common, grammar=self.tools.grammar or common.grammar)
        self.n_texts = common.n
        self.messages = _messages(fields.raw("messages"))
        self.template_values = fields.mapping("chat_template_kwargs")
        if fields.raw("functions") or fields.raw("function_call") not in (None, "none", "auto"):
            raise invalid("functions", "this old form is not supported: give tools and tool_choice")
        fields.check_spelling()

    async def run(self, api: ApiState, model: LoadedModel, exchange: Exchange) -> None:
        fields, key = self.fields, exchange.key
        prompt = await self._prompt(model)
        check_prompt(model, prompt, "messages")
        usage = Usage(len(prompt))
        made = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.name}
        answers = [ChatAnswer() for _ in range(fields.n)]
        stop = PLAIN_STOPS if model.template.is_plain and fields.grammar is None else ()
        chunk = {**made, "object": "chat.completion.chunk"}
        if fields.is_streamed:
            for index in range(fields.n):
                await exchange.push(sse.event(_chunk(chunk, index, {"role": "assistant", "content": ""})))
        async for piece in write_texts(api, model, key, [prompt], fields, continues=False, stop=stop):
            usage.count(piece, fields.n)
            answer = answers[piece.index]
            new = chat_logprobs(model.codec, piece) if fields.n_logprobs is not None else []
            answer.logprobs += new
            delta = self.delta(answer, piece, model.template.is_plain)
            if fields.is_streamed and (delta or new or piece.finish_reason):
                await exchange.push(sse.event(_chunk(chunk, piece.index, delta, new, answer.reason)))
        if fields.is_streamed:
            if fields.with_usage:
                await exchange.push(sse.event({**chunk, "choices": [], "usage": usage.to_json()}))
            await exchange.end()
            return
        choices = [_choice(i, answer, fields.n_logprobs is not None) for i, answer in enumerate(answers)]
        await exchange.answer({**made, "object": "chat.completion", "choices": choices, "usage": usage.to_json()})

    async def _prompt(self, model: LoadedModel) -> list[int]:
        messages = self.messages
        if self.tools.tools and not model.template.knows_tools:
            messages = _with_instructions(messages, self.tools.instructions)
        text = await model.template.render(messages, self.tools.tools, self.template_values)
        encode = model.codec.encode if model.template.is_plain else model.tokenizer.encode_rendered
        return await encoded(model, text, encode, "messages")

    def delta(self, answer: ChatAnswer, piece: TextPiece, is_plain: bool = False) -> dict[str, Any]:
        """The part of a piece that can be shown now."""
        is_over = piece.finish_reason is not None
        # The plain template ends without a blank, which the model's own first token brings.
        answer.held += piece.text if answer.shown or answer.held or not is_plain else piece.text.removeprefix(" ")
        answer.reason = piece.finish_reason
        if not answer.shown and self.tools.may_be_call(answer.held):
            if not is_over:
                return {}
            answer.calls = self.tools.calls_in(answer.held)
            if answer.calls:
                answer.held = ""
                answer.reason = "tool_calls" if piece.finish_reason == "stop" else piece.finish_reason
                return {"tool_calls": [{"index": i, **call} for i, call in enumerate(answer.calls)]}
            if piece.finish_reason == "length" and self.tools.is_cut_call(answer.held):
                answer.held = ""
                return {}
        text, answer.held = answer.held, ""
        answer.shown += text
        return {"content": text} if text else {}


def _chunk(
    base: dict[str, Any], index: int, delta: dict[str, Any], logprobs: Sequence[Any] = (), reason: str | None = None
) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": {"content": list(logprobs)} if logprobs else None}
    return {**base, "choices": [{**choice, "finish_reason": reason}]}


def _choice(index: int, answer: ChatAnswer, with_logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None if answer.calls else answer.shown, "refusal": None}
    if answer.calls:
        message["tool_calls"] = answer.calls
    logprobs = {"content": answer.logprobs, "refusal": None} if with_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.reason}


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages whose contents are texts. Raises ApiError."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise invalid("messages", f"expected a list of 1 to {MOST_MESSAGES} messages")
    messages = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise invalid(where, f"expected an object with one of the roles {', '.join(ROLES)}")
        kept = {**message, "content": _content(where, message.get("content"))}
        calls = message.get("tool_calls")
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
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(where, "this server reads parts of type text only")
        parts.append(checked_text(where, part["text"]))
    return "".join(parts)


def _with_instructions(messages: list[dict[str, Any]], instructions: str) -> list[dict[str, Any]]:
    """Describes the tools in words, for a model whose template has no place for them."""
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
