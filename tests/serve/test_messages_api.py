"""/v1/messages as its clients' code reads it: the order of all events, what a request may say, and what comes back."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from test_api_paths import KEYS, Asked
from test_surfaces import asked, events_of

from mdi.serve import api_errors
from mdi.serve.api_errors import ApiError
from mdi.serve.messages import MESSAGES, TOKEN_COUNTS, MessageRequest, error_of
from mdi.serve.seals import signature_of
from test_harmony import ANALYSIS, CALL, FINAL, NEXT, TOOL, USER, ids_of, prompt_of_conversation, write_texts

LOOK = {"name": "look", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {"max_tokens": 50, "messages": [USER]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


def whole(folder: Path, written: str, reason: str = "eos", **body: Any) -> dict[str, Any]:
    begins, data = asked(folder, MESSAGES, {**BODY, **body}, written, reason)
    assert [status for status, _ in begins] == [200], data
    return json.loads(data)


def streamed(folder: Path, written: str, reason: str = "eos", **body: Any) -> list[dict[str, Any]]:
    return events_of(asked(folder, MESSAGES, {**BODY, "stream": True, **body}, written, reason)[1])


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """What comes in order; several deltas of one kind that follow each other are one."""
    found = []
    for event in events:
        kind = event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"]
        if kind == "content_block_start":
            kind = event["content_block"]["type"]
        if not (found and found[-1] == kind and kind.endswith("delta")):
            found.append(kind)
    return found


TEXT = ["text", "text_delta", "content_block_stop"]
THOUGHT = ["thinking", "thinking_delta", "signature_delta", "content_block_stop"]
CALLED = ["tool_use", "input_json_delta", "content_block_stop"]
END = ["message_delta", "message_stop"]
TOOLS = {"tools": [LOOK]}


@pytest.mark.parametrize(
    ("written", "reason", "body", "expected", "stop_reason"),
    [
        (f"{FINAL}Yes.<|return|>", "eos", {}, [*TEXT, *END], "end_turn"),
        (f"{ANALYSIS}Hm, so.{NEXT}{FINAL}Yes.<|return|>", "eos", {}, [*THOUGHT, *TEXT, *END], "end_turn"),
        (f"{ANALYSIS}Hm.{NEXT}{CALL}", "eos", TOOLS, [*THOUGHT, *CALLED, *END], "tool_use"),
        (f"{FINAL}So:{NEXT}{CALL}<|start|>assistant{CALL}", "eos", TOOLS, [*TEXT, *CALLED, *CALLED, *END], "tool_use"),
        (f"{FINAL}Yes", "length", {"max_tokens": len(ids_of(f"{FINAL}Yes"))}, [*TEXT, *END], "max_tokens"),
        (f"{ANALYSIS}Hm", "length", {"max_tokens": 10_000}, [*THOUGHT, *END], "model_context_window_exceeded"),
        (f"{FINAL}One, two", "eos", {"stop_sequences": ["x", ", "]}, [*TEXT, *END], "stop_sequence"),
        ("<|return|>", "eos", {}, END, "end_turn"),
        (f"{FINAL}Yes", "memory", {}, [*TEXT[:2], "error"], ""),
    ],
)  # fmt: skip
def test_events_come_in_their_order_and_make_the_whole_answer(
    written: str, reason: str, body: dict[str, Any], expected: list[str], stop_reason: str, folder: Path
) -> None:
    first, *events = streamed(folder, written, reason, **body)
    message = first["message"]
    assert first["type"] == "message_start" and message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["input_tokens"] > 10 and message["usage"]["output_tokens"] == 0
    assert kinds(events) == expected
    if not stop_reason:
        assert events[-1]["error"] == {"type": "api_error", "message": "the nodes could not go on with this text"}
        return
    for event in events[:-2]:  # as the clients do it
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = (block["input"] or "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        else:
            assert event["index"] == len(message["content"]) - 1
            block = message["content"][event["index"]]
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"])
    message |= events[-2]["delta"]
    message["usage"] = events[-2]["usage"]
    assert message["stop_reason"] == stop_reason
    assert message["stop_sequence"] == (", " if stop_reason == "stop_sequence" else None)
    answer = whole(folder, written, reason, **body)
    for one in (message, answer):
        assert one.pop("id").startswith("msg_")
        one["usage"].pop("pace")
        for block in one["content"]:
            assert block.get("id") is None or (len(block["id"]) == 9 and block.pop("id").isalnum())
    assert message == answer


def test_a_call_has_an_object(folder: Path) -> None:
    """What is no JSON is refused by whom it is for."""
    assert whole(folder, CALL, **TOOLS)["content"][0]["input"] == {"at": "Zürich"}
    wrong = CALL.replace('{"at":"Zürich"}', "[1")
    assert whole(folder, wrong, **TOOLS)["content"][0]["input"] == {"arguments": "[1"}


def test_pings_come_while_nothing_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.serve.endpoint.SIGN_S", 0.05)
    events = streamed(folder, f"{FINAL}Yes.<|return|>", "eos+0.3")
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "ping"]


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature_of(text)}


SAID: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "is it?", "cache_control": {}}]},
    {"role": "user", "content": "Tell me."},
    {"role": "assistant", "content": [
        thought("Look."), {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": 1}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "there"}], "is_error": False},
        {"type": "text", "text": "Now?"},
    ]},
    {"role": "assistant", "content": [{"type": "text", "text": "The"}, {"type": "text", "text": "re."}]},
    {"role": "system", "content": "Be right."},
    {"role": "user", "content": "Where?"},
]  # fmt: skip
BILLING = "x-anthropic-billing-header: cc_version=2; cch=1;"


def test_what_was_said_goes_back_to_the_model_in_its_form(folder: Path) -> None:
    system = [
        {"type": "text", "text": BILLING},
        {"type": "text", "text": "Be kind."},
        {"type": "text", "text": "Be brief."},
    ]
    request = MessageRequest({**BODY, "messages": SAID, "system": system, **TOOLS, "output_config": {"effort": "high"}})
    assert prompt_of_conversation(folder, request.conversation, request.fields) == (
        "<|start|>system<|message|>Reasoning: high<|end|><|start|>developer<|message|>look<|end|>"
        "<|start|>system<|message|>Be kind.\n\nBe brief.\n\nBe right.<|end|>"
        "<|start|>user<|message|>Where\n\nis it?\n\nTell me.<|end|>"
        f"<|start|>assistant{ANALYSIS}Look.<|end|>"
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": 1}<|call|>'
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"there"<|end|>'
        "<|start|>user<|message|>Now?<|end|>"
        f"<|start|>assistant{FINAL}There.<|end|><|start|>user<|message|>Where?<|end|><|start|>assistant"
    )


def test_an_answer_goes_back_as_it_came(folder: Path) -> None:
    content = whole(folder, f"{ANALYSIS}Größe?{NEXT}{CALL}", **TOOLS)["content"]
    (_, turn) = MessageRequest(
        {**BODY, "messages": [USER, {"role": "assistant", "content": content}]}
    ).conversation.turns
    assert turn.reasoning == "Größe?" and turn.content is None
    assert json.loads(turn.calls[0]["function"]["arguments"]) == {"at": "Zürich"}
    assert turn.calls[0]["id"] == content[1]["id"]
    for change in ({"signature": "ErUB"}, {"signature": None}, {"thinking": "Grösse?"}, {"signature": ""}):
        other = [{**content[0], **change}, content[1]]
        with pytest.raises(ApiError, match="signature") as caught:
            MessageRequest({**BODY, "messages": [USER, {"role": "assistant", "content": other}]})
        assert (caught.value.status, caught.value.param) == (400, "messages[1]")


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ([{"type": "text", "text": BILLING}], ""),
        ([{"type": "text", "text": f"See: {BILLING}"}], f"See: {BILLING}"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": BILLING}], f"a\n\n{BILLING}"),
        (BILLING, BILLING), ("a", "a"), ([], ""), (None, ""),
    ],
)  # fmt: skip
def test_only_a_first_block_that_changes_with_each_request_is_left_out(system: Any, said: str) -> None:
    turns = MessageRequest(
        {**BODY, "system": system, "messages": [{"role": "user", "content": BILLING}]}
    ).conversation.turns
    assert [turn.content for turn in turns] == ([said] if said else []) + [BILLING]


def test_parts_of_results_that_are_no_texts_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A search for tools answers with their names, which the client's next request has among its tools."""
    api_errors.tell_once.cache_clear()
    parts = [{"type": "tool_reference", "tool_name": "look"}, {"type": "text", "text": "there"}]
    for content, told in ((parts, "there"), (parts[:1], "")):
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": content}
        said = [*SAID[:3], {"role": "user", "content": [result]}]
        with caplog.at_level(logging.WARNING):
            *_, turn = MessageRequest({**BODY, "messages": said}).conversation.turns
        assert (turn.role, turn.content) == ("tool", told)
    assert [one.message for one in caplog.records] == [
        "blocks of /v1/messages of these kinds are left out: tool_reference"
    ]


