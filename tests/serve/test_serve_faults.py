"""Bad requests, strangers and clients that go away: each gets its error in OpenAI's form, and nobody else notices."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import KEYS, Server
from mdi.serve.api_errors import ApiError
from mdi.serve.chat import Chat
from mdi.serve.completions import Completion
from waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "nano-llama", "prompt": "ROMEO:", "max_tokens": 3, "temperature": 0}
MANY = {f"p{i}": {"type": "string"} for i in range(3000)}
TOO_LARGE = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": MANY}}}
# llguidance compiles it on as many levels of the stack
TOO_DEEP = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "object", "required": [f"{i:x}" for i in range(30000)]}},
}
NO_TEXT = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}  # which is itself: nothing else is asked

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
NAMES = """model prompt messages n stop seed temperature top_p top_k min_p logit_bias logprobs top_logprobs max_tokens stream
stream_options response_format tools tool_choice presence_penalty repetition_penalty deadline_s echo best_of"""
names = st.sampled_from(NAMES.split())


@given(body=values | st.dictionaries(names, values), is_chat=st.booleans())
def test_any_json_is_understood_or_refused(body: Any, is_chat: bool) -> None:
    try:
        (Chat if is_chat else Completion)(body)
    except ApiError as e:
        assert e.status == 400 and e.body["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("temperature", 3), ("n", 0), ("max_tokens", -1), ("prompt", {}), ("prompt", [-1]), ("stop", [""]),
     ("logit_bias", {"x": 1}), ("top_p", -0.5), ("seed", 1.5), ("stream", "yes"), ("response_format", {"type": "xml"}),
     ("prompt", "\ud800"), ("prompt", [10**6])],
)  # fmt: skip
def test_a_wrong_field_is_named(server: Server, field: str, value: Any) -> None:
    status, told = server.ask("POST", COMPLETIONS, {**GOOD, field: value})
    assert status == 400 and told["error"]["param"] == field and told["error"]["type"] == "invalid_request_error"


# What LangChain, LiteLLM and others send beside the fields that are known here.
OTHERS = {
    "functions": None, "function_call": None, "user": "me", "metadata": {}, "store": False, "parallel_tool_calls": True,
    "service_tier": "auto", "reasoning_effort": "low", "modalities": ["text"], "verbosity": "low", "min_tokens": 1,
    "ignore_eos": False, "repeat_penalty": 1.1, "length_penalty": 1.0, "stop_token_ids": [], "typical_p": 1.0, "top_a": 0,
    "guided_json": None, "add_generation_prompt": True, "prompt_cache_key": "x", "mode": "chat", "models": [],
    "extra_body": {}, "timeout": 5, "repetition_penalty_range": 1024, "max_token": None, "temprature": None,
}  # fmt: skip


@pytest.mark.parametrize("make", [Chat, Completion])
def test_fields_of_other_servers_are_ignored(make: type[Chat] | type[Completion]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", **OTHERS}
    assert make({**body, "max_tokens": 7, "max_completion_tokens": 8}).fields.n_tokens == 8


@pytest.mark.parametrize(
    ("field", "meant"),
    [("temprature", "temperature"), ("maxTokens", "max_tokens"), ("max_token", "max_tokens"), ("top-p", "top_p"),
     ("stream_option", "stream_options"), ("mesages", "messages"), ("tool_choise", "tool_choice")],
)  # fmt: skip
def test_a_misspelt_field_is_named(field: str, meant: str) -> None:
    with pytest.raises(ApiError) as caught:
        Chat({"messages": [{"role": "user", "content": "x"}], field: 1})
    assert (caught.value.status, caught.value.param) == (400, field) and meant in str(caught.value)


def test_only_some_unknown_fields_are_compared_because_it_takes_long() -> None:
    unknown = {f"unknown_{n}": 1 for n in range(10_000)}
    assert Chat({"messages": [{"role": "user", "content": "x"}], **unknown, "temprature": 1}).conversation


@pytest.mark.parametrize("old", [{"functions": [{"name": "look"}]}, {"function_call": {"name": "look"}}])
def test_calls_in_the_old_form_are_refused(old: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ApiError) as caught:
        Chat({"messages": messages, **old})
    assert (caught.value.status, caught.value.param) == (400, "functions") and "tools" in str(caught.value)
    assert Chat({"messages": messages, "functions": [], "function_call": "none"}).conversation


def test_requests_that_cannot_be(server: Server) -> None:
    asked = [
        (b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b'{"a":' * 5000, 400), (b'{"temperature": NaN}', 400), (b"", 400),
        (b'{"temperature": 1%s}' % (b"0" * 400), 400), (b'{"temperature": 1e400}', 400), (b"x" * (17 << 20), 413),
        ({**GOOD, "model": "gpt-4"}, 404), ({**GOOD, "prompt": "a b " * 5000}, 400),
        ({**GOOD, "response_format": NO_TEXT}, 400), ({**GOOD, "stop": "x" * 5000}, 400),
        ({**GOOD, "response_format": TOO_LARGE, "max_tokens": 50}, 400), ({**GOOD, "response_format": TOO_DEEP}, 400),
    ]  # fmt: skip
    for body, wanted in asked:
        status, told = server.ask("POST", COMPLETIONS, body)
        assert status == wanted and told["error"]["message"], (body[:50] if isinstance(body, bytes) else body, told)
    assert server.ask("GET", COMPLETIONS)[0] == 405 and server.ask("GET", "/v2/nothing")[0] == 404
    assert server.ask("POST", COMPLETIONS, GOOD)[0] == 200


def test_strangers_are_refused(server: Server) -> None:
    for headers, wanted in [
        ({"authorization": ""}, 401), ({"authorization": "Bearer wrong-secret"}, 401), ({"host": "evil.example"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://evil.example"}, 403), ({"origin": f"http://127.0.0.1:{server.port}"}, 200),
        ({"host": "localhost:1"}, 200), ({"authorization": f"bearer {KEYS[1]}"}, 200),
    ]:  # fmt: skip
        status, told = server.ask("GET", "/v1/models", headers=headers)
        assert status == wanted, headers
        assert status == 200 or told["error"]["code"]


def test_errors_are_the_clients_own(server: Server) -> None:
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="wrong-secret", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEYS[0], max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="nano-llama", prompt="x", temperature=9)
        assert caught.value.param == "temperature"


def test_connections_that_say_nothing_disturb_nobody(server: Server) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    try:
        for i, sock in enumerate(silent):
            sock.sendall(
                [b"", b"POST /v1/comple", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 90\r\n\r\n{"][i % 3]
            )
        assert server.ask("POST", COMPLETIONS, GOOD)[0] == 200
    finally:
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("sent", [b"\x00rubbish\r\n\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\n%s\r\n"])
def test_what_strangers_send_fills_no_log(server: Server, sent: bytes) -> None:
    n_before = server.log.stat().st_size
    with socket.create_connection(("127.0.0.1", server.port), 60) as sock:
        sock.sendall(sent.replace(b"%s", b"connection: upgrade, close\r\nupgrade: websocket\r\n"))
        assert sock.makefile("rb").readline().startswith(b"HTTP/1.1")
    told = server.log.read_bytes()[n_before:]
    assert b"WARNING:" not in told, "as uvicorn would write it"


@pytest.fixture(scope="module")
def endless_server(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its texts last until something ends them."""
    made = Server(tmp_path_factory.mktemp("server"), "--ckpt", endless, "--queue", 8, "--max-running", 16)
    try:
        made.wait()
        yield made
    finally:
        status = made.end()
    assert status == 0, made.log.read_text()


