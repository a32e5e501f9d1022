"""Calls of tools in what a model writes: found behind words, reasoning and each other, however the text comes in pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

import test_harmony
from answer_streams import apart
from mdi.serve.api_errors import ApiError
from mdi.text.answers.calls import Calls
from mdi.text.answers.events import Call, Text
from mdi.text.answers.forms import form_of
from mdi.text.answers.stream import AnswerStream
from mdi.text.texts import TextCodec

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "go.to")]
TOOLS.append({"type": "function", "function": {"name": "stop"}})
PARIS, ROME = {"city": "Paris"}, {"city": "Rome } </tool_call> \\", "days": 2}


def written(name: str, arguments: Any, word: str = "arguments") -> str:
    return json.dumps({"name": name, word: arguments})


def hermes(name: str = "look", arguments: Any = PARIS) -> str:
    return f"<tool_call>\n{written(name, arguments)}\n</tool_call>"


def coder(name: str, *parameters: str) -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def taken_apart(text: str, size: int, is_cut: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """The words and the calls of an answer that comes `size` characters at a time."""
    parser = Calls(TOOLS)
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    words, _, calls = apart([*events, *parser.close(is_cut)])
    return words, [(call.name, json.loads(call.arguments)) for call in calls]


LOOK = ("look", PARIS)
BOTH = [LOOK, ("go.to", ROME)]
ANSWERS: dict[str, tuple[str, str, list[Any]]] = {
    "hermes": (hermes(), "", [LOOK]),
    "without its end": (hermes().removesuffix("</tool_call>"), "", [LOOK]),
    "another mark": (f"<function_call>{written('look', PARIS)}</function_call>", "", [LOOK]),
    "behind words": (f"Let me look.\n{hermes()}", "Let me look.", [LOOK]),
    "behind reasoning": (f"<think>\nI <tool_call>\n</think>\n\n{hermes()}", "<think>\nI <tool_call>\n</think>", [LOOK]),
    "behind both": (f"<think>\nHm.</think>\n\nSo: {hermes()}\n", "<think>\nHm.</think>\n\nSo:", [LOOK]),
    "several": (f"{hermes()}\n{hermes('go.to', ROME)}", "", BOTH),
    "words behind it": (f"So: {hermes()}\nDone.\n", "So:\nDone.\n", [LOOK]),
    "between words": (f"a\n{hermes()} b\n\n{hermes('go.to', ROME)}\nc", "a b\nc", BOTH),
    "a list": (f"<tool_call>[{written('look', PARIS)}, {written('go.to', ROME)}]</tool_call>", "", BOTH),
    "arguments as a text": (hermes("look", json.dumps(PARIS)), "", [LOOK]),
    "without arguments": ('<tool_call>{"name": "stop"}</tool_call>', "", [("stop", {})]),
    "mistral's list": (f"[TOOL_CALLS][{written('look', PARIS)}, {written('go.to', ROME)}]", "", BOTH),
    "mistral's names": (
        f"Well, [TOOL_CALLS]look[ARGS]{json.dumps(PARIS)}[TOOL_CALLS]go.to[ARGS]{json.dumps(ROME)}", "Well,", BOTH,
    ),
    "mistral's ids": (f"[TOOL_CALLS]look[CALL_ID]abc123DEF[ARGS]{json.dumps(PARIS)}", "", [LOOK]),
    "a name and JSON": (f"[TOOL_CALLS]look{json.dumps(PARIS)}[TOOL_CALLS]go.to{json.dumps(ROME)}", "", BOTH),
    "llama": (written("look", PARIS, "parameters"), "", [LOOK]),
    "llama's two": (f"{written('look', PARIS, 'parameters')}; {written('go.to', ROME, 'parameters')}", "", BOTH),
    "llama's two without a blank": (f"{written('look', PARIS)};{written('go.to', ROME)}", "", BOTH),
    "words at a comma": (f"{hermes()},x", ",x", [LOOK]),
    "llama's mark": (f"I will.\n<|python_tag|>{written('look', PARIS, 'parameters')}", "I will.", [LOOK]),
    "a list alone": (f" [{written('look', PARIS)}]", "", [LOOK]),
    "JSON behind reasoning": (f"<think>a</think>\n{written('look', PARIS)}", "<think>a</think>", [LOOK]),
    "qwen 3 coder": (coder("look", parameter("city", "Paris")), "", [LOOK]),
    "its types": (
        f"I go.\n{coder('look', parameter('city', '12'), parameter('days', '12'))}\n{coder('stop')}", "I go.",
        [("look", {"city": "12", "days": 12}), ("stop", {})],
    ),
    "marks in its value": (
        coder("look", parameter("city", "\n<parameter=x>a</parameter>\n<b>"), parameter("days", "x")), "",
        [("look", {"city": "\n<parameter=x>a</parameter>\n<b>", "days": "x"})],
    ),
    "without its last end": (coder("look", parameter("city", "Paris")).removesuffix("\n</tool_call>"), "", [LOOK]),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_calls_are_found_wherever_they_stand(case: str) -> None:
    text, *expected = ANSWERS[case]
    for size in (1, 2, 3, 7, len(text)):
        assert taken_apart(text, size) == tuple(expected), size


def test_an_answer_may_begin_within_reasoning(tmp_path: Path) -> None:
    codec = TextCodec.from_checkpoint(test_harmony.write_texts(tmp_path), prompt_style="none")
    said = f"I could {hermes()}"
    call = Call("look", json.dumps(PARIS))
    for end, expected in ((f"\n</think>\n\nSo: {hermes()}", ["So:", said, [call]]), ("\n</think>", ["", said, []])):
        ids = test_harmony.ids_of(said + end)
        for size in (1, 3, 500):
            stream = AnswerStream(codec, form_of("<think>", ()), (), TOOLS, begins_in_reasoning=True)
            assert test_harmony.taken_apart(stream, ids, size) == expected


PLAIN = [
    "", " ", "Look!\n", "[1] is the first", "[1, 2]", '{"city": "Paris"}\n', "{x} and [y]", '{"name": "look"', "<think>never",
    hermes("other"), f"{hermes('other')} b", written("other", {}), '{"name": ["look"], "arguments": {}}',
    "<tool_call>{}</tool_call> x", '{"name": "look", "arguments": 1}', f"{{x}} {written('look', PARIS)}",
    f"So: {written('look', PARIS)}", "<tool_call>look</tool_call>", "<tool_call>" * 500, '<tool_call>{"a": ' * 500,
    "[TOOL_CALLS]none[ARGS]{}", "[TOOL_CALLS]look at this {", "[TOOL_CALLS] ", "[TOOL_", "<|python_tag|>print(1)",
    coder("other"), coder("look", "<parameter=city>Paris"), coder("look", parameter("city", "a"), "x"),
    '<minimax:tool_call><invoke name="look">', "<tool_call>" + " " * 500 + "{", '{"a": "' + '\\"' * 100, "a < b </think> c",
]  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_call_stays_as_it_is(text: str) -> None:
    for size in (1, 3, 10_000):
        assert taken_apart(text, size) == (text, []), size


def test_other_calls_stay_text_beside_those_of_tools() -> None:
    text = f"{hermes('other')}\n{hermes()}"
    assert taken_apart(text, 3) == (hermes("other"), [LOOK])
    both = f"[{written('look', PARIS)}, {written('other', {})}]"
    assert taken_apart(both, 3) == (both, [])


def test_any_text_is_all_there_however_it_comes() -> None:
    pieces = [
        *"{}[];, \n\"\\", "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "look", '{"name": "',
        "<function=look>", "<parameter=", "</parameter>", "</function>", "<|python_tag|>",
    ]  # fmt: skip
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=12))
        found = [taken_apart(text, size) for size in (1, 4, 500)]
        assert found[0] == found[1] == found[2], text
        assert found[0][1] or found[0][0] == text, text


def test_nothing_waits_but_what_may_change() -> None:
    parser = Calls(TOOLS)
    assert parser.feed("Let me ") == [Text("Let me")] and parser.feed("look <") == [Text(" look")]
    assert parser.feed("b> at {") == [Text(" <b> at {")]
    parser = Calls(TOOLS)
    assert parser.feed("[1") == [Text("[1")]
    parser = Calls(TOOLS)
    assert parser.feed(hermes()) == [Call("look", json.dumps(PARIS))]
    assert parser.feed("\n") == [] == parser.close(False)


@pytest.mark.parametrize(
    "text",
    [
        hermes(),
        f"[TOOL_CALLS]look[ARGS]{json.dumps(PARIS)}",
        coder("look", parameter("city", "Paris")),
        written("look", PARIS),
    ],
)
def test_a_call_that_is_cut_off_is_left_out(text: str) -> None:
    whole = [LOOK]
    for before, said in (("", ""), ("So.\n", "So.")):
        if before and text[0] == "{":
            continue
        for n in range(text.index("look") + 4, len(text) + 1):
            words, calls = taken_apart(before + text[:n], 5, is_cut=True)
            assert words == said and calls in ([], whole), n
    assert calls == whole
    assert taken_apart('{"name": "lo', 3, is_cut=True) == ("", [])


@pytest.mark.parametrize("text", ['{"city": "Par', '{"name": "Alice", "age', "[1, 2, ", "Look! {", "Well <tool"])
def test_other_text_that_is_cut_off_is_content(text: str) -> None:
    assert taken_apart(text, 3, is_cut=True) == (text, [])


def streamed(pieces: list[dict[str, Any]]) -> tuple[str, list[tuple[int, str]], str]:
    """Content, calls and the reason of the end of a stream's pieces."""
    calls = [call for piece in pieces for call in piece["delta"].get("tool_calls", [])]
    content = "".join(piece["delta"].get("content", "") for piece in pieces)
    begun = [(call["index"], call["function"]["name"]) for call in calls if "id" in call]
    return content, begun, pieces[-1]["finish_reason"]


