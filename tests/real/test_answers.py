"""Answers as Qwen 3 and DeepSeek R1 write them, in the ids of their published tokenizers, and prompts of their templates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from answer_streams import taken_apart
from mdi.text.answers.deepseek import CALLS, DEEPSEEK_BLOCKS, DEEPSEEK_CALLS
from mdi.text.answers.events import Call
from mdi.text.answers.forms import form_of
from mdi.text.answers.stream import AnswerStream
from mdi.text.templates import ChatTemplate
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import FileTokenizer
from real.answers import published
from real.cases import SPECIALS, TOOLS, answer, user
from real.published import FILES

CITY = {"city": "Zürich 🙂", "days": 2}
CALL = Call("get_weather", json.dumps(CITY))
WRITTEN = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(CITY, ensure_ascii=False)}}}\n</tool_call>'
THOUGHT = "Okay, the user asks about Zürich 🙂.\n\nI could write <tool_call>, but first: 東京."


def rendered(source: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
    async def prompt() -> str:
        made = ChatTemplate(source, SPECIALS)
        try:
            return await made.render(messages, tools, {})
        finally:
            made.close()
            await asyncio.get_running_loop().shutdown_default_executor()

    return asyncio.run(prompt())


@pytest.mark.parametrize(
    ("tokenizer", "template", "begins"),
    [("qwen3", "Qwen-Qwen3-0.6B", False), ("deepseek_v3", "llama-cpp-deepseek-r1", True)],
)
def test_thoughts_and_calls_come_apart_wherever_the_answer_is_cut(
    tokenizer: str, template: str, begins: bool, tmp_path: Path
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).symlink_to(published(f"tokenizers/{tokenizer}/{file}"))
    codec = TextCodec.from_checkpoint(tmp_path, "none")
    source = published(f"templates/{template}.jinja").read_text(encoding="utf-8")
    form = form_of(source, codec.special_marks.values())

    chat = rendered(source, [user("How is it there?")], TOOLS if not begins else ())
    assert chat.rstrip().endswith("<think>") == begins
    begin = "" if begins else "<think>\n"
    cases = [
        (f"{begin}{THOUGHT}\n</think>\n\nIt is fine.", ["It is fine.", THOUGHT, []]),
        (f"{begin}{THOUGHT}\n</think>\n\nLet me look.\n{WRITTEN}\n{WRITTEN}", ["Let me look.", THOUGHT, [CALL, CALL]]),
        (f"{begin}\n</think>\n\n{WRITTEN}", ["", "", [CALL]]),
    ]
    encode = FileTokenizer(tmp_path, codec.facts()).encode_rendered
    for written, expected in cases:
        ids = encode(written)
        for size in range(1, len(ids) + 1):
            assert taken_apart(AnswerStream(codec, form, (), TOOLS, begins), ids, size) == expected, size


DEEPSEEK = {
    "V3": ("tokenizers/deepseek_v3/tokenizer_config.json", False),
    "V3.1": ("templates/deepseek-ai-DeepSeek-V3.1.jinja", False),
    "R1": ("templates/llama-cpp-deepseek-r1.jinja", True),
    "R1's Llama": ("templates/deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja", True),
    "R1's Qwen": ("templates/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", True),
}


def source_of(name: str) -> str:
    text = published(name).read_text(encoding="utf-8")
    return str(json.loads(text)["chat_template"]) if name.endswith(".json") else text


@pytest.mark.parametrize("model", DEEPSEEK)
def test_deepseeks_calls_are_read_as_its_templates_write_them(model: str, tmp_path: Path) -> None:
    """What a template makes of two calls goes through the model's own tokenizer, and comes back as these calls."""
    name, begins = DEEPSEEK[model]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).symlink_to(published(f"tokenizers/deepseek_v3/{file}"))
    codec = TextCodec.from_checkpoint(tmp_path, "none")
    form = form_of(source_of(name), codec.special_marks.values())
    assert form.calls is (DEEPSEEK_CALLS if model == "V3.1" else DEEPSEEK_BLOCKS)
    marked = {"city": f"``` <｜tool▁call▁end｜> {CALLS} <think>"}
    calls = [CALL, Call("get_weather", json.dumps(marked))]
    called = [{"id": "a", "type": "function", "function": vars_of(call)} for call in calls]
    chat = [user("How is it there?"), answer("", tool_calls=called)]
    written = rendered(source_of(name), form.messages(chat))
    end = "<｜tool▁calls▁end｜>"
    written = written[written.index(CALLS) : written.rindex(end) + len(end)]
    encode = FileTokenizer(tmp_path, codec.facts()).encode_rendered
    before = "Hm.\n</think>\n\n" if begins else ""
    ids = encode(before + written)
    for size in range(1, len(ids) + 1):
        expected = ["", "Hm." if begins else "", calls]
        assert taken_apart(AnswerStream(codec, form, (), TOOLS, begins), ids, size) == expected, size


def vars_of(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def test_no_other_template_has_deepseeks_form() -> None:
    own = {name for name, _ in DEEPSEEK.values()}
    others = [name for name in FILES if name.endswith(".jinja") and name not in own]
    assert len(others) > 30
    for name in others:
        assert form_of(source_of(name), ()).calls not in (DEEPSEEK_CALLS, DEEPSEEK_BLOCKS), name
