"""Asks a server (MDI_URL, MDI_KEY; MDI_SMALL_KEY may ask once) as litellm, langchain-openai and openai-agents do, and
prints what came as JSON. It runs in `.venv-clients`.
"""

import json
import os
from typing import Literal

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}

import agents
import litellm
import openai
import pydantic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, KEY, MODEL = os.environ["MDI_URL"], os.environ["MDI_KEY"], "nano-llama"
ASK = "Speak, Romeo."
litellm.suppress_debug_info = True


class House(pydantic.BaseModel):
    house: Literal["Montague", "Capulet"]


def open_act(act: Literal["first", "second"]) -> str:
    """Open an act."""
    return f"the {act} act is open"


def with_litellm() -> dict:
    own = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
    chat = {**own, "messages": [{"role": "user", "content": ASK}], "max_tokens": 20, "seed": 5}
    parameters = {"type": "object", "properties": {"act": {"enum": ["first", "second"]}}, "required": ["act"]}
    tools = [{"type": "function", "function": {"name": "open_act", "parameters": parameters}}]
    demand = {**chat, "max_tokens": 200, "tools": tools, "tool_choice": "required"}
    (call,) = litellm.completion(**demand).choices[0].message.tool_calls
    chunks = list(litellm.completion(**demand, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    others = {"model": f"anthropic/{MODEL}", "api_base": URL, "seed": None, "extra_body": {"seed": 5}}
    anthropic = litellm.completion(**{**chat, **others})
    responses = litellm.responses(**own, input=ASK, max_output_tokens=20, extra_body={"seed": 5})
    error = ""
    try:
        for _ in range(2):
            litellm.completion(**{**chat, "api_key": os.environ["MDI_SMALL_KEY"]})
    except litellm.RateLimitError as e:
        error = str(e)
    return {
        "text": litellm.completion(**chat).choices[0].message.content,
        "pieces": "".join(one.choices[0].delta.content or "" for one in litellm.completion(**chat, stream=True)),
        "calls": [[one.function.name, json.loads(one.function.arguments)] for one in (call, streamed)],
        "messages": anthropic.choices[0].message.content, "responses": responses.output[0].content[0].text, "error": error,
    }  # fmt: skip


def with_langchain() -> dict:
    own = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
    model, wordy = ChatOpenAI(**own, max_tokens=20, seed=5), ChatOpenAI(**own, max_tokens=200)
    opened = tool(open_act)
    said = wordy.bind_tools([opened], tool_choice="any").invoke(ASK)
    (call,) = said.tool_calls
    result = opened.invoke(call)
    responses = ChatOpenAI(**own, max_tokens=20, use_responses_api=True, extra_body={"seed": 5}).invoke(ASK)
    return {
        "text": model.invoke(ASK).content, "pieces": "".join(one.content for one in model.stream(ASK)),
        "calls": [[call["name"], call["args"]]], "result": result.content,
        "after": model.bind_tools([opened]).invoke([("user", ASK), said, result]).content,
        "form": wordy.with_structured_output(House, method="json_schema").invoke(ASK).house,
        "responses": responses.content[0]["text"],
    }  # fmt: skip


def with_agents() -> dict:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    settings = agents.ModelSettings(tool_choice="required", max_tokens=200)
    found = {}
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="prompter", instructions="Open an act.", model=kind(MODEL, client), model_settings=settings,
            tools=[agents.function_tool(open_act)], tool_use_behavior="stop_on_first_tool",
        )  # fmt: skip
        found[kind.__name__] = agents.Runner.run_sync(agent, ASK, max_turns=2).final_output
    return found


print(json.dumps({one.__name__.removeprefix("with_"): one() for one in (with_litellm, with_langchain, with_agents)}))
