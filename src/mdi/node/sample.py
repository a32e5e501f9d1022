"""One sample as its reader sees it: text that grows token by token, and when each token came."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from mdi.detokenize import Detokenizer, StopMatcher
from mdi.engine.scheduler import Event
from mdi.metrics import SampleMetrics
from mdi.text import TextCodec

OnText = Callable[["Sample", str], None]


class Sample:
    """Collects the events of one sequence.

    Args:
        codec: turns ids into text.
        stop: strings that end the text and are not part of it.
        begin: time.perf_counter() when the run was ready.
        on_text: called with each piece of text that is final; with "" when the sample has ended.
    """

    def __init__(
        self, index: int, prompt: str, prompt_ids: Sequence[int], codec: TextCodec, stop: Sequence[str], begin: float,
        on_text: OnText | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.prompt = prompt
        self.prompt_ids = list(prompt_ids)
        self.token_ids: list[int] = []
        self.token_times_s: list[float] = []
        self.finish_reason: str | None = None
        self.cancel: Callable[[str], None] = lambda reason: None
        self.ended = threading.Event()
        self._begin = begin
        self._on_text = on_text
        # What follows a bare prompt goes on in mid-text; an answer in a prompt style begins one.
        self._detokenizer = Detokenizer(codec, continues=codec.prompt_style is None)
        self._matcher = StopMatcher(stop)
        self._pieces: list[str] = []
        self._stop_met = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def take(self, event: Event, now: float) -> None:
        """The engine's callback."""
        for token in event.tokens:
            if self._stop_met:
                break
            self.token_ids.append(token)
            self.token_times_s.append(now - self._begin)
            self._show(self._detokenizer.push([token]))
        if event.finish_reason is not None:
            self._end("stop" if self._stop_met else event.finish_reason)
        elif self._stop_met:
            self.cancel("stop")

    def _show(self, text: str) -> None:
        shown, self._stop_met = self._matcher.push(text)
        self._pieces.append(shown)
        if shown and self._on_text is not None:
            self._on_text(self, shown)

    def _end(self, reason: str) -> None:
        if not self._stop_met:
            self._show(self._detokenizer.flush())
        if not self._stop_met:
            rest = self._matcher.flush()
            self._pieces.append(rest)
            if rest and self._on_text is not None:
                self._on_text(self, rest)
        self.finish_reason = "stop" if self._stop_met else reason
        if self._on_text is not None:
            self._on_text(self, "")
        self.ended.set()

    def metrics(self) -> SampleMetrics:
        """What is known by now, of an unfinished sample too."""
        return SampleMetrics.from_times(
            self.prompt, self.text, self.token_ids, self.prompt_ids, self.finish_reason, self.token_times_s
        )
