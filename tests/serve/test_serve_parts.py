"""The parts of the server by themselves: the queue, tool calls, the lines between the processes."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import mdi.serve.models
from answer_streams import apart
from mdi.cli.serve_settings import read_key
from mdi.engine.sequence import SamplingParams
from mdi.errors import CheckpointError, UsageError, WireError
from mdi.files import module_environment
from mdi.serve import process as lines
from mdi.serve.admission import Admission
from mdi.serve.api_errors import ApiError
from mdi.serve.catalog import Catalog
from mdi.serve.chat import Chat
from mdi.serve.completions import Completion, CompletionChoices
from mdi.serve.endpoint import Answers
from mdi.serve.engine_client import EngineClient
from mdi.serve.host import Outlet
from mdi.serve.messages import MessageRequest
from mdi.serve.models import LoadedModel, Models, ServedTokenizer
from mdi.serve.openai import usage_of
from mdi.serve.request import (
    Opened,
    RequestFields,
    TextLogprobs,
    TextPiece,
    Usage,
    chat_logprobs,
    check_beams,
    check_prompt,
    common_fields,
    encoded,
    read_fields,
    write_texts,
)
from mdi.serve.responses import ResponseRequest
from mdi.serve.tools import parse_tools
from mdi.text.answers.events import End, Reasoning, Text
from mdi.text.answers.forms import WORDS
from mdi.text.answers.stream import AnswerStream
from mdi.text.limited import grammar_error
from mdi.text.quoted import Quotes
from mdi.text.templates import ChatTemplate
from mdi.text.texts import TextCodec
from mdi.text.tokenizer import FileTokenizer

NANO = Path(__file__).resolve().parents[2] / "assets" / "nano-llama"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def others_run() -> None:
    """Let every task of the loop get as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_priority_goes_first_then_who_has_least_then_who_came_first() -> None:
    async def scenario() -> list[str]:
        queue, order = Admission(2, 10), []
        leave = {"long": asyncio.Event(), "long2": asyncio.Event()}

        async def one(name: str, owner: str, priority: int) -> None:
            async with queue.entered(owner, priority, 1):
                order.append(name)
                if name in leave:
                    await leave[name].wait()

        tasks = [asyncio.create_task(one("long", "a", 0)), asyncio.create_task(one("long2", "b", 0))]
        await asyncio.sleep(0)
        for name, owner, priority in (("b1", "b", 0), ("a1", "a", 0), ("c1", "c", 0), ("vip", "b", 9)):
            tasks.append(asyncio.create_task(one(name, owner, priority)))
            await asyncio.sleep(0)
        assert (queue.n_running, queue.n_waiting) == (2, 4)
        leave["long"].set()
        await others_run()
        assert len(order) == 6
        leave["long2"].set()
        await others_run()
        assert (queue.n_running, queue.n_waiting) == (0, 0) and all(task.done() for task in tasks)
        return order

    assert asyncio.run(scenario())[2:] == ["vip", "a1", "c1", "b1"]


def test_a_full_queue_refuses_and_who_leaves_it_makes_way() -> None:
    async def scenario() -> None:
        queue = Admission(1, 1)
        entered = queue.entered("a", 0, 1)
        await entered.__aenter__()
        waiting = asyncio.create_task(queue.entered("b", 0, 1).__aenter__())
        await asyncio.sleep(0)
        refused = asyncio.create_task(queue.entered("c", 0, 1).__aenter__())
        await others_run()
        assert refused.done()
        error = refused.exception()
        assert isinstance(error, ApiError) and error.status == 429 and int(error.headers["retry-after"]) >= 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert queue.n_waiting == 0
        await entered.__aexit__(None, None, None)
        assert queue.n_running == 0

    asyncio.run(scenario())


