"""The APIs through the programs that other people's agents use, in an environment of their own: `make clients`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_surfaces import asked

from conftest import KEYS, ROOT, SMALL_KEY, Server
from mdi.serve.chat import CHATS as OPENAI_CHATS
from mdi.serve.completions import COMPLETIONS
from mdi.serve.embeddings import EmbeddingFields, EmbedFields
from mdi.serve.messages import MESSAGES, MessageFields
from mdi.serve.ollama import CHATS, ChatFields, GenerateFields, Options
from mdi.serve.request import check_spelling
from mdi.serve.responses import RESPONSES, ResponseFields
from mdi.serve.seals import signature_of
from test_harmony import ANALYSIS, CALL, FINAL, NEXT, USER, write_texts

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PROGRAM, FRAMEWORKS = (Path(__file__).with_name(name) for name in ("ask_as_clients.py", "ask_with_frameworks.py"))
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no clients: make clients")


@pytest.fixture(scope="module")
def told(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the clients got, by the names of the functions of that program."""
    folder = tmp_path_factory.mktemp("clients")
    texts, written = write_texts(folder / "texts"), f"{ANALYSIS}Hm.{NEXT}{FINAL}So:{NEXT}{CALL}"
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    made = {
        "/v1/responses": asked(texts, RESPONSES, {"input": "a", "stream": True, "tools": [look]}, written, "eos")[1],
        "/v1/messages": asked(
            texts,
            MESSAGES,
            {"messages": [USER], "max_tokens": 99, "stream": True, "tools": [{"name": "look"}]},
            written,
            "eos",
        )[1],
        "/api/chat": asked(texts, CHATS, {"messages": [USER], "tools": [{"function": look}]}, written, "eos")[1],
    }
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr("mdi.serve.endpoint.SIGN_S", 0.05)
        for path, surface, body in (
            ("chat/completions", OPENAI_CHATS, {"messages": [USER]}),
            ("completions", COMPLETIONS, {"prompt": "a"}),
        ):
            made[f"/v1/{path}"] = asked(texts, surface, {**body, "stream": True}, f"{FINAL}Yes.", "eos+0.3")[1]
    (folder / "streams").write_text(json.dumps({path: data.decode() for path, data in made.items()}))
    env = {
        **os.environ,
        "MDI_STREAMS": str(folder / "streams"),
        "MDI_URL": f"http://127.0.0.1:{server.port}",
        "MDI_OLLAMA": f"http://127.0.0.1:{server.ollama_port}",
        "MDI_KEY": KEYS[0],
    }
    sent = [made["/v1/chat/completions"], made["/v1/completions"]]
    return {**said_by(PROGRAM, env), "sent": sent}


