"""An answer from ids as they come: as events, and as one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mdi.text.answers.calls import written_call
from mdi.text.answers.events import Call, CallPiece, End, Event, Mark, Reasoning, Text, Tools
from mdi.text.answers.forms import Form
from mdi.text.answers.think import END_OF_THINK, THINK
from mdi.text.texts import Detokenizer, StopMatcher, TextCodec


class AnswerStream:
    """The events of one answer.

    Args:
        stop: strings that end the user's text and are removed from it; in reasoning and calls they mean nothing.
        tools: those that may be called; None: any, as far as a call can be read without the schema of its tool.
        begins_in_reasoning: whether the prompt ends with <think>.
        is_call: whether the answer is nothing but calls.
        continues: whether it continues other text.
        streams_calls: whether arguments come in pieces, where the form lets tell early that a call is one.

    Attributes:
        is_stopped: whether a stop string has been met; nothing but the end comes after it.
    """

    def __init__(
        self, codec: TextCodec, form: Form, stop: Sequence[str] = (), tools: Tools | None = (),
        begins_in_reasoning: bool = False, is_call: bool = False, continues: bool = False,
        streams_calls: bool = False,
    ) -> None:  # fmt: skip
        self._codec = codec
        self._marks = {i: Mark(mark) for i, mark in codec.special_marks.items() if mark in form.special}
        self._parsers = form.parsers(tools, begins_in_reasoning, is_call, streams_calls)
        self._detokenizer, self._matcher = Detokenizer(codec, continues), StopMatcher(stop)
        self._drops_blank = form.is_plain and not continues
        self.is_stopped = False

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Take the next ids; returns what is decided now."""
        events: list[Event] = []
        for i in ids:
            if self.is_stopped:
                break
            mark = self._marks.get(i)
            if mark is None:
                events += self._parsed(self._detokenizer.push([i]))
            else:
                events += self._parsed(self._detokenizer.flush()) + self._parsed(mark)
                self._detokenizer = Detokenizer(self._codec)
        return joined(events)

    def close(self, is_cut: bool) -> list[Event]:
        """The rest, because no more ids come; see Parser.close."""
        events: list[Event] = []
        if not self.is_stopped:
            events += self._parsed(self._detokenizer.flush())
            for number, parser in enumerate(self._parsers):
                events += self._through(parser.close(is_cut), number + 1)
            events += [] if self.is_stopped else [Text(self._matcher.flush())]
        return [*joined(events), End("length" if is_cut and not self.is_stopped else "stop", self._matcher.met)]

    def _parsed(self, text: str) -> list[Event]:
        if self._drops_blank and text:
            text, self._drops_blank = text.removeprefix(" "), False
        return self._through([Text(text)], 0) if text else []

    def _through(self, events: Iterable[Event], first: int) -> list[Event]:
        """What becomes of events behind the parsers before the `first`."""
        for parser in self._parsers[first:]:
            events = [new for one in events for new in (parser.feed(one.text) if isinstance(one, Text) else (one,))]
        return [new for one in events for new in self._matched(one)]

    def _matched(self, event: Event) -> list[Event]:
        if self.is_stopped:
            return []
        if not isinstance(event, Text):
            return [Text(self._matcher.flush()), event]
        shown, self.is_stopped = self._matcher.push(event.text)
        return [Text(shown)]


def joined(events: Iterable[Event]) -> list[Event]:
    """Events without empty pieces, and with pieces of one kind that follow each other as one."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, Text | Reasoning | CallPiece):
            last = found[-1] if found else None
            if isinstance(last, Text | Reasoning | CallPiece) and type(last) is type(event):
                found[-1] = last._replace(text=last.text + event.text)
                continue
            if not event.text:
                continue
        found.append(event)
    return found


class InlineStream:
    """All of an answer as one text, in which reasoning and calls stand between the marks that most families write. The pieces
    are those of a TextStream.
    """

    def __init__(self, codec: TextCodec, form: Form, stop: Sequence[str]) -> None:
        self._answer = AnswerStream(codec, form, stop, tools=None)
        self._is_open = False  # the reasoning

    @property
    def is_stopped(self) -> bool:
        return self._answer.is_stopped

    def push(self, ids: Sequence[int]) -> str:
        return self._written(self._answer.feed(ids))

    def flush(self) -> str:
        return self._written(self._answer.close(is_cut=False))

    def _written(self, events: Iterable[Event]) -> str:
        text = ""
        for event in events:
            if self._is_open != isinstance(event, Reasoning):
                self._is_open = not self._is_open
                text += THINK if self._is_open else f"{END_OF_THINK}\n\n"
            if isinstance(event, Call):
                text += f"<tool_call>{written_call(event.name, event.arguments)}</tool_call>"
            elif isinstance(event, Text | Reasoning):
                text += event.text
        return text
