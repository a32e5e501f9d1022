"""Scores of prompts over the API, `echo` with `logprobs`: those of litgpt's model, also as programs that score ask for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from own_server import SEEDS, right, run, server

from conftest import KEYS, Server
from mdi.node.secondary import SecondaryNode
from mdi.serve.api_errors import ApiError
from mdi.serve.completions import COMPLETIONS, Completion
from mdi.serve.request import Opened
from tiny_checkpoint import END, TEXT, encode, reference, tiny_gpt, tokenizer

TEXTS = [TEXT[:60], "The ring", "T", TEXT * 3]


@cache
def expected(ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities of all tokens behind each of some ids."""
    with torch.no_grad():
        return tiny_gpt(SEEDS["one"])(torch.tensor([ids]))[0].log_softmax(dim=1)


def is_named(name: str, token: int) -> bool:
    """Parts of characters have names of their own, and special tokens are no text."""
    text = tokenizer().decode([token])
    return name.startswith("bytes:") if "\ufffd" in text else name == text


def check_scores(logprobs: dict[str, Any], ids: list[int], n_best: int) -> None:
    """Of a choice whose first tokens are these."""
    n, of = len(ids), expected(tuple(ids))
    assert all(map(is_named, logprobs["tokens"], ids))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    own = of[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:n], own, atol=2e-4)
    most = logprobs["top_logprobs"][1:n]
    assert all(len(best) <= n_best for best in most)
    if n_best and most:
        highest = of[:-1].max(dim=1)
        np.testing.assert_allclose([max(best.values()) for best in most], highest.values, atol=2e-4)
        assert all(map(is_named, (next(iter(best)) for best in most), highest.indices.tolist()))
    pieces = [len(piece) for piece in logprobs["tokens"][: len(encode("The ring"))]]
    assert logprobs["text_offset"][: len(pieces)] == [sum(pieces[:i]) for i in range(len(pieces))]