def test_what_claude_code_sends_is_read(caplog: pytest.LogCaptureFixture) -> None:
    api_errors.tell_once.cache_clear()
    tools = [
        {**LOOK, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True, "description": "d"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, {"type": "custom", "name": "go"},
    ]  # fmt: skip
    content = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "There."}]
    body = {
        "model": "claude-opus-5", "max_tokens": 32000, "stream": True,
        "messages": [USER, {"role": "assistant", "content": content}],
        "metadata": {"user_id": "u"}, "temperature": 1, "tools": tools, "tool_choice": {"type": "auto"}, "betas": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 31999}, "context_management": {"edits": []}, "service_tier": "auto",
        "output_config": {"effort": "medium"}, "container": None, "mcp_servers": [], "inference_geo": "eu", "top_k": 5,
        "cache_control": {"type": "ephemeral"}, "speed": "fast", "diagnostics": {}, "stop_sequences": None,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        request, _ = MessageRequest(body), MessageRequest(body)
    assert request.conversation.values == {"enable_thinking": True, "reasoning_effort": "medium"}
    assert [tool["function"]["name"] for tool in request.conversation.tools.tools] == ["look", "go"]
    assert request.conversation.tools.tools[0] == {**TOOL, "function": {**TOOL["function"], "description": "d"}}
    assert [record.getMessage() for record in caplog.records] == [
        "tools of /v1/messages of these kinds are left out: web_search_20250305",
        "blocks of /v1/messages of these kinds are left out: redacted_thinking",
    ]


