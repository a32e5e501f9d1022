"""What becomes of an answer that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdi.text.answers.events import Call, Event, Reasoning, Text
from mdi.text.answers.stream import AnswerStream


def apart(events: Sequence[Event]) -> list[Any]:
    """Text, reasoning and calls."""
    text, reasoning = ("".join(one.text for one in events if isinstance(one, kind)) for kind in (Text, Reasoning))
    return [text, reasoning, [one for one in events if isinstance(one, Call)]]


def taken_apart(stream: AnswerStream, ids: Sequence[int], size: int, is_cut: bool = False) -> list[Any]:
    """Text, reasoning and calls of an answer whose ids come `size` at a time."""
    events = [event for at in range(0, len(ids), size) for event in stream.feed(ids[at : at + size])]
    return apart([*events, *stream.close(is_cut)])
