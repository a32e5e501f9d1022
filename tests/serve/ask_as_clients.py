"""Asks a server (MDI_URL, MDI_KEY) as `openai` and `anthropic` do, and prints what came as JSON. It runs in `.venv-clients`.

MDI_STREAMS is a JSON file of streams by their paths, which the clients read, too.
"""

import http.server
import json
import os
import threading
from pathlib import Path

import anthropic
import openai
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_params
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
MISSING = "gpt-4"


def fields() -> dict:
    beta = beta_params.MessageCreateParamsBase.__annotations__
    return {
        "responses": [*response_create_params.ResponseCreateParamsBase.__annotations__],
        "messages": sorted({*message_create_params.MessageCreateParamsBase.__annotations__, *beta}),
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


def models() -> list:
    own = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY), anthropic.Anthropic(base_url=URL, api_key=KEY)
    return [client.models.list().data[0].id for client in own]


class Streams(http.server.BaseHTTPRequestHandler):
    """Answers each path with its stream."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
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
        client = anthropic.Anthropic(base_url=url, api_key="a")
        user = {"role": "user", "content": "a"}
        with client.messages.stream(model="m", max_tokens=9, messages=[user]) as stream:
            message = stream.get_final_message()
        server.shutdown()
    return {
        "responses": [one.model_dump(exclude_none=True) for one in response.output],
        "messages": [one.model_dump(exclude_none=True) for one in message.content], "stop": message.stop_reason,
    }  # fmt: skip


print(json.dumps({one.__name__: one() for one in (fields, responses, messages, models, streams)}, default=str))