def test_it_thinks_if_it_is_asked_to() -> None:
    def thinks(**body: Any) -> bool:
        return bool(MessageRequest({**BODY, **body}).conversation.values["enable_thinking"])

    assert [thinks(thinking={"type": kind}) for kind in ("enabled", "adaptive", "disabled")] == [True, True, False]
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert not thinks() and not thinks(thinking={"type": "enabled"}, output_config=schema)
    assert MessageRequest({**BODY, "output_config": schema}).fields.grammar is not None


def test_a_call_is_demanded_as_in_chats() -> None:
    def forced(choice: Any) -> tuple[str, ...]:
        return MessageRequest(
            {**BODY, "tools": [LOOK, {"name": "go"}], "tool_choice": choice}
        ).conversation.tools.forced

    asked = ({"type": "auto", "disable_parallel_tool_use": True}, {"type": "any"}, {"type": "tool", "name": "go"}, None)
    assert [forced(one) for one in asked] == [(), ("look", "go"), ("go",), ()]
    none = MessageRequest({**BODY, **TOOLS, "tool_choice": {"type": "none"}}).conversation.tools
    assert none.tools == ()


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"messages": None}, "messages"),
        ({"messages": []}, "messages"), ({"messages": [USER] * 4097}, "messages"), ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"), ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0]"), (said(), "messages"), (said(1), "messages[0]"),
        (said({"type": "text"}), "messages[0]"), (said({"type": "text", "text": "\ud800"}), "messages[0]"),
        (said({"type": ["text"], "text": "a"}), "messages[0]"), (said({"type": "image", "source": {}}), "messages[0]"),
        (said({"type": "document", "source": {}}), "messages[0]"), (said(thought("a")), "messages[0]"),
        (said({"type": "tool_use", "id": "a", "name": "b", "input": {}}), "messages[0]"),
        (said({"type": "tool_use", "id": "a", "name": "b", "input": "{}"}, role="assistant"), "messages[0]"),
        (said({"type": "tool_use", "name": "b", "input": {}}, role="assistant"), "messages[0]"),
        (said({"type": "tool_result", "tool_use_id": "a"}, role="assistant"), "messages[0]"),
        (said({"type": "tool_result", "content": "a"}), "messages[0]"),
        (said({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}), "messages[0]"),
        (said({"type": "redacted_thinking"}), "messages"),
        ({"system": 1}, "system"), ({"system": [{"type": "image"}]}, "system"),
        ({"tools": {}}, "tools"), ({"tools": 5}, "tools"), ({"tools": [1]}, "tools"), ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [LOOK] * 129}, "tools"),
        ({"tools": [{**LOOK, "input_schema": 1}]}, "tools[0].input_schema"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "tool", "name": "go"}}, "tool_choice"),
        ({"tool_choice": {"type": ["a"]}}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"), ({"stop_sequences": "a"}, "stop_sequences"), 
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"), ({"stop_sequences": ["a" * 4097]}, "stop_sequences"),
        ({"thinking": 1}, "thinking"), ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"), ({"max_token": 5}, "max_token"),
        ({"stop_sequence": ["a"]}, "stop_sequence"), ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_name(body: dict[str, Any], param: str, folder: Path) -> None:
    with pytest.raises(ApiError) as caught:
        MessageRequest({**BODY, **body})
    assert (caught.value.status, caught.value.param) == (400, param) and str(caught.value).startswith(param)
    assert error_of(caught.value) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": str(caught.value)},
    }


