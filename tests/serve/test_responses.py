"""/v1/responses as its clients' code reads it: the order of all events, what a request may say, and what comes back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_surfaces import asked, events_of

from mdi.serve import api_errors
from mdi.serve.api_errors import ApiError
from mdi.serve.responses import RESPONSES, ResponseRequest
from mdi.serve.seals import sealed
from test_harmony import ANALYSIS, CALL, FINAL, NEXT, TOOL, ids_of, prompt_of_conversation, write_texts
from test_thoughts import TEMPLATES

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
AT = '{"at":"Zürich"}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


def whole(folder: Path, written: str, reason: str = "eos", **body: Any) -> dict[str, Any]:
    begins, data = asked(folder, RESPONSES, {"input": "Where?", **body}, written, reason)
    assert [status for status, _ in begins] == [200], data
    return json.loads(data)


def streamed(folder: Path, written: str, reason: str = "eos", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which are counted."""
    _, data = asked(folder, RESPONSES, {"input": "Where?", "stream": True, **body}, written, reason)
    events = events_of(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Their types in order; several deltas that follow each other are one."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(found) if at == 0 or found[at - 1] != kind or not kind.endswith("delta")]


TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
THOUGHT = [kind.replace("output_text", "reasoning_text") for kind in TEXT]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
BEGIN = ["created", "in_progress"]


@pytest.mark.parametrize(
    ("written", "reason", "body", "expected"),
    [
        (f"{FINAL}Yes.<|return|>", "eos", {}, [*BEGIN, *TEXT, "completed"]),
        (f"{ANALYSIS}Hm, so.{NEXT}{FINAL}Yes.<|return|>", "eos", {}, [*BEGIN, *THOUGHT, *TEXT, "completed"]),
        (f"{ANALYSIS}Hm.{NEXT}{CALL}", "eos", {"tools": [LOOK]}, [*BEGIN, *THOUGHT, *CALLED, "completed"]),
        (f"{FINAL}So:{NEXT}{CALL}<|start|>assistant{CALL}", "eos", {"tools": [LOOK]},
         [*BEGIN, *TEXT, *CALLED, *CALLED, "completed"]),
        (f"{FINAL}Ye", "length", {"max_output_tokens": 1}, [*BEGIN, *TEXT, "incomplete"]),
        (f"{ANALYSIS}Hm", "length", {}, [*BEGIN, *THOUGHT, "incomplete"]),
        ("<|return|>", "eos", {}, [*BEGIN, "completed"]),
        (f"{FINAL}Yes", "memory", {}, [*BEGIN, *TEXT[:3], "failed"]),
    ],
)  # fmt: skip
def test_events_come_in_their_order_and_the_last_one_has_all(
    written: str, reason: str, body: dict[str, Any], expected: list[str], folder: Path
) -> None:
    events = streamed(folder, written, reason, **body)
    assert kinds(events) == expected
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if "output_index" in event:
            assert event["output_index"] == len(items)
        if kind == "output_item.added":
            item_id = event["item"]["id"]
            assert event["item"]["status"] == "in_progress" and not event["item"].get("content")
        elif kind.endswith(".delta"):
            texts[item_id] = texts.get(item_id, "") + event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == texts[item_id]
        if "item_id" in event:
            assert event["item_id"] == item_id
        if kind == "output_item.done":
            item = event["item"]
            items.append(item)
            assert item["id"] == item_id
            assert texts[item_id] == (
                item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            )
    last = events[-1]["response"]
    assert last["status"] == expected[-1] and last["output"] == items
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}
    if expected[-1] == "failed":
        assert last["error"]["code"] == "engine_memory" and "nodes" in last["error"]["message"]
        return
    assert last["error"] is None and last["usage"]["output_tokens"] == len(ids_of(written))
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + last["usage"]["output_tokens"]
    assert (last["usage"]["output_tokens_details"]["reasoning_tokens"] > 0) == (ANALYSIS in written)
    assert last["incomplete_details"] == ({"reason": "max_output_tokens"} if reason == "length" else None)

    def told(response: dict[str, Any]) -> list[Any]:
        """What does not differ from one answer to the next."""
        own = ("id", "call_id")
        return [{key: value for key, value in item.items() if key not in own} for item in response["output"]]

    answer = whole(folder, written, reason, **body)
    assert told(answer) == told(last) and answer["usage"]["output_tokens"] == last["usage"]["output_tokens"]


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize(
    ("said", "reason", "expected"),
    [
        ("Hm.</think>\n\nYes.", "eos", {"reasoning": "Hm.", "message": "Yes."}),
        ("Hm.</thi", "length", {"reasoning": "Hm.</thi"}),  # cut in the mark
        ("Hm.", "eos", {"reasoning": "Hm."}),  # never closed
    ],
)
def test_reasoning_in_marks_is_an_item(
    said: str, reason: str, expected: dict[str, str], kind: str, tmp_path: Path
) -> None:
    """Also where the prompt ends with the mark."""
    folder = write_texts(tmp_path / kind, TEMPLATES[kind])
    written = said if kind == "r1" else f"<think>\n{said}"
    for answer in (whole(folder, written, reason), streamed(folder, written, reason)[-1]["response"]):
        assert {item["type"]: item["content"][0]["text"] for item in answer["output"]} == expected


