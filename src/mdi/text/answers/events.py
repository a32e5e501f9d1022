"""The events of an answer, and what makes them of its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Text(NamedTuple):
    """A piece of what the user reads."""

    text: str


class Reasoning(NamedTuple):
    """A piece of what the model thinks before."""

    text: str


class Call(NamedTuple):
    """A call: the name of a tool, and its arguments as JSON, or as the model wrote them if they are none.

    `id` is what the model itself calls it; "": nothing.
    """

    name: str
    arguments: str
    id: str = ""


class CallBegun(NamedTuple):
    """A call whose arguments come in pieces. The call itself follows them, whatever its arguments turn out to be."""

    name: str
    id: str = ""


class CallPiece(NamedTuple):
    """A piece of the arguments of the call that has begun, as the model writes them."""

    text: str


class End(NamedTuple):
    """The last event; `reason` is "stop", or "length" if the answer was cut off. `stop` is the stop string that ended it."""

    reason: str
    stop: str = ""


Event = Text | Reasoning | CallBegun | CallPiece | Call | End
Tools = Sequence[Mapping[str, Any]]  # as OpenAI's API has them


class Mark(str):
    """A special token, in the place of text: letters that read the same are none."""


class Parser(Protocol):
    """Takes an answer apart as it comes. Each character is looked at a bounded number of times."""

    def feed(self, text: str) -> list[Event]:
        """Take the next text, or a `Mark`; returns what is decided now."""

    def close(self, is_cut: bool) -> list[Event]:
        """The rest, because no more text comes.

        Args:
            is_cut: the model has not ended it: a call that is not complete is left out, because nobody can use it.
        """


def n_begun(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Characters at the end of a text, from `start` on, that may become one of the marks."""
    longest = min(max(map(len, marks)) - 1, len(text) - start)
    ends = (text[len(text) - n :] for n in range(longest, 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)
