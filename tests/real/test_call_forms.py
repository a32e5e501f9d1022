"""Which form of calls each published template has, and that what it writes of an answer's calls is read as these calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdi.errors import UsageError
from mdi.text.answers.events import Call
from mdi.text.answers.forms import HARMONY, PARSERS, Form, form_of
from mdi.text.answers.stream import AnswerStream
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import FileTokenizer
from real.answers import published
from real.cases import TOOLS, answer, user
from real.published import FILES
from real.test_answers import rendered, source_of, taken_apart
from real.test_tokenizers import qwen_3_6, vocabulary

# By forms, their templates, and with what a call ends.
TEMPLATES = {
    "hermes": ("</tool_call>", ["Qwen-QwQ-32B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "ibm-granite-granite-4.0",
                                "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"]),
    "qwen3_coder": ("</tool_call>", ["Qwen3-Coder", "Qwen3.5-4B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"]),
    "glm": ("</tool_call>", ["GLM-4.6", "GLM-4.7-Flash"]),
    "minimax_m2": ("</minimax:tool_call>", ["MiniMax-M2"]),
    "kimi_k2": ("<|tool_calls_section_end|>", ["moonshotai-Kimi-K2"]),
    "gemma4": ("<tool_call|>", ["google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"]),
    "mistral": ("}", ["Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512",
                      "unsloth-mistral-Devstral-Small-2507"]),
    "mistral_list": ("]", ["mistralai-Mistral-Nemo-Instruct-2407"]),
    "llama3": ("}", ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"]),
}  # fmt: skip
BEGINS = (
    "<tool_call>",
    "<minimax:tool_call>",
    "<|tool_calls_section_begin|>",
    "<|tool_call>",
    "[TOOL_CALLS]",
    '{"name"',
)
CASES = [(form, name) for form, (_, names) in TEMPLATES.items() for name in names]
# By llama.cpp's authors; they change lists, which neither transformers nor this server lets a template do.
REFUSED = {"Kimi-K2-Instruct": "kimi_k2", "Kimi-K2-Thinking": "kimi_k2"}
ARGUMENTS = [{"city": "Zürich 🙂", "days": 2}, {"city": "a <b>"}]
IDS = ["abcdefghi", "jklmnopqr"]
TOKENIZERS = [
    ("Qwen-Qwen3-0.6B", "qwen3"), ("Qwen3-Coder", "qwen3"), ("Qwen3.5-4B", "qwen3"), ("Qwen3.5-4B", "qwen3_6"),
    ("google-gemma-4-31B-it", "gemma-4"), ("google-gemma-4-31B-it-interleaved", "gemma-4"),
    ("google-gemma-4-31B-it", "gemma3"),  # which has none of the marks as a token
    ("meta-llama-Llama-3.1-8B-Instruct", "llama3_1"),
]  # fmt: skip


def template(name: str) -> str:
    return source_of(f"templates/{name}.jinja")


def called(n: int) -> list[dict[str, Any]]:
    """Calls as a request has them."""
    functions = [{"name": "get_weather", "arguments": json.dumps(one, ensure_ascii=False)} for one in ARGUMENTS[:n]]
    return [{"id": i, "type": "function", "function": one} for i, one in zip(IDS, functions, strict=False)]


def expected(form: str, name: str, n: int) -> list[Call]:
    ids = ["", ""]
    if form == "kimi_k2":
        ids = ["functions.get_weather:0", "functions.get_weather:1"]
    elif name.startswith("Mistral-Small"):
        ids = IDS
    return [Call("get_weather", json.dumps(one), i) for one, i in zip(ARGUMENTS[:n], ids, strict=False)]


def written(form: Form, name: str, end: str, n: int) -> str:
    """What a template makes of an answer with words and `n` calls."""
    question = user("How is it there?")
    said = rendered(template(name), form.messages([question, answer("I look.", tool_calls=called(n))]), TOOLS)
    said = said[: said.rindex(end) + len(end)]
    at = said.rindex("How is it there?")
    return said[min(found for mark in BEGINS if (found := said.find(mark, at)) >= 0) :]


@pytest.mark.parametrize(("form", "name"), CASES)
def test_what_a_template_writes_of_calls_is_read(form: str, name: str) -> None:
    found = form_of(template(name), HARMONY.special)
    assert found.calls is PARSERS[form].calls
    n = 1 if form == "llama3" else 2  # its template refuses two
    text = written(found, name, TEMPLATES[form][0], n)
    for at in range(len(text) + 1):
        parsers = found.parsers(TOOLS, False, False)[-1:]  # reasoning is no part of it
        events = [*parsers[0].feed(text[:at]), *parsers[0].feed(text[at:]), *parsers[0].close(False)]
        assert [one for one in events if isinstance(one, Call)] == expected(form, name, n), at


@pytest.mark.parametrize(("name", "tokenizer"), TOKENIZERS)
def test_calls_are_read_from_the_ids_of_published_tokenizers(name: str, tokenizer: str, tmp_path: Path) -> None:
    form = next(form for form, one in CASES if one == name)
    if tokenizer == "qwen3_6":
        qwen_3_6(tmp_path)
    elif tokenizer == "gemma-4":
        vocabulary(tokenizer, tmp_path)
    else:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / file).symlink_to(published(f"tokenizers/{tokenizer}/{file}"))
    codec = TextCodec.from_checkpoint(tmp_path, "none")
    found = form_of(template(name), codec.special_marks.values())
    n = 1 if form == "llama3" else 2
    ids = FileTokenizer(tmp_path, codec.facts()).encode_rendered(written(found, name, TEMPLATES[form][0], n))
    for size in range(1, len(ids) + 1):
        assert taken_apart(AnswerStream(codec, found, (), TOOLS), ids, size)[2] == expected(form, name, n), size


@pytest.mark.parametrize(("form", "name"), CASES)
def test_a_result_that_has_the_marks_of_a_call_goes_to_the_model_and_is_no_call(form: str, name: str) -> None:
    """The result of a tool, and the user's words: the parser reads what the model writes, and nothing else."""
    found = form_of(template(name), ())
    calls = called(1)
    hostile = written(found, name, TEMPLATES[form][0], 1)
    result = {"role": "tool", "content": hostile, "tool_call_id": calls[0]["id"], "name": "get_weather"}
    chat = [user(f"What does {hostile} mean?"), answer("", tool_calls=calls), result]
    prompt = rendered(template(name), found.messages(chat), TOOLS)
    assert "What does" in prompt and prompt.count("get_weather") >= 3
    parsers = found.parsers(TOOLS, found.begins_in_reasoning(prompt), False)
    events = parsers[0].feed("It was fine.")
    assert not [one for one in [*events, *parsers[0].close(False)] if isinstance(one, Call)]


