"""Turns a chat into one text, by the model's own template (data, rendered in jinja2's sandbox) or a plain one.

A template can read messages and write text. It cannot import, call what is no part of jinja2, or run for ever: how much it may
write, and how long its loops may be, is limited.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mdi.checkpoint.folder import CHAT_TEMPLATE
from mdi.errors import CheckpointError
from mdi.serve.api_errors import ApiError
from mdi.serve.parameters import checked_text
from mdi.settings_file import TEXT_LIMIT_BYTES, parse_json, read_limited

CONFIG = "tokenizer_config.json"
TEMPLATE_LIMIT = 1 << 18  # characters of a template
RENDERED_LIMIT = 1 << 24  # characters of a chat

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
    """Attributes:
    is_plain: whether the model has no template of its own.
    knows_tools: whether it writes the tools into the text itself.
    """

    def __init__(self, source: str | None, specials: Mapping[str, str]) -> None:
        self.is_plain = source is None
        self._specials = dict(specials)
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(str(form))
        try:
            self._template = environment.from_string(PLAIN if source is None else source)
        except jinja2.TemplateError as e:
            raise CheckpointError(f"the model's chat template cannot be read: {e}") from None
        self.knows_tools = source is not None and "tools" in source

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], extra: Mapping[str, Any]) -> str:
        """The text that the model continues. ApiError if the template refuses the messages."""
        values = {**self._specials, **extra, "messages": list(messages), "add_generation_prompt": True}
        values["tools"] = list(tools) or None
        pieces, n = [], 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                n += len(piece)
                if n > RENDERED_LIMIT:
                    raise ApiError(400, "messages: the chat is too long", "context_length_exceeded", "messages")
        except ApiError:
            raise
        except Exception as e:  # a foreign template may fail in any way
            reason = " ".join(str(e).split())[:200]
            raise ApiError(
                400, f"messages: the model's chat template refuses them: {reason}", param="messages"
            ) from None
        return checked_text("messages", "".join(pieces))


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox limits the length of ranges; strings that are multiplied are limited here."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            raise jinja2.exceptions.SecurityError(f"a template may not use {operator} so")
        return super().call_binop(context, operator, left, right)


def read_template(directory: Path) -> ChatTemplate:
    """That of a checkpoint's folder. Raises CheckpointError if it cannot be read."""
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


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    """As models have seen it: jinja2's own would escape characters for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
