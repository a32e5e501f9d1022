"""Reads the body of a request, with limits."""

from __future__ import annotations

import re
from typing import Any

import cherrypy

from mdi.control.gate import Asker
from mdi.errors import ControlError
from mdi.spec.settings_file import parse_json

JSON_LIMIT_BYTES = 4 << 20


class BodyBrokenError(Exception):
    """The client went away in the middle of its body, or the body is not in the form that it was said to be."""


def number_of(text: str) -> int | None:
    """A count in a header or a query; None if it is not a number, or has more digits than any size here."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def content_length() -> int:
    headers = cherrypy.request.headers
    n_bytes = number_of(headers.get("Content-Length", ""))
    if n_bytes is None or "Transfer-Encoding" in headers:
        raise ControlError("a request with a body needs a Content-Length and no transfer encoding", 411)
    return n_bytes


def read_body(n_bytes: int) -> bytes:
    """At most so many bytes of the body; b"" at its end."""
    try:
        data: bytes = cherrypy.request.rfile.read(n_bytes)
    except (OSError, ValueError) as e:  # cheroot's own errors are of the second
        raise BodyBrokenError(str(e)) from None
    return data


def read_json(limit_bytes: int = JSON_LIMIT_BYTES) -> Any:
    n_bytes = content_length()
    if n_bytes > limit_bytes:
        raise ControlError(f"a body of {n_bytes} bytes; at most {limit_bytes} are accepted here", 413)
    body = read_body(n_bytes)
    if len(body) != n_bytes:
        raise ControlError("the body was cut off", 400)
    asker: Asker | None = cherrypy.request.asker
    if asker is not None:
        asker.check_body(body)
    try:
        return parse_json(body)
    except ValueError as e:
        raise ControlError(f"the body is not JSON: {str(e)[:200]}", 400) from None