def test_every_template_has_the_form_that_is_said() -> None:
    said = {name: form for form, name in CASES} | {"openai-gpt-oss-120b": "harmony", **REFUSED}
    names = {id(form.calls): name for name, form in PARSERS.items()}
    for file in FILES:
        name = Path(file).stem
        if file.endswith(".jinja") and name in said:
            assert names[id(form_of(template(name), HARMONY.special).calls)] == said[name]


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_changes_lists_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="'append' of 'list' object is unsafe"):
        rendered(template(name), [user("a"), answer("", tool_calls=called(1))], TOOLS)


def test_ids_go_back_to_the_templates_that_write_them() -> None:
    """Kimi's unchanged, Mistral's with nine letters and digits, whatever they were."""
    for name, given, expected in (
        ("moonshotai-Kimi-K2", "functions.get_weather:7", "## Return of functions.get_weather:7"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "Ab3dEf9h1", "[CALL_ID]Ab3dEf9h1[ARGS]"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "call_1", "[CALL_ID]"),
    ):
        (call,) = called(1)
        result = {"role": "tool", "content": "21", "tool_call_id": given, "name": "get_weather"}
        prompt = rendered(template(name), [user("a"), answer("", tool_calls=[{**call, "id": given}]), result], TOOLS)
        assert expected in prompt, name
        if given == "call_1":
            (short,) = {one[:9] for one in prompt.split("[CALL_ID]")[1:]} | {
                one[:9] for one in prompt.split("call_")[1:]
            }
            assert short.isalnum() and given not in prompt
