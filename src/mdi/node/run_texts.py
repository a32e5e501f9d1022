"""The texts of a run for their readers: submitted as words, read as they grow."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from mdi.detokenize import TextStream
from mdi.engine.sequence import SamplingParams, seed_of
from mdi.engine.starter import StarterEngine
from mdi.node.sample import OnText, Sample, SampleReader, stops_at
from mdi.text import TextCodec


class RunTexts:
    """See the module. Made when the run is ready: times count from here.

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
        reader: SampleReader | None, before: Sequence[int], finish_reason: str | None,
    ) -> Sample:  # fmt: skip
        """Queue a sample; its own random numbers follow from params.seed and its number in this run. From any thread.

        Args:
            stop: strings that end the text and are not part of it.
            reader: reads it in this thread; None leaves that to `read`.
            before: its tokens from an earlier run, which also ended it if there is a `finish_reason`.

        Raises:
            UsageError: the nodes could never hold the text.
            EngineError: the run is over.
        """
        reader = self.reader if reader is None else reader
        index = next(self._indices)
        params = replace(
            params,
            seed=seed_of(params.seed, index),
            eos_ids=self._codec.eos_ids,
            stop_sequences=tuple(tuple(s) for s in self._codec.stop_sequences),
        )
        # A bare prompt is continued in mid-text; in a prompt style the answer begins a new text.
        streams = [TextStream(self._codec, stop, self._codec.prompt_style is None) for _ in range(2)]
        sample = Sample(index, prompt, prompt_ids, streams[0], self._begin, on_text)
        ends = stops_at(streams[1], before) if stop else None
        n_left = min(params.n_tokens, self._max_length - len(prompt_ids))
        if not (before or finish_reason) or sample.restore(before, finish_reason, n_left):
            reader.add(sample, self._engine.submit(prompt_ids, params, ends, reader.events, before))
        elif reader.record is not None:
            reader.record(index, [], sample.finish_reason)
        self.samples.append(sample)
        return sample

    def read(self) -> None:
        """Read all samples that were submitted without a reader, until they have ended."""
        try:
            self.reader.read()
        finally:
            self._end = time.perf_counter()
