"""From times of tokens to rates and ratios."""

from pathlib import Path

import pytest

from side_by_side.figure import PANELS, draw, rates
from side_by_side.measures import Summary, decode_rate, measured, medians, pair_ratios
from side_by_side.scenarios import SCENARIOS
from side_by_side.setup import Setup


def test_one_stream_counts_from_its_first_token():
    found = measured({"times_s": [[2.0, 2.5, 3.0]], "ids": [[1, 2, 3]]}, n_prompt=10)
    assert found["decode_tokens_per_s"] == 2.0
    assert found["ttft_s"] == 2.0
    assert found["prefill_tokens_per_s"] == 5.0


def test_the_rate_of_many_counts_only_while_all_of_them_decode():
    # The second begins when the first has two tokens, and the first ends before the second.
    times = [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 4.1, 4.2]]
    assert decode_rate(times) == 4 / 2.0
    found = measured({"times_s": times}, n_prompt=1)
    assert found["per_stream_tokens_per_s"] == found["decode_tokens_per_s"] / 2


def test_two_frames_in_turns_have_the_rate_of_their_rounds():
    # A round takes a second; the second frame is half a second behind the first.
    times = [[float(t) for t in range(10)], [t + 0.5 for t in range(10)]]
    assert decode_rate(times) == pytest.approx(2.0)


def test_no_rate_without_a_time_when_all_decode():
    assert decode_rate([[1.0]]) is None
    assert decode_rate([[0.0, 1.0], [2.0, 3.0]]) is None
    assert "decode_tokens_per_s" not in measured({"times_s": [[1.0]]}, 4)


def test_a_system_without_tokens_has_its_own_numbers_only():
    assert measured({"times_s": [], "read_bytes_per_s": 5}, 0) == {"read_bytes_per_s": 5.0}


def test_ratios_are_formed_within_a_round_against_the_best_of_the_others():
    ours = [{"r": 10.0}, {"r": 20.0}]
    a, b = [{"r": 5.0}, {"r": 4.0}], [{"r": 2.0}, {"r": 8.0}]
    assert pair_ratios(ours, [a, b], ("r", "r")) == [2.0, 2.5]
    assert pair_ratios(ours, [a], ("r", "r"), factor=2.0) == [4.0, 10.0]


def test_without_others_a_number_stands_for_itself():
    assert pair_ratios([{"s": 0.5}, {"s": 0.7}], [], ("s", "")) == [0.5, 0.7]


def test_a_round_that_is_missing_is_no_pair():
    assert pair_ratios([{"r": 1.0}] * 3, [[{"r": 2.0}]], ("r", "r")) == [0.5]


def test_medians_and_ranges():
    assert medians([{"a": 1.0, "b": 1.0}, {"a": 3.0}, {"a": 2.0}]) == {"a": 2.0}
    assert Summary.of([3.0, 1.0, 2.0]) == Summary(2.0, 1.0, 3.0, 3)


def test_the_figure_shows_what_was_measured_and_nothing_else(tmp_path):
    result = {"name": "sixteen", "shape": "tiny-1m", "medians": {"ring int8 x2": {"decode_tokens_per_s": 204.0}}}
    panel = PANELS["Sixteen sequences, two threads"]
    assert rates(panel, {"sixteen": result}) == {"MDI-LLM\ntwo nodes": {"8 bits": 204.0}}
    draw([result], tmp_path / "speed.svg")
    assert "<svg" in (tmp_path / "speed.svg").read_text()


def test_the_bars_of_the_figure_are_runs_of_scenarios():
    setup = Setup("tiny-llama-1.1b", Path("work"), (0, 1))
    for programs in PANELS.values():
        for bars in programs.values():
            for scenario, label in bars.values():
                assert label in {run.label for run in SCENARIOS[scenario](setup).runs}
