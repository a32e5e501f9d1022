"""Reasoning in <think>, before the text and before calls, in an answer that is cut into pieces at any place."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import test_harmony
from answer_streams import apart, taken_apart
from mdi.cli import launch
from mdi.kernels import library
from mdi.text.answers.events import Call, Event, Reasoning, Text
from mdi.text.answers.forms import WORDS, form_of
from mdi.text.answers.stream import AnswerStream
from mdi.text.answers.think import Thoughts, content
from mdi.text.texts import TextCodec

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "Rome"}}\n</tool_call>'
CALL = Call("look", '{"at": "Rome"}')
# How Qwen 3 and DeepSeek R1 begin an answer: the first with the mark, for the second the prompt ends with it.
TEMPLATES = {
    "qwen": "{{ messages[0].content }}{# <think> </think> #}",
    "r1": "{{ messages[0].content + '<think>\\n' }}",
}
ANSWERS: dict[str, tuple[bool, str, str, str, list[Call]]] = {
    "qwen": (False, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Yes.\n", "Hm.\n\nSo.", []),
    "qwen without thoughts": (False, "<think>\n\n</think>\n\nYes.", "Yes.", "", []),
    "qwen's call": (False, f"<think>\nI {LOOK}.\n</think>\n\nI look.\n{LOOK}", "I look.", f"I {LOOK}.", [CALL]),
    "r1": (True, "Hm, <think> so.\n</think>\n\nYes.", "Yes.", "Hm, <think> so.", []),
    "r1 without thoughts": (True, "\n</think>\n\nYes.", "Yes.", "", []),
    "r1's call": (True, f"Hm.</think>{LOOK}", "", "Hm.", [CALL]),
    "r1 never ends": (True, "Hm. </thin", "", "Hm. </thin", []),
    "thoughts twice": (False, "<think>a</think>\n<think>b</think>c</think>", "c</think>", "ab", []),
    "a mark behind words": (False, "Say <think>.</think>", "Say <think>.</think>", "", []),
    "a half mark": (False, "<thin", "<thin", "", []),
    "blanks alone": (False, " \n", "", "", []),
}


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec.from_checkpoint(test_harmony.write_texts(tmp_path), prompt_style="none")


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_comes_apart_wherever_it_is_cut(case: str, codec: TextCodec) -> None:
    begins, written, *expected = ANSWERS[case]
    ids, form = test_harmony.ids_of(written), form_of("<think>", ())
    for size in range(1, len(ids) + 1):
        assert taken_apart(AnswerStream(codec, form, (), [TOOL], begins), ids, size) == expected, size
    assert content(written, begins) == (
        expected[0] if not expected[2] else written[written.rindex("</think>") + 8 :].lstrip()
    )


def halves(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "é"]), max_size=9),
    st.booleans(), st.lists(st.integers(0, 99), max_size=6),
)  # fmt: skip
def test_pieces_do_not_matter_and_nothing_is_lost(words: list[str], is_open: bool, cuts: list[int]) -> None:
    def events(pieces: list[str]) -> list[Event]:
        parser = Thoughts(is_open)
        return [event for piece in pieces for event in parser.feed(piece)] + parser.close(False)

    text = "".join(words)
    found = apart(events(halves(text, cuts)))
    assert found == apart(events([text]))
    left = text
    for mark in ("<think>", "</think>"):
        left = left.replace(mark, "")
    if text.count("<think>") + text.count("</think>") == 0:
        assert "".join(found[1] + found[0]).split() == left.split()


def test_what_is_decided_is_told_at_once() -> None:
    parser = Thoughts(False)
    assert parser.feed("<think>") == [] and parser.feed("\nHm") == [Reasoning("Hm")]
    assert parser.feed(" <") == [] and parser.feed("b>\n") == [Reasoning(" <b>")]
    assert (
        parser.feed("</think>\n") == []
        and parser.feed("\nYes") == [Text("Yes")]
        and parser.feed("<th") == [Text("<th")]
    )
    assert Thoughts(True).feed("</think>\n\nYes") == [Text("Yes")]


def test_hundreds_of_thousands_of_marks_are_taken_in_one_pass() -> None:
    assert content("<think></think>" * 200_000 + "x", False) == "x"


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_server_says_thoughts_beside_the_text(kind: str, tmp_path: Path) -> None:
    folder = test_harmony.write_texts(tmp_path / "texts", TEMPLATES[kind])
    begin = "<think>\n" if kind == "qwen" else ""
    choice, pieces = test_harmony.answered(folder, f"{begin}Hm, so.\n</think>\n\nYes.", "eos", stop=["so"])
    assert choice["message"] == {
        "role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "Hm, so.",
    }  # fmt: skip
    deltas = [piece["delta"] for piece in pieces]
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "Hm, so."
    assert sum("reasoning_content" in one for one in deltas) > 2, "it comes as it is written"
    assert "".join(one.get("content", "") for one in deltas) == "Yes." and pieces[-1]["finish_reason"] == "stop"

    tools: dict[str, Any] = {"tools": [TOOL]}
    choice, pieces = test_harmony.answered(folder, f"{begin}I {LOOK}.</think>So:\n{LOOK}", "eos", **tools)
    assert choice["message"]["reasoning_content"] == f"I {LOOK}." and choice["message"]["content"] == "So:"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": "Rome"} and choice["finish_reason"] == "tool_calls"
    choice, _ = test_harmony.answered(folder, f"{begin}I loo", "length", **tools)
    assert choice["message"]["content"] == "" and choice["message"]["reasoning_content"] == "I loo"
    demanded = {"messages": [test_harmony.USER], "response_format": {"type": "json_object"}}
    assert test_harmony.prompt_of(folder, **demanded) == ("Where?" if kind == "qwen" else "Where?<think>\n</think>")


def test_a_stop_string_in_the_last_token_ends_the_answer(tmp_path: Path) -> None:
    folder = test_harmony.write_texts(tmp_path / "texts", TEMPLATES["r1"])
    choice, _ = test_harmony.answered(folder, "Hm.</think>Yes. N", "length", stop=["N"])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes. ", "stop")


def test_a_blank_before_an_answer_is_left_out_where_the_template_is_the_plain_one(tmp_path: Path) -> None:
    for template, said in (("", "Yes."), ("{{ messages[0].content }}", " Yes.")):
        folder = test_harmony.write_texts(tmp_path / said.strip() / str(len(template)), template)
        if not template:
            (folder / "chat_template.jinja").unlink()
        assert test_harmony.answered(folder, " Yes.", "eos")[0]["message"]["content"] == said


def test_reasoning_goes_back_under_the_name_that_the_template_has(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    for name in ("reasoning_content", "reasoning"):
        template = "{% for m in messages %}{{ m.content }}({{ m." + name + " }}){% endfor %}"
        folder = test_harmony.write_texts(tmp_path / name, template)
        assert test_harmony.prompt_of(folder, messages=[test_harmony.USER, said]) == "Where?()Yes.(Hm.)"


def test_the_template_and_the_special_marks_decide_the_form() -> None:
    channels = form_of("<|channel|><think>", test_harmony.MARKS)
    assert channels.special and not channels.thinks
    assert form_of("<|channel|><think>", test_harmony.MARKS[1:]).thinks, "letters are no marks"
    assert form_of("</think>", ()).thinks and form_of("{{ messages }}", ()) is WORDS
    assert form_of(None, ()).is_plain and not WORDS.is_plain


@pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")
@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_on_the_command_line_gives_no_thoughts_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = TEMPLATES[kind].replace("messages[0].content", "messages|map(attribute='content')|join('/')")
    begin = "<think>\n" if kind == "qwen" else ""
    n_prompt = len(test_harmony.ids_of("Where?" + ("" if begin else "<think>\n")))
    script = test_harmony.ids_of(f"{begin}Hm.\n</think>\n\nThere.<|return|>not this")
    folder = test_harmony.write_model(tmp_path / "script", script, n_prompt)
    test_harmony.write_texts(folder, template)
    monkeypatch.setattr("sys.stdin", io.StringIO("Where?\nAnd now?\n"))
    histories, encode_chat = [], TextCodec.encode_chat

    def kept(self: TextCodec, history: Any, question: str, system: str) -> list[int]:
        histories.append(list(history))
        return encode_chat(self, history, question)

    monkeypatch.setattr(TextCodec, "encode_chat", kept)
    flags = ["--ckpt", str(folder), "--device", "cpu", "--temperature", "0", "--n-tokens", "60"]
    assert launch("chat", flags) == 0
    assert "Model: <think>\nHm.\n</think>\n\nThere.\n" in capsys.readouterr().out
    assert histories == [[], [("Where?", "There.")]]
