"""Ollama's API on its own port, by requests as its clients write them: every path, streamed and not, and what goes back."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_surfaces import asked

from conftest import KEYS, Server
from mdi.cli.serve_settings import serve_settings
from mdi.errors import UsageError
from mdi.serve.api_errors import ApiError
from mdi.serve.endpoint import Surface
from mdi.serve.ollama import CHATS, GENERATIONS, Generation, OllamaChat
from mdi.serve.ollama_port import MISSING
from mdi.serve.process import ApiProcess
from mdi.spec.options import Options
from test_harmony import ANALYSIS, CALL, FINAL, NEXT, TOOL, USER, ids_of, prompt_of_conversation, write_texts

TEXT = "Speak, Romeo."
ASK = [{"role": "user", "content": TEXT}]
HOUSE = {
    "type": "object", "properties": {"house": {"enum": ["Montague", "Capulet"]}}, "required": ["house"],
    "additionalProperties": False,
}  # fmt: skip
BODY: dict[str, Any] = {"messages": [USER]}
CALLED = {"function": {"name": "look", "arguments": {"at": "Zürich"}}}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


def lines_of(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def checked_end(made: dict[str, Any]) -> str:
    """The reason for the end of an answer, whose other facts are checked and removed."""
    total, load, prompt, new = (made.pop(f"{n}_duration") for n in ("total", "load", "prompt_eval", "eval"))
    assert all(isinstance(one, int) and one >= 0 for one in (total, load, prompt, new)) and total >= load + prompt + new
    made.pop("created_at")
    return str(made.pop("done_reason"))


CASES: list[tuple[str, str, dict[str, Any], str]] = [
    (f"{FINAL}Yes.<|return|>", "eos", {"content": "Yes."}, "stop"),
    (f"{ANALYSIS}Hm, so.{NEXT}{FINAL}Yes.<|return|>", "eos", {"content": "Yes.", "thinking": "Hm, so."}, "stop"),
    (f"{ANALYSIS}Hm.{NEXT}{CALL}", "eos", {"content": "", "thinking": "Hm.", "tool_calls": [CALLED]}, "stop"),
    (f"{FINAL}So:{NEXT}{CALL}<|start|>assistant{CALL}", "eos", {"content": "So:", "tool_calls": [CALLED] * 2}, "stop"),
    (f"{FINAL}Yes", "length", {"content": "Yes"}, "length"),
    (f"{FINAL}One, two", "eos", {"content": "One"}, "stop"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("surface", "written", "reason", "expected", "done_reason"),
    [(one, *case) for one in (CHATS, GENERATIONS) for case in CASES if one is CHATS or "tool_calls" not in case[2]],
)
def test_lines_make_the_whole_answer(
    surface: Surface, written: str, reason: str, expected: dict[str, Any], done_reason: str, texts: Path
) -> None:
    body = {"model": "m:latest", "messages": [USER], "tools": [TOOL], "options": {"stop": [", t"]}}
    if surface is GENERATIONS:
        body |= {"prompt": USER["content"]}
        expected = {"response": expected["content"], **{k: v for k, v in expected.items() if k == "thinking"}}
    (begin,), data = asked(texts, surface, body, written, reason)
    assert begin == (200, b"application/x-ndjson")
    *lines, last = lines_of(data)
    parts: dict[str, Any] = {}
    for line in [*lines, last]:
        assert line["model"] == "m:latest" and line["done"] is (line is last) and line["created_at"].endswith("Z")
        part = line["message"] if surface is CHATS else line
        assert surface is GENERATIONS or part["role"] == "assistant"
        for name in ("content", "response", "thinking", "tool_calls"):
            if name in part:
                parts[name] = parts[name] + part[name] if name in parts else part[name]
    assert parts == expected
    (begin,), data = asked(texts, surface, {**body, "stream": False}, written, reason)
    assert begin == (200, b"application/json")
    whole = json.loads(data)
    assert checked_end(whole) == checked_end(last) == done_reason
    assert whole["prompt_eval_count"] == last["prompt_eval_count"] > 10 and whole["eval_count"] == last["eval_count"]
    assert whole["eval_count"] <= len(ids_of(written)) and whole["cached_tokens"] == last["cached_tokens"] == 0
    if surface is CHATS:
        assert whole["message"] == {"role": "assistant", **expected}
    else:
        assert {name: whole[name] for name in ("response", "thinking") if name in whole} == expected


def test_a_call_has_an_object(texts: Path) -> None:
    body = {**BODY, "tools": [TOOL], "stream": False}
    data = asked(texts, CHATS, body, CALL.replace('{"at":"Zürich"}', "[1"), "eos")[1]
    assert json.loads(data)["message"]["tool_calls"][0]["function"]["arguments"] == {"arguments": "[1"}


def test_an_error_in_a_stream_is_its_last_line(texts: Path) -> None:
    *lines, last = lines_of(asked(texts, CHATS, BODY, f"{FINAL}Yes", "memory")[1])
    assert lines[0]["message"]["content"] and last == {"error": "the nodes could not go on with this text"}
    begins, data = asked(texts, CHATS, {**BODY, "stream": False}, f"{FINAL}Yes", "memory")
    assert begins[0][0] == 500 and json.loads(data) == last


def test_empty_lines_come_while_nothing_is_said(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.serve.endpoint.SIGN_S", 0.05)
    first, second, *_ = lines_of(asked(texts, CHATS, BODY, f"{FINAL}Yes.<|return|>", "eos+0.3")[1])
    assert first["message"] == second["message"] == {"role": "assistant", "content": ""} and not first["done"]


def test_what_was_said_goes_back_to_the_model_in_its_form(texts: Path) -> None:
    look = {"function": {"name": "look", "arguments": {"at": "Zürich"}}}
    messages = [
        {"role": "system", "content": "Be kind."}, USER,
        {"role": "assistant", "content": "", "thinking": "Look.", "tool_calls": [look]},
        {"role": "tool", "content": "there", "tool_name": "look"}, USER,
    ]  # fmt: skip
    request = OllamaChat({"messages": messages, "tools": [TOOL], "think": "high"})
    assert prompt_of_conversation(texts, request.conversation, request.fields) == (
        "<|start|>system<|message|>Reasoning: high<|end|><|start|>developer<|message|>look<|end|>"
        "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>Where?<|end|>"
        f"<|start|>assistant{ANALYSIS}Look.<|end|>"
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": "Zürich"}<|call|>'
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"there"<|end|>'
        "<|start|>user<|message|>Where?<|end|><|start|>assistant"
    )


def test_results_belong_to_their_calls_and_ids_stay_the_same() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("look", "go", "look")]
    given = {"function": {"name": "go", "arguments": {}}, "id": "call_7"}
    messages = [
        USER, {"role": "assistant", "tool_calls": [*calls, given]},
        {"role": "tool", "content": "a", "tool_name": "go"}, {"role": "tool", "content": "b"},
        {"role": "tool", "content": "c", "tool_call_id": "call_7"}, {"role": "tool", "content": "d", "tool_name": "look"},
        {"role": "tool", "content": "e", "tool_name": "other"},
    ]  # fmt: skip
    first, second = (OllamaChat({"messages": messages}).conversation.turns for _ in range(2))
    assert first == second
    ids = [call["id"] for call in first[1].calls]
    assert len({*ids}) == 4 and ids[3] == "call_7" and all(len(i) == 9 and i.isalnum() for i in ids[:3])
    found = [turn.others.get("tool_call_id") for turn in first[2:]]
    assert found == [ids[1], ids[0], ids[3], ids[2], None] and first[2].others["name"] == "go"


def test_thinking_is_asked_for_or_not() -> None:
    def values(**body: Any) -> Any:
        return OllamaChat({**BODY, **body}).conversation.values

    assert [values(think=one) for one in (True, False, None)] == [
        {"enable_thinking": True},
        {"enable_thinking": False},
        {},
    ]
    assert values(think="low") == {"enable_thinking": True, "reasoning_effort": "low"}


def test_options_are_those_of_other_surfaces() -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "stop": "a", "num_predict": 5, "num_ctx": 8192,
        "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": None, "num_gpu": 1, "mirostat": 0,
    }  # fmt: skip
    fields = OllamaChat({**BODY, "model": "m:latest", "options": options, "keep_alive": "5m"}).fields
    assert (fields.model, fields.n_tokens, fields.stop, fields.sampling.seed) == ("m", 5, ("a",), 7)
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    assert fields.sampling.values == {
        **expected, "presence_penalty": 0.5, "frequency_penalty": 0.0, "logit_bias": [], "n_logprobs": None,
    }  # fmt: skip
    assert fields.is_streamed and not OllamaChat({**BODY, "stream": False}).fields.is_streamed
    for unlimited in (-1, -2, 0):
        assert OllamaChat({**BODY, "options": {"num_predict": unlimited}}).fields.n_tokens is None
    seeds = {OllamaChat({**BODY, "options": {"seed": -1}}).fields.sampling.seed for _ in range(2)}
    assert len(seeds) == 2, "-1 is any"


def test_a_form_is_a_grammar() -> None:
    def grammar(form: Any) -> Any:
        return OllamaChat({**BODY, "format": form}).fields.grammar

    assert grammar("json") == {"type": "schema", "schema": {"type": "object"}, "param": "format"}
    assert grammar("") is grammar(None) is None
    assert grammar(HOUSE) == {"type": "schema", "schema": HOUSE, "param": "format"}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "a", **message}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": "a"}, "messages"), ({"messages": [USER] * 4097}, "messages"), ({"messages": [1]}, "messages[0]"),
        (said(role="developer"), "messages[0]"), (said(role=["user"]), "messages[0]"), (said(content=1), "messages[0]"),
        (said(images=["aGk="]), "messages[0]"), (said(thinking=1), "messages[0]"), (said(tool_calls={"a": 1}), "messages[0]"),
        (said(tool_calls=[1]), "messages[0]"), (said(tool_calls=[{"function": {"name": "a"}}]), "messages[0]"),
        (said(tool_calls=[{"function": {"name": 1, "arguments": {}}}]), "messages[0]"),
        (said(tool_calls=[{"function": {"name": "a", "arguments": "{}"}}]), "messages[0]"),
        (said(tool_calls=[{"function": {"name": "a", "arguments": {"a": "\ud800"}}}]), "messages[0]"),
        ({"tools": {}}, "tools"), ({"tools": [{"name": "look"}]}, "tools[0]"), ({"think": "much"}, "think"),
        ({"format": "xml"}, "format"), ({"format": 1}, "format"), ({"stream": "yes"}, "stream"),
        ({"keep_alive": []}, "keep_alive"),
        ({"options": 1}, "options"), ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"num_ctx": 0}}, "options.num_ctx"), ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"stop": [""]}}, "stop"), ({"options": {"num_predicts": 3}}, "num_predicts"), ({"message": []}, "message"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        OllamaChat({**BODY, **body})
    assert (caught.value.status, caught.value.param) == (400, param) and str(caught.value).startswith(param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 1}, "prompt"), ({"prompt": "\ud800"}, "prompt"), ({"suffix": "a"}, "suffix"), ({"images": ["a"]}, "images"),
        ({"template": "a"}, "template"), ({"context": [1]}, "context"), ({"raw": True, "system": "a"}, "system"),
    ],
)  # fmt: skip
def test_what_a_prompt_cannot_have_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        Generation({"prompt": "a", **body})
    assert (caught.value.status, caught.value.param) == (400, param) and str(caught.value).startswith(param)


def test_a_body_that_is_no_object_is_refused_in_its_form(texts: Path) -> None:
    begins, data = asked(texts, CHATS, [1], FINAL, "eos")
    assert begins[0][0] == 400 and json.loads(data) == {"error": "the body must be a JSON object"}


def ask(server: Server, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, Any]:
    """Status of an answer, and its JSON, or its lines if there are several."""
    connection = server.connection(server.ollama_port)
    try:
        data = None if body is None else json.dumps(body).encode()
        key = {"authorization": f"Bearer {KEYS[1]}"}
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers or key)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    lines = [json.loads(line) for line in content.splitlines()] if content.startswith(b"{") else content.decode()
    return answer.status, lines[0] if isinstance(lines, list) and len(lines) == 1 else lines


def whole(server: Server, path: str, **body: Any) -> dict[str, Any]:
    status, answer = ask(server, path, {"model": "nano-llama", "stream": False, **body})
    assert status == 200, answer
    return dict(answer)


SHORT = {"num_predict": 12, "seed": 5}


def test_the_text_is_that_of_the_other_port(server: Server) -> None:
    body = {"messages": ASK, "seed": 5, "max_tokens": 12}
    text = server.ask("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    for name in ("nano-llama", "nano-llama:latest", ""):
        answer = whole(server, "/api/chat", model=name, messages=ASK, options=SHORT)
        assert answer["message"] == {"role": "assistant", "content": text} and answer["done_reason"] == "length"
        assert answer["model"] == (name or "nano-llama") and answer["eval_count"] == 12
        assert answer["eval_duration"] > 0 and answer["prompt_eval_duration"] > 0
    begin = time.monotonic_ns()
    status, lines = ask(server, "/api/chat", {"model": "nano-llama", "messages": ASK, "options": SHORT})
    spent = time.monotonic_ns() - begin
    assert spent / 20 < lines[-1]["total_duration"] < spent, "nanoseconds"
    assert status == 200 and "".join(line["message"]["content"] for line in lines) == text and len(lines) > 2
    assert whole(server, "/api/generate", prompt=TEXT, options=SHORT)["response"] == text
    _, lines = ask(server, "/api/generate", {"model": "nano-llama", "prompt": TEXT, "options": SHORT})
    assert "".join(line["response"] for line in lines) == text
    raw = server.ask("POST", "/v1/completions", {"prompt": TEXT, "seed": 5, "max_tokens": 12})[1]["choices"][0]["text"]
    assert whole(server, "/api/generate", prompt=TEXT, raw=True, options=SHORT)["response"] == raw != text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_answer_has_the_form_that_is_asked_for(path: str, server: Server) -> None:
    asks = {"messages": ASK, "prompt": TEXT, "format": HOUSE, "options": {"num_predict": 200}}
    answer = whole(server, path, **asks)
    text = answer["message"]["content"] if path == "/api/chat" else answer["response"]
    assert json.loads(text)["house"] in ("Montague", "Capulet") and answer["done_reason"] == "stop"


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "messages"), ("/api/generate", "prompt")])
def test_who_says_nothing_has_the_model_loaded(path: str, field: str, server: Server) -> None:
    for body in (
        {},
        {field: None},
        {field: [] if field == "messages" else ""},
        {"keep_alive": "10m"},
        {"keep_alive": -1},
    ):
        for is_streamed in (True, False):
            status, answer = ask(server, path, {"model": "nano-llama:latest", "stream": is_streamed, **body})
            assert (status, answer["done"], answer["done_reason"], answer["eval_count"]) == (200, True, "load", 0), (
                answer
            )
    for nothing in (0, "0", "0s"):
        status, answer = ask(server, path, {"model": "nano-llama", "keep_alive": nothing})
        assert status == 501 and "--keep-alive" in answer["error"]
    assert ask(server, path, {"model": "other"})[0] == 404


def test_models_are_told_as_their_clients_read_them(server: Server) -> None:
    ((model,), (running,)) = (ask(server, path)[1]["models"] for path in ("/api/tags", "/api/ps"))
    assert model["name"] == model["model"] == "nano-llama:latest" and model["size"] > 6_000_000
    assert len(model["digest"]) == 64 and model["details"]["format"] == "safetensors"
    (facts,) = server.ask("GET", "/v1/models")[1]["data"]
    assert model["details"]["quantization_level"] == facts["weights"]
    assert {**running, **model} == running and running["context_length"] == facts["max_model_len"]
    assert running["expires_at"].startswith("9999") and running["size_vram"] == 0
    for given in ({"model": "nano-llama"}, {"name": "nano-llama:latest"}):
        status, shown = ask(server, "/api/show", given)
        info = shown["model_info"]
        assert status == 200 and info[f"{info['general.architecture']}.context_length"] == facts["max_model_len"]
        assert shown["capabilities"] == ["completion", "tools", "embedding"] and shown["details"] == model["details"]
    for body, wanted in (({"model": "other"}, 404), ({}, 400), ({"model": 1}, 400), ([], 400)):
        status, answer = ask(server, "/api/show", body)
        assert status == wanted and isinstance(answer["error"], str)


def test_who_asks_whether_it_is_there(server: Server) -> None:
    assert ask(server, "/", accept="*/*") == (200, "Ollama is running")
    assert ask(server, "/", method="HEAD", accept="*/*") == (200, "")
    version = ask(server, "/api/version")[1]["version"]
    assert [*map(int, version.split("."))] >= [0, 9, 0], "the first with thinking"


@pytest.mark.parametrize("path", MISSING)
def test_what_is_not_done_is_told(path: str, server: Server) -> None:
    for method in MISSING[path][0].split():
        status, answer = ask(server, path.replace("{digest}", "sha256:00"), {"model": "a"}, method)
        assert status == 501 and (method == "HEAD" or answer == {"error": MISSING[path][1]})


def test_a_key_is_needed_on_this_port_too(server: Server) -> None:
    body = {"model": "nano-llama", "messages": ASK, "stream": False, "options": {"num_predict": 1}}
    for headers in ({"accept": "*/*"}, {"authorization": "Bearer wrong-secret"}, {"authorization": KEYS[0]}):
        for path, data in (("/api/chat", body), ("/api/tags", None), ("/api/version", None), ("/api/pull", {})):
            status, answer = ask(server, path, data, **headers)
            assert status == 401 and isinstance(answer["error"], str)
    assert ask(server, "/api/chat", body, authorization=f"Bearer {KEYS[0]}")[0] == 200
    status, answer = ask(server, "/api/tags", authorization=f"Bearer {KEYS[0]}", origin="http://evil.example")
    assert status == 403 and isinstance(answer["error"], str)


def test_each_port_has_its_own_paths(server: Server) -> None:
    for path, body, method, wanted in (
        ("/v1/models", None, "", 404), ("/v1/chat/completions", {}, "", 404), ("/api/chat", None, "", 405),
        ("/api/tags/", None, "", 404), ("/api/tags", {}, "", 405), ("/api/delete", {}, "POST", 405),
    ):  # fmt: skip
        status, answer = ask(server, path, body, method)
        assert status == wanted and path in answer["error"], answer
    assert server.ask("POST", "/api/chat", {"messages": ASK})[0] == 404


def test_wrong_requests_are_refused_in_its_form(server: Server) -> None:
    for body, wanted in (
        ({"model": "other", "messages": ASK}, 404), ({"messages": [1]}, 400),
        ({"messages": ASK, "format": {"type": "nonsense"}}, 400), ({"messages": [{**ASK[0], "content": "a b " * 5000}]}, 400),
    ):  # fmt: skip
        status, answer = ask(server, "/api/chat", body)
        assert status == wanted and [*answer] == ["error"] and isinstance(answer["error"], str), answer


def settings(**given: Any) -> Any:
    return serve_settings(replace(Options(), **given))


def test_without_keys_it_is_for_this_machine_alone() -> None:
    assert settings().ollama_port is None
    assert settings(ollama_port=0, host="0.0.0.0", insecure=True).ollama_host == "127.0.0.1"
    assert settings(ollama_port=0, host="0.0.0.0", api_key=("alpha-secret",)).ollama_host == "0.0.0.0"
    assert settings(ollama_port=0, host="::1").ollama_host == "::1"
    with pytest.raises(UsageError, match="--ollama-port 8000"):
        settings(ollama_port=8000)


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"{port}.*--ollama-port"):
            ApiProcess(settings(port=0, ollama_port=port), Path("nowhere"), Path("nowhere"))
