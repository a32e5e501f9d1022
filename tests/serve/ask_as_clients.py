"""Asks a server (MDI_URL, MDI_OLLAMA, MDI_KEY) as `openai`, `anthropic` and `ollama` do, and prints what came as
JSON. It runs in `.venv-clients`.

MDI_STREAMS is a JSON file of streams by their paths, which the clients read, too.
"""

import http.server
import importlib
import json
import os
import threading
from pathlib import Path

import anthropic
import ollama as ollama_client
import openai
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import embedding_create_params
from openai.types.responses import response_create_params

URL, KEY = os.environ["MDI_URL"], os.environ["MDI_KEY"]
MODEL = "nano-llama"
ASK = "Speak, Romeo."
SCHEMA = {
    "type": "object", "properties": {"act": {"type": "integer", "minimum": 1, "maximum": 5}}, "required": ["act"],
}  # fmt: skip
HOUSE = {
    "type": "object", "properties": {"house": {"enum": ["Montague", "Capulet"]}}, "required": ["house"],
    "additionalProperties": False,
}  # fmt: skip
ollama_types = importlib.import_module("ollama._types")  # the package has no other name for them
MISSING = "gpt-4"


def fields() -> dict:
    beta = beta_params.MessageCreateParamsBase.__annotations__
    return {
        "responses": [*response_create_params.ResponseCreateParamsBase.__annotations__],
        "messages": sorted({*message_create_params.MessageCreateParamsBase.__annotations__, *beta}),
        "chat": [*ollama_types.ChatRequest.model_fields],
        "options": [*ollama_client.Options.model_fields],
        "generate": [*ollama_types.GenerateRequest.model_fields],
    }


def errors(calls: list) -> list:
    found = []
    for call in calls:
        try:
            call()
        except Exception as e:
            found.append(type(e).__name__)
    return found