def test_who_is_let_in_and_gone_at_the_same_moment_keeps_no_place() -> None:
    async def scenario() -> None:
        queue = Admission(1, 5)
        first, second, third = (queue.entered(owner, 0, 1) for owner in "abc")
        await first.__aenter__()
        waiting = [asyncio.create_task(one.__aenter__()) for one in (second, third)]
        await others_run()
        assert queue.n_waiting == 2
        await first.__aexit__(None, None, None)  # lets the next one in, who does not know it yet
        assert (queue.n_running, queue.n_waiting) == (1, 1)
        waiting[0].cancel()
        await others_run()
        assert waiting[0].cancelled() and waiting[1].done(), "the one behind it has its place"
        assert (queue.n_running, queue.n_waiting) == (1, 0)
        await third.__aexit__(None, None, None)
        assert queue.n_running == 0

    asyncio.run(scenario())


def test_nobody_is_let_in_while_texts_wait_for_memory() -> None:
    async def scenario() -> None:
        is_open = True
        queue = Admission(2, 5, lambda: is_open)
        first, second = queue.entered("a", 0, 1), queue.entered("b", 0, 1)
        await first.__aenter__()
        is_open = False
        waiting = asyncio.create_task(second.__aenter__())
        await others_run()
        queue.admit()
        assert (queue.n_running, queue.n_waiting) == (1, 1), "there is a free place, and still"
        is_open = True
        queue.admit()
        await others_run()
        assert waiting.done() and (queue.n_running, queue.n_waiting) == (2, 0)

    asyncio.run(scenario())


def test_a_request_for_more_texts_than_run_at_once_waits_until_it_is_alone_and_is_not_overtaken() -> None:
    async def scenario() -> None:
        queue = Admission(2, 9)
        first, five, one = queue.entered("a", 0, 1), queue.entered("b", 0, 5), queue.entered("c", 0, 1)
        await first.__aenter__()
        large = asyncio.create_task(five.__aenter__())
        await others_run()
        small = asyncio.create_task(one.__aenter__())
        await others_run()
        assert (queue.n_running, queue.n_waiting) == (1, 6), "there is a place for the small one, but it came later"
        await first.__aexit__(None, None, None)
        await others_run()
        assert large.done() and (queue.n_running, queue.n_waiting) == (5, 1)
        await five.__aexit__(None, None, None)
        await others_run()
        assert small.done() and (queue.n_running, queue.n_waiting) == (1, 0)

    asyncio.run(scenario())


FIELDS: dict[str, Any] = {
    "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "presence_penalty": 0.75, "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
}  # fmt: skip


def test_every_field_of_a_request_reaches_the_engine() -> None:
    """From the body of a request to the parameters that a text is continued with."""
    body = {**FIELDS, "logit_bias": {"5": -2.5}, "seed": 9, "n": 2, "max_tokens": 11}
    fields = common_fields(read_fields(RequestFields, body), None, 3)
    assert (fields.sampling.seed, fields.n, fields.n_tokens) == (9, 2, 11)
    submitted: list[tuple[list[int], SamplingParams, str]] = []

    def submit(ids: list[int], params: SamplingParams, owner: str, **_: Any) -> Any:
        submitted.append((ids, params, owner))
        return SimpleNamespace(seq_id=1)

    codec = SimpleNamespace(eos_ids=frozenset({4}), suppressed=frozenset({3}))
    a, b = socket.socketpair()
    ours, theirs = lines.Lines(a), lines.Lines(b)
    outlet = Outlet("m", cast(Any, SimpleNamespace(submit=submit)), cast(Any, codec), ours)
    sampling = json.loads(json.dumps({**fields.sampling.values, "n_tokens": 11, "seed": fields.sampling.seed}))
    outlet.submit({"numbers": [1], "ids": [1, 2], "sampling": sampling, "owner": "me"}, None)
    outlet.close()
    ours.close()
    theirs.close()
    expected = SamplingParams(
        **FIELDS,
        n_tokens=11,
        seed=9,
        logit_bias=((5, -2.5),),
        n_logprobs=3,
        eos_ids=frozenset({4}),
        suppressed=frozenset({3}),
    )
    assert submitted == [([1, 2], expected, "me")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 9}, "n"), ({"n": 2, "best_of": 9}, "best_of"), ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 4, "max_tokens": 5000}, "max_tokens"), ({"early_stopping": "always"}, "early_stopping"),
        ({"use_beam_search": False, "best_of": 2}, "best_of"),
        ({"best_of": 4, "num_beam_groups": 3, "diversity_penalty": 1}, "num_beam_groups"),
        ({"use_beam_search": False, "num_beam_groups": 2}, "num_beam_groups"),
        ({"best_of": 4, "num_beam_groups": 2}, "diversity_penalty"),
        ({"best_of": 4, "diversity_penalty": 1}, "diversity_penalty"),
        ({"best_of": 4, "num_beam_groups": 0}, "num_beam_groups"),
    ],
)  # fmt: skip
def test_beams_that_an_api_key_may_not_have_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_beams(common_fields(read_fields(RequestFields, {"use_beam_search": True, **body}), 16, None), None, 9999)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_api_key_says_how_many_beams_it_may_have() -> None:
    key = read_key(1, "long-enough alpha 3 beams=2 beam_tokens=20 operator")
    assert (key.name, key.priority, key.role, key.beams, key.beam_tokens) == ("alpha", 3, "operator", 2, 20)
    fields = common_fields(
        read_fields(RequestFields, {"use_beam_search": True, "best_of": 2, "max_tokens": 10}), 16, None
    )
    assert fields.n_running == 2 and fields.n == 1
    check_beams(fields, key, 9999)
    for worse in (replace(key, beams=1), replace(key, beam_tokens=19)):
        with pytest.raises(ApiError):
            check_beams(fields, worse, 9999)
    check_beams(fields, replace(key, beam_tokens=8), 4)
    with pytest.raises(UsageError):
        read_key(1, "long-enough alpha beams=many")


