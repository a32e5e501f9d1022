"""A published model behind `mdi serve`, used by the openai client: answers, streams, stops, JSON by a schema, calls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from mdi.checkpoint.ggufsource import gguf_directory
from mdi.run.local import free_ports
from mdi.text.texts import TextCodec
from real.answers import expected, published
from real.cases import QUESTION, TOOLS, user
from real.published import SMOLLM
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "is_large": {"type": "boolean"}},
    "required": ["city", "is_large"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Of a server with the model on two nodes of this machine."""
    path, folder = published(f"models/{SMOLLM}.gguf"), tmp_path_factory.mktemp("server")
    (port,), log = free_ports(1), folder / "log"
    command = [sys.executable, ROOT / "src" / "serve.py", "--ckpt", path, "--nodes", 2, "--dtype", "float32"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with open(log, "wb") as written:
        words = [*map(str, command), "--port", str(port), "--wait", "120"]
        process = subprocess.Popen(words, stderr=written, env=env)
    try:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S
        ) as made:

            def serves() -> bool:
                assert process.poll() is None, f"the server has ended: {log.read_text()}"
                try:
                    return bool(made.models.list().data)
                except (openai.APIConnectionError, openai.InternalServerError):
                    return False

            until(serves, DEADLINE_S)
            yield made
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 0, log.read_text()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer to the question, by transformers."""
    found = expected(SMOLLM)["greedy"]["chat"]
    codec = TextCodec.from_checkpoint(
        gguf_directory(published(f"models/{SMOLLM}.gguf"), tmp_path_factory.mktemp("model"))
    )
    ids = found["ids"]
    n = next((i for i, one in enumerate(ids) if one in codec.eos_ids), len(ids))
    return codec.decode(ids[:n])


def ask(client: openai.OpenAI, question: str = QUESTION, **fields: Any) -> Any:
    given = {"model": client.models.list().data[0].id, "messages": [user(question)], "temperature": 0, "max_tokens": 32}
    return client.chat.completions.create(**{**given, **fields})


def test_the_answer_is_that_of_transformers(client: openai.OpenAI, right: str) -> None:
    assert ask(client).choices[0].message.content == right
    assert "Paris" in right


def test_a_stream_brings_the_same(client: openai.OpenAI, right: str) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True)]
    assert "".join(pieces) == right and len([piece for piece in pieces if piece]) > 3


def test_stop_strings_end_it(client: openai.OpenAI, right: str) -> None:
    choice = ask(client, stop=["Paris"]).choices[0]
    assert choice.message.content == right.partition("Paris")[0] and choice.finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, stop=["no such words", "ris"], stream=True)]
    assert "".join(pieces) == right.partition("ris")[0]


def test_json_fits_its_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    choice = ask(client, "Name a city in Italy.", response_format=form, max_tokens=100).choices[0]
    found = json.loads(choice.message.content)
    assert choice.finish_reason == "stop" and set(found) == {"city", "is_large"}
    assert isinstance(found["city"], str) and len(found["city"]) <= 20 and isinstance(found["is_large"], bool)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_a_demanded_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, "How is the weather in Paris?", tools=TOOLS, tool_choice=choice, max_tokens=100).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather" and answer.finish_reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str) and isinstance(arguments.get("days", 0), int)
