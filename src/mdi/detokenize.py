"""Text that grows token by token: what can be shown already, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mdi.errors import UsageError

if TYPE_CHECKING:
    from mdi.text import TextCodec

_UNDECIDED = "\ufffd"  # what bytes that are no complete character (yet) decode to


class Detokenizer:
    """Text from ids that come a few at a time.

    All that `push` and `flush` return, joined, is `codec.decode(ids, continues)` of all ids. What the next id may still
    change is held back: an incomplete character, or a run of single-byte tokens. Each id is decoded with the few before
    it that are needed, so its cost does not grow with the text.

    Args:
        continues: as for `TextCodec.decode`.
    """

    _WINDOW = 16
    _KEPT = 8  # tokens, i.e. at least as many bytes: UTF-8 finds its way again within four

    def __init__(self, codec: TextCodec, continues: bool = False) -> None:
        self._codec = codec
        self._continues = continues
        self._window: list[int] = []  # ids whose text is not all given out, and some before them
        self._n_shown = 0  # characters of the window's text that have been given out
        self._n_open = 0  # single-byte tokens at the window's end: one more may change how all of them read

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that has become final, often one token late, maybe empty."""
        for i in self._codec.visible(ids):
            self._window.append(i)
            self._n_open = self._n_open + 1 if i in self._codec.byte_ids else 0
        n_closed = len(self._window) - self._n_open
        if n_closed == 0:
            return ""
        closed, opened = self._window[:n_closed], self._window[n_closed:]
        text = self._codec.decode_visible(closed, self._continues)
        n_final = len(text) - text.endswith(_UNDECIDED)
        new = text[self._n_shown : n_final]
        if n_final == len(text):
            # Leading blanks that came to nothing stay at the beginning; one of them is as good as many.
            closed = closed[:1] if not text and not self._continues else []
            self._continues = self._continues or bool(text)
            self._n_shown = 0
        else:
            self._n_shown = n_final
            if n_closed > self._WINDOW:
                closed = closed[-self._KEPT :]
                self._continues = True
                self._n_shown = len(self._codec.decode_visible(closed, True)) - 1
        self._window = closed + opened
        return new

    def flush(self) -> str:
        """What was held back, as it is, because no more ids come."""
        rest = self._codec.decode_visible(self._window, self._continues)[self._n_shown :]
        self._window, self._n_shown, self._n_open = [], 0, 0
        return rest


class StopMatcher:
    """Cuts a growing text where a stop string first becomes complete, however the text comes in pieces.

    Raises:
        UsageError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not s for s in stop):
            raise UsageError("a stop string must not be empty (--stop)")
        self._stop = tuple(stop)
        self._held = ""
        self._met = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next text.

        Returns:
            The text that is safe to show, and whether a stop string has been met; it and all after it are cut off.
        """
        if self._met:
            return "", True
        text = self._held + text
        found = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            self._met, self._held = True, ""
            return text[: min(found)[1]], True
        longest = max((len(s) for s in self._stop), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(s.startswith(text[start:]) for s in self._stop):
                self._held = text[start:]
                return text[:start], False
        self._held = ""
        return text, False

    def flush(self) -> str:
        """The beginning of a stop string that was held back and did not become one."""
        rest, self._held = self._held, ""
        return rest


class TextStream:
    """The text of one sample, from ids as they come, up to a stop string.

    Args:
        stop: strings that end the text and are removed from it.
        continues: whether the text continues other text.

    Attributes:
        is_stopped: whether a stop string has been met; nothing comes after it.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], continues: bool) -> None:
        self._detokenizer = Detokenizer(codec, continues)
        self._matcher = StopMatcher(stop)
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that is now safe to show."""
        text = ""
        for i in ids:
            if self.is_stopped:
                break
            text += self._match(self._detokenizer.push([i]))
        return text

    def flush(self) -> str:
        """The rest, because no more ids come."""
        text = self._match(self._detokenizer.flush())
        return text if self.is_stopped else text + self._matcher.flush()

    def _match(self, text: str) -> str:
        shown, self.is_stopped = self._matcher.push(text)
        return shown
