"""Two checkouts in turns: what a log of their rounds says."""

from __future__ import annotations

import pytest

from compare_commits import STAGES, block_times, from_log, summary


def turn(name: str, number: int, int8_us: int, int4_us: int) -> str:
    rest = "reading its weights at 43.8 GB/s takes 4019 us (99%); its products take 4105 us, the rest -57 us"
    return (
        f"== {name} {number} 11:47:55 load 0.10\ncompiled the kernels in 15 s\n"
        "int8: its packed pages are read at 34.2 GB/s by one thread, 47.0 GB/s by two; 2596 MHz, steal 0.0%, others 1%\n"
        f"int8, 1 sequences at 100: {int8_us} us a block; {rest}\n"
        "  attention, caches in float32: 11 us a block; to read the caches takes 6 us, the products 6 us at the peak\n"
        f"int4, 16 sequences at 100: {int4_us} us a block; {rest}\n"
    )


def test_times_are_those_of_blocks() -> None:
    assert block_times(turn("old", 1, 1128, 2682)) == {"int8, 1 sequences": 1128, "int4, 16 sequences": 2682}


def test_ratios_are_those_within_a_round_in_whatever_order() -> None:
    log = turn("old", 1, 1000, 400) + turn("new", 1, 1100, 300) + turn("new", 2, 1500, 600) + turn("old", 2, 3000, 600)
    found = from_log(log, "old", "new")
    assert found[STAGES]["int8, 1 sequences"] == [[1000, 1100], [3000, 1500]]
    one = summary(found)[STAGES]["int8, 1 sequences"]
    assert one == {"before": 2000, "after": 1300, "ratio": pytest.approx(0.8), "least": 0.5, "most": 1.1, "rounds": 2}
    assert summary(from_log(log, "new", "old"))[STAGES]["int4, 16 sequences"]["ratio"] == pytest.approx(7 / 6)


def test_a_round_that_was_not_finished_does_not_count() -> None:
    log = turn("old", 1, 1000, 400) + turn("new", 1, 1100, 300) + turn("new", 2, 1500, 600)
    assert {len(pairs) for pairs in from_log(log, "old", "new")[STAGES].values()} == {1}
    cut = log + turn("old", 2, 3000, 600).partition("int4, 16")[0]
    for pair in (("old", "new"), ("new", "old")):
        counts = {what: len(pairs) for what, pairs in from_log(cut, *pair)[STAGES].items()}
        assert counts == {"int8, 1 sequences": 2, "int4, 16 sequences": 1}
