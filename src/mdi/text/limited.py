"""Computes for strangers under limits that the system enforces: chats in a model's own template, and JSON schemas.

jinja2's sandbox keeps a template from the machine, but not from computing for ever or filling the memory. Some schemas take
llguidance minutes, or end the process that compiles them. So a process of its own renders the chats and tries the schemas:
`python -m mdi.text.limited`, which `mdi.text.templates` starts and replaces.

Both directions carry JSON behind its length. The process is asked {"template", "specials"} once and then {"values"} of each
chat, or {"schema"} or {"lark"}; the answers are {"text"} or {"error", "code"}. It ends with its input.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDERED_LIMIT = 1 << 24  # characters of a chat
REPEATED_LIMIT = 1 << 16  # characters, or elements, of what a template multiplies
MEMORY_BYTES = 512 << 20  # of the process; a chat of 16 MB needs half of it
STACK_BYTES = 1 << 20  # for a schema: the engine's threads have more, so that what passes here does not fail there
COMPUTING_S = 2.0  # for each message, of the processor's time
LENGTH = struct.Struct("<Q")
UNREADABLE, REFUSED, TOO_LONG = "unreadable", "refused", "too_long"


class Renderer:
    """A compiled template. Raises jinja2's errors, and in a foreign template any other.

    Args:
        specials: values that each chat has.
    """

    def __init__(self, source: str, specials: Mapping[str, Any]) -> None:
        self._specials = dict(specials)
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
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


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which some templates have for training, is what stands in it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox limits the length of ranges; strings and lists that are multiplied are limited here."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        many, n = (right, left) if isinstance(left, int) else (left, right)
        is_long = isinstance(many, str | list | tuple) and not (isinstance(n, int) and len(many) * n <= REPEATED_LIMIT)
        if operator == "**" or is_long:
            raise jinja2.exceptions.SecurityError(f"a template may not use {operator} so")
        return super().call_binop(context, operator, left, right)


def reason_of(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def packed(message: Mapping[str, Any]) -> bytes:
    """Halves of surrogate pairs pass: who reads the message refuses them with better words."""
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def grammar_error(written: str, is_schema: bool) -> str:
    """Why llguidance cannot use a JSON schema, or a grammar of its own; "" if it can, or is not installed: then the engine says
    so.
    """
    with contextlib.suppress(ModuleNotFoundError):
        from llguidance import LLMatcher

        try:
            return LLMatcher.validate_grammar(llguidance_form(LLMatcher, written, is_schema))
        except ValueError as e:
            return reason_of(e)
    return ""


def llguidance_form(matcher: Any, written: str, is_schema: bool) -> str:
    """Raises ValueError."""
    if is_schema:
        return str(matcher.grammar_from_json_schema(written, overrides={"whitespace_flexible": False}))
    return str(matcher.grammar_from_lark(written))


class Worker:
    """Answers one message after the other."""

    def __init__(self) -> None:
        self._renderer: Renderer | None = None

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        kind = next((kind for kind in ("schema", "lark") if kind in message), "")
        if kind:
            error = grammar_error(message[kind], kind == "schema")
            return {"error": error.partition("\n")[0][:200], "code": REFUSED} if error else {"text": ""}
        if "template" in message:
            try:
                self._renderer = Renderer(message["template"], message["specials"])
            except Exception as e:
                return {"error": reason_of(e), "code": UNREADABLE}
            return {"text": ""}
        assert self._renderer is not None, "chats come after their template"
        return self._renderer.render(message["values"])


def main() -> None:
    """Answer until the input ends."""
    limit_process()
    working = threading.Thread(target=_serve, name="limited")  # because a thread's stack can be chosen
    working.start()
    working.join()


def _serve() -> None:
    worker, source, sink = Worker(), sys.stdin.buffer, sys.stdout.buffer
    while (data := _read(source)) is not None:
        with limited_time():
            try:
                message = json.loads(data)
                del data
                written = packed(worker.answer(message))
            except (MemoryError, RecursionError, ValueError) as e:
                written = packed({"error": reason_of(e), "code": REFUSED})
        sink.write(written)
        sink.flush()


def limit_process() -> None:
    """For the rest of this process's life. macOS does not limit memory; there the time limits it."""
    import resource

    threading.stack_size(STACK_BYTES)
    for what, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """The system ends this process if the block computes for longer than COMPUTING_S."""
    signal.setitimer(signal.ITIMER_PROF, COMPUTING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _read(source: BinaryIO) -> bytes | None:
    """The next message; None if there is none."""
    length = source.read(LENGTH.size)
    if len(length) < LENGTH.size:
        return None
    (n_bytes,) = LENGTH.unpack(length)
    data = source.read(n_bytes)
    return data if len(data) == n_bytes else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As models have seen it, with transformers' arguments: jinja2's own would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


if __name__ == "__main__":
    main()
