"""Chat templates: what they write, and what a hostile one cannot do to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdi.errors import CheckpointError
from mdi.serve.api_errors import ApiError
from mdi.serve.templates import ChatTemplate, read_template

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
    assert template.is_plain
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


def test_a_damaged_template_is_told_at_the_first_chat() -> None:
    with pytest.raises(ApiError) as caught:
        rendered(ChatTemplate("{% for", {}), user("Who?"))
    assert (caught.value.status, caught.value.code) == (500, CheckpointError.code)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}",
     "{{ ''|center(900000000) }}",
     "{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}", "{% include 'x' %}"],
)  # fmt: skip
def test_a_template_cannot_do_harm(source: str) -> None:
    try:
        assert rendered(ChatTemplate(source, {}), user("Who?")) == "", source  # what is not allowed is nothing
    except ApiError as e:
        assert e.status in (400, 500)


@pytest.mark.parametrize("what", ["loop", "square", "double", "lists", "width", "long"])
def test_a_chat_that_costs_too_much_is_refused_and_the_next_one_is_written(what: str) -> None:
    async def scenario(template: ChatTemplate) -> None:
        with pytest.raises(ApiError) as caught:
            await template.render(user(what), (), {})
        assert (caught.value.status, caught.value.param) == (400, "messages")
        assert (caught.value.code == "context_length_exceeded") == (what == "long")
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
    async def scenario(template: ChatTemplate) -> None:
        assert await template.render(user("first"), (), {}) == "first"
        given_up = asyncio.create_task(template.render(user("given up"), (), {}))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await template.render(user("Who?"), (), {}) == "Who?"
        assert given_up.cancelled()

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


def test_chats_at_the_same_time_get_their_own_texts() -> None:
    async def scenario(template: ChatTemplate) -> None:
        asked = [str(n) * 1000 for n in range(20)]
        assert await asyncio.gather(*(template.render(user(one), (), {}) for one in asked)) == asked

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


def test_an_unloaded_model_renders_no_chat() -> None:
    async def scenario(template: ChatTemplate) -> None:
        template.close()
        with pytest.raises(ApiError) as caught:
            await template.render(user("Who?"), (), {})
        assert caught.value.status == 503

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_model_that_is_unloaded_during_a_chat_is_told_as_such(n_before: int) -> None:
    async def scenario(template: ChatTemplate) -> None:
        for _ in range(n_before):  # without one, its process is just being started
            await template.render(user("Who?"), (), {})
        chat = asyncio.create_task(template.render(user("loop"), (), {}))
        await asyncio.sleep(0)
        template.close()
        with pytest.raises(ApiError) as caught:
            await chat
        assert caught.value.status == 503

    rendering(ChatTemplate(OBEDIENT, {}), scenario)


def test_what_a_template_writes_must_be_text() -> None:
    messages = [{"role": "user", "content": "Who?", "name": "\ud800"}]
    with pytest.raises(ApiError) as caught:
        rendered(ChatTemplate("{{ messages|tojson }}", {}), messages)
    assert caught.value.status == 400