LONG = {"prompt": "ROMEO:", "temperature": 0, "max_tokens": 60000, "n": 16}


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [True, False])
def test_who_goes_away_frees_its_text(endless_server: Server, is_streamed: bool) -> None:
    server = endless_server
    wait_for(server, lambda texts: texts["running"] == 0)
    before = n_cancelled(server)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps({**LONG, "stream": is_streamed}))
    wait_for(server, lambda texts: texts["running"] > 0)
    connection.close()
    wait_for(server, lambda texts: texts["running"] == 0)
    assert n_cancelled(server) == before + 16


def test_a_full_queue_is_told_and_a_deadline_is_kept(endless_server: Server) -> None:
    server, short = endless_server, {"prompt": "ROMEO:", "max_tokens": 3}
    first, second = (http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(2))
    try:
        first.request("POST", COMPLETIONS, json.dumps({**LONG, "stream": True}))
        first.getresponse()
        assert server.ask("POST", COMPLETIONS, {**short, "deadline_s": 0.05})[0] == 504
        second.request("POST", COMPLETIONS, json.dumps({**short, "n": 8}))
        deadline = time.monotonic() + 30
        while server.ask("GET", "/health")[1]["waiting"] < 8:
            assert time.monotonic() < deadline
        status, told = server.ask("POST", COMPLETIONS, short)
        assert (status, told["error"]["type"]) == (429, "rate_limit_error")
    finally:
        first.close()
        second.close()
    wait_for(server, lambda texts: texts["running"] == 0)
    assert server.ask("POST", COMPLETIONS, short)[0] == 200


def n_cancelled(server: Server) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", "/metrics", headers={"authorization": f"Bearer {KEYS[0]}"})
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    found = [line.split()[-1] for line in lines if line.startswith('mdi_texts_ended_total{reason="cancelled"}')]
    return float(found[0]) if found else 0.0


def wait_for(server: Server, condition: Any) -> dict[str, int]:
    found: dict[str, int] = {}

    def holds() -> bool:
        nonlocal found
        found = server.texts() or {}  # None: nothing was read yet
        return bool(found) and bool(condition(found))

    until(holds)
    return found