def test_the_server_tells_calls_from_reasoning_and_words(tmp_path: Path) -> None:
    folder = test_harmony.write_texts(tmp_path / "texts", "{{ messages[0].content }}{{ tools[0].function.name }}")
    said = f"<think>\nHm: {hermes()}\n</think>\n\nI look."
    choice, pieces = test_harmony.answered(folder, f"{said}\n{hermes()}\n{hermes('go.to')}", "eos", tools=TOOLS)
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": name, "arguments": json.dumps(PARIS)} for name in ("look", "go.to")
    ]
    ids = [call["id"] for call in calls]  # as Mistral's templates take them back
    assert ids[0] != ids[1] and all(len(i) == 9 and i.isascii() and i.isalnum() for i in ids)
    assert choice["message"]["content"] == said and choice["finish_reason"] == "tool_calls"
    assert streamed(pieces) == (said, [(0, "look"), (1, "go.to")], "tool_calls")
    told = [one for piece in pieces for one in piece["delta"].get("tool_calls", [])]
    for index in (0, 1):
        parts = [one["function"]["arguments"] for one in told if one["index"] == index]
        assert json.loads("".join(parts)) == PARIS and len(parts) > 2
    choice, pieces = test_harmony.answered(folder, f"{said}\n{hermes()[:-20]}", "length", tools=TOOLS)
    assert choice["message"]["content"] == said and choice["finish_reason"] == "length"
    assert streamed(pieces) == (said, [(0, "look")], "length") and "tool_calls" not in choice["message"]


