"""What a request may have at most, on every path: tools, their schemas, messages; and what waits for its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_server import right, run, server

from mdi.node.secondary import SecondaryNode
from mdi.serve.api_errors import ApiError
from mdi.serve.chat import CHATS, Chat
from mdi.serve.conversation import MOST_MESSAGES
from mdi.serve.embeddings import EMBEDDINGS, OLLAMA_EMBEDDINGS
from mdi.serve.endpoint import Surface
from mdi.serve.messages import MESSAGES, TOKEN_COUNTS
from mdi.serve.ollama import CHATS as OLLAMA_CHATS
from mdi.serve.ollama import GENERATIONS
from mdi.serve.responses import RESPONSES
from mdi.serve.schemas import SCHEMA_LIMIT
from mdi.serve.tools import LONGEST_TOOLS, MOST_TOOLS
from mdi.text.quoted import Quotes
from test_harmony import model_of, write_texts

SAID: dict[str, Any] = {"role": "user", "content": "a"}
Tool = Callable[[str, Any], Any]


def nested(name: str, schema: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


SURFACES: dict[str, tuple[Surface, str, dict[str, Any], Tool]] = {
    "chat": (CHATS, "messages", {}, nested),
    "responses": (
        RESPONSES,
        "input",
        {},
        lambda name, schema: {"type": "function", "name": name, "parameters": schema},
    ),
    "messages": (MESSAGES, "messages", {"max_tokens": 5}, lambda name, schema: {"name": name, "input_schema": schema}),
    "counts": (TOKEN_COUNTS, "messages", {}, lambda name, schema: {"name": name, "input_schema": schema}),
    "ollama": (OLLAMA_CHATS, "messages", {"model": "m"}, nested),
}


@pytest.mark.parametrize("name", SURFACES)
def test_tools_and_messages_have_limits(name: str) -> None:
    surface, param, fields, tool = SURFACES[name]
    long = {"type": "object", "description": "x" * (LONGEST_TOOLS // 8)}

    def body(n_messages: int, *tools: Any) -> dict[str, Any]:
        return {**fields, param: [SAID] * n_messages, "tools": list(tools)}

    many = [tool(f"t{i}", {"type": "object"}) for i in range(MOST_TOOLS)]
    surface.read(body(MOST_MESSAGES, *many))
    surface.read(body(1, *(tool(f"t{i}", long) for i in range(7))))
    for wrong, said in (
        (body(MOST_MESSAGES + 1), param),
        (body(1, *many, tool("more", {})), "tools"),
        (body(1, *(tool(f"t{i}", long) for i in range(8))), "tools"),
    ):
        with pytest.raises(ApiError) as caught:
            surface.read(wrong)
        assert caught.value.status == 400 and caught.value.body["error"]["param"] == said


def test_tools_that_no_context_holds_are_refused_before_anything_looks_through_them(tmp_path: Path) -> None:
    """Of a template it is not known how much of a schema it writes; the description of a function each one does."""
    model = model_of(write_texts(tmp_path / "texts"))
    most = model.most_characters // 2 + 1

    def tools(length: int) -> list[Any]:
        return [{"type": "function", "function": {"name": f"t{i}", "description": "x" * length}} for i in range(2)]

    async def refused(length: int) -> tuple[str | None, str]:
        with pytest.raises(ApiError) as caught:
            await Chat({"messages": [SAID], "tools": tools(length)}).opened(model)
        assert caught.value.is_too_long
        return caught.value.param, str(caught.value)

    async def scenario() -> None:
        try:
            with pytest.MonkeyPatch.context() as changed:
                changed.setattr(Quotes, "quoted", lambda *given: pytest.fail("it was looked through"))
                param, told = await refused(most)
            assert param == "tools" and "characters" in told
            assert (await refused(most - 1))[0] == "messages"  # by its tokens
        finally:
            model.template.close()

    asyncio.run(scenario())


IMAGES: dict[str, tuple[Surface, dict[str, Any]]] = {
    "chat": (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    "responses": (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    "responses, of a tool": (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}]},
    ),
    "messages": (MESSAGES, {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    "messages, of a tool": (
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}
                    ],
                }
            ],
        },
    ),
    "counts": (TOKEN_COUNTS, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    "ollama": (OLLAMA_CHATS, {"model": "m", "messages": [{**SAID, "images": ["aGk="]}]}),
    "ollama, a prompt": (GENERATIONS, {"model": "m", "prompt": "a", "images": ["aGk="]}),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_refused_with_the_reason(name: str) -> None:
    surface, body = IMAGES[name]
    with pytest.raises(ApiError) as caught:
        surface.read(body)
    assert caught.value.status == 400 and "language part alone" in str(caught.value)


def test_all_but_the_smallest_answers_wait_for_their_turn(folder: Path, nodes: list[SecondaryNode]) -> None:
    """Counting tokens and embedding, too; a schema has a limit before it is compiled."""
    chat = {"model": "one", "messages": [SAID]}

    async def scenario() -> None:
        async with server(folder, nodes, max_running=1, pooling="last") as made:
            queue = made.api.queue("one")
            queue.max_waiting = 0
            asked = (
                (TOKEN_COUNTS, chat), (EMBEDDINGS, {"model": "one", "input": "a"}), (CHATS, {**chat, "max_tokens": 1}),
                (OLLAMA_EMBEDDINGS, {"model": "one", "input": "a"}), (RESPONSES, {"model": "one", "input": "a"}),
            )  # fmt: skip
            async with queue.entered("", 0, 1):
                for surface, body in asked:
                    status, _ = await made.ask(surface, body)
                    assert status == 429, body
            assert (await made.ask(TOKEN_COUNTS, chat))[0] == 200
            # one request with many texts takes no more places than it has texts in the ring
            queue.max_running, queue.max_waiting = 20, 1
            many = asyncio.create_task(made.ask(EMBEDDINGS, {"model": "one", "input": ["The ring"] * 200}))
            await made.until(lambda: queue.n_running == 16)
            assert await made.write("one", 5) == right("one", 5)
            assert (await many)[0] == 200
            schema = {"type": "object", "description": "x" * SCHEMA_LIMIT}
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            status, told = await made.ask(CHATS, {**chat, "response_format": form})
            assert status == 400 and "characters" in told["error"]["message"]

    run(scenario())
