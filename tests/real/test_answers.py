"""Answers as Qwen 3 and DeepSeek R1 write them, in the ids of their published tokenizers, and prompts of their templates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from answer_streams import taken_apart
from mdi.text.answers.events import Call
from mdi.text.answers.forms import form_of
from mdi.text.answers.stream import AnswerStream
from mdi.text.templates import ChatTemplate
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import FileTokenizer
from real.answers import published
from real.cases import SPECIALS, TOOLS, user

CITY = {"city": "Zürich 🙂", "days": 2}
CALL = Call("get_weather", json.dumps(CITY))
WRITTEN = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(CITY, ensure_ascii=False)}}}\n</tool_call>'
THOUGHT = "Okay, the user asks about Zürich 🙂.\n\nI could write <tool_call>, but first: 東京."


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

    async def prompt() -> str:
        made = ChatTemplate(source, SPECIALS)
        try:
            return await made.render([user("How is it there?")], TOOLS if not begins else (), {})
        finally:
            made.close()
            await asyncio.get_running_loop().shutdown_default_executor()

    assert asyncio.run(prompt()).rstrip().endswith("<think>") == begins
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