def test_fields_that_a_request_does_not_name_are_left_to_the_model() -> None:
    values = common_fields(read_fields(RequestFields, {"top_p": None}), 16, None).sampling.values
    assert values == {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [], "n_logprobs": None}


def test_the_least_top_p_is_the_best_token_alone() -> None:
    values = common_fields(read_fields(RequestFields, {"top_p": 0}), 16, None).sampling.values
    assert 0 < values["top_p"] < 1e-6


@pytest.mark.parametrize("body", [{"a\udc80": 1}, {"stream_options": {"a\udc80": 1}}])
def test_a_name_that_is_half_a_character_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        read_fields(RequestFields, body)
    assert (caught.value.status, caught.value.body["error"]["code"]) == (400, "invalid_body")
    json.dumps(caught.value.body, ensure_ascii=False).encode()


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_of_allowed_tools_leaves_the_others_out(mode: str) -> None:
    others = [{"type": "function", "function": {"name": name}} for name in ("go", "stop")]
    allowed = {"mode": mode, "tools": [TOOL, others[0]]}
    use = parse_tools([TOOL, *others], {"type": "allowed_tools", "allowed_tools": allowed})
    assert use.tools == (TOOL, others[0]) and use.forced == (("look", "go") if mode == "required" else ())


@pytest.mark.parametrize(
    "allowed", [None, {}, {"mode": "auto"}, {"mode": "auto", "tools": []}, {"mode": "never", "tools": [TOOL]},
                {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
                {"mode": "auto", "tools": [1]}],
)  # fmt: skip
def test_a_choice_of_tools_that_there_are_not_is_refused(allowed: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse_tools([TOOL], {"type": "allowed_tools", "allowed_tools": allowed})
    assert caught.value.param == "tool_choice"


def test_what_openais_clients_send_in_chats_is_read() -> None:
    parts = [{"type": "text", "text": "No: "}, {"type": "refusal", "refusal": "not that."}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": parts}]
    made = Chat({"messages": messages, "reasoning_effort": "xhigh"}).conversation
    assert made.turns[1].content == "No: not that." and made.values["reasoning_effort"] == "xhigh"
    for part in ({"type": "refusal", "text": "x"}, {"type": "image_url", "image_url": {}}, "x"):
        with pytest.raises(ApiError):
            Chat({"messages": [{"role": "user", "content": [part]}]})


def refused(call: Callable[[], Any]) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value.param, caught.value.body["error"]["code"]


def test_what_is_too_much_is_refused_by_its_name() -> None:
    user = {"role": "user", "content": "x"}
    assert len(Chat({"messages": [user] * 4096}).conversation.turns) == 4096
    assert refused(lambda: Chat({"messages": [user] * 4097})) == ("messages", "invalid_value")
    assert len(parse_tools([TOOL] * 128, "auto").tools) == 128
    assert refused(lambda: parse_tools([TOOL] * 129, "auto")) == ("tools", "invalid_value")
    for stop in (["a"] * 16, "a" * 4096):
        Completion({"prompt": "a", "stop": stop})
    for stop in (["a"] * 17, "a" * 4097, ["b", "a" * 4097], [""]):
        assert refused(lambda stop=stop: Completion({"prompt": "a", "stop": stop})) == ("stop", "invalid_value")


def test_an_unknown_model_is_told_by_the_beginning_of_its_name() -> None:
    models = Models(EngineClient(lambda: None), Catalog(Path("nowhere"), Path("nowhere")), lambda: None)
    with pytest.raises(ApiError) as caught:
        models.load("x" * 10_000)
    assert caught.value.status == 404 and "x" * 50 in str(caught.value) and len(str(caught.value)) < 300


def test_an_adapter_that_is_being_unloaded_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another one is unloaded meanwhile, and for requests that came before and waited for the model."""
    loaded = SimpleNamespace(with_adapter=lambda name: name)
    monkeypatch.setattr(mdi.serve.models, "LoadedModel", SimpleNamespace(of=lambda facts: Read(loaded.with_adapter)))

    @dataclass
    class Read:
        with_adapter: Callable[[str], str]
        tool_parser: str = ""

    class Engine:
        is_gone = is_waited_for = False
        adapters = ("a", "b")

        def __init__(self) -> None:
            self.models = {"m": {"n_virtual": {}}}
            self.state = SimpleNamespace(models=self.models, is_serving=lambda name: self.is_loaded, statuses={})
            self.is_loaded = True

        async def wait_for_change(self) -> None:
            self.is_waited_for = True
            await asyncio.sleep(0)

        def notify(self) -> None: ...

        async def ask(self, what: str, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            if what == "load":
                while not self.is_loaded:
                    await asyncio.sleep(0)
                return {"code": ""}
            self.adapters = tuple(one for one in self.adapters if one != args["adapter"])
            return {"adapters": [*self.adapters], "n_virtual": {}}

    async def scenario() -> None:
        engine: Any = Engine()
        catalog: Any = SimpleNamespace(adapters=("a", "b"), first_name="m", meant=lambda name: name)
        catalog.names = lambda: ["m", *catalog.adapters]
        catalog.model_of = lambda name: "m" if name in catalog.adapters else name
        models = Models(engine, catalog, lambda: None)

        async def use(name: str) -> object:
            async with models.using(name) as found:
                return found

        async with models.using("a"):  # an older request
            engine.is_loaded = False
            late = asyncio.create_task(use("a"))
            while not engine.is_waited_for:
                await asyncio.sleep(0)
            leaving = asyncio.create_task(models.unload_adapter("a"))
            await asyncio.sleep(0)
            await models.unload_adapter("b")
            assert catalog.adapters == () and engine.adapters == ("a",)
            engine.is_loaded = True
            with pytest.raises(ApiError) as caught:
                await late
            assert caught.value.status == 404
        await leaving
        assert engine.adapters == () and catalog.adapters == ()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_prompt_has_known_tokens_and_leaves_place_for_one() -> None:
    model = cast(LoadedModel, SimpleNamespace(context=4, n_vocabulary=9))
    check_prompt(model, [0, 8, 1], "prompt")
    assert refused(lambda: check_prompt(model, [9], "prompt")) == ("prompt", "invalid_value")
    assert refused(lambda: check_prompt(model, [-1], "prompt")) == ("prompt", "invalid_value")
    assert refused(lambda: check_prompt(model, [], "prompt")) == ("prompt", "invalid_value")
    assert refused(lambda: check_prompt(model, [0] * 4, "prompt")) == ("prompt", "context_length_exceeded")


def test_a_text_that_is_too_long_is_not_tokenized() -> None:
    model = cast(LoadedModel, SimpleNamespace(most_characters=5, context=4))

    def encode(text: str) -> list[int]:
        assert len(text) <= 5
        return [1]

    assert asyncio.run(encoded(model, "12345", encode, "prompt")) == [1]
    assert refused(lambda: asyncio.run(encoded(model, "123456", encode, "prompt"))) == (
        "prompt",
        "context_length_exceeded",
    )


def test_cached_tokens_of_a_prompt_count_once() -> None:
    usage = Usage(7)
    for index, n_cached in enumerate((3, 3, 5, 5)):
        usage.count(TextPiece(index, [Text("a")], [1], n_cached=n_cached), 2)
    told = usage_of(usage)
    assert told["prompt_tokens_details"]["cached_tokens"] == 8 and told["completion_tokens"] == 4


def test_usage_says_what_was_reasoning_and_how_fast_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("mdi.serve.request.time.monotonic", lambda: now[0])
    usage = Usage(7, begin_s=now[0])
    assert usage_of(usage)["pace"] == {}
    usage.count(TextPiece(0, [], []), 1)
    assert usage_of(usage)["pace"] == {}, "no token yet"
    for after_s, tokens, events in (
        (2.0, [1], [Reasoning("a")]),
        (0.5, [2, 3], [Reasoning("b")]),
        (1.5, [4, 5], [Text("c")]),
    ):
        now[0] += after_s
        usage.count(TextPiece(0, events, tokens), 1)
    told = usage_of(usage)
    assert told["completion_tokens_details"]["reasoning_tokens"] == 3
    assert told["pace"] == {"first_token_s": 2.0, "tokens_s": 2.0}
    at_once = Usage(7, begin_s=now[0])
    for _ in range(2):
        at_once.count(TextPiece(0, [Text("c")], [4]), 1)
    assert usage_of(at_once)["pace"] == {"first_token_s": 0.0}
    usage.count(TextPiece(0, [Text("c")], [4, 5], n_before=5), 1)
    assert usage.n_reasoning == 0 and usage.n_completion == 2


def choices_of(asked: Completion, *prompts: list[int]) -> CompletionChoices:
    """Of a model of which only the texts of ids are asked."""
    model = SimpleNamespace(codec=SimpleNamespace(decode=lambda ids: f"<{ids}>"))
    answers = SimpleNamespace(model=model, opened=Opened(prompts, cast(Any, None)))
    return CompletionChoices(asked, cast(Answers, answers))


def test_each_text_echoes_its_own_prompt_as_it_was_given() -> None:
    for given, shown in (
        (["a<s>", "b"], ["a<s>", "a<s>", "b", "b"]),
        ([[1, 2], [3]], ["<[1, 2]>"] * 2 + ["<[3]>"] * 2),
    ):
        job = Completion({"prompt": given, "echo": True, "n": 2})
        choices = choices_of(job, [1, 2], [3])
        begun = choices.begin()
        assert [(one["index"], one["text"]) for one in begun] == list(enumerate(shown))
        choices.piece(TextPiece(2, [Text("!"), End("stop")]))
        assert [one["text"] for one in choices.choices()] == [*shown[:2], shown[2] + "!", shown[3]]
    assert choices_of(Completion({"prompt": ["a"]}), [1]).begin() == []


def test_no_new_tokens_is_the_prompt_alone() -> None:
    async def pieces(job: Completion) -> list[TextPiece]:
        nobody: Any = None
        opened = Opened([[1], [2]], nobody, is_prompt_alone=job.is_prompt_alone)
        return [piece async for piece in write_texts(nobody, nobody, None, opened, job.fields)]

    job = Completion({"prompt": ["a", "b"], "echo": True, "max_tokens": 0})
    assert asyncio.run(pieces(job)) == [TextPiece(i, [End("length")]) for i in range(2)]
    with pytest.raises(ApiError) as caught:
        Completion({"prompt": "a", "max_tokens": 0})
    assert caught.value.param == "max_tokens"
    with pytest.raises(ApiError):
        Chat({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0})


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}


def grammar_of(parameters: Any) -> Any:
    """The schema of the arguments of a call that is demanded."""
    function = {"name": "look"} | ({} if parameters is None else {"parameters": parameters})
    grammar = parse_tools([{"type": "function", "function": function}], "required").grammar
    assert grammar is not None
    return grammar["schema"]["properties"]["arguments"]


def test_a_call_has_no_keys_that_its_schema_does_not_name() -> None:
    for none in (None, {}, {"type": "object"}):
        assert grammar_of(none) == {"type": "object", "properties": {}, "additionalProperties": False}
    closed = {**PLACE, "additionalProperties": False}
    assert grammar_of(PLACE) == closed
    inner = {"at": PLACE, "all": {"type": "array", "items": PLACE}, "free": {"type": "object"}, "properties": PLACE}
    found = grammar_of({"type": "object", "properties": inner, "$defs": {"one": PLACE}})
    assert found["properties"]["at"] == found["properties"]["all"]["items"] == found["$defs"]["one"] == closed
    assert found["properties"]["free"] == {"type": "object"} and found["properties"]["properties"] == closed
    assert not found["additionalProperties"]


@pytest.mark.parametrize(
    "more", [{"additionalProperties": True}, {"additionalProperties": {"type": "integer"}}, {"allOf": [PLACE]}]
)
def test_a_schema_that_says_more_about_keys_is_left_as_it_is(more: dict[str, Any]) -> None:
    assert grammar_of({**PLACE, **more}) == {**PLACE, **more}


def meant(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference means."""
    for word in reference.removeprefix("#/").split("/"):
        schema = schema[int(word)] if isinstance(schema, list) else schema[word]
    return schema


def test_references_of_a_demanded_calls_schema_mean_the_tools_own_parts() -> None:
    """As pydantic writes nested classes, two of which have the same name here."""
    tools = []
    for name, kind in (("look", "string"), ("go", "integer")):
        inner = {"type": "object", "properties": {"at": {"type": kind}, "next": {"$ref": "#/$defs/Inner"}}}
        fixed = {"const": {"$ref": "#/$defs/none"}}
        named = {"a": "#/$defs/Inner", "b": "#/definitions/B", "c": "#/properties/a"}
        properties = {**{name: {"$ref": to} for name, to in named.items()}, "$ref": fixed}
        defined = {"$defs": {"Inner": inner}, "definitions": {"B": {"type": kind}}}
        parameters = {"type": "object", "properties": properties, **defined}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    for demanded in (tools, tools[:1], tools[1:]):
        grammar = parse_tools(demanded, "required").grammar
        assert grammar is not None and grammar_error(json.dumps(grammar["schema"]), True) == ""
        for number, tool in enumerate(demanded):
            kind = "string" if tool["function"]["name"] == "look" else "integer"
            call = grammar["schema"]["anyOf"][number] if len(demanded) == 2 else grammar["schema"]
            parts = call["properties"]["arguments"]["properties"]
            inner = meant(grammar["schema"], parts["a"]["$ref"])
            assert inner["properties"]["at"] == {"type": kind} and not inner["additionalProperties"]
            assert meant(grammar["schema"], inner["properties"]["next"]["$ref"]) == inner
            assert meant(grammar["schema"], parts["b"]["$ref"]) == {"type": kind}
            assert meant(grammar["schema"], parts["c"]["$ref"]) == parts["a"]
            assert parts["$ref"] == {"const": {"$ref": "#/$defs/none"}}


def test_a_schema_that_means_itself_still_does() -> None:
    found = grammar_of({"type": "object", "properties": {"inner": {"$ref": "#"}, "size": {"type": "integer"}}})
    assert found["properties"]["inner"] == {"$ref": "#/properties/arguments"}


def answered(text: str, choice: Any, reason: str) -> tuple[str, list[Any]]:
    """Content and calls of a chat's answer."""
    codec = TextCodec.from_checkpoint(NANO, prompt_style="none")
    answer = AnswerStream(codec, WORDS, (), [TOOL], is_call=choice == "required")
    found, _, calls = apart([*answer.feed(codec.encode(text)), *answer.close(is_cut=reason == "length")])
    return found, calls


CALL = '{"name": "look", "arguments": {"at": 1}}'


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_is_cut_off_is_no_content(choice: str) -> None:
    for text in (CALL, f"<tool_call>{CALL}", f"[{CALL}, {CALL}]"):
        for n in range(1 if choice == "required" else len('<tool_call>{"name": "'), len(CALL) - 1):
            assert answered(text[:n], choice, "length") == ("", []), text[:n]
    content, (call,) = answered(CALL, choice, "length")
    assert content == "" and call.name == "look"


@pytest.mark.parametrize("text", ['{"city": "Par', '{"name": "Alice", "age', "[1, 2, ", "Look! {", '{"name": "look'])
def test_other_text_that_is_cut_off_is_content(text: str) -> None:
    reason = "stop" if "look" in text else "length"
    assert answered(text, "auto", reason) == (text, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, status, code",
    [
        ("{{ messages|tojson }}", 400, "invalid_value"),  # half a surrogate pair, which is no text
        ("{{ raise_exception('no') }}", 400, None),
        ("{% for i in range(99999) %}{{ '%200d' % i }}{% endfor %}", 400, "context_length_exceeded"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", 400, "chat_template"),
        ("{% for", 500, CheckpointError.code),
    ],
)
def test_a_chat_that_its_template_does_not_write_gets_an_error_of_the_api(
    source: str, status: int, code: str | None
) -> None:
    chat = Chat({"messages": [{"role": "user", "content": "Who?", "name": "\ud800"}]})

    async def scenario() -> None:
        template = ChatTemplate(source, {})
        codec = SimpleNamespace(quotes=Quotes(()))
        model = SimpleNamespace(template=template, codec=codec, form_of=lambda _: WORDS, most_characters=99)
        with pytest.raises(ApiError) as caught:
            try:
                await chat.opened(cast(LoadedModel, model))
            finally:
                template.close()
        assert (caught.value.status, caught.value.body["error"]["code"]) == (status, code)

    asyncio.run(scenario())


def test_a_tokenizer_that_panics_is_told_in_one_line(tmp_path: Path) -> None:
    content = json.loads((NANO / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    facts = {"backend": "huggingface", "bos_id": None, "eos_id": None, "use_bos": False}
    served, text = ServedTokenizer({**facts, "directory": str(tmp_path)}), "a" * 36 + "!"
    model = cast(LoadedModel, SimpleNamespace(most_characters=1000, context=100))
    with pytest.raises(ApiError) as caught:
        asyncio.run(encoded(model, text, served.encode, "prompt"))
    assert (caught.value.status, caught.value.param) == (400, "prompt") and len(str(caught.value).splitlines()) == 1
    assert asyncio.run(encoded(model, "KING", served.encode, "prompt")) == served.encode("KING")
    with pytest.raises(CheckpointError):
        FileTokenizer(tmp_path, facts).encode(text)
    assert module_environment()["RUST_BACKTRACE"] == "0"


def test_a_text_is_tokenized_outside_the_loop() -> None:
    threads: list[str] = []

    def encode(text: str) -> list[int]:
        threads.append(threading.current_thread().name)
        return [1]

    model = cast(LoadedModel, SimpleNamespace(most_characters=1000, context=100))
    assert asyncio.run(encoded(model, "KING", encode, "prompt")) == [1]
    assert threads != [threading.current_thread().name]


def test_lines_come_as_they_were_sent_and_no_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = socket.socketpair()
    ours, theirs = lines.Lines(a), lines.Lines(b)
    sent: list[dict[str, Any]] = [{"text": "ä\n" * 50_000}, {"n": 1}]
    writer = threading.Thread(target=lambda: [ours.send(message) for message in sent])
    writer.start()
    reader = iter(theirs)
    assert [next(reader), next(reader)] == sent
    writer.join()
    monkeypatch.setattr(lines, "LIMIT_BYTES", 1000)
    a.sendall(b"x" * 2000)
    with pytest.raises(WireError):
        next(reader)
    ours.close()
    theirs.close()


def test_log_probabilities_of_tokens_that_are_parts_of_characters() -> None:
    codec = TextCodec.from_checkpoint(NANO, prompt_style="none")
    text = "né 🙂 x"
    ids = codec.encode(text)
    parts = [i for i in range(codec.vocab_size) if "\ufffd" in codec.decode([i], continues=True)][:5]
    worse = [(part, -1.0 - n) for n, part in enumerate(parts)]
    logprobs = [(-0.5, [(i, -0.5), *worse]) for i in ids]
    piece = TextPiece(0, [Text(text)], ids, logprobs)
    entries = chat_logprobs(codec, piece)
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    for entry in entries:
        data = bytes(entry["bytes"])
        is_whole = "\ufffd" not in data.decode(errors="replace")
        assert entry["token"] == (data.decode() if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data))
        assert entry["logprob"] == -0.5 == entry["top_logprobs"][0]["logprob"]
    found = TextLogprobs(codec)
    for half in (slice(3), slice(3, None)):
        found.take(replace(piece, tokens=ids[half], logprobs=logprobs[half]))
    assert found.all["tokens"] == [entry["token"] for entry in entries]
    # Where the text is that the tokens before have completed.
    starts = [len(codec.decode(ids[:n], continues=True).rstrip("\ufffd")) for n in range(len(ids))]
    assert found.all["text_offset"] == starts and max(starts) < len(text)
    for token, best in zip(found.all["tokens"], found.all["top_logprobs"], strict=True):
        assert best[token] == -0.5 and len(best) >= len(parts)


def test_of_tokens_that_are_no_text_the_best_counts() -> None:
    codec = TextCodec.from_checkpoint(NANO, prompt_style="none")
    ends = [*codec.eos_ids, codec.vocab_size + 1]
    found = TextLogprobs(codec).take(TextPiece(0, [], ends[:1], [(-0.5, [(ends[0], -0.5), (ends[-1], -2.0)])]))
    assert found is not None and found["top_logprobs"] == [{"": -0.5}]


@pytest.mark.parametrize("name", ["name", "description", "parameters"])
def test_what_is_wrong_with_a_tool_is_told_by_the_name_of_its_field(name: str) -> None:
    user, schema = {"role": "user", "content": "x"}, {"type": "object"}
    value: Any = {"name": "a b", "description": 5, "parameters": []}[name]
    function = {"name": "a", "description": "b", "parameters": schema, name: value}
    chat = [TOOL, {"type": "function", "function": function}]
    assert refused(lambda: Chat({"messages": [user], "tools": chat}))[0] == f"tools[1].function.{name}"
    # those that are left out count, too
    flat = [{"type": "web_search"}, {"type": "function", **function}]
    assert refused(lambda: ResponseRequest({"input": "x", "tools": flat}))[0] == f"tools[1].{name}"
    own = "input_schema" if name == "parameters" else name
    blocks = [{"type": "bash_1"}, {"name": "a", "description": "b", "input_schema": schema, own: value}]
    asked = {"messages": [user], "max_tokens": 1, "tools": blocks}
    assert refused(lambda: MessageRequest(asked))[0] == f"tools[1].{own}"
    assert refused(lambda: Chat({"messages": [user], "tools": [TOOL, 1]}))[0] == "tools[1]"


def test_a_schema_is_known_by_the_field_that_has_it() -> None:
    user, go = {"role": "user", "content": "x"}, {"name": "go", "parameters": {"type": "object"}}
    tools = [TOOL, {"type": "function", "function": go}]
    one = {"type": "function", "function": {"name": "go"}}
    for choice, param in ((one, "tools[1].function.parameters"), ("required", "tools")):
        grammar = Chat({"messages": [user], "tools": tools, "tool_choice": choice}).fields.grammar
        assert grammar is not None and grammar["param"] == param
    asked = {"messages": [user], "max_tokens": 1, "tools": [{**go, "input_schema": {}}]}
    grammar = MessageRequest({**asked, "tool_choice": {"type": "tool", "name": "go"}}).fields.grammar
    assert grammar is not None and grammar["param"] == "tools[0].input_schema"