def responses() -> dict:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong-secret", max_retries=0)
    asked = {"model": MODEL, "input": ASK, "max_output_tokens": 20, "extra_body": {"seed": 5}}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response  # the client's own function for it knows complete ones only
    tool = {"type": "function", "name": "open_act", "parameters": SCHEMA, "strict": False}
    demand = {"model": MODEL, "input": ASK, "tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
    (call,) = client.responses.create(**demand).output
    with client.responses.stream(**demand) as stream:
        (streamed,) = stream.get_final_response().output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    said = [{"role": "user", "content": ASK}, call, result]
    after = client.responses.create(model=MODEL, input=said, max_output_tokens=5)
    form = {"format": {"type": "json_schema", "name": "house", "schema": HOUSE, "strict": True}}
    formed = client.responses.create(model=MODEL, input=ASK, text=form, max_output_tokens=200)
    return {
        "text": whole.output_text, "pieces": "".join(pieces), "final": final.output_text,
        "usage": [whole.usage.input_tokens, final.usage.output_tokens],
        "calls": [[one.name, json.loads(one.arguments)] for one in (call, streamed)], "after": after.output_text,
        "form": formed.output_text,
        "errors": errors([
            lambda: stranger.responses.create(**asked), lambda: client.responses.create(**{**asked, "model": MISSING}),
            lambda: client.responses.create(**asked, previous_response_id="resp_1"),
            lambda: client.responses.create(**{**asked, "input": "a b " * 5000}),
        ]),
    }  # fmt: skip


def messages() -> dict:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong-secret", max_retries=0)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": ASK}]}
    asked = {**chat, "max_tokens": 20, "extra_body": {"seed": 5}}
    whole = client.messages.create(**asked)
    text = "".join(block.text for block in whole.content)
    with client.messages.stream(**asked) as stream:
        pieces = "".join(stream.text_stream)
        final = stream.get_final_message()
    tool = {"name": "open_act", "input_schema": SCHEMA}
    demand = {**chat, "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "any"}}
    (call,) = client.messages.create(**demand).content
    with client.messages.stream(**demand) as stream:
        (streamed,) = stream.get_final_message().content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    said = [*chat["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    after = client.messages.create(model=MODEL, messages=said, tools=[tool], max_tokens=5)
    stopped = client.messages.create(**{**asked, "stop_sequences": [text[4:7]]})
    bearer = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    formed = bearer.messages.create(
        **chat, max_tokens=200, output_config={"format": {"type": "json_schema", "schema": HOUSE}}
    )
    return {
        "text": text, "pieces": pieces, "final": final.content[0].text,
        "usage": [whole.usage.input_tokens + whole.usage.cache_read_input_tokens, final.usage.output_tokens],
        "calls": [[one.name, one.input] for one in (call, streamed)],
        "after": "".join(block.text for block in after.content if block.type == "text") or after.content,
        "counted": client.messages.count_tokens(**chat).input_tokens,
        "stop": [stopped.stop_reason, stopped.stop_sequence == text[4:7]], "form": formed.content[0].text,
        "errors": errors([
            lambda: stranger.messages.create(**asked), lambda: client.messages.create(**{**asked, "model": MISSING}),
            lambda: client.messages.create(**{**asked, "messages": []}),
            lambda: client.messages.create(**{**asked, "messages": [{"role": "user", "content": "a b " * 5000}]}),
        ]),
    }  # fmt: skip


def ollama() -> dict:
    def client(url: str = os.environ["MDI_OLLAMA"], key: str = KEY) -> ollama_client.Client:
        return ollama_client.Client(url, headers={"authorization": f"Bearer {key}"})

    own, chat = client(), {"model": MODEL, "messages": [{"role": "user", "content": ASK}]}
    asked = {**chat, "options": {"seed": 5, "num_predict": 20, "num_ctx": 8192}, "keep_alive": "5m"}
    lines = list(own.chat(**asked, stream=True))
    whole = own.chat(**asked)
    prompt = {**asked, "prompt": ASK}
    prompt.pop("messages")

    def open_act(act: int) -> str:
        """Open an act.

        Args:
            act: its number
        """

    call = {"function": {"name": "open_act", "arguments": {"act": 2}}}
    said = [
        *chat["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_name": "open_act"},
    ]
    after = own.chat(MODEL, said, tools=[open_act], options={"num_predict": 5})
    shown, (running,), (listed,) = own.show(MODEL), own.ps().models, own.list().models
    return {
        "text": whole.message.content, "pieces": "".join(line.message.content for line in lines),
        "final": own.generate(**prompt).response,
        "prompt": "".join(one.response for one in own.generate(**prompt, stream=True)),
        "usage": [whole.prompt_eval_count, lines[-1].eval_count], "ends": [one.done_reason for one in (whole, lines[-1])],
        "durations": [lines[-1].total_duration, lines[-1].eval_duration],
        "after": after.message.content or [one.function.name for one in after.message.tool_calls or []],
        "form": own.chat(**chat, format=HOUSE, options={"num_predict": 200}).message.content,
        "load": own.generate(MODEL).done_reason, "models": [running.model, listed.model], "size": listed.size,
        "context": [running.context_length, shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"]],
        "errors": [
            status_of(lambda: client(key="wrong-secret").chat(**asked)), status_of(lambda: own.chat("gpt-4", chat["messages"])),
            status_of(lambda: own.chat(**{**chat, "messages": [{"role": "user", "content": "a b " * 5000}]})),
            status_of(lambda: list(own.chat(**{**asked, "model": MISSING}, stream=True))),
            status_of(lambda: own.pull(MODEL)), status_of(lambda: own.delete(MODEL)),
        ],
    }  # fmt: skip


def embeddings() -> dict:
    given = [ASK, "JULIET:"]
    own = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    other = ollama_client.Client(os.environ["MDI_OLLAMA"], headers={"authorization": f"Bearer {KEY}"})
    found = other.embed(MODEL, given)
    return {
        "openai": [one.embedding for one in own.embeddings.create(model=MODEL, input=given).data],
        "ollama": list(map(list, found.embeddings)), "count": found.prompt_eval_count,
        "old": list(other.embeddings(MODEL, ASK).embedding),
        "short": [one.embedding for one in own.embeddings.create(model=MODEL, input=given, dimensions=8).data],
        "fields": [
            sorted(embedding_create_params.EmbeddingCreateParams.__annotations__), [*ollama_types.EmbedRequest.model_fields],
        ],
        "errors": errors([lambda: own.embeddings.create(model=MISSING, input="a")]),
    }  # fmt: skip


def status_of(call: object) -> int:
    try:
        call()
    except ollama_client.ResponseError as e:
        assert e.error, e
        return e.status_code
    return 200


def models() -> list:
    own = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY), anthropic.Anthropic(base_url=URL, api_key=KEY)
    return [client.models.list().data[0].id for client in own]


class Streams(http.server.BaseHTTPRequestHandler):
    """Answers each path with its stream."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/x-ndjson" if "/api/" in self.path else "text/event-stream")
        self.end_headers()
        self.wfile.write(json.loads(Path(os.environ["MDI_STREAMS"]).read_text())[self.path].encode())

    def log_message(self, *_: object) -> None: ...


def streams() -> dict:
    """What the clients make of streams with reasoning, words and a call."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streams) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="a").responses.stream(model="m", input="a") as stream:
            response = stream.get_final_response()
        user = {"role": "user", "content": "a"}
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="a")
        chunks = list(client.chat.completions.create(model="m", messages=[user], stream=True))
        texts = list(client.completions.create(model="m", prompt="a", stream=True))
        client = anthropic.Anthropic(base_url=url, api_key="a")
        with client.messages.stream(model="m", max_tokens=9, messages=[user]) as stream:
            message = stream.get_final_message()
        lines = list(ollama_client.Client(url).chat("m", [user], stream=True))
        server.shutdown()
    said = [line.message for line in lines]
    calls = [[one.function.name, one.function.arguments] for message in said for one in message.tool_calls or []]
    thinking, content = ("".join(getattr(message, name) or "" for message in said) for name in ("thinking", "content"))
    return {
        "chat": "".join(one.choices[0].delta.content or "" for one in chunks),
        "prompt": "".join(one.choices[0].text for one in texts),
        "ollama": [thinking, content, calls, lines[-1].done_reason],
        "responses": [one.model_dump(exclude_none=True) for one in response.output],
        "messages": [one.model_dump(exclude_none=True) for one in message.content], "stop": message.stop_reason,
    }  # fmt: skip


print(
    json.dumps(
        {one.__name__: one() for one in (fields, responses, messages, ollama, embeddings, models, streams)}, default=str
    )
)
