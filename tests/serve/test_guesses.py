"""Guesses of a server with `--draft auto`: predicted texts and schemas make no text different, and usage counts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from own_server import TEXT, right, run, server

from conftest import NANO, Server
from guessing import guess_always
from mdi.engine.sequence import SamplingParams
from mdi.kernels import library
from mdi.node.secondary import SecondaryNode
from mdi.run.nodes import GivenNodes
from mdi.run.run import Run
from mdi.serve.grammar import GrammarSource
from mdi.spec.options import StarterOptions
from mdi.text.texts import TextCodec
from secondaries import cluster_of, secondaries
from tiny_checkpoint import encode

SCHEMA = {
    "type": "object",
    "properties": {"family_name": {"type": "string", "maxLength": 8}, "is_known": {"type": "boolean"}},
    "required": ["family_name", "is_known"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    server = Server(tmp_path_factory.mktemp("guesses"), "--nodes", 1, "--draft", "auto")
    try:
        server.wait()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as made:
            yield made
    finally:
        status = server.end()
    assert status == 0, server.log.read_text()


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Speak, Romeo."}]
    return client.chat.completions.create(
        **{"model": "nano-llama", "messages": messages, "max_tokens": 200, "seed": 3, "temperature": 0.8, **fields}
    )


def details(answer: Any) -> tuple[int, int]:
    found = answer.usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


def test_a_prediction_is_counted_and_changes_nothing(client: openai.OpenAI) -> None:
    plain = chat(client)
    assert details(plain) == (0, 0)
    text = plain.choices[0].message.content
    # Whether guesses pay is measured, and on a busy machine they may pause for some hundreds of tokens.
    for _ in range(30):
        right = chat(client, prediction={"type": "content", "content": text})
        assert right.choices[0].message.content == text
        accepted, rejected = details(right)
        assert 0 <= accepted <= right.usage.completion_tokens and rejected >= 0
        if accepted:
            break
    assert accepted
    parts = [{"type": "text", "text": text[:100]}, {"type": "text", "text": " and now for something else" * 8}]
    other = chat(client, prediction={"type": "content", "content": parts})
    assert other.choices[0].message.content == text
    off = chat(client, prediction={"type": "content", "content": text}, extra_body={"draft": "none"})
    assert off.choices[0].message.content == text and details(off) == (0, 0)


@pytest.mark.skipif(library.load() is None, reason="needs the kernels")
@pytest.mark.parametrize("n_right", [60, 20])
def test_what_was_predicted_is_counted_once(n_right: int, folder: Path, nodes: list[SecondaryNode]) -> None:
    """With the end alone: a text's last frame has several events, and all of them are sent behind it."""

    async def scenario() -> None:
        async with server(folder, nodes) as made:
            guess_always(made.engine)
            asked = {
                "model": "one", "adapter": None, "ids": encode(TEXT), "owner": "", "grammar": None,
                "sampling": {"temperature": 0, "n_tokens": 60, "seed": 1, "logit_bias": []},
                "prediction": [*right("one", n_right), *[7] * (60 - n_right)],
            }  # fmt: skip
            with made.client.generate([asked]) as texts:
                found = [event async for _, event in texts]
        assert [token for event in found for token in event.tokens] == right("one", 60)
        assert [event.n_accepted > 0 for event in found] == [False] * (len(found) - 1) + [True]
        assert n_right / 2 < found[-1].n_accepted < 60
        assert (found[-1].n_rejected > 0) == (n_right < 60)

    run(scenario())


def test_a_schema_forces_tokens_and_changes_nothing(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
    plain = chat(client, response_format=form, extra_body={"draft": "none"})
    guessed = chat(client, response_format=form)
    assert guessed.choices[0].message.content == plain.choices[0].message.content
    assert set(json.loads(plain.choices[0].message.content)) == {"family_name", "is_known"}


@pytest.mark.parametrize("kind", ["grammar", "prediction"])
def test_over_a_ring_of_three_nodes_the_texts_are_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several frames of a text are under way, as where nodes have cores of their own."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr("mdi.run.form.share_cores", lambda nodes: False)
    found, guesses = [], []
    for draft in ("none", "auto"):
        with secondaries(2, tmp_path / draft) as nodes:
            made = StarterOptions(
                NANO, draft=draft, prompt_style="none", device="cpu", dtype="float32", placement="even", wait_s=20,
                cache_dir=tmp_path / draft,
            )  # fmt: skip
            with Run(GivenNodes(cluster_of(nodes)), made, 200, n_texts=2) as run:
                source = GrammarSource(NANO, run.model.codec.eos_ids, 2048)
                prompt = list(run.model.codec.encode("Speak, Romeo."))
                if draft == "auto":
                    guess_always(run.engine)
                requests = []
                for i, temperature in enumerate((0.0, 0.8)):
                    params = SamplingParams(80, temperature=temperature, seed=i, n_logprobs=2)
                    constraint = source.constraint({"schema": SCHEMA}, 0) if kind == "grammar" else None
                    prediction = found[0][i][0][10:] if kind == "prediction" and found else ()
                    requests.append(run.engine.submit(prompt, params, constraint=constraint, prediction=prediction))
                texts = []
                for request in requests:
                    events = list(request)
                    texts.append(([token for event in events for token in event.tokens], [e.logprobs for e in events]))
                found.append(texts)
                guesses.append(run.engine.guesses)
    assert found[0] == found[1]
    assert guesses[0] == (0, 0) and guesses[1][1] > 20


def test_a_copy_of_a_grammar_looks_ahead_and_leaves_the_text_where_it_is() -> None:
    pytest.importorskip("llguidance")
    codec = TextCodec.from_checkpoint(NANO, "none")
    source = GrammarSource(NANO, codec.eos_ids, 2048)
    grammar = source.constraint({"schema": SCHEMA}, 0)
    begin = grammar.forced()
    assert codec.decode(begin).startswith('{"family') or len(begin) > 1
    before = grammar.allowed()
    copy = grammar.copy()
    assert not any(copy.take(token) for token in begin)
    assert (grammar.allowed() == before).all() and not (copy.allowed() == before).all()
    forbidden = next(i for i, is_allowed in enumerate(before) if not is_allowed)
    assert grammar.n_valid([*begin, forbidden]) in (len(begin), len(begin) + 1)
    assert grammar.n_valid([forbidden, *begin]) == 0
    assert (grammar.allowed() == before).all() and grammar.forced() == begin