def test_reasoning_that_the_prompt_begins_has_no_calls_and_is_left_out_where_a_call_is_demanded(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ tools[0].function.name }}{{ '<think>\\n' }}"
    folder = test_harmony.write_texts(tmp_path / "texts", template)
    said = f"Hm: {hermes()}"
    choice, _ = test_harmony.answered(folder, f"{said}\n</think>\n\n{hermes('go.to')}", "eos", tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], call["function"]["name"]) == (None, "go.to")
    assert choice["message"]["reasoning_content"] == said
    demanded = {"tools": TOOLS, "tool_choice": "required"}
    assert test_harmony.prompt_of(folder, messages=[test_harmony.USER], **demanded) == "Where?look<think>\n</think>"
    choice, pieces = test_harmony.answered(folder, written("look", PARIS), "eos", **demanded)
    assert choice["message"]["content"] is None and streamed(pieces) == ("", [(0, "look")], "tool_calls")
    for text in ('{"na', "{", '{"name": "look", "arg'):
        choice, pieces = test_harmony.answered(folder, text, "length", **demanded)
        assert choice["message"]["content"] == "" and streamed(pieces) == ("", [], "length")


def test_marks_of_calls_are_text_also_where_the_tokenizer_calls_them_special(tmp_path: Path) -> None:
    folder = test_harmony.write_texts(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "[TOOL_CALLS]look[CALL_ID]a[ARGS]{}<|python_tag|>"
    marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "[INST]")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text + "[INST]").ids
    assert TextCodec.from_checkpoint(folder, prompt_style="none").decode(ids) == text


GEMMA = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif -%}
<{{ m.role }}>{{ m.content }}
{%- endfor -%}"""


def test_tools_of_a_template_that_knows_no_system_stand_before_the_first_question(tmp_path: Path) -> None:
    folder, user = test_harmony.write_texts(tmp_path / "texts", GEMMA), test_harmony.USER
    (tool,) = tools = TOOLS[2:]
    words = test_harmony.prompt_of(folder, messages=[user], tools=tools)
    assert (
        words.startswith("<user>You can call")
        and json.dumps(tool["function"]) in words
        and words.endswith("\n\nWhere?")
    )
    called = [{"id": i, "type": "function", "function": {"name": "stop", "arguments": '{"a": 1}'}} for i in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": i, "content": f"done {i}"} for i in ("a", "b")]
    chat = [user, {"role": "assistant", "content": None, "tool_calls": called}, *results]
    call = written("stop", {"a": 1})
    rest = f"<assistant>{call}\n{call}<user>Result: done a\n\nResult: done b"
    assert test_harmony.prompt_of(folder, messages=chat, tools=tools) == words + rest
    assert test_harmony.prompt_of(folder, messages=chat) == f"<user>Where?{rest}"
    system = {"role": "system", "content": "Be short."}
    assert test_harmony.prompt_of(folder, messages=[system, *chat], tools=tools) == (
        f"<user>Be short.\n\n{words.removeprefix('<user>')}{rest}"
    )
    with pytest.raises(ApiError):
        test_harmony.prompt_of(folder, messages=[system, user])
