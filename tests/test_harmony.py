"""Answers in channels: apart into reasoning, calls and text, whole models that give them, and chats that go back to them."""

from __future__ import annotations

import asyncio
import functools
import io
import json
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from answer_streams import apart, taken_apart
from mdi.checkpoint.hfconfig import derive_config
from mdi.checkpoint.shapes import model_shapes
from mdi.cli import launch
from mdi.kernels import library
from mdi.serve.chat import CHATS, Chat
from mdi.serve.conversation import Conversation
from mdi.serve.engine_client import TextEvent
from mdi.serve.models import LoadedModel
from mdi.serve.quotas import Quotas
from mdi.serve.request import CommonFields
from mdi.text.answers.events import Call, CallBegun, CallPiece, Event, Mark, Text
from mdi.text.answers.forms import WORDS, Form, form_of
from mdi.text.answers.harmony import Channels
from mdi.text.answers.stream import AnswerStream, InlineStream
from mdi.text.answers.think import content
from mdi.text.texts import TextCodec

MARKS = ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"Zürich"}<|call|>'
LOOK = Call("look", '{"at":"Zürich"}')
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
# In the form that the models were trained with, with what the tests need of it.
TEMPLATE = """\
{%- set reasoning_effort = reasoning_effort or 'medium' %}
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}
{%- if tools %}{% set tool = tools[0].function %}
  {{- '<|start|>developer<|message|>' + tool.description + tool.name + '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
  {%- if 'thinking' in message and '<|channel|>' in message.thinking %}{{ raise_exception('no marks') }}{% endif %}
  {%- if message.thinking and 'tool_calls' in message %}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
  {%- if 'tool_calls' in message %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments|tojson + '<|call|>' }}
  {%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- elif message.role == 'tool' %}{{ '<|start|>functions.look to=assistant<|channel|>commentary<|message|>' }}
  {{- message.content|tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@functools.cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["analysis commentary final functions assistant " * 4], trainer)
    return made


def write_texts(folder: Path, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.from_checkpoint(write_texts(tmp_path / "texts"), prompt_style="none")


def harmony(codec: TextCodec) -> Form:
    return form_of(TEMPLATE, codec.special_marks.values())


def stream_of(codec: TextCodec, *stop: str) -> AnswerStream:
    return AnswerStream(codec, harmony(codec), stop, [TOOL])


def ids_of(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


ANSWERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "reasoning and text": (f"{ANALYSIS}Größe?{NEXT}{FINAL}Ja: 3 < 4 to=5.<|return|>", "Ja: 3 < 4 to=5.", "Größe?", []),
    "text alone": (f"{FINAL}Ja.<|return|>", "Ja.", "", []),
    "a call": (f"{ANALYSIS}Look.{NEXT}{CALL}", "", "Look.", [LOOK]),
    "a call whose recipient comes first": (
        f"{ANALYSIS}Look.{NEXT} to=functions.look<|channel|>commentary json<|message|>{LOOK[1]}<|call|>", "", "Look.", [LOOK],
    ),
    "a call in the other channel": (CALL.replace("commentary", "analysis"), "", "", [LOOK]),
    "words before a call": (f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}", "I look.", "", [LOOK]),
    "a tool that is none of the user's": (
        f"<|channel|>analysis to=python code<|message|>1+1{NEXT}{FINAL}2<|return|>", "2", "1+1", [],
    ),
    "several of each": (
        f"{ANALYSIS}A{NEXT}{ANALYSIS}B{NEXT}{FINAL}C{NEXT}{FINAL}D<|return|>", "C\n\nD", "A\n\nB", [],
    ),
    "no mark between messages": (f"{ANALYSIS}A{FINAL}B<|return|>", "B", "A", []),
    "cut off": (f"{ANALYSIS}A{NEXT}{FINAL}Jaw", "Jaw", "A", []),
    "cut off in a header": (f"{ANALYSIS}A{NEXT}<|channel|>fin", "", "A", []),
    "nothing": ("<|return|>", "", "", []),
    "no channels": ("Ja, to=functions.look.", "Ja, to=functions.look.", "", []),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_comes_apart_however_it_comes(case: str, codec: TextCodec) -> None:
    written, *expected = ANSWERS[case]
    ids = ids_of(written)
    for size in (1, 2, 7, len(ids)):
        assert taken_apart(stream_of(codec), ids, size) == expected, size


IN_PIECES = [CallBegun("look"), CallPiece("{"), CallPiece("}"), Call("look", "{}")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [(None, IN_PIECES), ("look", IN_PIECES), ("other", [Text('{"name": "look", "arguments": {}}')])],
)
def test_arguments_come_in_pieces_where_the_tool_may_be_called(name: str | None, expected: list[Event]) -> None:
    tools = None if name is None else [{"type": "function", "function": {"name": name}}]
    parser = Channels(tools, streams_calls=True)
    said = (Mark("<|channel|>"), "commentary to=functions.look", Mark("<|message|>"), "{", "}", Mark("<|call|>"))
    assert [event for piece in said for event in parser.feed(piece)] == expected


def test_a_message_that_ends_within_a_character_ends(codec: TextCodec) -> None:
    ids = [*ids_of(f"{FINAL}a"), ids_of("ü")[0], *ids_of("<|return|>")]
    assert taken_apart(stream_of(codec), ids, 1)[0] == "a\ufffd"


def test_nothing_waits_but_what_may_change(codec: TextCodec) -> None:
    stream = stream_of(codec)
    shown = apart([one for i in ids_of(f"{ANALYSIS}one{NEXT}{FINAL}two") for one in stream.feed([i])])
    assert shown == ["two", "one", []]


def test_a_stop_string_is_one_of_the_text_alone(codec: TextCodec) -> None:
    stream = stream_of(codec, "o")
    assert taken_apart(stream, ids_of(f"{ANALYSIS}no stop{NEXT}{FINAL}a word"), 50) == ["a w", "no stop", []]
    assert stream.is_stopped


def test_on_one_line_it_is_marked_as_others_mark_it(codec: TextCodec) -> None:
    for written, expected in (
        (f"{ANALYSIS}A{NEXT}{FINAL}B<|return|>", "<think>A</think>\n\nB"),
        (
            f"{ANALYSIS}A{NEXT}{CALL}",
            '<think>A</think>\n\n<tool_call>{"name": "look", "arguments": {"at": "Z\\u00fcrich"}}</tool_call>',
        ),
        (f"{ANALYSIS}A", "<think>A</think>\n\n"),
        (f"{FINAL}B", "B"),
    ):
        stream = InlineStream(codec, harmony(codec), ())
        found = "".join(stream.push([i]) for i in ids_of(written)) + stream.flush()
        assert found == expected
        assert content(found, False) == expected.rpartition("</think>\n\n")[2]
    assert content("<think>cut", False) == ""


def test_what_ends_an_answer_is_known_without_being_said(codec: TextCodec, tmp_path: Path) -> None:
    assert {tokenizer().token_to_id(mark) for mark in ("<|return|>", "<|call|>")} == codec.eos_ids
    plain = json.loads((tmp_path / "texts" / "tokenizer.json").read_text())
    plain["added_tokens"] = [one for one in plain["added_tokens"] if one["content"] != "<|channel|>"]
    del plain["model"]["vocab"]["<|channel|>"]
    (tmp_path / "texts" / "tokenizer.json").write_text(json.dumps(plain))
    other = TextCodec.from_checkpoint(tmp_path / "texts", prompt_style="none")
    assert not other.special_marks and harmony(other) is WORDS and other.eos_ids == {0}


def model_of(folder: Path) -> LoadedModel:
    codec = TextCodec.from_checkpoint(folder, prompt_style="none")
    return LoadedModel.of(
        {
            "name": "m",
            "context": 512,
            "n_vocabulary": 320,
            "n_virtual": {},
            "width": 8,
            "pooling": None,
            "no_pooling": "its files do not say how",
            "tokenizer": {**codec.facts(), "directory": str(folder)},
        }
    )


def prompt_of(folder: Path, **body: Any) -> str:
    chat = Chat(body)
    return prompt_of_conversation(folder, chat.conversation, chat.fields)


def prompt_of_conversation(folder: Path, conversation: Conversation, fields: CommonFields) -> str:
    model = model_of(folder)

    async def made() -> list[int]:
        try:
            (ids,) = (await conversation.opened(model, fields)).prompts
            return list(ids)
        finally:
            model.template.close()

    return str(tokenizer().decode(asyncio.run(made()), skip_special_tokens=False))


USER = {"role": "user", "content": "Where?"}
SYSTEM = "<|start|>system<|message|>Reasoning: medium<|end|>"


def test_a_chat_goes_back_to_the_model_in_its_form(tmp_path: Path) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "there"},
        {"role": "assistant", "content": "There.", "reasoning_content": "Said."},
        USER,
    ]
    expected = (
        f"{SYSTEM}<|start|>developer<|message|>look<|end|><|start|>user<|message|>Where?<|end|>"
        f"<|start|>assistant{ANALYSIS}Look.<|end|>"
        '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": 1}<|call|>'
        '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"there"<|end|>'
        f"<|start|>assistant{FINAL}There.<|end|><|start|>user<|message|>Where?<|end|><|start|>assistant"
    )
    folder = write_texts(tmp_path / "texts")
    assert prompt_of(folder, messages=messages, tools=[TOOL]) == expected


def _call(number: int, name: str = "look") -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": f'{{"at": {number}}}'}}


def _result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"there {number}"}


def _called(number: int, name: str = "look") -> str:
    return f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"at": {number}}}<|call|>'


def _there(number: int) -> str:
    return f'<|start|>functions.look to=assistant<|channel|>commentary<|message|>"there {number}"<|end|>'


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_several_calls_of_a_message_each_stand_before_their_result(order: tuple[int, ...], tmp_path: Path) -> None:
    """The template writes the first call of a message alone."""
    calls = [_call(1), _call(2, "other"), _call(3)]
    message = {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": calls}
    messages = [USER, message, *map(_result, order), {"role": "assistant", "content": "There."}, USER]
    assert prompt_of(write_texts(tmp_path / "texts"), messages=messages) == (
        f"{SYSTEM}<|start|>user<|message|>Where?<|end|><|start|>assistant{ANALYSIS}Look.<|end|>"
        f"{_called(1)}{_there(1)}{_called(2, 'other')}{_there(2)}{_called(3)}{_there(3)}"
        f"<|start|>assistant{FINAL}There.<|end|><|start|>user<|message|>Where?<|end|><|start|>assistant"
    )


def test_messages_with_several_calls_may_follow_each_other(tmp_path: Path) -> None:
    first, second = ({"role": "assistant", "content": "", "tool_calls": [_call(n), _call(n + 1)]} for n in (1, 3))
    messages = [USER, first, _result(1), _result(2), second, _result(3), _result(4)]
    prompt = prompt_of(write_texts(tmp_path / "texts"), messages=messages)
    assert prompt.endswith("".join(f"{_called(n)}{_there(n)}" for n in (1, 2, 3, 4)) + "<|start|>assistant")


def test_results_without_a_call_of_their_own_are_kept(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [_call(1), _call(2)]}
    prompt = prompt_of(write_texts(tmp_path / "texts"), messages=[USER, message, _result(1), _result(4)])
    assert prompt.endswith(f"{_called(1)}{_there(1)}{_called(2)}{_there(4)}<|start|>assistant")


@pytest.mark.parametrize(
    "empty", [{"tool_calls": None}, {"tool_calls": []}, {"reasoning_content": None, "thinking": None}]
)
def test_empty_fields_that_clients_send_back_are_none(empty: dict[str, Any], tmp_path: Path) -> None:
    """The template asks whether a field is there."""
    said = {"role": "assistant", "content": "There.", "refusal": None, **empty}
    assert f"<|start|>assistant{FINAL}There.<|end|>" in prompt_of(
        write_texts(tmp_path / "texts"), messages=[USER, said, USER]
    )


def test_reasoning_that_the_form_has_no_place_for_is_left_out(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": "not JSON"}}
    message = {"role": "assistant", "content": "I look.", "reasoning_content": "Look.", "tool_calls": [call]}
    prompt = prompt_of(write_texts(tmp_path / "texts"), messages=[USER, message, USER])
    assert "Look." not in prompt and '<|message|>"not JSON"<|call|>' in prompt


def test_effort_is_said_and_a_demanded_form_begins_behind_the_reasoning(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    assert "Reasoning: high" in prompt_of(folder, messages=[USER], reasoning_effort="high")
    asked = {"messages": [USER], "response_format": {"type": "json_object"}}
    assert prompt_of(folder, **asked).endswith(f"<|start|>assistant{FINAL}")
    choice, _ = answered(folder, f"{{}}{ANALYSIS}", "eos", **asked)
    assert choice["message"]["content"] == "{}analysis"
    other = write_texts(tmp_path / "other", "{{ messages[0].content }}")
    assert prompt_of(other, messages=[USER], response_format={"type": "json_object"}) == "Where?"


def engine_that_says(written: str, reason: str) -> Any:
    """The engine of a server, as far as it writes texts: this one, however often it is asked.

    Args:
        reason: how it ends; "eos+0.3" begins to write after 0.3 s.
    """
    reason, _, wait_s = reason.partition("+")

    class Texts:
        has_next = False

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __aiter__(self) -> Any:
            return self._inner

        def cancel(self, index: int) -> None: ...

    @contextmanager
    def generate(requests: Any) -> Any:
        async def texts() -> Any:
            ids = ids_of(written)
            await asyncio.sleep(float(wait_s or 0))
            for i in ids[:-1]:
                yield 0, TextEvent([i], None, None, 0)
            yield 0, TextEvent(ids[-1:], reason, None, 0)

        yield Texts(texts())

    return SimpleNamespace(generate=generate)


def answered(folder: Path, written: str, reason: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer of the server, and the pieces of a stream, if the engine gives these tokens."""
    model = model_of(folder)
    sent: list[bytes] = []

    async def push(data: bytes, is_followed: bool) -> None:
        sent.append(data)

    async def end(data: bytes) -> None: ...

    answers: list[dict[str, Any]] = []

    async def answer(found: dict[str, Any]) -> None:
        answers.append(found)

    api = SimpleNamespace(engine=engine_that_says(written, reason), observe=[], quotas=Quotas(()))
    exchange = SimpleNamespace(key=None, push=push, end=end, answer=answer, kept_alive=nullcontext)

    async def both() -> None:
        try:
            for stream in (False, True):
                chat = Chat({"messages": [USER], "stream": stream, **body})
                await CHATS.answer(chat, cast(Any, api), model, cast(Any, exchange))
        finally:
            model.template.close()

    asyncio.run(both())
    events = [event for event in b"".join(sent).split(b"\n\n") if event]
    return answers[0]["choices"][0], [json.loads(event[6:])["choices"][0] for event in events]


