"""Vectors of texts over the API: those of litgpt's hidden rows, over any ring, while others write and nodes are lost."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from own_server import SEEDS as MODELS
from own_server import OwnServer, right, run, server
from test_scores import check_scores

from conftest import KEYS, Server
from mdi.engine.sequence import Plan
from mdi.net.hello import Fault
from mdi.node.secondary import SecondaryNode
from mdi.serve import embeddings
from mdi.serve.api_errors import ApiError
from mdi.serve.completions import COMPLETIONS
from mdi.serve.embeddings import EMBEDDINGS, OLD_EMBEDDINGS, OLLAMA_EMBEDDINGS, Embedding, OllamaEmbedding
from secondaries import close_ports
from test_pooled import expected, said
from tiny_checkpoint import TEXT, encode, tiny_gpt, write_checkpoint

MANY = [TEXT[i : i + 3 + 2 * i % 40] for i in range(60)]


def vectors(answer: tuple[int, Any]) -> np.ndarray:
    status, told = answer
    assert status == 200, told
    assert [one["index"] for one in told["data"]] == list(range(len(told["data"])))
    return np.array([one["embedding"] for one in told["data"]])


def references(texts: list[str], pooling: str, name: str = "one") -> np.ndarray:
    return np.array([expected(tiny_gpt(MODELS[name]), encode(text), pooling) for text in texts])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_the_reference_and_disturb_nobody(
    pooling: str, folder: Path, nodes: list[SecondaryNode]
) -> None:
    async def scenario() -> None:
        async with server(folder, nodes, pooling=pooling) as made:
            n_slices = plans_of(made)
            writing = [asyncio.create_task(made.write("one", 60)) for _ in range(3)]
            found = vectors(await made.ask(EMBEDDINGS, {"model": "one", "input": MANY}))
            np.testing.assert_allclose(found, references(MANY, pooling), atol=1e-5)
            assert [await one for one in writing] == [right("one", 60)] * 3
            assert max(n_slices) > 4, "several texts in one frame"
            await check_forms(made, found)

    run(scenario())


def plans_of(made: OwnServer) -> list[int]:
    """Texts in each frame from now on."""
    found: list[int] = []
    scheduler = made.engine.scheduler
    schedule = scheduler.schedule

    def noted() -> Plan | None:
        if (plan := schedule()) is not None:
            found.append(len(plan.slices))
        return plan

    scheduler.schedule = noted  # type: ignore[method-assign]
    return found


async def check_forms(made: OwnServer, found: np.ndarray) -> None:
    ids = [encode(text) for text in MANY[:3]]
    np.testing.assert_array_equal(vectors(await made.ask(EMBEDDINGS, {"input": ids})), found[:3])
    status, told = await made.ask(EMBEDDINGS, {"model": "one", "input": ids[0], "encoding_format": "base64"})
    assert status == 200 and told["usage"] == {"prompt_tokens": len(ids[0]), "total_tokens": len(ids[0])}
    assert told["model"] == "one" and told["object"] == "list"
    data = base64.b64decode(told["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), found[0].astype("f4"))
    short = found[0][:8] / np.linalg.norm(found[0][:8])
    for form in ("float", "base64"):
        body = {"input": MANY[0], "dimensions": 8, "encoding_format": form}
        ((own,),) = ([one["embedding"] for one in told["data"]] for _, told in [await made.ask(EMBEDDINGS, body)])
        np.testing.assert_allclose(
            np.frombuffer(base64.b64decode(own), "<f4") if form != "float" else own, short, atol=1e-6
        )

    status, told = await made.ask(OLLAMA_EMBEDDINGS, {"model": "one:latest", "input": MANY[:3]})
    assert status == 200 and told["model"] == "one:latest" and told["prompt_eval_count"] == sum(map(len, ids))
    np.testing.assert_array_equal(told["embeddings"], found[:3])
    assert told["total_duration"] >= told["load_duration"] >= 0
    status, told = await made.ask(OLD_EMBEDDINGS, {"model": "one", "prompt": MANY[1]})
    np.testing.assert_array_equal(told["embedding"], found[1])
    assert (await made.ask(OLLAMA_EMBEDDINGS, {"model": "one"}))[1]["embeddings"] == []
    assert (await made.ask(OLD_EMBEDDINGS, {"model": "one"}))[1] == {"embedding": []}
    long = {"model": "one", "input": "The ring. " * 400}
    status, told = await made.ask(OLLAMA_EMBEDDINGS, long)
    assert status == 200 and told["prompt_eval_count"] == 299
    status, told = await made.ask(OLLAMA_EMBEDDINGS, {**long, "truncate": False})
    assert status == 400 and "tokens" in told["error"]


def test_what_cannot_be_embedded_is_refused(
    folder: Path, nodes: list[SecondaryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MOST_TOKENS", 40)

    async def scenario() -> None:
        async with server(folder, nodes, pooling="mean") as made:
            for wrong, param in (
                ({"input": []}, "input"), ({"input": [""]}, "input"), ({"input": [[]]}, "input"), ({}, "input"),
                ({"input": ["a"] * 2049}, "input"), ({"input": [[1], "a"]}, "input"), ({"input": [999]}, "input"),
                ({"input": "The ring. " * 400}, "input"), ({"input": [TEXT[:40]] * 9}, "input"),
                ({"input": "a", "dimensions": 0}, "dimensions"), ({"input": "a", "dimensions": 10**6}, "dimensions"),
                ({"input": "a", "encoding_format": "int8"}, "encoding_format"), ({"input": "\ud800"}, "input"),
            ):  # fmt: skip
                status, told = await made.ask(EMBEDDINGS, {"model": "one", **wrong})
                assert (status, told["error"]["param"]) == (400, param), (wrong, told)
            assert made.api.queue("one").n_running == 0 and made.engine.texts()[:2] == (0, 0)

    run(scenario())


def test_each_model_says_itself_how_and_a_chat_model_does_not(tmp_path: Path, nodes: list[SecondaryNode]) -> None:
    for name, seed in MODELS.items():
        write_checkpoint(tmp_path / name, seed)
    said(tmp_path / "two", "lasttoken")
    said(tmp_path / "three", "cls_token")

    async def scenario() -> None:
        async with server(tmp_path, nodes) as made:
            status, told = await made.ask(EMBEDDINGS, {"model": "one", "input": "a"})
            assert (status, told["error"]["code"]) == (400, "no_pooling") and "--pooling" in told["error"]["message"]
            found = vectors(await made.ask(EMBEDDINGS, {"model": "two", "input": MANY[:2]}))
            np.testing.assert_allclose(found, references(MANY[:2], "last", "two"), atol=1e-5)
            status, told = await made.ask(EMBEDDINGS, {"model": "three", "input": "a"})
            assert status == 400 and "cls_token" in told["error"]["message"]

    run(scenario())


@pytest.mark.slow
def test_a_node_that_is_lost_changes_no_vector_and_no_score(folder: Path, nodes: list[SecondaryNode]) -> None:
    texts = [TEXT * 2 + text for text in MANY]

    async def scenario() -> None:
        async with server(folder, nodes, pooling="mean") as made:
            n_slices = plans_of(made)
            asking = asyncio.create_task(made.ask(EMBEDDINGS, {"model": "one", "input": texts}))
            scored = {"model": "one", "prompt": texts[:20], "echo": True, "logprobs": 1, "max_tokens": 0}
            scoring = asyncio.create_task(made.ask(COMPLETIONS, scored))
            await made.until(lambda: len(n_slices) > 12)
            assert not asking.done() and not scoring.done()
            ring = made.host.loaded["one"].run.ring.link  # type: ignore[union-attr]
            close_ports(nodes[1])
            ring.fail(Fault("secondary1", "it is gone", "starter"))  # type: ignore[union-attr]
            found = vectors(await asking)
            assert len(made.host.loaded["one"].run.cluster.secondaries) == 1
            np.testing.assert_allclose(found, references(texts, "mean"), atol=1e-5)
            for choice, text in zip((await scoring)[1]["choices"], texts, strict=False):
                assert len(choice["logprobs"]["tokens"]) == len(encode(text))
                check_scores(choice["logprobs"], encode(text), 1)

    run(scenario())


def test_texts_are_not_embedded_where_rows_are_verified(folder: Path, nodes: list[SecondaryNode]) -> None:
    async def scenario() -> None:
        async with server(folder, nodes, pooling="mean", verify=1.0) as made:
            status, told = await made.ask(EMBEDDINGS, {"model": "one", "input": "a"})
            assert status == 400 and "--verify" in told["error"]["message"]

    run(scenario())


def test_openais_client_gets_vectors(server: Server) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEYS[0], max_retries=0)
    asked = {"model": "nano-llama", "input": ["ROMEO:", "JULIET:", "ROMEO:"]}
    one, two, same = (np.array(each.embedding) for each in client.embeddings.create(**asked).data)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-6) and np.linalg.norm(one - two) > 0.01
    np.testing.assert_array_equal(one, same)
    status, told = server.ask("POST", "/v1/embeddings", asked)
    np.testing.assert_array_equal([each["embedding"] for each in told["data"]], [one, two, same])
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="nano-llama", input="a", dimensions=10**6)


def test_vectors_that_would_fill_the_memory_are_refused_before_a_text_is_read() -> None:
    def opened(body: dict[str, Any], asked: Any = Embedding) -> Any:
        tokenizer = SimpleNamespace(embedded_ids=None)
        model: Any = SimpleNamespace(
            pooling="mean", width=2048, most_characters=9, context=9, asked_name="m", tokenizer=tokenizer
        )
        return asyncio.run(asked(body).opened(model))

    many = {"input": ["a text that is too long"] * 1025}
    for asked in (Embedding, OllamaEmbedding):
        with pytest.raises(ApiError, match="ask for fewer texts in one request, or set dimensions") as found:
            opened(many, asked)
        assert found.value.body["error"]["param"] == "input"
    for fewer in ({"input": many["input"][:1024]}, {**many, "dimensions": 512}):
        with pytest.raises(ApiError, check=lambda e: e.is_too_long):  # it was read
            opened(fewer)
