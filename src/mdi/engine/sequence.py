"""A text in flight as the engine sees it: token ids and the parameters to continue them. No text, no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mdi.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence is continued.

    Attributes:
        n_tokens: new tokens at most.
        temperature: 0 is greedy.
        top_k: sample among the k most probable tokens; None is all.
        top_p: sample among the smallest set of tokens that has this probability together.
        seed: of the sequence's own random generator: its text does not depend on the others.
        eos_ids: tokens that end the sequence and are not part of it.
        stop_sequences: runs of tokens that do the same.
        min_p: leave tokens out that are less probable than this part of the best one's probability.
        presence_penalty: taken off the logit of each token that has been generated.
        frequency_penalty: the same, as often as it has been.
        repetition_penalty: logits of tokens that the text has, the prompt included, are divided by it, or multiplied if they
            are negative.
        logit_bias: (token, number that is added to its logit).
        n_logprobs: how many of the best tokens' probabilities come with each token, besides its own; None: none at all.
    """

    n_tokens: int = 300
    temperature: float = 0.8
    top_k: int | None = 200
    top_p: float = 1.0
    seed: int = 10137
    eos_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n_logprobs: int | None = None

    @property
    def changes_logits(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias)

    def __post_init__(self) -> None:
        if self.n_tokens < 1:
            raise UsageError(f"the number of new tokens must be at least 1, got {self.n_tokens}")
        if not self.temperature >= 0:
            raise UsageError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top-k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be over 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p must be from 0 to 1, got {self.min_p}")
        if not self.repetition_penalty > 0:
            raise UsageError(f"the repetition penalty must be over 0, got {self.repetition_penalty}")


@dataclass(eq=False)
class Sequence:
    """State of one sequence on the starter.

    Attributes:
        ids: prompt and generated tokens so far.
        n_sent: positions whose rows have gone into the ring.
        n_reused: tokens of the prompt that an ended sequence's caches held when this one began.
        n_held: generated tokens at the end of `ids` that may become a stop sequence, and are not given out yet.
        life: how often it has lost its caches; what comes back for an earlier life is out of date.
        finish_reason: "eos", "stop", "length" or "cancelled" once it has ended.
        owner: only its texts may continue from the caches of the ended sequence; None frees them at once.
    """

    seq_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_length: int
    ids: list[int] = field(default_factory=list)
    n_sent: int = 0
    n_reused: int = 0
    n_held: int = 0
    life: int = 0
    finish_reason: str | None = None
    owner: str | None = None

    def __post_init__(self) -> None:
        if not self.ids:
            self.ids = list(self.prompt_ids)

    @property
    def n_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def generated(self) -> list[int]:
        return self.ids[self.n_prompt :]

    @property
    def n_to_send(self) -> int:
        return len(self.ids) - self.n_sent

    @property
    def in_prefill(self) -> bool:
        """Whether rows of tokens that are known are still to be sent; a rewound text is a prompt as a whole."""
        return self.n_sent < len(self.ids)

    @property
    def n_positions(self) -> int:
        """Most cache positions that it can need: the last token is never sent."""
        return min(self.max_length, self.n_prompt + self.params.n_tokens - 1)

    @property
    def n_cached(self) -> int:
        """Cache positions that it takes once all tokens that are known have been sent."""
        return min(len(self.ids), self.n_positions)

    def begin_behind(self, n: int) -> int:
        """Its first `n` positions are in caches already. Returns `n`."""
        self.n_sent = n
        if not self.life:
            self.n_reused = n
        return n

    def rewind(self) -> None:
        """Its caches are gone: from now on it is a prompt of all its tokens so far."""
        self.n_sent = 0
        self.life += 1

    def extend(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Take new tokens, up to the one that ends the sequence; those that are now part of the text."""
        new: list[int] = []
        for token in tokens:
            if self.finish_reason is None:
                new.extend(self.append(token))
        self.n_sent = min(self.n_sent, len(self.ids) - 1)  # rows beyond the last token were guesses
        return tuple(new)

    def append(self, token: int) -> tuple[int, ...]:
        """Take a new token. Sets `finish_reason` when this ends the sequence.

        Returns:
            The tokens that are now known to be part of the text: none while they may become a stop sequence, several when
            they did not. An EOS or a stop sequence is never among them.
        """
        if token in self.params.eos_ids:
            return self.end("eos")
        self.ids.append(token)
        self.n_held += 1
        n_stop = self._n_stop(complete=True)
        if n_stop:
            del self.ids[-n_stop:]
            self.n_held -= n_stop
            return self.end("stop")
        if len(self.ids) - self.n_prompt >= self.params.n_tokens or len(self.ids) >= self.max_length:
            return self.end("length")
        return self._give_out(self._n_stop(complete=False))

    def end(self, reason: str) -> tuple[int, ...]:
        """Set `finish_reason`; returns the tokens that were held back."""
        self.finish_reason = reason
        return self._give_out(0)

    def _give_out(self, n_kept: int) -> tuple[int, ...]:
        """All held tokens but the last `n_kept`."""
        begin, stop = len(self.ids) - self.n_held, len(self.ids) - n_kept
        self.n_held = n_kept
        return tuple(self.ids[begin:stop])

    def _n_stop(self, complete: bool) -> int:
        """How many tokens at the end form a stop sequence, or else the beginning of one; 0 if none do.

        Only held tokens can: no stop sequence can begin before them.
        """
        longest = 0
        for stop in self.params.stop_sequences:
            lengths = (len(stop),) if complete else range(1, len(stop))
            for n in lengths:
                if longest < n <= self.n_held and tuple(self.ids[-n:]) == stop[:n]:
                    longest = n
        return longest
