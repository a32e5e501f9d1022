"""Renders a chat with a model's own template, which is a program of the model's author.

jinja2's sandbox keeps a template from the machine, but not from computing for ever or filling the memory. So a model's template
is rendered in a process of its own (`python -m mdi.serve.rendering`, see `mdi.serve.templates`), which the system limits.

Both directions carry JSON behind its length. The first message is {"source", "specials"}, each further one has the values of a
chat; the answers are {"text"} or {"error", "code"}. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import struct
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDERED_LIMIT = 1 << 24  # characters of a chat
MEMORY_BYTES = 512 << 20  # of the process; a chat of 16 MB needs half of it
COMPUTING_S = 3  # of each chat, of the processor's time
LENGTH = struct.Struct("<Q")
UNREADABLE, REFUSED, TOO_LONG = "unreadable", "refused", "too_long"


class Renderer:
    """A compiled template. Raises jinja2's errors, and in a foreign template any other.

    Args:
        specials: values that each chat has.
    """

    def __init__(self, source: str, specials: Mapping[str, Any]) -> None:
        self._specials = dict(specials)
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(str(form))
        self._template = environment.from_string(source)

    def render(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """{"text"}, or {"error", "code"} if the template refuses the values."""
        pieces, n = [], 0
        try:
            for piece in self._template.generate({**self._specials, **values}):
                pieces.append(piece)
                n += len(piece)
                if n > RENDERED_LIMIT:
                    return {"error": f"it has more than {RENDERED_LIMIT} characters", "code": TOO_LONG}
        except Exception as e:  # a foreign template may fail in any way
            return {"error": reason_of(e), "code": REFUSED}
        return {"text": "".join(pieces)}


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox limits the length of ranges; strings that are multiplied are limited here."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            raise jinja2.exceptions.SecurityError(f"a template may not use {operator} so")
        return super().call_binop(context, operator, left, right)


def reason_of(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def packed(message: Mapping[str, Any]) -> bytes:
    """Halves of surrogate pairs pass: who reads the message refuses them with better words."""
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def main() -> None:
    """Answer until the input ends."""
    limit_process()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    renderer: Renderer | None = None
    while (data := _read(source)) is not None:
        allow_computing()
        try:
            values = json.loads(data)
            del data
            if renderer is None:
                renderer = Renderer(values["source"], values["specials"])
                answer: dict[str, Any] = {"text": ""}
            else:
                answer = renderer.render(values)
            written = packed(answer)
        except Exception as e:
            written = packed({"error": reason_of(e), "code": UNREADABLE if renderer is None else REFUSED})
        sink.write(written)
        sink.flush()


def limit_process() -> None:
    """For the rest of this process's life. macOS does not limit memory; there the time limits it."""
    import resource

    for what, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))


def allow_computing() -> None:
    """The system ends this process COMPUTING_S from now, or up to a second earlier, of the time that it computes."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + COMPUTING_S, hard))


def _read(source: BinaryIO) -> bytes | None:
    """The next message; None if there is none."""
    length = source.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    (n_bytes,) = LENGTH.unpack(length)
    data = source.read(n_bytes)
    return data if len(data) == n_bytes else None


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    """As models have seen it: jinja2's own would escape characters for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


if __name__ == "__main__":
    main()
