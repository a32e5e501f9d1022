"""How many prompt rows go into a frame while others decode.

One prompt makes the others wait at most twice as long for their tokens. If more sequences wait for their first token than
decode, they get more of the time in the same proportion.

The cost of prompt rows depends on their number: kernels take rows in tiles, so a few more may cost nothing, or as much as a
whole tile. So few rows say nothing about many: the number of rows follows the times of frames with about as many rows, up
slowly and down fast. Pure: times come in as numbers.
"""

from __future__ import annotations

from mdi.engine.planned import Plan

SLOWER = 0.6  # by this part of its time a frame of decoding rows may take longer: 1 would double it, but times scatter
FIRST_ROWS = 16  # before anything was measured
LEAST_ROWS = 4
WEIGHT = 0.2  # of the newest frame without prompt rows
UP, DOWN = 1.1, 0.7  # by which one frame changes the number at most


class PromptPace:
    """Belongs to the engine's thread.

    Attributes:
        doubling_rows: prompt rows that take as long as all decoding ones of a frame.
    """

    def __init__(self) -> None:
        self.doubling_rows = FIRST_ROWS / SLOWER
        self.under_way: dict[int, tuple[float, int, int]] = {}  # frame -> when, prompt rows, decoding rows
        self._last = 0.0
        self._decode_s: float | None = None

    def sent(self, plan: Plan, now_s: float) -> None:
        """A frame leaves."""
        n_decoding = sum(part.n_rows == 1 and part.n_logits == 1 for part in plan.slices)
        n_rows = sum(part.n_rows for part in plan.slices)
        self.under_way[plan.number] = now_s, n_rows - n_decoding, n_decoding

    def returned(self, number: int, now_s: float) -> None:
        """It is back. Those of a lost ring never are, and are forgotten."""
        if (sent := self.under_way.pop(number, None)) is None:
            return  # it left before anybody looked
        sent_s, n_prompt, n_decoding = sent
        for earlier in [other for other in self.under_way if other < number]:
            del self.under_way[earlier]
        time_s = now_s - max(sent_s, self._last)  # frames follow each other; the first of them has gone the whole way
        self._last = now_s
        if not n_decoding:
            return  # no decoding text waits for it
        if not n_prompt:
            self._decode_s = time_s if self._decode_s is None else self._decode_s + WEIGHT * (time_s - self._decode_s)
        elif self._decode_s:
            self._follow(n_prompt, time_s / self._decode_s - 1)

    def _follow(self, n_prompt: int, slower: float) -> None:
        """So many rows made a frame so much slower."""
        most = UP * self.doubling_rows
        found = n_prompt / slower if slower > n_prompt / most else most
        self.doubling_rows = max(found, DOWN * self.doubling_rows, LEAST_ROWS)


def rows_beside(doubling_rows: float, n_prompts: int, n_decoding: int) -> int:
    """Prompt rows that the next frame may take beside decoding ones."""
    return max(LEAST_ROWS, int(doubling_rows * max(SLOWER, n_prompts / n_decoding)))
