"""How many prompt rows go into a frame while others decode.

One prompt lets the others wait at most twice as long for their tokens. Where more sequences wait for their first token than
decode, they get as much more of the time as they are more.

A frame's time is taken to be that of the decoding rows and so much for each prompt row; both are measured as frames come back.
Pure: times come in as numbers.
"""

from __future__ import annotations

from mdi.engine.planned import Plan

SLOWER = 0.7  # by this part of its time a frame of decoding rows may take longer: 1 would double it, but times scatter
FIRST_ROWS = 16  # before anything was measured
LEAST_ROWS = 4
WEIGHT = 0.2  # of the newest measurement


class PromptPace:
    """Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[float, int, int]] = {}  # frame -> when, prompt rows, decoding rows
        self._last = 0.0
        self._decode_s: float | None = None
        self._row_s: float | None = None

    @property
    def doubling_rows(self) -> float:
        """Prompt rows that take as long as all decoding ones of a frame."""
        if self._decode_s is None or not self._row_s:
            return FIRST_ROWS / SLOWER
        return self._decode_s / self._row_s

    def sent(self, plan: Plan, now_s: float) -> None:
        """A frame leaves."""
        n_decoding = sum(part.n_rows == 1 and part.n_logits == 1 for part in plan.slices)
        n_rows = sum(part.n_rows for part in plan.slices)
        self._sent[plan.number] = now_s, n_rows - n_decoding, n_decoding

    def returned(self, number: int, now_s: float) -> None:
        """It is back. Those of a lost ring never are, and are forgotten."""
        if (sent := self._sent.pop(number, None)) is None:
            return  # it left before anybody looked
        sent_s, n_prompt, n_decoding = sent
        for earlier in [other for other in self._sent if other < number]:
            del self._sent[earlier]
        time_s = now_s - max(sent_s, self._last)  # frames follow each other; the first of them has gone the whole way
        self._last = now_s
        if n_decoding and not n_prompt:
            self._decode_s = _mean(self._decode_s, time_s)
        elif n_prompt:
            own_s = time_s - (self._decode_s or 0.0 if n_decoding else 0.0)
            self._row_s = _mean(self._row_s, max(own_s, 0.0) / n_prompt)


def rows_beside(doubling_rows: float, n_prompts: int, n_decoding: int) -> int:
    """Prompt rows that the next frame may take beside decoding ones."""
    return max(LEAST_ROWS, int(doubling_rows * max(SLOWER, n_prompts / n_decoding)))


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + WEIGHT * (new - before)
