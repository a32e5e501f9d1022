"""/api/chat and /api/generate: Ollama's API, which has a port of its own (mdi.serve.ollama_port)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mdi.serve.api_errors import ApiError, checked_text, invalid
from mdi.serve.conversation import ChatRequest, Conversation, Turn, effort_values, messages_of, with_one_system
from mdi.serve.endpoint import Answers
from mdi.serve.models import LoadedModel
from mdi.serve.one_text import LINES, Growing, Said, Sent, surface
from mdi.serve.parts import LANGUAGE_ALONE, text_of, word_of
from mdi.serve.request import (
    Limit,
    Opened,
    SamplingFields,
    TextFields,
    check_prompt,
    check_spelling,
    encoded,
    grammar_of,
    one_text,
    read_fields,
)
from mdi.serve.tools import parse_tools
from mdi.text.answers.calls import parsed_arguments
from mdi.text.answers.events import Call, Reasoning, Text
from mdi.text.answers.forms import WORDS
from mdi.text.answers.stream import AnswerStream

LATEST = ":latest"
ROLES = ("system", "user", "assistant", "tool")
_NO_IMAGES = f"this server reads no images: {LANGUAGE_ALONE}"


class Options(SamplingFields, kw_only=True):
    seed: int | None = None
    stop: str | list[str] = []
    num_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] = -1  # below 1: as many as the context holds
    num_ctx: Limit | None = None  # the server has decided already
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None


class OllamaFields(TextFields, kw_only=True):
    stream: bool = True
    options: Options = msgspec.field(default_factory=Options)
    format: Literal["", "json"] | dict[str, Any] = ""
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str = ""


class ChatFields(OllamaFields, kw_only=True):
    messages: Any = None
    tools: Any = None


class GenerateFields(OllamaFields, kw_only=True):
    prompt: str = ""
    system: str = ""
    raw: bool = False


class _Asked(ChatRequest):
    """A request, read from its body. One that says nothing, in the field PARAM, has the model loaded."""

    PARAM = "messages"
    streams_calls = False  # arguments are objects

    def _read(self, kind: type[Any], body: Any) -> Any:
        """The fields, after those have been set that all requests have."""
        self.begin_s = time.monotonic()
        given = body.get("options") if isinstance(body, dict) else None
        if isinstance(given, dict):
            given = {name: value for name, value in given.items() if value is not None}
            body = {**body, "options": given}
        fields = read_fields(kind, body)
        check_spelling(Options, given or {})
        options, form, self.name = fields.options, fields.format, fields.model
        stated = {name: getattr(fields, name) for name in TextFields.__struct_fields__}
        stated |= {name: getattr(options, name) for name in given or {} if name in stated and hasattr(options, name)}
        stated["model"] = fields.model.removesuffix(LATEST)
        if options.repeat_penalty is not None:
            stated["repetition_penalty"] = options.repeat_penalty
        stated["seed"] = None if stated["seed"] == -1 else stated["seed"]
        stop = [options.stop] if isinstance(options.stop, str) else options.stop
        common = one_text(TextFields(**stated), max(options.num_predict, 0) or None, stop)
        wanted = "json_schema" if isinstance(form, dict) else "json_object" if form else "text"
        self.fields = replace(common, grammar=grammar_of("format", {"type": wanted}, form))
        self.values = effort_values(fields.think) if isinstance(fields.think, str) else {}
        if fields.think is not None:
            self.values["enable_thinking"] = bool(fields.think)
        self.says_nothing = not getattr(fields, self.PARAM)
        if self.says_nothing and str(fields.keep_alive).rstrip("smh") in ("0", "0.0"):
            raise ApiError(501, "this server unloads models by itself (--keep-alive)")
        return fields

    async def opened(self, model: LoadedModel) -> Opened:
        if self.says_nothing:
            return Opened([], partial(AnswerStream, model.codec, WORDS), is_prompt_alone=True)
        return await super().opened(model)

    def part(self, content: str, **others: Any) -> dict[str, Any]:
        """What an answer has of these words."""
        return {"message": {"role": "assistant", "content": content, **others}}


class OllamaChat(_Asked):
    def __init__(self, body: Any) -> None:
        fields = self._read(ChatFields, body)
        if not self.says_nothing:
            turns = with_one_system("messages", _turns(fields.messages))
            self.conversation = Conversation(turns, parse_tools(fields.tools, None), self.values)


class Generation(_Asked):
    PARAM = "prompt"

    def __init__(self, body: Any) -> None:
        fields = self._read(GenerateFields, body)
        if body.get("images"):
            raise invalid("images", _NO_IMAGES)
        for name in filter(body.get, ("suffix", "template", "context", *(["system"] if fields.raw else []))):
            raise invalid(name, "it is not supported" + (" with raw" if name == "system" else ""))
        self._prompt, system = checked_text("prompt", fields.prompt), checked_text("system", fields.system)
        self._is_raw = fields.raw
        turns = with_one_system("prompt", [Turn("user", self._prompt)], system)
        self.conversation = Conversation(turns, values=self.values, param="prompt")

    async def opened(self, model: LoadedModel) -> Opened:
        if not self._is_raw or self.says_nothing:
            return await super().opened(model)
        prompt = await encoded(model, self._prompt, model.codec.encode, "prompt")
        check_prompt(model, prompt, "prompt")
        stop = self.fields.stop
        return Opened([prompt], partial(AnswerStream, model.codec, WORDS, stop, continues=True), stop)

    def part(self, content: str, **others: Any) -> dict[str, Any]:
        return {"response": content, **others}


def _turns(given: Any) -> list[Turn]:
    """What `messages` say. Calls without an id get their number, so that the beginning of a chat stays the same text."""
    turns: list[Turn] = []
    waiting: dict[str, str] = {}  # names of functions by the ids of calls that have no result yet
    for number, (where, role, message) in enumerate(messages_of(given, ROLES, least=0)):
        if message.get("images"):
            raise invalid(where, _NO_IMAGES)
        calls, others, said = message.get("tool_calls") or [], dict[str, Any](), message.get("content")
        if not isinstance(calls, list):
            raise invalid(where, "tool_calls must be a list")
        made = [_call(where, one, f"{number:05}{index:04}") for index, one in enumerate(calls)]
        waiting |= {one["id"]: one["function"]["name"] for one in made}
        if role == "tool":
            name, own = message.get("tool_name"), message.get("tool_call_id")
            found = next((i for i in waiting if own == i or (own is None and name in (None, waiting[i]))), None)
            if found is not None:
                others = {"tool_call_id": found, "name": waiting.pop(found)}
        content = None if made and not said else text_of(where, said, {"text": "text"})
        thinking = word_of(where, message, "thinking") if message.get("thinking") else ""
        turns.append(Turn(role, content, made, thinking, others))
    return turns


def _call(where: str, given: Any, number: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        raise invalid(where, 'expected calls {"function": {"name": ..., "arguments": an object}}')
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    made = {"name": word_of(where, function, "name"), "arguments": checked_text(where, arguments)}
    return {"id": word_of(where, given, "id") if given.get("id") else number, "type": "function", "function": made}


class _Answer(Growing):
    def __init__(self, asked: _Asked, answers: Answers) -> None:
        super().__init__()
        self._asked, self._answers = asked, answers
        self._said: dict[Said, str] = {Text: "", Reasoning: ""}
        self._calls: list[dict[str, Any]] = []

    def sign(self) -> Sent:
        return self._line(self._asked.part(""))

    def more(self, kind: Said, text: str) -> Sent:
        self._said[kind] += text
        return self._line(self._asked.part("", thinking=text) if kind is Reasoning else self._asked.part(text))

    def called(self, call: Call) -> Iterator[Sent]:
        found = parsed_arguments(call.arguments)
        given = found if isinstance(found, dict) else {"arguments": found}  # the client will say what is wrong
        self._calls.append({"function": {"name": call.name, "arguments": given}})
        yield self._line(self._asked.part("", tool_calls=self._calls[-1:]))

    def end(self) -> Iterator[Sent]:
        yield self._line(self._asked.part(""), **self._ending())

    def failed(self, error: ApiError) -> Iterator[Sent]:
        yield error_of(error)

    def whole(self) -> Sent:
        others: dict[str, Any] = {"thinking": self._said[Reasoning], "tool_calls": self._calls}
        part = self._asked.part(self._said[Text], **{name: value for name, value in others.items() if value})
        return self._line(part, **self._ending())

    def _line(self, part: Sent, done: bool = False, **ending: Any) -> Sent:
        now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        return {
            "model": self._asked.name or self._answers.model.asked_name,
            "created_at": now,
            **part,
            "done": done,
            **ending,
        }

    def _ending(self) -> dict[str, Any]:
        begin_s, end_s, usage = self._asked.begin_s, time.monotonic(), self._answers.usage
        first_s, last_s = usage.first_s or end_s, usage.last_s or end_s
        seconds = {  # before its turn the request waited for its model
            "total_duration": end_s - begin_s, "load_duration": usage.begin_s - begin_s,
            "prompt_eval_duration": first_s - usage.begin_s, "eval_duration": last_s - first_s,
        }  # fmt: skip
        counts = {
            "prompt_eval_count": usage.n_prompt,
            "eval_count": usage.n_completion,
            "cached_tokens": usage.n_cached,
        }
        reason = "load" if self._asked.says_nothing else self.ending.reason if self.ending else "stop"
        return {"done": True, "done_reason": reason, **{name: int(s * 1e9) for name, s in seconds.items()}, **counts}


def error_of(error: ApiError) -> dict[str, Any]:
    return {"error": str(error)}


CHATS = surface(OllamaChat, _Answer, error_of, LINES)
GENERATIONS = surface(Generation, _Answer, error_of, LINES)
