"""What a key may use: tokens per minute and day, texts at once; beyond that every API says when to try again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from mdi.cli.serve_settings import read_key
from mdi.serve.admission import Admission
from mdi.serve.api import SURFACES, make_app, make_ollama_app
from mdi.serve.api_errors import ApiError
from mdi.serve.api_state import ApiState
from mdi.serve.catalog import Catalog
from mdi.serve.completions import COMPLETIONS, Completion
from mdi.serve.embeddings import EMBEDDINGS
from mdi.serve.endpoint import Answers, Endpoint, Exchange, Surface
from mdi.serve.engine_client import EngineClient, TextEvent
from mdi.serve.process import ApiKey, ServeSettings
from mdi.serve.quotas import Quotas
from mdi.serve.request import Opened, write_texts

KEY = read_key(1, "alpha-secret alpha 0 minute_tokens=60 texts=2")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/api/generate": {"prompt": "a", "model": "m"},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "model": "m"},
}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refusal(quotas: Quotas, n_texts: int = 1) -> ApiError | None:
    try:
        with quotas.begun("alpha", n_texts):
            return None
    except ApiError as e:
        return e


def waits(quotas: Quotas) -> int:
    """Seconds that a request is told to wait; 0: it is not refused."""
    found = refusal(quotas)
    assert found is None or (found.status, found.body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert found is None or f"try again in {found.headers['retry-after']}s" in str(found)
    return 0 if found is None else int(found.headers["retry-after"])


def test_a_key_says_what_it_may_use() -> None:
    key = read_key(1, "long-enough alpha 3 texts=2 minute_tokens=600 day_tokens=9000 beams=4 operator")
    assert (key.texts, key.minute_tokens, key.day_tokens, key.beams, key.role) == (2, 600, 9000, 4, "operator")
    assert read_key(1, "long-enough alpha") == ApiKey(key.digest, "alpha"), "without a limit any number"


def test_tokens_come_back_evenly() -> None:
    now = Time()
    quotas = Quotas((KEY,), now)
    assert waits(quotas) == 0
    quotas.began("alpha", "m", 50)
    assert waits(quotas) == 0, "there is room for one"
    quotas.tokens("alpha", 40, 0.1)  # more than were left: nobody knew
    assert waits(quotas) == 31
    now.now_s += 30
    assert waits(quotas) == 1
    now.now_s += 1
    assert waits(quotas) == 0
    now.now_s += 3600
    quotas.tokens("alpha", 59, 0.1)
    assert waits(quotas) == 0
    quotas.tokens("alpha", 1, 0.1)
    assert waits(quotas) == 1, "an hour of nothing leaves no more than a minute does"


def test_a_day_has_its_own_limit_and_the_longer_wait_is_told() -> None:
    now = Time()
    quotas = Quotas((replace(KEY, day_tokens=864),), now)
    quotas.tokens("alpha", 64, 0.1)
    assert waits(quotas) == 5
    for _ in range(8):
        quotas.tokens("alpha", 100, 0.1)
    assert "per minute" in str(refusal(quotas)) and waits(quotas) == 805
    now.now_s += 805
    assert "per day" not in str(refusal(quotas)), "and it has emptied by 8 of 864"
    quotas.tokens("alpha", 59, 0.1)
    error = refusal(quotas)
    assert error is not None and "864 tokens per day" in str(error) and int(error.headers["retry-after"]) > 5000


def test_texts_at_once_are_counted_until_they_end() -> None:
    quotas = Quotas((KEY,))
    with quotas.begun("alpha", 1):
        with quotas.begun("alpha", 1):
            assert waits(quotas) == 1 and "2 texts at the same time" in str(refusal(quotas))
        with contextlib.suppress(RuntimeError), quotas.begun("alpha", 1):
            raise RuntimeError
        assert waits(quotas) == 0
    error = refusal(quotas, 3)
    assert error is not None and error.status == 400, "waiting would not help"
    assert quotas.uses["alpha"].n_texts == 0


def test_other_keys_and_requests_without_one_are_not_held_up() -> None:
    quotas = Quotas((KEY, read_key(2, "beta-secret beta")))
    quotas.tokens("alpha", 10_000, 0.1)
    for owner in ("beta", ""):
        quotas.tokens(owner, 10_000, 0.1)
        with quotas.begun(owner, 100):
            pass
    assert waits(quotas) > 0 and quotas.uses["beta"].tokens == {"generated": 10_000}


def ask(path: str, body: Any, is_ollamas: bool) -> httpx.Response:
    async def asked() -> httpx.Response:
        api = ApiState(
            ServeSettings(keys=(KEY,)), EngineClient(lambda: None), Catalog(Path("nowhere"), Path("nowhere"))
        )
        app = make_ollama_app(api) if is_ollamas else make_app(api)
        for observer in api.observe:  # as the texts of a request do
            observer.began("alpha", "m", 40)
            observer.tokens("alpha", 60, 0.1)
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            headers = {"authorization": "Bearer alpha-secret"}
            found = await http.post(path, json=body, headers=headers)
            told = (await http.get("/metrics", headers=headers)).text if not is_ollamas else ""
            assert is_ollamas or 'mdi_key_tokens_total{key="alpha",of="prompt"} 40.0' in told
            assert is_ollamas or 'mdi_key_tokens_total{key="alpha",of="generated"} 60.0' in told
            assert is_ollamas or 'mdi_key_refused_total{key="alpha"} 1.0' in told
            return found

    return asyncio.run(asked())


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [*SURFACES, "/api/chat", "/api/generate"])
def test_every_api_says_why_and_when_to_try_again(path: str, is_streamed: bool) -> None:
    body = {**BODIES.get(path, CHAT), "stream": is_streamed}
    if path.endswith("count_tokens"):
        body = {"messages": CHAT["messages"]}
    found = ask(path, body, path.startswith("/api/"))
    assert found.status_code == 429 and 41 <= int(found.headers["retry-after"]) <= 42, found.text
    error = found.json()["error"]
    words = error if isinstance(error, str) else error["message"]
    assert words.startswith("the key alpha has used its 60 tokens per minute: try again in 4")
    assert isinstance(error, str) or error["type"] == "rate_limit_error"


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.ends: list[str] = []

    def began(self, owner: str, model: str, n_prompt: int) -> None:
        assert owner == "alpha"
        self.prompts.append(n_prompt)

    def ended(self, reason: str) -> None:
        self.ends.append(reason)


class Scoring:
    """An engine that scores prompts, or is at it for ever."""

    def __init__(self, is_done: bool) -> None:
        self._is_done = is_done

    @contextlib.contextmanager
    def generate(self, requests: list[dict[str, Any]]) -> Iterator[AsyncIterator[tuple[int, TextEvent]]]:
        yield self._events(requests)

    async def _events(self, requests: list[dict[str, Any]]) -> AsyncIterator[tuple[int, TextEvent]]:
        if not self._is_done:
            await asyncio.get_running_loop().create_future()
        for index, request in enumerate(requests):
            scores = [[-1.0, []]] * (len(request["ids"]) - 1)
            yield index, TextEvent([], "length", scores, 0)


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_prompts_that_are_scored_are_charged_once_before(n_tokens: int) -> None:
    body = {"prompt": [[1, 2, 3], [4, 5]], "echo": True, "logprobs": 1, "max_tokens": n_tokens}
    fields = Completion(body).fields

    async def told(is_done: bool) -> Told:
        found = Told()
        api: Any = SimpleNamespace(observe=[found], engine=Scoring(is_done))
        model: Any = SimpleNamespace(name="m", adapter="")
        opened = Opened(body["prompt"], lambda: None, is_prompt_alone=n_tokens == 0, n_best=1)  # type: ignore[arg-type]

        async def written() -> None:
            async for piece in write_texts(api, model, KEY, opened, fields):
                if piece.scores is None and piece.finish_reason is None:
                    raise AssertionError

        writing = asyncio.create_task(written())
        await asyncio.wait([writing], timeout=0.05 if not is_done else None)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        return found

    gone = asyncio.run(told(False))
    assert (gone.prompts, gone.ends) == ([3, 2], ["cancelled"] * 2), "the client left while they were scored"
    if n_tokens == 0:
        done = asyncio.run(told(True))
        assert (done.prompts, done.ends) == ([3, 2], ["length"] * 2)


def answered(surface: Surface, bodies: list[Any], api: Any, model: Any) -> list[tuple[int, Any]]:
    """Status and JSON of each of some requests at the same time, where one of them runs at a time."""
    queue = Admission(1, 99)

    @contextlib.asynccontextmanager
    async def using(name: str) -> AsyncIterator[Any]:
        yield model

    api.models, api.queue = SimpleNamespace(using=using), lambda name: queue

    async def answer(body: Any) -> tuple[int, Any]:
        sent: list[Any] = []
        coming = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return coming.pop() if coming else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        await Endpoint(api, surface)({"type": "http", "mdi.key": KEY}, receive, send)
        return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent))

    async def all_of_them() -> list[tuple[int, Any]]:
        return await asyncio.gather(*map(answer, bodies))

    return asyncio.run(all_of_them())


def test_a_request_that_waited_is_refused_if_those_before_it_used_the_tokens() -> None:
    quotas = Quotas((KEY,))

    async def opened(model: Any) -> Any:
        return Opened([[1]], lambda: None)  # type: ignore[arg-type]

    async def write(asked: Any, answers: Answers, exchange: Exchange) -> None:
        await asyncio.sleep(0.02)
        quotas.tokens("alpha", 60, 0.0)
        await exchange.answer({})

    def read(body: Any) -> Any:
        return SimpleNamespace(fields=Completion(body).fields, n_texts=1, opened=opened)

    model = SimpleNamespace(name="m", context=99)
    api = SimpleNamespace(quotas=quotas)
    found = answered(Surface(read, write, lambda error: error.body), [{"prompt": "a"}] * 2, api, model)
    assert [status for status, _ in found] == [200, 429] and quotas.uses["alpha"].n_texts == 0
    assert "try again" in found[1][1]["error"]["message"] and quotas.uses["alpha"].n_refused == 1


def test_a_key_with_few_texts_embeds_many_in_parts() -> None:
    n_together: list[int] = []

    class Embedding(Scoring):
        def generate(self, requests: list[dict[str, Any]]) -> Any:
            n_together.append(len(requests))
            return super().generate(requests)

    async def opened(asked: Any, model: Any) -> Any:
        return Opened(asked.texts, lambda: None, is_prompt_alone=True)  # type: ignore[arg-type]

    quotas = Quotas((KEY,))
    model = SimpleNamespace(name="m", asked_name="m", adapter="", context=99, pooling="mean")
    api = SimpleNamespace(quotas=quotas, observe=[quotas], engine=Embedding(True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mdi.serve.embeddings.Embedding.opened", opened)
        ((status, told),) = answered(EMBEDDINGS, [{"input": [[1]] * 5}], api, model)
    assert (status, len(told["data"]), n_together) == (200, 5, [2, 2, 1])
    found = answered(COMPLETIONS, [{"prompt": ["a", "b", "c"]}, {"prompt": "a", "n": 3}], api, model)
    for status, told in found:
        error = told["error"]
        assert (status, error["code"], error["param"]) == (400, "too_many_texts", None)
        assert "asks for 3: ask for fewer texts in one request" in error["message"]
