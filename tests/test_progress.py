"""The line about a transfer: true at its beginning, in its middle and at its end."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from mdi.run.setup import WINDOW_S, Progress

MB = 1_000_000


def test_from_beginning_to_end() -> None:
    progress = Progress("secondary0", 400 * MB, 0, 100.0)
    assert str(progress) == "secondary0: 0 bytes of 400.0 MB (0 %), nothing comes at the moment"
    progress.update(80 * MB, 102.0)
    assert str(progress) == "secondary0: 80.0 MB of 400.0 MB (20 %), 40.0 MB/s, 8.0 s left"
    progress.update(400 * MB, 110.0)
    assert str(progress) == "secondary0: 400.0 MB of 400.0 MB (100 %)"
    assert progress.summary(110.0) == "secondary0 has its weights: 400.0 MB in 10.0 s, 40.0 MB/s"


def test_what_was_there_is_not_counted_as_sent() -> None:
    progress = Progress("secondary0", 400 * MB, 300 * MB, 0.0)
    assert "300.0 MB of 400.0 MB (75 %)" in str(progress)
    progress.update(350 * MB, 10.0)
    assert "5.0 MB/s, 10.0 s left" in str(progress), "not the rate of what an earlier run sent"
    assert progress.summary(20.0) == "secondary0 has its weights: 100.0 MB in 20.0 s, 5.0 MB/s (300.0 MB were there)"


def test_the_rate_is_that_of_the_last_seconds() -> None:
    progress = Progress("secondary0", 1000 * MB, 0, 0.0)
    for second in range(1, 101):
        progress.update(second * MB, float(second))  # a slow start
    for second in range(1, 31):
        progress.update((100 + 20 * second) * MB, 100.0 + second)
    assert "20.0 MB/s, 15.0 s left" in str(progress)
    progress.update(700 * MB, 131.0 + WINDOW_S)
    progress.update(700 * MB, 132.0 + 2 * WINDOW_S)
    assert "nothing comes at the moment" in str(progress)


def test_long_times() -> None:
    for seconds, words in ((150, "2:30 min"), (3600 + 62, "1:01 h")):
        progress = Progress("secondary0", (seconds + 1) * MB, 0, 0.0)
        progress.update(MB, 1.0)
        assert str(progress).endswith(f"{words} left")


@given(st.lists(st.tuples(st.integers(-5, 10**13), st.floats(0, 1e6)), max_size=20), st.integers(0, 10**12))
def test_never_more_than_all_and_never_backwards(steps: list[tuple[int, float]], total: int) -> None:
    progress = Progress("n", total, 0, 0.0)
    now, last = 0.0, 0
    for n_bytes, seconds in steps:
        now += seconds
        progress.update(n_bytes, now)
        match = re.search(r"\((\d+) %\)", str(progress))
        assert match and last <= int(match[1]) <= 100
        last = int(match[1])