def test_calls_have_ids_that_every_template_takes(folder: Path) -> None:
    first, second = whole(folder, f"{CALL}<|start|>assistant{CALL}", tools=[LOOK])["output"]
    assert first["name"] == second["name"] == "look" and first["arguments"] == AT
    assert first["call_id"] != second["call_id"] and len(first["call_id"]) == 9 and first["call_id"].isalnum()


def test_something_is_sent_while_nothing_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdi.serve.endpoint.SIGN_S", 0.05)
    events = streamed(folder, f"{FINAL}Yes.<|return|>", "eos+0.3")
    assert kinds(events)[:4] == ["created", *["in_progress"] * 3]


SAID = [
    {"role": "user", "content": [{"type": "input_text", "text": "Where"}, {"type": "input_text", "text": "?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"at": 1}'},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "there"}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "There."}]},
    {"type": "message", "role": "user", "content": "Where?"},
]  # fmt: skip


def test_what_was_said_goes_back_to_the_model_in_its_form(folder: Path) -> None:
    """Instructions, and what developers say anywhere, stand in one first message; reasoning comes before its call."""
    said = [{"role": "developer", "content": "Be brief."}, *SAID, {"role": "system", "content": "Be right."}]
    request = ResponseRequest(
        {"input": said, "instructions": "Be kind.", "tools": [LOOK], "reasoning": {"effort": "high"}}
    )
    assert prompt_of_conversation(folder, request.conversation, request.fields) == (
        "<|start|>system<|message|>Reasoning: high<|end|><|start|>developer<|message|>look<|end|>"
        "<|start|>system<|message|>Be kind.\n\nBe brief.\n\nBe right.<|end|><|start|>user<|message|>Where?<|end|>"
        f"<|start|>assistant{ANALYSIS}Look.<|end|>"
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": 1}<|call|>'
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"there"<|end|>'
        f"<|start|>assistant{FINAL}There.<|end|><|start|>user<|message|>Where?<|end|><|start|>assistant"
    )


def test_sealed_reasoning_goes_back_and_no_other(folder: Path) -> None:
    """Clients that keep nothing give back what they cannot read."""
    answer = whole(folder, f"{ANALYSIS}Größe?{NEXT}{CALL}", tools=[LOOK], include=["reasoning.encrypted_content"])
    reasoning, call = answer["output"]
    assert "Größe" not in reasoning["encrypted_content"]
    back = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    turns = ResponseRequest({"input": [*SAID[:1], back, call]}).conversation.turns
    assert turns[-1].reasoning == "Größe?" and turns[-1].calls[0]["id"] == call["call_id"]
    assert "encrypted_content" not in whole(folder, f"{ANALYSIS}Größe?{NEXT}{FINAL}Yes.")["output"][0]
    for other in ("gAAAAAB", "", 7, sealed("a")[:-2], sealed("a").replace("_", "-"), sealed("é").encode().hex()):
        with pytest.raises(ApiError) as caught:
            ResponseRequest({"input": [*SAID[:1], {**back, "encrypted_content": other}]})
        assert (caught.value.status, caught.value.param) == (400, "input[1]")


def test_what_is_not_known_is_left_out_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    api_errors.tell_once.cache_clear()
    tools = [
        {"type": "web_search"},
        LOOK,
        {"type": "namespace", "name": "x", "tools": []},
        {"type": "custom", "name": "y"},
    ]
    items = [
        *SAID,
        {"type": "web_search_call", "id": "ws_1"},
        {"type": "a\nb" + "x" * 10_000},
        {"type": "web_search_call"},
    ]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            request = ResponseRequest({"input": items, "tools": tools})
    assert request.conversation.tools.tools == (TOOL,) and len(request.conversation.turns) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "tools of /v1/responses of these kinds are left out: custom, namespace, web_search",
        f"items of /v1/responses of these kinds are left out: a\\nb{'x' * 37}, web_search_call",
    ]


def test_what_codex_sends_is_read() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    body = {
        "model": "m", "instructions": "Be kind.", "input": SAID, "tools": [{**LOOK, "strict": False, "description": "d"}],
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"effort": "xhigh", "summary": "auto"},
        "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "service_tier": "auto", "client_metadata": {"x": "y"}, "truncation": "disabled", "max_tool_calls": 3,
        "top_logprobs": 0, "user": "u", "safety_identifier": "s", "stream_options": {"include_obfuscation": False},
        "text": {"verbosity": "low", "format": {"type": "json_schema", "strict": True, "name": "n", "schema": schema}},
    }  # fmt: skip
    request = ResponseRequest(body)
    assert request.fields.grammar == {"type": "schema", "schema": schema, "param": "text.format"}
    assert request.fields.is_streamed
    assert request.conversation.values == {"reasoning_effort": "xhigh"}
    for nothing in ({"reasoning": None, "text": None, "previous_response_id": None}, {"text": {"format": None}}):
        assert ResponseRequest({"input": "a", **nothing}).fields.grammar is None


def test_a_call_is_demanded_as_in_chats() -> None:
    def forced(choice: Any) -> tuple[str, ...]:
        go = {"type": "function", "name": "go"}
        return ResponseRequest({"input": "a", "tools": [LOOK, go], "tool_choice": choice}).conversation.tools.forced

    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go"}]}
    assert [forced(one) for one in ("auto", "required", {"type": "function", "name": "go"}, allowed)] == [
        (), ("look", "go"), ("go",), ("go",),
    ]  # fmt: skip


def refused(call: Callable[[], Any]) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == 400
    return caught.value.param, str(caught.value)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": []}, "input"), ({"input": {}}, "input"), ({"input": [1]}, "input[0]"),
        ({"input": [*SAID[:1]] * 4097}, "input"), ({"input": [{"type": "compaction"}]}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0]"), ({"input": [{"role": ["user"]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": {}, "call_id": "c"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": {"a": 1}}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"), ({"prompt": {"id": "p"}}, "prompt"), ({"instructions": ["a"]}, "instructions"),
        ({"tools": {}}, "tools"), ({"tools": 5}, "tools"), ({"tools": [1]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [LOOK] * 129}, "tools"), ({"tools": [{**LOOK, "parameters": 1}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [1]}}, "tools"), ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"), ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": "a"}, "text"), ({"reasoning": {"effort": "much"}}, "reasoning.effort"), ({"temperature": 3}, "temperature"),
        ({"max_output_token": 3}, "max_output_token"), ({"include": [1]}, "include"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    found, message = refused(lambda: ResponseRequest({"input": "Where?", **body} if body else body))
    assert found == param and message.startswith(param)


def test_nothing_that_was_kept_can_be_asked_for() -> None:
    told = refused(lambda: ResponseRequest({"input": "a", "previous_response_id": "resp_1"}))[1]
    assert "keeps no responses" in told and "whole conversation" in told


def test_errors_before_a_stream_are_openais(folder: Path) -> None:
    begins, data = asked(folder, RESPONSES, {"input": [], "stream": True}, FINAL, "eos")
    error = json.loads(data)["error"]
    assert begins[0][0] == 400 and (error["param"], error["code"]) == ("input", "invalid_value")


@pytest.mark.parametrize("n", [900, 3000], ids=["in tokens", "in characters"])
def test_a_stream_tells_of_a_prompt_that_is_too_long(folder: Path, n: int) -> None:
    """Codex makes its chat shorter after this event, and not after the same error with a status."""
    long = "x" * n
    events = streamed(folder, FINAL, input=long)
    assert kinds(events) == [*BEGIN, "failed"]
    told = events[-1]["response"]
    assert (told["status"], told["output"], told["error"]["code"]) == ("failed", [], "context_length_exceeded")
    begins, data = asked(folder, RESPONSES, {"input": long}, FINAL, "eos")
    error = json.loads(data)["error"]
    assert begins[0][0] == 400 and (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert told["error"]["message"] == error["message"]


def test_reasoning_words_and_calls_that_follow_each_other_are_one_turn() -> None:
    message, again = ({"type": "message", "role": "assistant", "content": text} for text in ("I look.", "And?"))
    turns = ResponseRequest({"input": [SAID[1], message, SAID[2], SAID[2], again, SAID[1], SAID[1]]}).conversation.turns
    assert [(turn.reasoning, turn.content, len(turn.calls)) for turn in turns] == [
        ("Look.", "I look.", 2), ("", "And?", 0), ("Look.", "", 0), ("Look.", "", 0),
    ]  # fmt: skip
