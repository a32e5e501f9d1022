"""Who may ask the server, and what it says to those who ask for what it does not have: the ASGI application by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from mdi.cli.serve_settings import read_key
from mdi.serve.api import PATHS, make_app
from mdi.serve.api_state import ApiState
from mdi.serve.catalog import Catalog
from mdi.serve.engine_client import EngineClient
from mdi.serve.process import ServeSettings


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
        ({"origin": "http://localhost:9999"}, 403),  # another server of this machine
        ({"origin": "http://localhost:80", "host": "localhost:8000"}, 403),
        ({"host": "evil.example"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/plan", "/nothing"])
def test_what_a_foreign_web_page_sends_is_refused_unread(path: str, headers: dict[str, str], status: int) -> None:
    asked = Asked("POST", path, **headers)
    assert (asked.status, asked.was_read) == (status, False) and asked.json["error"]["message"]


def test_clients_in_a_page_that_may_ask_send_headers_of_their_own_and_read_when_to_ask_again() -> None:
    settings, page = ServeSettings(origins=("http://friend.example",)), "http://friend.example"
    wanted = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,x-stainless-os"}
    asked = Asked("OPTIONS", "/v1/chat/completions", settings, origin=page, **wanted)
    assert asked.status == 200 and asked.headers["access-control-allow-origin"] == page
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    told = Asked("GET", "/v1/models", settings, origin=page)
    assert told.status == 503 and told.headers["retry-after"]
    assert told.headers["access-control-expose-headers"] == "retry-after"
    other = Asked("OPTIONS", "/v1/chat/completions", settings, origin="http://evil.example", **wanted)
    assert other.status == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "kind", [None, "application/json", "application/json; charset=utf-8", "application/octet-stream"]
)
def test_programs_may_name_the_type_or_not(kind: str | None) -> None:
    headers = {} if kind is None else {"content_type": kind}
    assert Asked("POST", "/v1/completions", **headers).was_read


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/v1/chat/completions/", "POST /v1/chat/completions"),
        ("POST", "/v1/v1/completions", "POST /v1/completions"),
        ("POST", "/V1/Completions", "POST /v1/completions"),
        ("POST", "//v1//completions", "POST /v1/completions"),
        ("POST", "/v1/chat/completion", "POST /v1/chat/completions"),
        ("POST", "/completion", "POST /v1/completions"),
        ("GET", "/models", "GET /v1/models"),
        ("GET", "/v1/models/", "GET /v1/models"),
        ("GET", "/v1/health", "GET /health"),
        ("GET", "/api/tags", "GET /v1/models"),
        ("POST", "/api/chat", "POST /v1/chat/completions"),
        ("POST", "/api/generate", "POST /v1/completions"),
        ("GET", "/api/version", None),
        ("POST", "/api/nothing", None),
        ("GET", "/static/nothing.js", None),
        ("GET", "/" + "x" * 100_000, None),
    ],
)
def test_an_unknown_path_is_told_which_there_are_and_which_was_meant(method: str, path: str, meant: str | None) -> None:
    asked = Asked(method, path)
    error = asked.json["error"]
    assert asked.status == 404 and asked.headers["content-type"] == "application/json" and error["code"] == "not_found"
    assert error["paths"][:3] == ["GET /v1/models", "POST /v1/completions", "POST /v1/chat/completions"]
    assert all(one in error["message"] for one in error["paths"]) and len(error["message"]) < 1000
    assert f"did you mean {meant}?" in error["message"] if meant else "did you mean" not in error["message"]


def test_all_paths_that_are_named_are_there() -> None:
    for path, method in PATHS.items():
        assert Asked(method, path).status != 404
        assert Asked("DELETE", path).status == 405


@pytest.mark.parametrize("path", ["/api/plan", "/api/doctor", "/api/ring", "/v1/completions", "/metrics"])
def test_a_wrong_method_is_told_the_right_one(path: str) -> None:
    asked = Asked("DELETE", path)
    assert asked.status == 405 and asked.headers["allow"] and asked.json["error"]["message"]


def test_the_questions_of_the_page_are_asked() -> None:
    for path in ("/api/plan", "/api/doctor"):
        assert Asked("POST", path).status == 503  # the engine, which is not there


KEYS = ServeSettings(keys=(read_key(1, "alpha-secret alpha"), read_key(2, "beta-secret beta 5")))


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"authorization": "Bearer alpha-secret"}, True),
        ({"x_api_key": "alpha-secret"}, True),
        ({"x_api_key": "beta-secret", "authorization": "Bearer stale-secret"}, True),
        ({"x_api_key": "stale-secret", "authorization": "Bearer beta-secret"}, True),
        ({"x_api_key": "stale-secret"}, False),
        ({"x_api_key": ""}, False),
        ({"authorization": "alpha-secret"}, False),
        ({}, False),
    ],
)
def test_a_key_is_the_same_in_either_header(headers: dict[str, str], is_let_in: bool) -> None:
    asked = Asked("POST", "/v1/completions", KEYS, **headers)
    assert (asked.was_read, asked.status) == ((True, 0) if is_let_in else (False, 401))


@pytest.mark.parametrize("path", ["/", "/api/hello"])
def test_agents_ask_without_a_key_whether_the_server_is_there(path: str) -> None:
    assert Asked("HEAD", path, KEYS).status == 200
    assert Asked("GET", "/api/ring", KEYS).status == 401
