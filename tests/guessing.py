"""Texts of which many tokens are guessed, and right."""

from __future__ import annotations

from dataclasses import replace

from mdi.engine.sequence import SamplingParams
from mdi.engine.speculation import Speculation
from mdi.engine.starter import StarterEngine


class Bold(Speculation):
    """Guesses from the first token on, whatever it costs: nothing is measured."""

    def limits(self, sequence: object, n_places: int, n_texts: int, n_beside: int) -> tuple[int, int]:
        return n_places, 3

    def sent(self, plan: object, now_s: float, guessing_s: float = 0.0) -> None:
        """No time is known, so that no source ever costs too much."""


def guess_always(engine: StarterEngine) -> None:
    """Have an engine with guesses of a run make them as `Bold` does; before its first text, so that nothing was measured."""
    speculation = engine.speculation
    assert speculation is not None
    speculation.limits = lambda sequence, n_places, n_texts, n_beside: (n_places, 3)  # type: ignore[method-assign]
    speculation.sent = lambda plan, now_s, guessing_s=0.0: None  # type: ignore[method-assign]


def of_two_tokens(params: SamplingParams, first: int, second: int) -> SamplingParams:
    """A text in which the last eight tokens soon have occurred before, because there are only two."""
    return replace(params, logit_bias=((first, 1000.0), (second, 1000.0)))
