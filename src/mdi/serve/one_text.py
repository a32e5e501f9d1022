"""What APIs have in common whose answer is one text in blocks, streamed as events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mdi.serve.api_errors import ApiError
from mdi.serve.endpoint import EVENTS, Answers, Asked, Exchange, Surface, compact
from mdi.text.answers.events import Call, CallBegun, CallPiece, End, Event, Reasoning, Text

Said = type[Text] | type[Reasoning]
Sent = dict[str, Any]  # an event of the API
LINES = "application/x-ndjson"


class Growing(ABC):
    """An answer as it grows. What follows each other of one kind, text or reasoning, is a block; a call is one, too.

    Attributes:
        ending: how it ended; None: not yet.
    """

    def __init__(self) -> None:
        self.ending: End | None = None
        self._kind: Said | None = None  # of the block that is open
        self._pieces: list[str] = []
        self._is_calling = False  # a call comes in pieces

    def begin(self) -> Iterator[Sent]:
        """First events, before any token."""
        return iter(())

    @abstractmethod
    def sign(self) -> Sent:
        """An event that says nothing new."""

    def opened(self, kind: Said) -> Iterator[Sent]:
        """A block begins."""
        return iter(())

    @abstractmethod
    def more(self, kind: Said, text: str) -> Sent:
        """A piece of the open block."""

    def closed(self, kind: Said, text: str) -> Iterator[Sent]:
        """The block is complete."""
        return iter(())

    def calling(self, call: CallBegun) -> Iterator[Sent]:
        """A block begins that is a call."""
        return iter(())

    def arguing(self, piece: str) -> Iterator[Sent]:
        """A piece of its arguments."""
        return iter(())

    @abstractmethod
    def called(self, call: Call) -> Iterator[Sent]:
        """It is complete."""

    def arguments_of(self, call: Call) -> str:
        """What is told of a call that comes as a whole."""
        return call.arguments

    @abstractmethod
    def end(self) -> Iterator[Sent]:
        """Last events."""

    @abstractmethod
    def failed(self, error: ApiError) -> Iterator[Sent]:
        """Last events in their place, if the text cannot be finished."""

    @abstractmethod
    def whole(self) -> Mapping[str, Any]:
        """The answer that is not streamed."""

    def take(self, events: Iterable[Event]) -> Iterator[Sent]:
        """What tells of new events of the model."""
        for event in events:
            kind = type(event) if isinstance(event, Text | Reasoning) else None
            if isinstance(event, End):
                self.ending = event
            if kind is not self._kind:
                if self._kind is not None:
                    yield from self.closed(self._kind, "".join(self._pieces))
                self._kind, self._pieces = kind, []
                if kind is not None:
                    yield from self.opened(kind)
            if isinstance(event, Text | Reasoning):
                self._pieces.append(event.text)
                yield self.more(type(event), event.text)
            elif isinstance(event, CallBegun):
                self._is_calling = True
                yield from self.calling(event)
            elif isinstance(event, CallPiece):
                yield from self.arguing(event.text)
            elif isinstance(event, Call):
                if not self._is_calling:
                    yield from self.calling(CallBegun(event.name, event.id))
                    yield from self.arguing(self.arguments_of(event))
                self._is_calling = False
                yield from self.called(event)


def _server_sent(event: Sent) -> bytes:
    """Some clients read the type beside the data, some in it."""
    return f"event: {event['type']}\ndata: {compact(event)}\n\n".encode()


def _line(event: Sent) -> bytes:
    return compact(event).encode() + b"\n"


_FORMS = {EVENTS: _server_sent, LINES: _line}


def surface(
    read: Callable[[Any], Any], open_answer: Callable[[Any, Answers], Growing],
    error: Callable[[ApiError], Mapping[str, Any]], media_type: str = EVENTS,
) -> Surface:  # fmt: skip
    """Args:
    media_type: of streams: EVENTS or LINES.
    """

    def written(events: Iterable[Sent]) -> bytes:
        return b"".join(map(_FORMS[media_type], events))

    async def write(asked: Asked, answers: Answers, exchange: Exchange) -> None:
        growing, is_streamed = open_answer(asked, answers), asked.fields.is_streamed
        exchange.failure = lambda e: written(growing.failed(e))
        if is_streamed:
            await exchange.push(written(growing.begin()))
        async with exchange.kept_alive((lambda: written([growing.sign()])) if is_streamed else None):
            async for piece in answers.pieces():
                if piece.n_before is not None:  # only where nothing is streamed
                    growing = open_answer(asked, answers)
                sent = written(growing.take(piece.events))
                if is_streamed:
                    await exchange.push(sent, piece.is_followed)
        last = written(growing.end())
        if is_streamed:
            await exchange.end(last)
        else:
            await exchange.answer(growing.whole())

    return Surface(read, write, error, media_type)