def test_tokens_are_counted_as_they_will_be_read(folder: Path) -> None:
    body = {"messages": SAID, "system": "Be kind.", **TOOLS}
    begins, data = asked(folder, TOKEN_COUNTS, body, FINAL, "eos")
    n_tokens = json.loads(data)["input_tokens"]
    assert begins[0][0] == 200 and json.loads(data) == {"input_tokens": n_tokens}
    assert n_tokens == whole(folder, f"{FINAL}Yes.<|return|>", **body)["usage"]["input_tokens"]


def test_a_prompt_that_is_too_long_is_told_as_agents_know_it(folder: Path) -> None:
    for surface in (MESSAGES, TOKEN_COUNTS):
        begins, data = asked(
            folder, surface, {**BODY, "messages": [{"role": "user", "content": "x" * 3000}]}, FINAL, "eos"
        )
        error = json.loads(data)["error"]
        assert begins[0][0] == 400 and error["type"] == "invalid_request_error"
        assert error["message"].startswith("prompt is too long: messages: it has")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_before_the_body_is_read_have_the_same_form(path: str) -> None:
    for answer, status, kind in (
        (Asked("POST", path, KEYS), 401, "authentication_error"),
        (Asked("POST", path, origin="http://evil.example"), 403, "permission_error"),
        (Asked("DELETE", path), 405, "invalid_request_error"),
        (Asked("POST", path, content_type="text/plain"), 415, "invalid_request_error"),
    ):
        assert answer.status == status and answer.json["type"] == "error" and answer.json["error"]["type"] == kind
        assert answer.json["error"]["message"]
    assert Asked("POST", path, KEYS, x_api_key="alpha-secret", anthropic_version="2023-06-01").was_read
    assert error_of(ApiError(503, "loading"))["error"]["type"] == "overloaded_error"
    assert error_of(ApiError(429, "full"))["error"]["type"] == "rate_limit_error"


def test_results_and_words_stay_in_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "there"}
    words = [{"type": "text", "text": text} for text in ("First.", "Then.", "Last.")]
    made = MessageRequest(
        {**BODY, "messages": [*SAID[:3], {"role": "user", "content": [words[0], result, *words[1:]]}]}
    )
    assert [(turn.role, turn.content) for turn in made.conversation.turns[2:]] == [
        ("user", "First."), ("tool", "there"), ("user", "Then.\n\nLast."),
    ]  # fmt: skip
