"""What becomes of an answer that comes in pieces."""

from __future__ import annotations

from typing import Any


def taken_apart(stream: Any, ids: list[int], size: int) -> list[Any]:
    """Text, reasoning and calls of an answer whose ids come `size` at a time."""
    text, reasoning, calls = "", "", []
    for at in range(0, len(ids) + size, size):
        text += stream.push(ids[at : at + size]) if at < len(ids) else stream.flush()
        more, new = stream.others()
        reasoning, calls = reasoning + more, calls + new
    return [text, reasoning, calls]
