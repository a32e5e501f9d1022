"""Answers of DeepSeek V3, R1 and V3.1: apart into reasoning, calls and text, and chats that go back in their form."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import test_harmony
from answer_streams import apart, taken_apart
from mdi.text.answers.calls import Calls
from mdi.text.answers.deepseek import DEEPSEEK_CALLS, MARKS
from mdi.text.answers.events import Call
from mdi.text.answers.forms import form_of
from mdi.text.answers.stream import AnswerStream
from mdi.text.texts import TextCodec
from test_calls import TOOLS, hermes
from test_harmony import USER

BEGIN, ONE, SEPARATOR, END_OF_ONE, END = MARKS
PARIS = {"city": "Zürich 🙂"}
MARKED = {"city": f'a {END_OF_ONE}{END} b {BEGIN}{ONE}``` }} \\ " <think>', "days": 2}


def v3(name: str = "look", arguments: Any = PARIS, blank: str = "") -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    return f"{ONE}function{SEPARATOR}{name}\n```json\n{written}\n```{blank}{END_OF_ONE}"


def v31(name: str = "look", arguments: Any = PARIS) -> str:
    return f"{ONE}{name}{SEPARATOR}{json.dumps(arguments, ensure_ascii=False)}{END_OF_ONE}"


def call(name: str = "look", arguments: Any = PARIS) -> Call:
    return Call(name, json.dumps(arguments))


@functools.cache
def tokenizer(are_special: bool = True) -> Tokenizer:
    """A token for each byte, and one for each mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(one, special=True) for one in ("<|endoftext|>", "<｜User｜>", "<｜Assistant｜>")]
    )
    made.add_tokens([AddedToken(one, special=are_special, normalized=False) for one in (*MARKS, "<think>", "</think>")])
    return made


@pytest.fixture(autouse=True)
def own_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_harmony, "tokenizer", tokenizer)


def write_texts(folder: Path, are_special: bool = True, template: str = BEGIN) -> Path:
    test_harmony.write_texts(folder, template)
    tokenizer(are_special).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


# Whether the prompt opens the reasoning, what the model writes, and its text, reasoning and calls.
ANSWERS: dict[str, tuple[bool, str, str, str, list[Call]]] = {
    "v3": (False, f"{BEGIN}{v3()}{END}", "", "", [call()]),
    "v3.1": (False, f"{BEGIN}{v31()}{END}", "", "", [call()]),
    "as llama.cpp's prompt shows it": (False, f"{BEGIN}{v3(blank=chr(10))}{END}", "", "", [call()]),
    "v3, several": (False, f"{BEGIN}{v3()}\n{v3('go.to', MARKED)}{END}\n", "", "", [call(), call("go.to", MARKED)]),
    "v3.1, several": (
        False, f"I look.\n\n{BEGIN}{v31()}{v31('go.to', MARKED)}{v31()}{END}", "I look.", "",
        [call(), call("go.to", MARKED), call()],
    ),
    "r1": (True, f"Hm, {BEGIN} is a mark.\n</think>\n\n{BEGIN}{v3()}{END}", "", f"Hm, {BEGIN} is a mark.", [call()]),
    "r1, words": (True, "Hm.\n</think>\n\nIt is {fine}.", "It is {fine}.", "Hm.", []),
    "v3.1, thinking": (True, f"Hm.</think>I look.{BEGIN}{v31()}{END}", "I look.", "Hm.", [call()]),
    "without the outer marks": (False, f"{v31()}", "", "", [call()]),
    "a tool that is called as the kind": (False, f"{BEGIN}{v31('function')}{END}", "", "", [call("function")]),
    "without its end": (False, f"{BEGIN}{v3()}".removesuffix(f"\n```{END_OF_ONE}"), "", "", [call()]),
    "as others write it": (False, hermes("look", PARIS), "", "", [call()]),
    "unclosed": (False, f'So:\n{BEGIN}{ONE}look{SEPARATOR}{{"city": "', f'So:\n{BEGIN}{ONE}look{SEPARATOR}{{"city": "', "", []),
    "no tool": (False, f"{BEGIN}{v3('other')}{END}", f"{BEGIN}{v3('other')}{END}", "", []),
    "no call": (False, f"{BEGIN} and {END}", f"{BEGIN} and {END}", "", []),
    "a mark alone": (False, f"a {SEPARATOR} b", f"a {SEPARATOR} b", "", []),
}  # fmt: skip
WITH_FUNCTION = [*TOOLS, {"type": "function", "function": {"name": "function"}}]


