"""What comes through the API: the texts of the commands, among others too; usage, choices, stop strings, forms, tools."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from conftest import KEYS, NANO, Server
from mdi.cli import launch
from mdi.engine.cohort import Beams
from mdi.engine.sequence import SamplingParams
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import StarterOptions
from waiting import until

SAMPLED = {"seed": 5, "temperature": 0.9, "extra_body": {"top_k": 50}}
PROMPT = "ROMEO:"
MODEL = "nano-llama"


@pytest.fixture
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEYS[0], max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Three texts of the command for the same prompt and seed, on one node."""
    import contextlib
    import io

    printed = io.StringIO()
    flags = [
        "--prompt",
        PROMPT,
        "--n-samples",
        "3",
        "--n-tokens",
        "40",
        "--seed",
        "5",
        "--temperature",
        "0.9",
        "--quantize",
        "auto",
    ]
    with contextlib.redirect_stdout(printed):
        assert launch("sample", ["--ckpt", str(NANO), *flags, "--top-k", "50", "--json", "--device", "cpu"]) == 0
    return [sample["text"] for sample in json.loads(printed.getvalue())["samples"]]


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 40, **fields})


def chat(client: openai.OpenAI, text: str = "Speak, Romeo.", **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "max_tokens": 30, **fields})


def test_models(client: openai.OpenAI, server: Server) -> None:
    assert server.ask("GET", "/v1/models?client_version=1.2")[1]["models"] == [], "as Codex asks"
    assert "models" not in server.ask("GET", "/v1/models")[1]
    listed = client.models.list().data
    assert listed[0].id == MODEL and client.models.retrieve(MODEL).id == MODEL
    assert listed[0].model_extra is not None and listed[0].model_extra["max_model_len"] == 1024


