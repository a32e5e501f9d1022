"""Answers of GLM and MiniMax: apart into reasoning, calls and text, and chats that go back to them in their templates' form."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import test_harmony
from answer_streams import apart, taken_apart
from mdi.text.answers.calls import LONGEST_CALL, Calls, ReadCalls
from mdi.text.answers.events import Call
from mdi.text.answers.forms import form_of
from mdi.text.answers.marked import GLM_CALLS, MINIMAX_CALLS, glm_calls, minimax_calls
from mdi.text.answers.stream import AnswerStream
from mdi.text.texts import TextCodec
from test_harmony import USER

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
GLM = (
    "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    '<arg_key>where</arg_key>\n<arg_value>{"a": [1, "</x>"]}</arg_value>\n</tool_call>'
)
GLM_4_7 = "<tool_call>look<arg_key>city</arg_key><arg_value>a <b>\n & c</arg_value></tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">12</parameter>\n<parameter name="days">3</parameter>\n'
    '<parameter name="where">{"a": [1, "</x>"]}</parameter>\n</invoke>\n</minimax:tool_call>'
)
TWO = (
    '<minimax:tool_call><invoke name="look"></invoke><invoke name="look"><parameter name="days">x</parameter></invoke>'
    "</minimax:tool_call>"
)
WHOLE = {"city": "12", "days": 3, "where": {"a": [1, "</x>"]}}
MARKS = [f"<{end}{word}>" for word in ("think", "tool_call", "arg_key", "arg_value") for end in ("", "/")]
TURNS = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "]~!b[", "]~b]", "[e~["]


def calls_in(text: str) -> list[Call]:
    parser = Calls(TOOLS, MINIMAX_CALLS if "<minimax" in text else GLM_CALLS)
    said, _, calls = apart([*parser.feed(text), *parser.close(False)])
    assert calls and not said or said == text
    return list(calls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(GLM, [WHOLE]), (GLM_4_7, [{"city": "a <b>\n & c"}]), (MINIMAX, [WHOLE]), (TWO, [{}, {"days": "x"}]),
     ("<tool_call>look</tool_call>\n" + GLM, [{}, WHOLE])],
)  # fmt: skip
def test_arguments_are_of_the_type_that_the_tool_says(text: str, expected: list[Any]) -> None:
    assert calls_in(text) == [Call("look", json.dumps(arguments)) for arguments in expected]


@pytest.mark.parametrize(
    "text",
    ["", "look", "<tool_call>other</tool_call>", "<tool_call>look", "<tool_call></tool_call>",
     "<tool_call>look<arg_key>city</arg_key></tool_call>", "<minimax:tool_call>look</minimax:tool_call>",
     '<minimax:tool_call><invoke name="look">x</invoke></minimax:tool_call>', '<tool_call>"look"</tool_call>',
     "<tool_call>look<arg_value>12</arg_value><arg_key>city</arg_key></tool_call>",
     '<minimax:tool_call><invoke name="look"</invoke></minimax:tool_call>',
     "<tool_call>look" + "<arg_key>a</arg_key><arg_value>" * 2000],
)  # fmt: skip
def test_other_text_is_no_call(text: str) -> None:
    assert calls_in(text) == []


@pytest.mark.parametrize(
    "piece",
    ["<arg_key>", "<arg_key>a</arg_key>", "<arg_value>", '<invoke name="look">', '<parameter name="a">', "\n" * 10],
)
@pytest.mark.parametrize(("mark", "read"), [("tool_call", glm_calls), ("minimax:tool_call", minimax_calls)])
def test_marks_in_great_number_take_no_longer_than_other_text(mark: str, read: ReadCalls, piece: str) -> None:
    """If each was searched to the end of the text, this would take minutes."""
    assert read(f"<{mark}>look" + piece * 30_000 + f"x</{mark}>", {"look": PARAMETERS}) == []


@functools.cache
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    made.add_special_tokens([AddedToken(one, special=True) for one in ["<|endoftext|>", *TURNS, *MARKS[:2]]])
    made.add_tokens(
        [AddedToken(one, normalized=False) for one in [*MARKS[2:], "<minimax:tool_call>", "</minimax:tool_call>"]]
    )
    return made


GLM_TEMPLATE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool.function | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
...
{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() + '</think>' }}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if visible_text(m.content).strip() -%}
{{ '\\n' + visible_text(m.content).strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""
MINIMAX_TEMPLATE = """\
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{%- set toolcall_end_token = '</minimax:tool_call>' -%}
{{- ']~!b[' ~ ']~b]system' ~ '\\n' }}You help.{% if tools %}{{ '\\n<tools>' ~ tools[0].function.name ~ '</tools>' }}{% endif %}
{{- '[e~[\\n' }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
    {{- ']~b]ai' ~ '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>' ~ '\\n' ~ message.reasoning_content ~ '\\n' ~ '</think>' ~ '\\n\\n' }}
    {%- endif %}
    {%- if message.content %}{{- message.content }}{%- endif -%}
    {%- if message.tool_calls -%}
        {{- '\\n' ~ toolcall_begin_token ~ '\\n' }}
        {%- for tool_call in message.tool_calls -%}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<invoke name="' + tool_call.name + '">' }}
            {%- for k, v in tool_call.arguments.items() %}
                {{- '<parameter name="' + k + '">' }}
                {{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- '</parameter>' }}
            {%- endfor %}
            {{- '</invoke>' ~ '\\n' }}
        {%- endfor -%}
        {{- toolcall_end_token }}
    {%- endif -%}
    {{- '[e~[' ~ '\\n' }}
{%- elif message.role == 'tool' -%}
    {{- ']~b]tool' }}{{- '\\n<response>' ~ message.content ~ '</response>' }}{{- '[e~[\\n' }}
{%- else -%}{{- ']~b]user' ~ '\\n' }}{{- message.content }}{{- '[e~[' ~ '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}{%- endif -%}"""


@pytest.fixture(autouse=True)
def own_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_harmony, "tokenizer", tokenizer)


def folder_of(tmp_path: Path, template: str) -> Path:
    folder = test_harmony.write_texts(tmp_path / "texts", template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.from_checkpoint(folder_of(tmp_path, GLM_TEMPLATE), prompt_style="none")


def stream_of(codec: TextCodec, begins: bool, *stop: str, template: str = "<arg_key>") -> AnswerStream:
    return AnswerStream(codec, form_of(template, ()), stop, TOOLS, begins)


LOOK = Call("look", json.dumps(WHOLE))
ANSWERS: dict[str, tuple[bool, str, str, str, list[tuple[str, str]]]] = {
    "text alone": (False, "Größe: 3 < 4 <tool> 5.", "Größe: 3 < 4 <tool> 5.", "", []),
    "reasoning and text": (False, "\n<think>Hm < so?</think>\n\nYes.", "Yes.", "Hm < so?", []),
    "no reasoning": (False, "\n<think></think>\nYes.", "Yes.", "", []),
    "begun reasoning": (True, "Hm.\n\nSo.\n</think>\n\nYes.\n", "Yes.\n", "Hm.\n\nSo.", []),
    "a call": (False, f"\n<think>Hm.</think>\n{GLM}", "", "Hm.", [LOOK]),
    "words and two calls": (True, f"Hm.</think>I look.\n{MINIMAX}\n{MINIMAX}", "I look.", "Hm.", [LOOK, LOOK]),
    "words behind a call": (False, f"I look.\n{MINIMAX}\n\nThere.\n", "I look.\n\nThere.\n", "", [LOOK]),
    "blanks behind a call": (False, f"I look. {GLM}\n", "I look.", "", [LOOK]),
    "blanks before a call of no tool": (False, "So:\n<tool_call>x</tool_call>\n", "So:\n<tool_call>x</tool_call>\n", "", []),
    "reasoning about marks": (True, f"No {GLM}</think>Yes.", "Yes.", f"No {GLM}", []),
    "thoughts that are text": (False, "Say <think>.", "Say <think>.", "", []),
    "a call of no tool": (False, "<tool_call>other</tool_call>!", "<tool_call>other</tool_call>!", "", []),
    "cut off in reasoning": (True, "Hm. </thi", "", "Hm. </thi", []),
    "cut off behind a blank": (True, "Hm.\n", "", "Hm.\n", []),
    "cut off in a call": (False, "<tool_call>look<arg", "<tool_call>look<arg", "", []),
    "nothing": (False, "", "", "", []),
}  # fmt: skip


@pytest.mark.parametrize("are_words", [False, True])
@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_comes_apart_however_it_comes(case: str, are_words: bool, codec: TextCodec) -> None:
    """Marks are tokens, or several letters, of which each may be the last one of a piece."""
    begins, written, *expected = ANSWERS[case]
    ids = (
        [i for letter in written for i in tokenizer().encode(letter).ids]
        if are_words
        else tokenizer().encode(written).ids
    )
    for size in (1, 3, 50, len(ids) + 1):
        assert (
            taken_apart(
                stream_of(codec, begins, template="<minimax:tool_call>" if "<minimax" in written else "<arg_key>"),
                ids,
                size,
            )
            == expected
        ), size


def test_stop_strings_are_for_the_text_and_nothing_waits_in_vain(codec: TextCodec) -> None:
    stream = stream_of(codec, True, "o")
    assert taken_apart(stream, tokenizer().encode("no stop</think>a word").ids, 50) == ["a w", "no stop", []]
    assert stream.is_stopped
    stream = stream_of(codec, True)
    shown = [apart(stream.feed([i])) for i in tokenizer().encode("one</think>two").ids]
    assert shown[2][1] and shown[-1][0]


def test_what_is_too_long_for_a_call_is_text_and_a_call_may_follow(codec: TextCodec) -> None:
    long = "<tool_call>look<arg_key>city</arg_key><arg_value>" + "x" * LONGEST_CALL
    end = "</arg_value></tool_call>"
    ids = tokenizer().encode(long + end + GLM).ids
    text, _, calls = taken_apart(stream_of(codec, False), ids, 10_000)
    assert text == long + end and calls == [LOOK]


def test_the_end_of_a_call_is_found_wherever_its_pieces_are_cut(codec: TextCodec) -> None:
    written = f"{GLM_4_7}{GLM}"
    ids = [i for letter in written for i in tokenizer().encode(letter).ids]
    for size in (*range(1, 20), 40, 80):
        text, _, calls = taken_apart(stream_of(codec, False), ids, size)
        assert text == "" and [call.name for call in calls] == ["look", "look"], size


CALLED = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Z", "days": 3}'}}
CHAT = [
    USER,
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "there"},
]


def test_a_chat_goes_back_in_glms_form(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, GLM_TEMPLATE)
    tool = json.dumps(TOOLS[0]["function"])
    assert test_harmony.prompt_of(folder, messages=CHAT, tools=TOOLS) == (
        f"[gMASK]<sop><|system|>\n# Tools\n<tools>\n{tool}\n</tools>\n<tool_call>{{function-name}}\n"
        "<arg_key>{arg-key-1}</arg_key>\n...<|user|>\nWhere?<|assistant|>\n<think>Hm.</think>\nI look.\n"
        "<tool_call>look\n<arg_key>city</arg_key>\n"
        "<arg_value>Z</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>\n"
        "<tool_response>\nthere\n</tool_response><|assistant|>"
    )
    quiet = test_harmony.prompt_of(folder, messages=[USER], chat_template_kwargs={"enable_thinking": False})
    assert quiet == "[gMASK]<sop><|user|>\nWhere?<|assistant|>\n<think></think>"


def test_a_chat_goes_back_in_minimaxs_form_and_a_demanded_form_begins_behind_the_reasoning(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, MINIMAX_TEMPLATE)
    expected = (
        "]~!b[]~b]system\nYou help.\n<tools>look</tools>[e~[\n]~b]user\nWhere?[e~[\n]~b]ai\n<think>\nHm.\n</think>\n\nI look.\n"
        '<minimax:tool_call>\n<invoke name="look"><parameter name="city">Z</parameter><parameter name="days">3</parameter>'
        "</invoke>\n</minimax:tool_call>[e~[\n]~b]tool\n<response>there</response>[e~[\n]~b]ai\n<think>\n"
    )
    assert test_harmony.prompt_of(folder, messages=CHAT, tools=TOOLS) == expected
    asked = {"messages": [USER], "response_format": {"type": "json_object"}}
    assert test_harmony.prompt_of(folder, **asked).endswith("]~b]ai\n<think>\n</think>")
    of_glm = folder_of(tmp_path / "glm", GLM_TEMPLATE)
    assert test_harmony.prompt_of(of_glm, **asked).endswith("<|assistant|>\n<think></think>")
    asked["chat_template_kwargs"] = {"enable_thinking": True}
    assert test_harmony.prompt_of(of_glm, **asked).endswith("<|assistant|>")
    choice, _ = test_harmony.answered(folder, '{"a": "<think>"}', "eos", **asked)
    assert choice["message"]["content"] == '{"a": "<think>"}'


@pytest.mark.parametrize(
    ("template", "written"),
    [(GLM_TEMPLATE, "\n<think>Hm.</think>\n" + GLM), (MINIMAX_TEMPLATE, f"Hm.</think>{MINIMAX}")],
)
def test_the_server_says_reasoning_and_calls_beside_the_text(template: str, written: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, template)
    choice, pieces = test_harmony.answered(folder, written, "eos", tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == WHOLE
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Hm."
    (streamed,) = [one for piece in pieces for one in piece["delta"].get("tool_calls", [])]
    assert (streamed["index"], streamed["function"]) == (0, call["function"])
    choice, _ = test_harmony.answered(folder, written[:-30], "length", tools=TOOLS)
    assert "tool_calls" not in choice["message"] and choice["message"]["content"] == ""


def test_the_form_of_an_answer_is_that_of_the_template_that_wrote_the_chat(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "")
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": GLM_TEMPLATE},
    ]
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert test_harmony.prompt_of(folder, messages=[USER]) == "Where?"
    assert test_harmony.prompt_of(folder, messages=[USER], tools=TOOLS).startswith("[gMASK]<sop><|system|>")
    choice, _ = test_harmony.answered(folder, GLM, "eos", tools=TOOLS)
    assert choice["message"]["tool_calls"] and choice["message"]["content"] is None
    choice, _ = test_harmony.answered(folder, GLM, "eos")
    assert choice["message"]["content"] == GLM