def test_the_server_says_reasoning_and_calls_beside_the_text(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    choice, pieces = answered(folder, f"{ANALYSIS}Hm, so.{NEXT}{FINAL}Yes.<|return|>", "eos")
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "Hm, so.",
    }
    deltas = [piece["delta"] for piece in pieces]
    assert "".join(d.get("content", "") for d in deltas) == "Yes." and pieces[-1]["finish_reason"] == "stop"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm, so."
    assert sum("reasoning_content" in d for d in deltas) > 2, "it comes as it is written"

    choice, pieces = answered(folder, f"{ANALYSIS}Hm.{NEXT}{CALL}", "eos", tools=[TOOL])
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == {"at": "Zürich"}
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Hm."
    begun, *more = [one for piece in pieces for one in piece["delta"].get("tool_calls", [])]
    assert (begun["index"], begun["function"]) == (0, {"name": call["function"]["name"], "arguments": ""})
    assert "".join(one["function"]["arguments"] for one in more) == call["function"]["arguments"]
    assert more and all(one.keys() == {"index", "function"} and one["index"] == 0 for one in more)
    assert pieces[-1]["finish_reason"] == "tool_calls"


def test_calls_that_are_cut_off_or_of_nobody_are_none(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    choice, _ = answered(folder, CALL.removesuffix('"}<|call|>'), "length", tools=[TOOL])
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    for more in ({}, {"tools": [{"type": "function", "function": {"name": "other"}}]}):
        choice, _ = answered(folder, CALL, "eos", **more)
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"]) == {"name": "look", "arguments": {"at": "Zürich"}}


CONTEXT = 320


def write_model(folder: Path, script: list[int], begin: int) -> Path:
    """A model that says a script from a position on, whatever was said before: each position's embedding is one token's."""
    sizes = {"n_embd": CONTEXT, "n_layer": 1, "n_head": 4, "n_positions": CONTEXT, "vocab_size": 320, "n_inner": 16}
    config = derive_config({"model_type": "gpt2", **sizes}, "script", Path("config.json"))
    state = {name: np.zeros(shape, dtype=np.float32) for name, shape in model_shapes(config, "").items()}
    state["transformer.wpe.weight"] = 10 * np.eye(CONTEXT, dtype=np.float32)
    state["transformer.ln_f.weight"] += 1
    for at, token in enumerate(script):
        state["lm_head.weight"][token, begin - 1 + at] = 1
    save_file(state, write_texts(folder) / "lit_model.safetensors")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config.plain()))
    return folder


@pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
def test_a_chat_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ids_of(f"{SYSTEM}<|start|>user<|message|>Where?<|end|><|start|>assistant")
    script = ids_of(f"{ANALYSIS}Hm.{NEXT}{FINAL}There.<|return|>not this")
    folder = write_model(tmp_path / "script", script, len(prompt))
    monkeypatch.setattr("sys.stdin", io.StringIO("Where?\nAnd now?\n"))
    histories, encode_chat = [], TextCodec.encode_chat

    def kept(self: TextCodec, history: Any, question: str, system: str) -> list[int]:
        histories.append(list(history))
        return encode_chat(self, history, question)

    monkeypatch.setattr(TextCodec, "encode_chat", kept)
    flags = ["--ckpt", str(folder), "--device", "cpu", "--temperature", "0", "--n-tokens", "60"]
    assert launch("chat", flags) == 0
    assert "Model: <think>Hm.</think>\n\nThere.\n" in capsys.readouterr().out
    assert histories == [[], [("Where?", "There.")]]