def test_what_a_request_leaves_out_is_the_models_own(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    """As /v1/models says it, and as the commands have it."""
    sampling = client.models.list().data[0].model_extra["sampling"]  # type: ignore[index]
    assert sampling == {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.0}
    text = complete(client, seed=5).choices[0].text
    assert text == complete(client, seed=5, extra_body=sampling).choices[0].text
    assert text != complete(client, seed=5, temperature=1, extra_body={"min_p": 0}).choices[0].text
    flags = ["--prompt", PROMPT, "--n-samples", "1", "--n-tokens", "40", "--seed", "5", "--json", "--device", "cpu"]
    assert launch("sample", ["--ckpt", str(NANO), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["samples"][0]["text"] == text


def test_choices_are_the_samples_of_the_command(client: openai.OpenAI, expected: list[str]) -> None:
    answer = complete(client, n=3, **SAMPLED)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.completion_tokens == 120 and answer.choices[0].finish_reason == "length"


def test_a_text_is_the_same_among_others(client: openai.OpenAI, expected: list[str]) -> None:
    def other(i: int) -> str:
        fields = [{"temperature": 0}, {"top_p": 0.8}, {"presence_penalty": 1.0}, {"extra_body": {"min_p": 0.1}}][i % 4]
        return complete(client, prompt="First Citizen:" * (1 + i), seed=i, **fields).choices[0].text

    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(other, i) for i in range(8)]
        mine = pool.submit(lambda: complete(client, **SAMPLED).choices[0].text)
        assert mine.result() == expected[0]
        among = [one.result() for one in others]
    assert among == [other(i) for i in range(8)]


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, expected: list[str]) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **SAMPLED))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected[0]
    assert chunks[-1].usage.completion_tokens == 40 and len(chunks) > 10
    whole = chat(client, seed=1).choices[0].message.content
    assert whole and not whole.startswith(" "), (
        "the blank after the plain template's last word is no part of the answer"
    )
    chunks = list(chat(client, seed=1, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


def test_other_apis_say_the_same_text(client: openai.OpenAI, server: Server) -> None:
    whole = chat(client, seed=1).choices[0].message.content
    events = list(client.responses.create(
        model=MODEL, input="Speak, Romeo.", max_output_tokens=30, stream=True, extra_body={"seed": 1}
    ))  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    assert events[-1].response.output_text == whole and events[-1].type in ("response.incomplete", "response.completed")
    asked = {"model": MODEL, "max_tokens": 30, "seed": 1, "messages": [{"role": "user", "content": "Speak, Romeo."}]}
    status, told = server.ask("POST", "/v1/messages", asked, {"authorization": "", "x-api-key": KEYS[1]})
    assert status == 200 and told["content"] == [{"type": "text", "text": whole}]
    n_tokens = told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"]
    assert server.ask("POST", "/v1/messages/count_tokens", asked) == (200, {"input_tokens": n_tokens})
    _, again = server.ask("POST", "/v1/messages", {**asked, "stop_sequences": [whole[5:8]]})
    assert again["stop_sequence"] == whole[5:8] and again["content"][0]["text"] == whole[: whole.index(whole[5:8])]


def test_the_best_texts_are_those_of_the_command(client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    """Found with more beams than texts, streamed at the end, with probabilities, and up to a stop string."""
    flags = [
        "--beams",
        "4",
        "--n-samples",
        "2",
        "--n-tokens",
        "20",
        "--length-penalty",
        "0.5",
        "--early-stopping",
        "never",
    ]
    assert launch("sample", ["--ckpt", str(NANO), "--prompt", PROMPT, *flags, "--json", "--device", "cpu"]) == 0
    best = [sample["text"] for sample in json.loads(capsys.readouterr().out)["samples"]]
    assert len(set(best)) == 2
    more = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    fields: dict[str, Any] = {"n": 2, "best_of": 4, "max_tokens": 20, "extra_body": more}
    answer = complete(client, logprobs=1, **fields)
    assert [choice.text for choice in answer.choices] == best and answer.usage.completion_tokens == 40
    assert all(len(choice.logprobs.tokens) == 20 for choice in answer.choices)
    pieces = [piece.choices[0] for piece in complete(client, stream=True, **fields)]
    assert [piece.text for piece in pieces if piece.text] == best
    stop = best[0][5:8]
    stopped = complete(client, stop=stop, **fields)
    assert all(stop not in choice.text for choice in stopped.choices)
    assert "stop" in {choice.finish_reason for choice in stopped.choices}
    with pytest.raises(openai.BadRequestError):
        complete(client, **{**fields, "best_of": 30})


def test_groups_of_beams_are_those_of_the_request(client: openai.OpenAI) -> None:
    """Their number and what a token costs: each with another value finds other texts."""
    cases = [Beams(4), Beams(4, n_groups=2, diversity_penalty=0.5), Beams(4, n_groups=2, diversity_penalty=5.0),
             Beams(4, n_groups=4, diversity_penalty=0.5)]  # fmt: skip
    options = StarterOptions(ckpt=NANO, prompt_style="none", device="cpu", quantize="auto")
    with Run(GivenNodes(standalone()), options, 60, n_texts=4 * len(cases)) as run:
        ids, params = run.model.codec.encode_prompt(PROMPT), SamplingParams(20)
        searched = [run.submit_beams(PROMPT, ids, params, beams, on_texts=[None] * 4) for beams in cases]
        run.read()
        wanted = [[sample.text for sample in best] for best in searched]
    assert len(set(map(str, wanted))) == len(cases)
    for beams, texts in zip(cases, wanted, strict=True):
        groups = {"num_beam_groups": beams.n_groups, "diversity_penalty": beams.diversity_penalty}
        answer = complete(client, n=4, max_tokens=20, extra_body={"use_beam_search": True, **groups})
        assert [choice.text for choice in answer.choices] == texts, beams


def test_a_stop_string_is_cut_off(client: openai.OpenAI, expected: list[str]) -> None:
    stop = expected[0][12:15]
    answer = complete(client, stop=[stop, "not in it"], **SAMPLED).choices[0]
    assert (answer.text, answer.finish_reason) == (expected[0][: expected[0].index(stop)], "stop")


def test_probabilities(client: openai.OpenAI) -> None:
    answer = complete(client, temperature=0, logprobs=3, max_tokens=5).choices[0].logprobs
    for own, best in zip(answer.token_logprobs, answer.top_logprobs, strict=True):
        assert own == max(best.values()) <= 0
    entries = chat(client, temperature=0, logprobs=True, top_logprobs=4, max_tokens=5).choices[0].logprobs.content
    for entry in entries:
        assert len(entry.top_logprobs) == 4 and entry.logprob == entry.top_logprobs[0].logprob
        assert sum(math.exp(one.logprob) for one in entry.top_logprobs) <= 1.0001


def test_a_bias_forces_and_forbids_tokens(client: openai.OpenAI) -> None:
    free = complete(client, temperature=0, max_tokens=3, logprobs=0).choices[0]
    forced = complete(client, temperature=0, max_tokens=3, logit_bias={"40": 100}).choices[0].text
    assert forced == forced[0] * 3 and forced != free.text


def test_an_answer_of_a_given_form(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"house": {"enum": ["Montague", "Capulet"]}, "is_alive": {"type": "boolean"}},
        "required": ["house", "is_alive"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(3):
        answer = chat(client, seed=seed, response_format=form, max_tokens=200).choices[0]
        value = json.loads(answer.message.content)
        assert value["house"] in ("Montague", "Capulet") and type(value["is_alive"]) is bool, answer
        assert answer.finish_reason == "stop"


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"act": {"type": "integer", "minimum": 1, "maximum": 5}},
        "required": ["act"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "open_act", "parameters": parameters}}]
    answer = chat(client, tools=tools, tool_choice="required", max_tokens=200).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "open_act" and 1 <= json.loads(call.function.arguments)["act"] <= 5
    assert answer.finish_reason == "tool_calls"
    chunks = list(chat(client, tools=tools, tool_choice="required", max_tokens=200, stream=True))
    pieces = [c.choices[0].delta.tool_calls[0].function for c in chunks if c.choices[0].delta.tool_calls]
    assert [one.name for one in pieces if one.name] == ["open_act"]
    assert json.loads("".join(one.arguments or "" for one in pieces)) == json.loads(call.function.arguments)
    assert chat(client, tools=tools, tool_choice="none", max_tokens=5).choices[0].message.tool_calls is None


@pytest.mark.slow
def test_a_second_turn_begins_behind_the_first_for_the_same_key_alone(client: openai.OpenAI, server: Server) -> None:
    def ids(key: str, prompt: list[int]) -> tuple[list[str], int]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0) as own:
            choice = own.completions.create(
                model=MODEL, prompt=prompt, max_tokens=20, temperature=0, logprobs=0
            ).choices[0]
        return choice.logprobs.tokens, reused()

    def reused() -> int:
        found: int = server.ask("GET", "/health")[1]["n_reused"]
        return found

    def settled() -> int:
        """As the engine told it after now."""
        now = time.time()
        until(lambda: server.ask("GET", "/api/ring")[1]["rings"].get("nano-llama", {}).get("time_s", 0.0) > now)
        return reused()

    prompt = [7 + (i * 37) % 1900 for i in range(300)]
    first, _ = ids(KEYS[0], prompt)
    before = settled()
    again, _ = ids(KEYS[0], prompt)
    assert again == first
    after = settled()
    assert after - before == 299, "all but the last token, whose row gives the first new one"
    other, _ = ids(KEYS[1], prompt)
    assert other == first and settled() == after, "another key's caches are not touched"
    usage = client.completions.create(model=MODEL, prompt=[prompt, prompt], n=2, max_tokens=1).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 598, "of each prompt, whatever the number of its texts"
