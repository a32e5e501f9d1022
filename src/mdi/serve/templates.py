"""Turns a chat into one text, by the model's own template or a plain one.

A model's template is rendered in another process (`mdi.serve.limited`): this one answers all requests, and must not stop for
a template that computes for ever. Each template has a process of its own, from its first chat on. A process that did not answer
is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mdi.checkpoint.folder import CHAT_TEMPLATE
from mdi.errors import CheckpointError
from mdi.serve import limited
from mdi.serve.api_errors import ApiError
from mdi.serve.limited import Renderer
from mdi.serve.limited_process import LimitedError, LimitedProcess
from mdi.serve.parameters import checked_text
from mdi.spec.settings_file import TEXT_LIMIT_BYTES, parse_json, read_limited

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


class ChatTemplate:
    """Belongs to one event loop.

    Attributes:
        is_plain: whether the model has no template of its own.
        knows_tools: whether it writes the tools into the text itself.
    """

    def __init__(self, source: str | None, specials: Mapping[str, str]) -> None:
        self.is_plain = source is None
        self.knows_tools = source is not None and "tools" in source
        self._plain = Renderer(PLAIN, specials) if source is None else None
        self._template = {"template": source, "specials": dict(specials)}
        self._process: LimitedProcess | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()

    async def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], extra: Mapping[str, Any]
    ) -> str:
        """The text that the model continues. ApiError if the template refuses the messages, or does not come to an end."""
        values = {**extra, "messages": list(messages), "tools": list(tools) or None, "add_generation_prompt": True}
        answer = await self._rendered(values) if self._plain is None else self._plain.render(values)
        if "text" in answer:
            return checked_text("messages", answer["text"])
        reason = answer["error"]
        if answer["code"] == limited.UNREADABLE:
            raise ApiError(500, f"the model's chat template cannot be read: {reason}", CheckpointError.code)
        if answer["code"] == limited.TOO_LONG:
            raise ApiError(400, f"messages: the chat is too long: {reason}", "context_length_exceeded", "messages")
        raise ApiError(400, f"messages: the model's chat template refuses them: {reason}", param="messages")

    def close(self) -> None:
        """End the process; no chat can be rendered any more."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApiError(503, "the model has been unloaded", "engine_ended")

    async def _rendered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        async with self._turn:
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
                raise ApiError(
                    400, f"messages: the model's chat template needs more than {limited.COMPUTING_S:g} s of computing or "
                    f"{limited.MEMORY_BYTES >> 20} MB of memory for them", "chat_template", "messages",
                ) from None  # fmt: skip
            finally:
                if self._process is not None and not is_usable:
                    self._process.kill()
                    self._process = None


def read_template(directory: Path) -> ChatTemplate:
    """The template of a checkpoint's folder. Raises CheckpointError if it cannot be read."""
    config: dict[str, Any] = {}
    if (path := directory / CONFIG).is_file():
        try:
            read = parse_json(read_limited(path, TEXT_LIMIT_BYTES))
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{path} cannot be read: {e}") from None
        config = read if isinstance(read, dict) else {}
    source = _own_source(directory) or _source_in(config.get("chat_template"))
    if source is not None and len(source) > TEMPLATE_LIMIT:
        raise CheckpointError(f"the chat template in {directory} has more than {TEMPLATE_LIMIT} characters")
    specials = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        specials[name] = value if isinstance(value, str) else ""
    return ChatTemplate(source, specials)


def _own_source(directory: Path) -> str | None:
    path = directory / CHAT_TEMPLATE
    if not path.is_file():
        return None
    try:
        return read_limited(path, 4 * TEMPLATE_LIMIT).decode()
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from None


def _source_in(value: Any) -> str | None:
    """Of several named templates, the one for tools if there is one, else the default."""
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("tool_use") or named.get("default")
    return value if isinstance(value, str) and value else None