@pytest.mark.slow
@pytest.mark.parametrize("are_special", [True, False])
@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_comes_apart_wherever_it_is_cut(case: str, are_special: bool, tmp_path: Path) -> None:
    """Marks as tokens, which may be special ones, or letter by letter: each byte may be the last one of a piece."""
    begins, written, *expected = ANSWERS[case]
    codec = TextCodec.from_checkpoint(write_texts(tmp_path, are_special), prompt_style="none")
    form = form_of(BEGIN, codec.special_marks.values())
    letters = [i for byte in written for i in tokenizer().encode(byte).ids]
    assert len(letters) == len(written.encode())
    for ids in (tokenizer().encode(written).ids, letters):
        for size in (*range(1, 8), *range(8, len(ids) + 1, 5), len(ids)):
            found = taken_apart(AnswerStream(codec, form, (), WITH_FUNCTION, begins), ids, size)
            assert found == expected, size
        for at in range(len(ids) + 1):
            stream = AnswerStream(codec, form, (), WITH_FUNCTION, begins)
            events = [*stream.feed(ids[:at]), *stream.feed(ids[at:]), *stream.close(False)]
            assert apart(events) == expected, at


@pytest.mark.parametrize("written", [v3(), v31()])
def test_a_call_that_is_cut_off_is_left_out(written: str) -> None:
    text = f"So.\n{BEGIN}{written}{END}"
    for n in range(len(f"So.\n{BEGIN}"), len(text) + 1):
        parser = Calls(TOOLS, DEEPSEEK_CALLS)
        said, _, calls = apart([*parser.feed(text[:n]), *parser.close(True)])
        assert said == "So." and calls in ([], [call()]), n
    assert calls == [call()]


def test_any_text_is_all_there_however_it_comes() -> None:
    pieces = [*MARKS, *'{}\n"` ', "look", "function", "```json", '{"city": "', "```"]
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=12))
        found = []
        for size in (1, 3, 500):
            parser = Calls(TOOLS, DEEPSEEK_CALLS)
            events = [one for at in range(0, len(text), size) for one in parser.feed(text[at : at + size])]
            found.append(apart([*events, *parser.close(False)]))
        assert found[0] == found[1] == found[2], text
        assert found[0][2] or found[0][0] == text, text


def test_the_form_is_that_of_the_template_alone(tmp_path: Path) -> None:
    """Another model's tokenizer may know the marks, and its template does not write them."""
    codec = TextCodec.from_checkpoint(write_texts(tmp_path), prompt_style="none")
    text = f"{BEGIN}{v31()}{END}"
    for template in ("", "<think>", "<tool_call>"):
        form = form_of(template, codec.special_marks.values())
        assert taken_apart(AnswerStream(codec, form, (), TOOLS), tokenizer().encode(text).ids, 3) == [text, "", []]


# As V3's and V3.1's published ones write calls: with the arguments as text, and V3's only where the content is null.
V3_TEMPLATE = """\
{%- for m in messages %}
{%- if m['role'] == 'assistant' and m['content'] is none %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for tool in m['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}
{%- elif m['role'] == 'tool' %}{{ '[' + m['content'] + ']' }}
{%- else %}{{ '<｜User｜>' + m['content'] }}{% endif %}{% endfor %}{{ tools[0].function.name }}"""


@pytest.mark.parametrize("content", ["", None])
def test_a_chat_goes_back_with_its_calls(content: str | None, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", template=V3_TEMPLATE)
    called = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"city": "Zürich 🙂"}'}}
    chat = [USER, {"role": "assistant", "content": content, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "a", "content": "fine"}]  # fmt: skip
    assert test_harmony.prompt_of(
        folder, messages=chat, tools=TOOLS
    ) == f"<｜User｜>Where?{BEGIN}{v3()}{END}[fine]look".replace(BEGIN, f"<｜Assistant｜>{BEGIN}")


def test_the_server_says_reasoning_and_calls_beside_the_text(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ tools[0].function.name }}{{ '<think>\\n' }}" + f"{{# {BEGIN} #}}"
    folder = write_texts(tmp_path / "texts", template=template)
    choice, pieces = test_harmony.answered(
        folder, f"Hm.\n</think>\n\n{BEGIN}{v3()}\n{v3('stop', {})}{END}", "eos", tools=TOOLS
    )
    calls = [one["function"] for one in choice["message"]["tool_calls"]]
    assert calls == [{"name": "look", "arguments": json.dumps(PARIS)}, {"name": "stop", "arguments": "{}"}]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert choice["message"]["reasoning_content"] == "Hm."
    streamed = [one["function"] for piece in pieces for one in piece["delta"].get("tool_calls", [])]
    assert [one["name"] for one in streamed if "name" in one] == ["look", "stop"], "arguments follow in pieces"
