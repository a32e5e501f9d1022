"""Reasoning between two marks before the text, such as <think> and </think> of Qwen 3, DeepSeek R1, GLM and MiniMax.

A prompt may end with the first one: then an answer begins with reasoning.
"""

from __future__ import annotations

from mdi.text.answers.events import Event, Reasoning, Text, n_begun

THINK, END_OF_THINK = MARKS = ("<think>", "</think>")
MISTRAL = ("[THINK]", "[/THINK]")


class Thoughts:
    """Blanks around reasoning belong to its marks. Behind words, a mark is text.

    Args:
        is_open: whether the prompt ends with the first mark.
    """

    def __init__(self, is_open: bool, marks: tuple[str, str] = MARKS) -> None:
        self._is_open = is_open
        self._begin, self._end = marks
        self._text, self._at = "", 0  # what came last, and how far it has been taken
        self._blank = ""  # at the end of the reasoning so far: left out if that has ended
        self._has_reasoned = self._has_said = False
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._reasons() if self._is_open else self._speaks():
            pass
        events, self._events = self._events, []
        return events

    def close(self, is_cut: bool) -> list[Event]:
        rest, self._text = self._blank + self._text[self._at :], ""
        return [Reasoning(rest) if self._is_open else Text(rest)] if rest else []

    # Each takes a part of the text, and says whether it is worth going on: else it waits for more.

    def _reasons(self) -> bool:
        end = self._text.find(self._end, self._at)
        to = end if end >= 0 else len(self._text) - n_begun(self._text, (self._end,), self._at)
        thought, self._at = self._text[self._at : to], to
        thought = self._blank + (thought if self._has_reasoned else thought.lstrip())
        said = thought.rstrip()
        if said:
            self._events.append(Reasoning(said))
            self._has_reasoned = True
        self._blank = thought[len(said) :] if end < 0 else ""
        if end >= 0:
            self._at, self._is_open = end + len(self._end), False
        return end >= 0

    def _speaks(self) -> bool:
        if not self._has_said:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            rest = self._text[self._at : self._at + len(self._begin)]
            if rest == self._begin:
                self._at, self._is_open = self._at + len(self._begin), True
                return True
            if self._begin.startswith(rest):
                return False
        if said := self._text[self._at :]:
            self._events.append(Text(said))
            self._at, self._has_said = len(self._text), True
        return False


def content(text: str, is_open: bool, marks: tuple[str, str] = MARKS) -> str:
    """The text of a whole answer without its reasoning."""
    thoughts = Thoughts(is_open, marks)
    return "".join(one.text for one in [*thoughts.feed(text), *thoughts.close(False)] if isinstance(one, Text))
