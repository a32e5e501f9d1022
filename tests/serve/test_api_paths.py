"""Who may ask the server, and what it says to those who ask for what it does not have: the ASGI application by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from mdi.serve.api_state import ApiState
from mdi.serve.app import make_app
from mdi.serve.catalog import Catalog
from mdi.serve.engine_client import EngineClient
from mdi.serve.serve_settings import ServeSettings


class Asked:
    """One request whose body does not come, and its answer.

    Attributes:
        was_read: whether anything of the body was asked for.
    """

    def __init__(self, method: str, path: str, settings: ServeSettings | None = None, **headers: str) -> None:
        self.was_read = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        asyncio.run(self._ask(settings or ServeSettings(), method, path, {"host": "localhost", **headers}))

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def _ask(self, settings: ServeSettings, method: str, path: str, headers: dict[str, str]) -> None:
        encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": encoded,
            "root_path": "",
        }
        client = EngineClient(lambda: None)
        app = make_app(ApiState(settings, client, Catalog(Path("nowhere"), Path("nowhere"))))
        await app(scope, self._receive, self._send)

    async def _receive(self) -> MutableMapping[str, Any]:
        self.was_read = True
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        self.body += message.get("body", b"")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": "multipart/form-data; boundary=application/json"}, 415),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/plan", "/nothing"])
def test_what_a_foreign_web_page_sends_is_refused_unread(path: str, headers: dict[str, str], status: int) -> None:
    asked = Asked("POST", path, **headers)
    assert (asked.status, asked.was_read) == (status, False) and asked.json["error"]["message"]


@pytest.mark.parametrize(
    "kind", [None, "application/json", "application/json; charset=utf-8", "application/octet-stream"]
)
def test_programs_may_name_the_type_or_not(kind: str | None) -> None:
    headers = {} if kind is None else {"content_type": kind}
    assert Asked("POST", "/v1/completions", **headers).was_read