def test_prompts_are_scored_as_the_reference_does(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            asked = {"model": "one", "echo": True, "logprobs": 3, "max_tokens": 0}
            for given in (TEXTS, list(map(encode, TEXTS))):
                status, told = await made.ask(COMPLETIONS, {**asked, "prompt": given})
                assert status == 200 and told["usage"]["completion_tokens"] == 0
                assert told["usage"]["prompt_tokens"] == sum(len(encode(text)) for text in TEXTS)
                for choice, text in zip(told["choices"], TEXTS, strict=True):
                    assert (choice["text"], choice["finish_reason"]) == (text, "length")
                    assert len(choice["logprobs"]["tokens"]) == len(encode(text))
                    check_scores(choice["logprobs"], encode(text), 3)
            _, told = await made.ask(COMPLETIONS, {**asked, "prompt": TEXTS[0], "logprobs": 0})
            check_scores(told["choices"][0]["logprobs"], encode(TEXTS[0]), 0)

    run(scenario())


def test_texts_go_on_behind_what_is_scored(folder: Path, nodes: list[SecondaryNode]) -> None:
    """A program leaves the last token out (`[begin:-1]`), which is the one that was drawn: it must be there at any end."""
    ids = encode("The ring")

    async def scenario() -> None:
        async with server(folder, nodes) as made:
            asked = {"model": "one", "prompt": ids, "echo": True, "logprobs": 1, "temperature": 0, "n": 2}
            status, told = await made.ask(COMPLETIONS, {**asked, "max_tokens": 6})
            assert status == 200
            for choice in told["choices"]:
                check_scores(choice["logprobs"], ids, 1)
                check_scores(choice["logprobs"], ids + right("one", 6), 1)
                assert choice["text"] == "The ring" + tokenizer().decode(right("one", 6))
            assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            end = {str(tokenizer().token_to_id(END)): 100}
            _, told = await made.ask(COMPLETIONS, {**asked, "max_tokens": 1, "logit_bias": end})
            for choice in told["choices"]:
                assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1 and choice["text"] == "The ring"
            _, told = await made.ask(COMPLETIONS, {**asked, "max_tokens": 2, "logit_bias": end})
            assert [choice["finish_reason"] for choice in told["choices"]] == ["stop"] * 2
            # what was scored is not computed again
            reused = made.engine.n_reused
            long = {**asked, "n": 1, "prompt": encode(TEXTS[3]), "max_tokens": 1}
            _, told = await made.ask(COMPLETIONS, long)
            assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "nothing of an earlier request"
            assert made.engine.n_reused - reused >= len(encode(TEXTS[3])) - 40

    run(scenario())


def test_a_scored_prompt_comes_first_in_a_stream(server: Server) -> None:
    asked = {"prompt": "ROMEO:", "max_tokens": 3, "echo": True, "logprobs": 2, "temperature": 0}
    whole = server.ask("POST", "/v1/completions", asked)[1]["choices"][0]
    with contextlib.closing(server.connection()) as connection:
        body = json.dumps({**asked, "stream": True})
        connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {KEYS[0]}"})
        parts = connection.getresponse().read().split(b"\n\n")
    events = [json.loads(part[6:]) for part in parts if part.startswith(b"data: {")]
    choices = [event["choices"][0] for event in events]
    assert choices[0]["text"] == "ROMEO:" and "".join(choice["text"] for choice in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [one for choice in choices if choice["logprobs"] for one in choice["logprobs"][name]] == values


def test_what_is_scored_has_limits_and_names_its_field(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            asked = {"model": "one", "echo": True, "logprobs": 1, "max_tokens": 0}
            for wrong, param in (
                ({"prompt": [[1]] * 33}, "prompt"), ({"prompt": [[1] * 400]}, "prompt"), ({"prompt": [[999]]}, "prompt"),
                ({"prompt": "a", "logprobs": 21}, "logprobs"), ({"prompt": "a", "suffix": "b"}, "suffix"),
            ):  # fmt: skip
                status, told = await made.ask(COMPLETIONS, {**asked, **wrong})
                assert (status, told["error"]["param"]) == (400, param), told
        async with server(folder, nodes, verify=1.0) as made:
            status, told = await made.ask(COMPLETIONS, {**asked, "prompt": "abc"})
            assert status == 400 and "--verify" in told["error"]["message"]

    run(scenario())


def test_long_prompts_of_others_and_texts_are_as_alone(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes) as made:
            asked = {"model": "one", "echo": True, "logprobs": 1, "max_tokens": 0, "prompt": [encode(TEXT * 3)] * 20}
            writing = [asyncio.create_task(made.write("one", 50)) for _ in range(3)]
            _, told = await made.ask(COMPLETIONS, asked)
            for choice in told["choices"]:
                check_scores(choice["logprobs"], encode(TEXT * 3), 1)
            assert [await one for one in writing] == [list(reference("The ring", 50, SEEDS["one"]))] * 3

    run(scenario())


def test_scores_that_would_fill_the_memory_are_refused() -> None:
    model: Any = SimpleNamespace(codec=SimpleNamespace(encode=None), context=1 << 20, n_vocabulary=2)

    def opened(n_tokens: int, n: int, n_best: int | None) -> Opened:
        body = {"prompt": [[1] * n_tokens] * 4, "echo": True, "logprobs": n_best, "n": n, "max_tokens": 0}
        return asyncio.run(Completion(body).opened(model))

    assert opened(1 << 15, 4, 3).n_best == 3 and opened(1 << 19, 8, None).n_best is None
    for wrong in ((1 << 15, 4, 4), (1 << 15, 5, 3), ((1 << 15) + 1, 4, 3)):
        with pytest.raises(ApiError, match="fewer or shorter prompts, a smaller n, or fewer logprobs") as found:
            opened(*wrong)
        assert found.value.body["error"]["param"] == "logprobs"
