"""Chat templates: what they write, for servers and for commands, and what a hostile one cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gguf_files import byte_level_tokens, write_gguf
from mdi.checkpoint.ggufsource import gguf_directory
from mdi.cli import launch
from mdi.errors import CheckpointError, UsageError
from mdi.serve.chat import Chat
from mdi.text.templates import ChatTemplate, read_template
from mdi.text.texts import TextCodec
from tiny_checkpoint import END, encode, reference, tiny_config, tiny_gpt, tokenizer, write_checkpoint
from tiny_models import hf_config, hf_state, write_hf

DEADLINE_S = 120.0
# Does what the first message says.
OBEDIENT = """\
{%- set n = messages[0]['content'] %}
{%- if n == 'loop' %}{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}
{%- elif n == 'square' %}{% set ns = namespace(s=99999999) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}
{%- elif n == 'double' %}{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(27) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}
{%- elif n == 'lists' %}{% set ns = namespace(s=[1]) %}{% for i in range(27) %}{% set ns.s = ns.s + ns.s %}{% endfor %}
{%- elif n == 'width' %}{{ ('%' ~ 900000000 ~ 'd') % 1 }}
{%- elif n == 'long' %}{% for i in range(99999) %}{{ '%200d' % i }}{% endfor %}
{%- endif %}{{ n }}"""


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def rendering(template: ChatTemplate, scenario: Callable[[ChatTemplate], Awaitable[None]]) -> None:
    """The scenario; no process may be left."""

    async def limited() -> None:
        try:
            await asyncio.wait_for(scenario(template), DEADLINE_S)
        finally:
            template.close()

    before = psutil.Process().children()
    asyncio.run(limited())
    assert psutil.Process().children() == before


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any = (), extra: Any = None) -> str:
    found: list[str] = []

    async def scenario(template: ChatTemplate) -> None:
        found.append(await template.render(messages, tools, extra or {}))

    rendering(template, scenario)
    return found[0]


def test_a_model_without_a_template_gets_a_plain_one(tmp_path: Path) -> None:
    template = read_template(tmp_path)
    assert template.source is None
    messages = [{"role": "system", "content": "Be short."}, *user("Who?")]
    assert rendered(template, messages) == "Be short.\n\nUser: Who?\nAssistant:"


def test_a_template_of_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools|tojson }}{{ thinks }}"
    )
    template = read_template(tmp_path)
    text = rendered(template, user("Wer ist’s?"), [{"a": 1}], {"thinks": True, "messages": "another chat"})
    assert text == '<s><user>Wer ist’s?[{"a": 1}]True' and template.knows_tools


def named(**templates: str) -> str:
    return json.dumps({"chat_template": [{"name": name, "template": source} for name, source in templates.items()]})


def test_of_two_named_templates_a_chat_with_tools_gets_the_one_for_tools(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        named(default="{{ messages[0].content }}", tool_use="{% for t in tools %}{{ t.a }}{% endfor %}!")
    )
    template = read_template(tmp_path)
    found = []

    async def scenario(template: ChatTemplate) -> None:
        for tools in ([], [{"a": 1}]):
            chosen = template.for_chat(bool(tools))
            found.append((await chosen.render(user("Who?"), tools, {}), chosen.knows_tools))

    rendering(template, scenario)
    assert found == [("Who?", False), ("1!", True)]


def test_a_single_named_template_is_for_all_chats(tmp_path: Path) -> None:
    for name in ("default", "tool_use"):
        (tmp_path / "tokenizer_config.json").write_text(named(**{name: "{{ messages[0].content }}!", "rag": "no"}))
        for has_tools in (False, True):
            assert rendered(read_template(tmp_path).for_chat(has_tools), user("Who?")) == "Who?!"


@pytest.mark.parametrize(
    ("more", "role"), [("", "system"), ("{% if messages[0].role == 'developer' %}{% endif %}", "developer")]
)
def test_a_developers_message_is_the_systems_where_the_template_does_not_know_developers(more: str, role: str) -> None:
    """GLM's and MiniMax' templates leave out roles that they do not know."""
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + more, {})
    messages = [{"role": "developer", "content": "Be short."}, *user("Who?")]
    assert rendered(template, messages) == f"<{role}>Be short.<user>Who?"


# How families write the arguments of a call: Llama 3.1 and gpt-oss, Qwen 3, GLM, MiniMax.
CALLS = """\
{%- set a = messages[0].tool_calls[0].function.arguments -%}
{{ a | tojson }}!{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}!
{%- for k, v in a.items() %}{{ k }}={{ v | tojson(ensure_ascii=False) if v is not string else v }}{% endfor %}"""


def test_arguments_of_calls_are_objects_for_templates_as_in_transformers() -> None:
    def message(arguments: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": arguments}}]}]

    template, found = ChatTemplate(CALLS, {}), []

    async def scenario(template: ChatTemplate) -> None:
        for arguments in ('{"at": "1", "n": [2]}', {"at": "1", "n": [2]}, "", " "):
            found.append(await template.render(message(arguments), (), {}))

    rendering(template, scenario)
    whole = '{"at": "1", "n": [2]}'
    assert found == [f"{whole}!{whole}!at=1n=[2]"] * 2 + ["{}!{}!"] * 2
    # A template that takes them as the text that they are in requests, and what is no object.
    as_text = "{{ '<' + messages[0].tool_calls[0].function.arguments + '>' }}"
    assert rendered(ChatTemplate(as_text, {}), message('{"at":  1}')) == '<{"at":  1}>'
    assert rendered(ChatTemplate(as_text, {}), message("not {")) == "<not {>"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}!{% endfor %}",
            "a<!",
        ),
        ("{{ {'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":[2],"b":1}'),
        ("{{ ['é<'] | tojson }}{{ ['é'] | tojson(true) }}{{ [1] | tojson(indent=1) }}", '["é<"]["\\u00e9"][\n 1\n]'),
        ("{{ '-' * 3 }}{{ 2 * 'ab' }}{{ [1] * 2 }}{{ 2 * 3 }}{{ 'a' * -1 }}{{ 2 * (1,) }}", "---abab[1, 1]6(1, 1)"),
    ],
)
def test_templates_may_use_what_transformers_has_for_them(source: str, expected: str) -> None:
    assert rendered(ChatTemplate(source, {}), user("a<")) == expected


NULL = (
    "{% for m in messages %}"
    "{% if m['content'] is none %}[{{ m.tool_calls|length }}]{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (NULL, "<a>[1]"), (NULL.replace("m['content'] is none", "m.content is not none"), "[0]<None>"),
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<a><>"),
    ],
)  # fmt: skip
def test_a_content_is_null_beside_calls_where_the_template_asks_for_it(source: str, expected: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = Chat({"messages": [*user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert rendered(ChatTemplate(source, {}), chat.conversation.messages) == expected


MISTRAL = """\
{%- for m in messages -%}
{%- for c in m.tool_calls or [] -%}
{%- if c.id is not defined or c.id|length != 9 -%}{{ raise_exception("length 9!") }}{%- endif -%}{{ c.id ~ ' ' }}
{%- endfor -%}
{%- if m.role == 'tool' -%}{%- if m.tool_call_id|length != 9 -%}{{ raise_exception("length 9!") }}{%- endif -%}
{{ m.tool_call_id ~ ' ' }}{%- endif -%}
{%- endfor -%}"""


def test_ids_of_calls_are_as_short_as_the_template_wants_them() -> None:
    ids = ["call_0123456789abcdef01234567", "call_0123456789abcdef01234568", "aB3456789", "é" * 9, "functions.look:0"]
    calls = [{"id": i, "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in ids]
    results = [{"role": "tool", "tool_call_id": i, "content": "x"} for i in ids]
    chat = [*user("a"), {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    found = rendered(ChatTemplate(MISTRAL, {}), chat).split()
    assert found[:5] == found[5:] and len(set(found[:5])) == 5 and found[2] == ids[2]
    assert all(len(i) == 9 and i.isascii() and i.isalnum() for i in found)
    other = rendered(ChatTemplate("{{ messages[1].tool_calls[0].id }}", {}), chat)
    assert other == ids[0]


def test_a_damaged_template_is_told_at_the_first_chat() -> None:
    with pytest.raises(CheckpointError):
        rendered(ChatTemplate("{% for", {}), user("Who?"))


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}",
     "{{ 'x' * 99999 }}", "{{ 99999 * [1] }}", "{% set s = 'x' * 65536 %}{{ s * 2 }}",
     "{{ ''|center(900000000) }}",
     "{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}", "{% include 'x' %}"],
)  # fmt: skip
def test_a_template_cannot_do_harm(source: str) -> None:
    with contextlib.suppress(UsageError, CheckpointError):
        assert rendered(ChatTemplate(source, {}), user("Who?")) == "", source  # what is not allowed is nothing


@pytest.mark.parametrize("what", ["loop", "square", "double", "lists", "width", "long"])
def test_a_chat_that_costs_too_much_is_refused_and_the_next_one_is_written(what: str) -> None:
    async def scenario(template: ChatTemplate) -> None:
        with pytest.raises(UsageError) as caught:
            await template.render(user(what), (), {})
        assert (caught.value.code == "length") == (what == "long")
        assert await template.render(user("Who?"), (), {}) == "Who?"

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


def test_the_limit_of_time_is_one_of_each_chat_and_not_of_all_together() -> None:
    counted = "{% for a in range(30) %}{% for b in range(50000) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}"

    async def scenario(template: ChatTemplate) -> None:
        for n in range(60):
            assert await template.render(user(str(n)), (), {}) == str(n)

    rendering(ChatTemplate(counted, {}), scenario)


def test_an_endless_chat_of_one_model_does_not_hold_up_another_model() -> None:
    async def scenario(template: ChatTemplate) -> None:
        endless = asyncio.create_task(template.render(user("loop"), (), {}))
        other = ChatTemplate(OBEDIENT, {})
        try:
            assert await other.render(user("Who?"), (), {}) == "Who?"
            assert not endless.done()
        finally:
            other.close()
            await asyncio.gather(endless, return_exceptions=True)

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


def test_who_comes_after_a_chat_that_was_given_up_gets_the_text_of_the_own_chat() -> None:
    before = set(psutil.Process().children())

    async def scenario(template: ChatTemplate) -> None:
        assert await template.render(user("first"), (), {}) == "first"
        (process,) = set(psutil.Process().children()) - before
        given_up = [asyncio.create_task(template.render(user(f"given up {n}"), (), {})) for n in range(3)]
        await asyncio.sleep(0)  # the first is asked, the others wait for their turn
        for one in given_up:
            one.cancel()
        assert await template.render(user("Who?"), (), {}) == "Who?"
        assert all(one.cancelled() for one in given_up)
        assert set(psutil.Process().children()) - before == {process}, "nobody waits for a new process"

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


def test_chats_at_the_same_time_get_their_own_texts() -> None:
    async def scenario(template: ChatTemplate) -> None:
        asked = [str(n) * 1000 for n in range(20)]
        assert await asyncio.gather(*(template.render(user(one), (), {}) for one in asked)) == asked

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


def test_an_unloaded_model_renders_no_chat() -> None:
    async def scenario(template: ChatTemplate) -> None:
        template.close()
        with pytest.raises(UsageError) as caught:
            await template.render(user("Who?"), (), {})
        assert caught.value.code == "removed"

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_model_that_is_unloaded_during_a_chat_is_told_as_such(n_before: int) -> None:
    async def scenario(template: ChatTemplate) -> None:
        for _ in range(n_before):  # without one, its process is just being started
            await template.render(user("Who?"), (), {})
        chat = asyncio.create_task(template.render(user("loop"), (), {}))
        await asyncio.sleep(0)
        template.close()
        with pytest.raises(UsageError) as caught:
            await chat
        assert caught.value.code == "removed"

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


# ---- in commands

TEMPLATE = """\
{%- for m in messages %}
{%- if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}The {{ m.role }} says: {{ m.content }}<|end|>
{%- endfor %}{% if add_generation_prompt %}The ring {% endif %}"""
QUESTION = "Who are you?"
RENDERED = f"The user says: {QUESTION}{END}The ring "
GREEDY = ("--temperature", "0", "--dtype", "float32", "--device", "cpu", "--n-tokens", "8")


def hf_folder(tmp_path: Path, name: str = "my-model") -> Path:
    config = tiny_config()
    folder = write_hf(
        tmp_path / name, hf_config("Llama-3.1-8B", config), hf_state(config, dict(tiny_gpt().state_dict()))
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    settings |= {"bos_token": END, "add_bos_token": True}  # which is not put before a chat whose template leaves it out
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def gguf_file(tmp_path: Path) -> Path:
    fields = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": TEMPLATE}
    tokens = byte_level_tokens(json.loads(tokenizer().to_str()), **fields)
    return write_gguf(tmp_path / "tiny.gguf", "Llama-3.1-8B", tiny_config(), tiny_gpt().state_dict(), tokens=tokens)


@pytest.fixture(params=["hf", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "store"))
    return hf_folder(tmp_path) if request.param == "hf" else gguf_file(tmp_path)


def test_a_codec_writes_chats_in_the_models_own_template(model: Path, tmp_path: Path) -> None:
    before = psutil.Process().children()
    codec = TextCodec.from_checkpoint(gguf_directory(model, tmp_path / "store") if model.is_file() else model)
    try:
        assert codec.encode_prompt(QUESTION) == encode(RENDERED) and tokenizer().token_to_id(END) in encode(RENDERED)
        history = f"The user says: Hello{END}The assistant says: Yes{END}"
        assert codec.encode_chat([("Hello", "Yes")], QUESTION) == encode(history + RENDERED)
        with pytest.raises(UsageError) as caught:
            codec.encode_prompt("no")
        assert caught.value.code == "template" and "not that" in str(caught.value)
        assert codec.encode_prompt(QUESTION) == encode(RENDERED), "after a refusal"
    finally:
        codec.close()
    assert psutil.Process().children() == before


@pytest.mark.parametrize("command", ["sample", "run", "chat"])
def test_commands_use_the_models_own_template(
    model: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n"))
    words = {"sample": ["--ckpt", str(model), "--prompt", QUESTION, "--n-samples", "1"],
             "run": [str(model), QUESTION, "--quantize", "float32"], "chat": [str(model)]}[command]  # fmt: skip
    assert launch(command, [*words, *GREEDY]) == 0
    shown = capsys.readouterr()
    assert tokenizer().decode(list(reference(RENDERED, 8))).strip() in shown.out
    assert "no chat template" not in shown.err
    assert reference(RENDERED, 8) != reference(QUESTION + "\n", 8)


def test_a_model_without_a_template_continues_the_text_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "plain")
    assert launch("run", [str(folder), QUESTION, "--quantize", "float32", *GREEDY]) == 0
    shown = capsys.readouterr()
    assert QUESTION + tokenizer().decode(list(reference(QUESTION, 8))) in shown.out
    assert shown.err.count("no chat template is known") == 1


def test_a_template_comes_before_a_name_but_not_in_litgpts_form(tmp_path: Path) -> None:
    chat = hf_folder(tmp_path, "Qwen3-0.6B")
    assert TextCodec.from_checkpoint(chat).prompt_style.class_name == "the model's own"  # type: ignore[union-attr]
    assert TextCodec.from_checkpoint(chat, "alpaca").prompt_style.class_name == "Alpaca"  # type: ignore[union-attr]
    assert TextCodec.from_checkpoint(hf_folder(tmp_path, "Qwen3-0.6B-Base")).prompt_style is None
    (chat / "model_config.yaml").write_text("name: Qwen3-0.6B\n")
    assert TextCodec.from_checkpoint(chat).prompt_style.class_name == "Qwen3"  # type: ignore[union-attr]
    (chat / "model_config.yaml").write_text("name: my-own\n")
    assert TextCodec.from_checkpoint(chat).prompt_style.class_name == "the model's own"  # type: ignore[union-attr]
