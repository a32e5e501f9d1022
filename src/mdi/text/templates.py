"""Chats as one text, by the model's own template or a plain one.

A model's template is foreign code, so another process with limits renders it (`mdi.text.limited`): a server answers all
requests in one process, which must not stop for a template that computes for ever. Each template has a process of its own, from
its first chat on. A process that did not answer is replaced.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mdi.checkpoint.folder import CHAT_TEMPLATE
from mdi.errors import CheckpointError, Code, UsageError
from mdi.files import module_environment
from mdi.spec.settings_file import TEXT_LIMIT_BYTES, parse_json, read_limited
from mdi.text import limited
from mdi.text.answers.calls import parsed_arguments
from mdi.text.limited import Renderer

FIRST_ANSWER_S = 60.0  # the process must begin before, which takes long on a busy board
ANSWER_S = 15.0  # the process's own limit is shorter, but counts only while it computes
ANSWER_LIMIT_BYTES = 8 * limited.RENDERED_LIMIT


class LimitedError(Exception):
    """The request needs too much time or memory; the process has ended, or can be asked no more."""


class LimitedProcess:
    """One process. Belongs to one event loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._source = source
        self._sink = sink
        self._answer_s = FIRST_ANSWER_S

    @classmethod
    async def start(cls) -> LimitedProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            source, sink = await asyncio.open_connection(sock=ours)
            try:
                command = [sys.executable, "-m", limited.__name__]
                ends = theirs.fileno()
                # Ctrl-C on a terminal is meant for this process, with which the other one ends.
                process = subprocess.Popen(
                    command, stdin=ends, stdout=ends, env=module_environment(), start_new_session=True
                )
            except BaseException:
                sink.close()
                raise
        return cls(process, source, sink)

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Raises LimitedError. If it is cancelled, the process can be asked no more."""
        try:
            answer = await asyncio.wait_for(self._exchange(limited.packed(message)), self._answer_s)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):  # noqa: UP041 - another class before Python 3.11
            raise LimitedError from None
        self._answer_s = ANSWER_S
        return answer

    async def _exchange(self, data: bytes) -> dict[str, Any]:
        self._sink.write(data)
        await self._sink.drain()
        (n_bytes,) = limited.LENGTH.unpack(await self._source.readexactly(limited.LENGTH.size))
        if n_bytes > ANSWER_LIMIT_BYTES:
            raise OSError("no answer of this program is so long")
        answer: dict[str, Any] = json.loads(await self._source.readexactly(n_bytes))
        return answer

    def kill(self) -> None:
        """The event loop does not end before the process has ended."""
        self._process.kill()
        self._sink.close()
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)


CONFIG = "tokenizer_config.json"
TEMPLATE_LIMIT = 1 << 18  # characters of a template

PLAIN = """\
{%- for message in messages %}
{%- if message['role'] == 'system' or message['role'] == 'developer' %}{{ message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n' }}
{%- elif message['role'] == 'tool' %}{{ 'Result: ' + message['content'] + '\\n' }}
{%- else %}{{ 'Assistant: ' + (message['content'] or '') + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
PLAIN_STOPS = ("\nUser:",)  # where the plain template's next turn would begin


_ASKS_FOR_NULL = re.compile(r"\bcontent\b['\"\]]*\s+is\s+(not\s+)?none\b")
_SHORT_IDS = re.compile(r"\blength\s*!=\s*9\b")  # in Mistral's templates, which refuse other ids of calls


class ChatTemplate:
    """Belongs to one event loop.

    Args:
        with_tools: the model's other template, for chats that have tools; None: it has one for all chats.

    Attributes:
        source: None: the model has no template of its own.
        knows_tools: whether it writes the tools into the text itself.
    """

    def __init__(self, source: str | None, specials: Mapping[str, str], with_tools: ChatTemplate | None = None) -> None:
        self._with_tools = with_tools
        self.source = source
        self.knows_tools = source is not None and "tools" in source
        self._knows_developers = source is None or "developer" in source
        self._knows_null = source is not None and _ASKS_FOR_NULL.search(source) is not None
        self._wants_short_ids = source is not None and _SHORT_IDS.search(source) is not None
        self._plain = Renderer(PLAIN, specials) if source is None else None
        self._template = {"template": source, "specials": dict(specials)}
        self._process: LimitedProcess | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._asking: asyncio.Future[dict[str, Any]] | None = None  # goes on when nobody waits for it any more

    def for_chat(self, has_tools: bool) -> ChatTemplate:
        """The template that writes a chat: of two, the one for tools only if the chat has some, as in transformers."""
        return self._with_tools if has_tools and self._with_tools is not None else self

    async def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], extra: Mapping[str, Any]
    ) -> str:
        """The text that the model continues.

        Args:
            messages: a content may be None in a message with calls.

        Raises:
            UsageError: the template refuses the messages ("template"), needs too much time or memory ("costly"), writes too
                much ("length"), or has been closed ("removed").
            CheckpointError: it cannot be read.
        """
        values = {**extra, "tools": list(tools) or None, "add_generation_prompt": True}
        given = list(messages) if self._knows_developers else [_by_system(message) for message in messages]
        if not self._knows_null:  # others would write "None"
            given = [{**message, "content": ""} if message.get("content") is None else message for message in given]
        if self._wants_short_ids:
            given = [_with_short_ids(message) for message in given]
        found = with_objects(given)
        answer = await self._written({**values, "messages": found})
        if answer.get("code") == limited.REFUSED and found != given:
            answer = await self._written({**values, "messages": given})
        if "text" in answer:
            return str(answer["text"])
        reason = answer["error"]
        if answer["code"] == limited.UNREADABLE:
            raise CheckpointError(f"the model's chat template cannot be read: {reason}")
        if answer["code"] == limited.TOO_LONG:
            raise UsageError(f"the chat is too long: {reason}", code=Code.LENGTH)
        raise UsageError(f"the model's chat template refuses the chat: {reason}", code=Code.TEMPLATE)

    async def _written(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return await self._rendered(values) if self._plain is None else self._plain.render(values)

    def close(self) -> None:
        """End the process; no chat can be rendered any more."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        if self._with_tools is not None:
            self._with_tools.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the model has been unloaded", code=Code.REMOVED)

    async def _rendered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Who gives up while the process is at the chat does not end it: others would wait for a new one."""
        await self._turn.acquire()
        self._asking = asyncio.ensure_future(self._asked(values))
        self._asking.add_done_callback(self._is_asked)
        return await asyncio.shield(self._asking)

    def _is_asked(self, asking: asyncio.Future[dict[str, Any]]) -> None:
        self._turn.release()
        if not asking.cancelled():
            asking.exception()  # or asyncio complains of one that nobody waits for any more

    async def _asked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        self._check_open()
        is_usable = False  # until it has answered: one that has ended, or is still at this chat, gets no other one
        try:
            if self._process is None:
                self._process = await LimitedProcess.start()
                self._check_open()
                answer = await self._process.ask(self._template)
                if "error" in answer:
                    return answer
            answer = await self._process.ask({"values": values})
            is_usable = True
            return answer
        except LimitedError:
            self._check_open()  # `close` ends the process, too
            raise UsageError(
                f"the model's chat template needs more than {limited.COMPUTING_S:g} s of computing or "
                f"{limited.MEMORY_BYTES >> 20} MB of memory for the chat", code=Code.COSTLY,
            ) from None  # fmt: skip
        finally:
            if self._process is not None and not is_usable:
                self._process.kill()
                self._process = None


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat with the arguments of calls as objects, as templates take them; in requests they are JSON."""

    def with_object(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
            return call
        return {**call, "function": {**function, "arguments": parsed_arguments(function["arguments"])}}

    return [
        {**m, "tool_calls": [with_object(c) for c in m["tool_calls"]]} if m.get("tool_calls") else dict(m)
        for m in messages
    ]


def _by_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A developer's message as the system's, as it was called before: a template that does not know the role leaves it out."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose ids of calls have nine letters and digits; the same id becomes the same in a call and its result."""
    found = dict(message)
    if isinstance(found.get("tool_call_id"), str):
        found["tool_call_id"] = _short_id(found["tool_call_id"])
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call
            for call in found["tool_calls"]
        ]
    return found


def _short_id(given: str) -> str:
    if len(given) == 9 and given.isascii() and given.isalnum():
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


class TemplateStyle:
    """A model's own template in the place of a prompt style, for code without an event loop. Close it."""

    class_name = "the model's own"
    knows_conversations = is_complete = True

    def __init__(self, template: ChatTemplate) -> None:
        self._template, self.source = template, template.source
        self._loop: asyncio.AbstractEventLoop | None = None

    def apply(self, prompt: str | Sequence[Mapping[str, str]]) -> str:
        """The text for a question, or for messages. Raises UsageError, CheckpointError: see ChatTemplate.render."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(self._template.render(messages, (), {}))
        except (UsageError, CheckpointError) as e:
            raise type(e)(f"{e} (--prompt-style none leaves the template out)", code=e.code) from None

    def stop_tokens(self, tokenizer: Any) -> list[list[int]]:
        """None but those that end every text of the model."""
        return []

    def close(self) -> None:
        """End the process of the template; harmless if repeated."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run_until_complete(self._end())
            loop.close()

    async def _end(self) -> None:
        self._template.close()
        await asyncio.get_running_loop().shutdown_default_executor()


def read_template(directory: Path) -> ChatTemplate:
    """The template of a checkpoint's folder. Raises CheckpointError if it cannot be read."""
    config: dict[str, Any] = {}
    if (path := directory / CONFIG).is_file():
        try:
            read = parse_json(read_limited(path, TEXT_LIMIT_BYTES))
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path} cannot be read: {e}") from None
        config = read if isinstance(read, dict) else {}
    own = _own_source(directory)
    source, tool_source = (own, None) if own else _sources_in(config.get("chat_template"))
    if any(len(one) > TEMPLATE_LIMIT for one in (source, tool_source) if one is not None):
        raise CheckpointError(f"the chat template in {directory} has more than {TEMPLATE_LIMIT} characters")
    specials = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        specials[name] = value if isinstance(value, str) else ""
    return ChatTemplate(source, specials, None if tool_source is None else ChatTemplate(tool_source, specials))


def _own_source(directory: Path) -> str | None:
    path = directory / CHAT_TEMPLATE
    if not path.is_file():
        return None
    try:
        return read_limited(path, 4 * TEMPLATE_LIMIT).decode()
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None


def _sources_in(value: Any) -> tuple[str | None, str | None]:
    """The template, and that of chats with tools if it is another one."""
    listed = value if isinstance(value, list) else [{"name": "default", "template": value}]
    named = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
    default, for_tools = (
        found if isinstance(found := named.get(name), str) and found else None for name in ("default", "tool_use")
    )
    return (for_tools, None) if default is None else (default, for_tools)
