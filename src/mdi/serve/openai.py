"""The envelope of OpenAI's API: ids, choices and usage, in one object or in chunks that are server-sent events."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from mdi.serve.api_errors import ApiError
from mdi.serve.endpoint import Answers, Asked, Exchange, Surface, compact
from mdi.serve.request import TextPiece, Usage

PACE = "pace"  # an extension of ours in `usage`, on all surfaces
DONE = b"data: [DONE]\n\n"
SIGN = b": waiting\n\n"  # a comment, which parsers leave out; some take ": ping" for the end


class Choices(ABC):
    """The choices of one answer, as they grow.

    Attributes:
        ID: beginning of the answer's id.
        OBJECT: type of the whole answer.
        CHUNK: type of a streamed part.
    """

    ID: str
    OBJECT: str
    CHUNK: str

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """First ones of a stream, before any token."""

    @abstractmethod
    def piece(self, piece: TextPiece) -> dict[str, Any] | None:
        """Record a piece of a text; the choice that shows it, None if nothing can be shown yet."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """All of them, complete."""


def surface(read: Callable[[Any], Any], open_choices: Callable[[Any, Answers], Choices]) -> Surface:
    async def write(asked: Asked, answers: Answers, exchange: Exchange) -> None:
        fields, choices = asked.fields, open_choices(asked, answers)
        made = {"id": f"{choices.ID}-{secrets.token_hex(12)}", "created": int(time.time())}
        made["model"] = answers.model.asked_name
        head = compact({**made, "object": choices.CHUNK, "choices": []})[:-2]  # the same in all chunks

        def chunk(choice: dict[str, Any]) -> bytes:
            return f"data: {head}{compact(choice)}]}}\n\n".encode()

        exchange.failure = _failure
        begun = (
            choices.begin() if fields.is_streamed else []
        )  # they wait for a piece: until then an error has its own status
        async with exchange.kept_alive((lambda: SIGN) if fields.is_streamed else None):
            async for piece in answers.pieces():
                new = choices.piece(piece)
                if fields.is_streamed:
                    shown = [] if new is None else [*begun, new]
                    begun = begun if new is None else []
                    await exchange.push(b"".join(map(chunk, shown)), piece.is_followed)
        usage = usage_of(answers.usage)
        if not fields.is_streamed:
            await exchange.answer({**made, "object": choices.OBJECT, "choices": choices.choices(), "usage": usage})
            return
        told = {**made, "object": choices.CHUNK, "choices": [], "usage": usage}
        await exchange.end((stream_event(told) if fields.with_usage else b"") + DONE)

    return Surface(read, write, lambda error: error.body)


def stream_event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + compact(data).encode() + b"\n\n"


def _failure(error: ApiError) -> bytes:
    return stream_event(error.body) + DONE


def usage_of(usage: Usage) -> dict[str, Any]:
    total = usage.n_prompt + usage.n_completion
    counts = {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_completion,
        "total_tokens": total,
    }
    predicted = {"accepted_prediction_tokens": usage.n_accepted, "rejected_prediction_tokens": usage.n_rejected}
    details = {"reasoning_tokens": usage.n_reasoning, **predicted}
    cached = {"cached_tokens": usage.n_cached}
    return {**counts, "prompt_tokens_details": cached, "completion_tokens_details": details, PACE: usage.pace}
