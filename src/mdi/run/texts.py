"""The texts of a run for their readers: submitted as words, read as they grow, with the time of each token."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from mdi.engine.cohort import Beams
from mdi.engine.sequence import FAILED, UNTRUE, Event, Events, Request, SamplingParams, seed_of, wait_for_event
from mdi.engine.starter import StarterEngine
from mdi.errors import Code, UsageError
from mdi.metrics import SampleMetrics
from mdi.model.spec import ModelSpec
from mdi.text.answers.stream import InlineStream
from mdi.text.texts import TextCodec, TextStream, stop_test

OnText = Callable[[str], None]
# Number of the sample, new token ids, finish_reason if it has ended; called by the reader's thread. With True, these are all
# ids that it has: others were retracted.
Record = Callable[[int, list[int], str | None, bool], None]
# The number of a text that a search has found beyond those that are wanted: it is neither shown nor recorded.
UNREAD = -1
RETRACTED = "\n[a node gave wrong rows: the text is written again]\n"


def _nothing() -> None: ...


class Sample:
    """Collects the events of one sequence.

    Its text is made once: by `ends`, in the engine's thread, if the engine asks that, else by `take`, in the reader's. Both
    see the same tokens in the same order, and `ends` sees those of an event before the event is there.

    Args:
        streams: makes what makes text of its ids.
        begin: time.perf_counter() when the run was ready.
        on_text: called by the reader's thread with each piece of text that is final; with "" when the sample has ended.

    Attributes:
        request: set once it has been submitted.
        again: submits it with the tokens that it has; set with the request.
        finish_reason: None until it has ended, and when it could not be finished.
        has_ended: whether its last event has been taken.
        may_differ_from: as in SampleMetrics, by an earlier run.
    """

    def __init__(
        self, index: int, prompt: str, prompt_ids: Sequence[int], streams: Callable[[], TextStream | InlineStream],
        begin: float, on_text: OnText | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.prompt = prompt
        self.prompt_ids = list(prompt_ids)
        self.token_ids: list[int] = []
        self.token_times_s: list[float] = []
        self.finish_reason: str | None = None
        self.request: Request | None = None
        self.again: Callable[[], None] = _nothing
        self.has_ended = False
        self.may_differ_from: int | None = None
        self._streams = streams
        self._stream = streams()
        self._begin = begin
        self._on_text = on_text
        self._pieces: list[str] = []
        self._made: deque[tuple[str, bool]] = (
            deque()
        )  # by `ends`, of each token: its text, and whether a stop string was met
        self._is_stopped = False  # as far as it has been read

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def n_reached(self) -> int:
        """Generated tokens; while the best texts of a prompt are searched, those of each text so far."""
        if self.token_ids or self.request is None or not self.request.sequence.cohort:
            return len(self.token_ids)
        return len(self.request.sequence.generated)

    def cancel(self, reason: str = "cancelled") -> None:
        """Have it ended soon."""
        if self.request is not None:
            self.request.cancel(reason)

    def ends(self, token: int) -> bool:
        """Whether a token completes a stop string: the engine asks, so that nothing is computed beyond it."""
        text = self._stream.push([token])
        self._made.append((text, self._stream.is_stopped))
        return self._stream.is_stopped

    def take(self, event: Event) -> None:
        pieces = []
        for token in event.tokens:
            if self._is_stopped:
                break  # the engine stops at the same token; further tokens are not shown
            self.token_ids.append(token)
            self.token_times_s.append(event.time_s - self._begin)
            if self._made:
                piece, self._is_stopped = self._made.popleft()
            else:  # the engine does not ask, or not any more, as the text has ended
                piece = self._stream.push([token])
                self._is_stopped = self._stream.is_stopped
            pieces.append(piece)
        self._show("".join(pieces))  # whose exceptions lose no token
        if event.finish_reason is not None:
            self._show(self._stream.flush())
            reason = "stop" if self._stream.is_stopped else event.finish_reason
            self.finish_reason = None if reason == FAILED else reason
            self.has_ended = True
            self.again = _nothing  # which knows the sample: else only the collector of cycles would free the engine
            if self._on_text is not None:
                self._on_text("")

    def restore(self, token_ids: Sequence[int], finish_reason: str | None, n_tokens: int) -> bool:
        """Take what an earlier run had reached.

        Args:
            n_tokens: that it may have.

        Returns:
            whether it goes on.
        """
        self.take(Event(-1, tuple(token_ids), None, self._begin))
        if finish_reason is None:  # its end was not recorded, but follows from its tokens
            finish_reason = "stop" if self._is_stopped else "length" if len(token_ids) >= n_tokens else None
        if finish_reason is not None:
            self.take(Event(-1, (), finish_reason, self._begin))
        return finish_reason is None

    def retract(self, n_kept: int) -> None:
        """All tokens but the first `n_kept` were wrong."""
        kept, times, shown = self.token_ids[:n_kept], self.token_times_s[:n_kept], self.text
        self._stream, self._is_stopped = self._streams(), False
        self._made.clear()
        self._pieces, self.token_ids, self.token_times_s = [], [], []
        on_text, self._on_text = self._on_text, None
        self.take(Event(-1, tuple(kept), None, self._begin))
        self.token_times_s, self._on_text = times, on_text
        if self.text != shown and on_text is not None:
            on_text(RETRACTED + self.text)

    def _show(self, text: str) -> None:
        self._pieces.append(text)
        if text and self._on_text is not None:
            self._on_text(text)

    def metrics(self) -> SampleMetrics:
        """The measurements by now, of an unfinished sample too."""
        sequence = None if self.request is None else self.request.sequence
        guesses = (0, 0) if sequence is None else (sequence.n_guessed, sequence.n_confirmed)
        return SampleMetrics.from_times(
            self.prompt, self.text, self.token_ids, self.prompt_ids, self.finish_reason, self.token_times_s, *guesses
        )


class SampleReader:
    """Reads any number of samples in one thread, each piece as it comes. If left early, it cancels unfinished ones.

    Attributes:
        record: called with the new tokens of each sample.
    """

    def __init__(self) -> None:
        self.events: Events = queue.SimpleQueue()
        self.record: Record | None = None
        self._samples: dict[int, Sample] = {}  # unfinished ones, by seq_id

    def add(self, sample: Sample, request: Request) -> None:
        """A sample whose request puts its events into `events`; from the thread that reads."""
        sample.request = request
        self._samples[request.seq_id] = sample

    def read(self) -> None:
        """Return when all samples have ended. Exceptions of `on_text` pass through; reading can be continued after them."""
        while self._samples:
            event = wait_for_event(self.events)
            sample = self._samples[event.seq_id]
            if event.finish_reason == UNTRUE:
                self._begin_again(sample, event.n_kept)
                continue
            if event.finish_reason is not None:
                del self._samples[event.seq_id]
            n_before = len(sample.token_ids)
            sample.take(event)
            if self.record is not None and sample.index != UNREAD:
                self.record(sample.index, sample.token_ids[n_before:], sample.finish_reason, False)

    def _begin_again(self, sample: Sample, n_kept: int) -> None:
        sample.retract(n_kept)
        if self.record is not None and sample.index != UNREAD:
            self.record(sample.index, sample.token_ids, None, True)
        assert sample.request is not None
        del self._samples[sample.request.seq_id]
        sample.again()

    def __enter__(self) -> SampleReader:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sample in self._samples.values():
            sample.cancel()


class RunTexts:
    """Made when the run is ready: times count from here.

    Attributes:
        samples: all submitted samples.
        reader: reads the samples without a reader of their own.
    """

    def __init__(self, engine: StarterEngine, codec: TextCodec, max_length: int) -> None:
        self._engine, self._codec, self._max_length = engine, codec, max_length
        self.samples: list[Sample] = []
        self.reader = SampleReader()
        self._indices = itertools.count()
        self._begin, self._end = time.perf_counter(), 0.0

    @property
    def duration_s(self) -> float:
        """From the beginning to the last time that all texts had been read, or until now."""
        return max((self._end or time.perf_counter()) - self._begin, 1e-9)

    def submit(
        self, prompt: str, prompt_ids: Sequence[int], params: SamplingParams, stop: Sequence[str], on_text: OnText | None,
        reader: SampleReader | None, before: Sequence[int], finish_reason: str | None, adapter: str = "",
    ) -> Sample:  # fmt: skip
        """Queue a sample; its own random numbers follow from params.seed and its number in this run. From any thread.

        Args:
            stop: strings that end the text and are not part of it.
            reader: reads it in this thread; None leaves that to `read`.
            before: its tokens from an earlier run, which also ended it if there is a `finish_reason`.
            adapter: see StarterEngine.submit.

        Raises:
            UsageError: the nodes could never hold the text.
            EngineError: the run is over.
        """
        reader = self.reader if reader is None else reader
        sample = self._sample(prompt, prompt_ids, stop, on_text)
        index = sample.index
        params = replace(self._params(params), seed=seed_of(params.seed, index))
        ends = sample.ends if stop else None
        n_left = min(params.n_tokens, self._max_length - self._engine.n_virtual(adapter) - len(prompt_ids))
        if not (before or finish_reason) or sample.restore(before, finish_reason, n_left):
            self._submit(sample, reader, prompt_ids, params, ends, adapter)
        elif reader.record is not None:
            reader.record(index, [], sample.finish_reason, False)
        return sample

    def submit_beams(
        self, prompt: str, prompt_ids: Sequence[int], params: SamplingParams, beams: Beams, stop: Sequence[str],
        on_texts: Sequence[OnText | None], known: Sequence[tuple[Sequence[int], str | None]] = (), adapter: str = "",
    ) -> list[Sample]:  # fmt: skip
        """Queue the search for the best texts of a prompt, one sample for each of `on_texts`, the best first.

        Args:
            known: ids of each from an earlier run, and the reason of its end; one without it is searched again.

        Raises:
            UsageError: there are fewer beams than texts, or as `submit`.
        """
        if len(on_texts) > beams.n:
            raise UsageError(
                f"{len(on_texts)} texts of a prompt need as many beams, got {beams.n}: give --beams {len(on_texts)}, or "
                f"--n-samples {beams.n}", code=Code.VALUE,
            )  # fmt: skip
        samples = [self._sample(prompt, prompt_ids, stop, on_text) for on_text in on_texts]
        n_left = min(params.n_tokens, self._max_length - self._engine.n_virtual(adapter) - len(prompt_ids))
        goes_on = {sample.index for sample in samples}
        for sample, (ids, reason) in zip(samples, known, strict=False):
            if reason is not None:
                sample.restore(ids, reason, n_left)
                goes_on.remove(sample.index)
                if self.reader.record is not None:
                    self.reader.record(sample.index, [], reason, False)
        if goes_on:
            codec = self._codec
            unread = [Sample(UNREAD, "", (), lambda: TextStream(codec, (), True), self._begin) for _ in range(beams.n)]
            pairs = itertools.zip_longest(samples, unread)
            searched = [one if one is not None and one.index in goes_on else other for one, other in pairs]
            self._search(searched, prompt_ids, self._params(params), beams, stop, adapter)
        return samples

    def _submit(
        self, sample: Sample, reader: SampleReader, prompt_ids: Sequence[int], params: SamplingParams,
        ends: Callable[[int], bool] | None, adapter: str,
    ) -> None:  # fmt: skip
        sample.again = partial(self._submit, sample, reader, prompt_ids, params, ends, adapter)
        known = sample.token_ids
        reader.add(sample, self._engine.submit(prompt_ids, params, ends, reader.events, known, adapter=adapter))

    def _search(
        self, searched: Sequence[Sample], prompt_ids: Sequence[int], params: SamplingParams, beams: Beams,
        stop: Sequence[str], adapter: str,
    ) -> None:  # fmt: skip
        requests = self._engine.submit_beams(
            prompt_ids, params, beams, self.reader.events, is_stopped=stop_test(self._codec, stop), adapter=adapter
        )
        for sample, request in zip(searched, requests, strict=True):
            self.reader.add(sample, request)

    def _params(self, params: SamplingParams) -> SamplingParams:
        stops = tuple(tuple(s) for s in self._codec.stop_sequences)
        codec = self._codec
        return replace(params, eos_ids=codec.eos_ids, stop_sequences=stops, suppressed=codec.suppressed)

    def _sample(self, prompt: str, prompt_ids: Sequence[int], stop: Sequence[str], on_text: OnText | None) -> Sample:
        # A bare prompt is continued in mid-text; in a prompt style the answer begins a new text.
        codec = self._codec  # and not self, which knows the sample
        is_bare, form = codec.prompt_style is None, codec.form

        def stream() -> TextStream | InlineStream:  # marks that are no text are shown as those that are
            return InlineStream(codec, form, stop) if form.special else TextStream(codec, stop, is_bare)

        sample = Sample(next(self._indices), prompt, prompt_ids, stream, self._begin, on_text)
        self.samples.append(sample)
        return sample

    def read(self) -> None:
        """Read all samples that were submitted without a reader, until they have ended."""
        try:
            self.reader.read()
        finally:
            self._end = time.perf_counter()


def context_length(spec: ModelSpec, longest: int, wanted: int | None) -> int:
    """Tokens that a sequence may have.

    Args:
        spec: of the model; `longest` is what that allows.
        wanted: by the user; None leaves it to the model.

    Raises:
        UsageError: it is more than the model was made for.
    """
    if wanted is None:
        return longest
    if not 1 <= wanted <= spec.max_length:
        raise UsageError(f"--sequence-length {wanted}: {spec.name or 'the model'} has a context of {spec.max_length}")
    return wanted


def check_prompt(prompt_ids: Sequence[int], spec: ModelSpec, n_context: int, directory: Path) -> None:
    """Raises UsageError if the prompt is empty, does not fit the context, or has tokens that the model does not know."""
    if not prompt_ids:
        raise UsageError("a prompt without any token cannot be continued: give it some text")
    if len(prompt_ids) > n_context:
        raise UsageError(
            f"a prompt has {len(prompt_ids)} tokens, but the context holds {n_context}: shorten it, or choose a larger "
            "--sequence-length if the model allows it"
        )
    if max(prompt_ids) >= spec.n_rows:
        raise UsageError(
            f"a prompt has the token {max(prompt_ids)}, but the model knows {spec.n_rows} tokens: the "
            f"tokenizer in {directory} belongs to another model"
        )