def said_by(program: Path, env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([PYTHON, program], capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_fields_that_the_clients_know_are_none_of_ours_misspelt(told: dict[str, Any]) -> None:
    kinds = (ResponseFields, MessageFields, ChatFields, GenerateFields, Options)
    for kind, names in zip(
        kinds, map(told["fields"].get, ("responses", "messages", "chat", "generate", "options")), strict=True
    ):
        assert len(names) >= 10
        check_spelling(kind, dict.fromkeys(names, 1))


@pytest.mark.parametrize("api", ["responses", "messages", "ollama"])
def test_a_stream_is_the_whole_answer_in_pieces(api: str, told: dict[str, Any]) -> None:
    of = told[api]
    assert of["text"] and of["text"] == of["pieces"] == of["final"], "the same seed"
    assert of["usage"][0] > 5 and of["usage"][1] == 20


def test_the_text_is_that_of_the_chat(told: dict[str, Any], server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Speak, Romeo."}], "seed": 5, "max_tokens": 20}
    text = server.ask("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    assert told["responses"]["text"] == told["messages"]["text"] == told["ollama"]["text"] == text


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_tool_is_called_and_its_result_read(api: str, told: dict[str, Any]) -> None:
    calls = told[api]["calls"]
    assert [name for name, _ in calls] == ["open_act", "open_act"], "at once and streamed"
    assert all(1 <= given["act"] <= 5 for _, given in calls) and told[api]["after"]


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_errors_are_the_clients_own(api: str, told: dict[str, Any]) -> None:
    assert told[api]["errors"] == ["AuthenticationError", "NotFoundError", "BadRequestError", "BadRequestError"]


def test_reasoning_words_and_calls_are_what_the_clients_make_of_streams(told: dict[str, Any]) -> None:
    reasoning, message, call = told["streams"]["responses"]
    assert (reasoning["content"][0]["text"], message["content"][0]["text"]) == ("Hm.", "So:")
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": "Zürich"})
    thinking, text, use = told["streams"]["messages"]
    assert (thinking["thinking"], thinking["signature"]) == ("Hm.", signature_of("Hm."))
    assert text["text"] == "So:" and (use["name"], use["input"]) == ("look", {"at": "Zürich"})
    assert told["streams"]["stop"] == "tool_use"
    assert told["streams"]["ollama"] == ["Hm.", "So:", [["look", {"at": "Zürich"}]], "stop"]


def test_openais_client_leaves_comments_out(told: dict[str, Any]) -> None:
    assert b"\n: waiting\n" in told["sent"][0] and told["sent"][1].startswith(b": waiting\n")
    assert told["streams"]["chat"] == "Yes." and told["streams"]["prompt"].endswith("Yes.")


def test_models_and_counts(told: dict[str, Any]) -> None:
    assert told["models"] == ["nano-llama", "nano-llama"]
    assert told["messages"]["counted"] == told["messages"]["usage"][0]
    assert told["messages"]["stop"] == ["stop_sequence", True]


def test_an_answer_of_a_given_form(told: dict[str, Any]) -> None:
    for api in ("responses", "messages", "ollama"):
        assert json.loads(told[api]["form"])["house"] in ("Montague", "Capulet")


def test_what_the_client_of_ollama_gets(told: dict[str, Any], server: Server) -> None:
    of = told["ollama"]
    assert of["prompt"] == of["text"] and of["ends"] == ["length", "length"] and of["load"] == "load" and of["after"]
    assert of["durations"][0] >= of["durations"][1] > 0 and of["models"] == ["nano-llama:latest"] * 2
    (facts,) = server.ask("GET", "/v1/models")[1]["data"]
    assert of["context"] == [facts["max_model_len"]] * 2 and of["size"] > 6_000_000
    assert of["errors"] == [401, 404, 400, 404, 501, 501]


def test_vectors_are_the_same_by_all_clients(told: dict[str, Any], server: Server) -> None:
    of = told["embeddings"]
    asked = {"input": ["Speak, Romeo.", "JULIET:"]}
    answer = server.ask("POST", "/v1/embeddings", asked)[1]
    vectors = [one["embedding"] for one in answer["data"]]
    assert of["openai"] == of["ollama"] == vectors and of["old"] == vectors[0]
    assert of["count"] == answer["usage"]["prompt_tokens"] and [len(one) for one in of["short"]] == [8, 8]
    assert of["errors"] == ["NotFoundError"]
    for kind, names in zip((EmbeddingFields, EmbedFields), of["fields"], strict=True):
        assert len(names) >= 5
        check_spelling(kind, dict.fromkeys(names, 1))


@pytest.fixture(scope="module")
def frameworks(server: Server) -> dict[str, Any]:
    """What litellm, langchain and agents got."""
    env = {"MDI_URL": f"http://127.0.0.1:{server.port}", "MDI_KEY": KEYS[0], "MDI_SMALL_KEY": SMALL_KEY}
    return said_by(FRAMEWORKS, {**os.environ, **env})


def test_frameworks_give_the_text_of_the_chat(frameworks: dict[str, Any], server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Speak, Romeo."}], "seed": 5, "max_tokens": 20}
    text = server.ask("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    for name in ("litellm", "langchain"):
        found = frameworks[name]
        assert found["text"] == found["pieces"] == found["responses"] == text, name
    assert frameworks["litellm"]["messages"]


def test_frameworks_call_tools_and_read_their_results(frameworks: dict[str, Any]) -> None:
    for name in ("litellm", "langchain"):
        assert all(
            call == ["open_act", {"act": given["act"]}] and given["act"] in ("first", "second")
            for call in frameworks[name]["calls"]
            for given in [call[1]]
        )
    assert frameworks["langchain"]["after"] and frameworks["langchain"]["form"] in ("Montague", "Capulet")
    for answer in frameworks["agents"].values():
        assert answer in ("the first act is open", "the second act is open")


def test_a_key_that_has_used_what_it_may_is_a_rate_limit(frameworks: dict[str, Any]) -> None:
    assert "the key small has used its 1 tokens per minute: try again in" in frameworks["litellm"]["error"]
