"""Results as Markdown."""

import pytest

from side_by_side.tables import PROCESSORS, all_medians, fill, overview, scenario_table, sets_table

CHECK = {"what": "a against b", "unit": "x", "error": "",
         "measured": {"median": 1.5, "lowest": 1.4, "highest": 1.625, "n": 5}}  # fmt: skip
RESULT = {
    "name": "two-nodes",
    "machine": "2 cores of Intel(R) Xeon(R) Processor, 25 GB, Linux",
    "date": "2026-11-22 05:45",
    "checks": [CHECK],
    "medians": {"ring x2": {"decode_tokens_per_s": 123.4, "per_stream_tokens_per_s": 7.72, "ttft_s": 0.5}},
    "systems": {"ring x2": "ring"},
    "peak_mb": {"ring": "900, 700"},
    "errors": {"llama": "it did not start"},
}


def test_a_scenario_shows_ratios_medians_and_failures():
    lines = scenario_table(RESULT).splitlines()
    assert "| a against b | 1.50x [1.40x .. 1.62x] |" in lines
    assert "| median | tokens/s | per stream | first token, s | peak MB per node |" in lines
    assert "| ring x2 | 123.4 | 7.72 | 0.50 | 900, 700 |" in lines
    assert lines[-1] == "Not measured: it did not start"


def test_all_medians_are_in_one_table():
    lines = all_medians(
        [RESULT, {**RESULT, "name": "reading", "medians": {"ring x2": {"read_bytes_per_s": 2e10}}}]
    ).splitlines()
    assert lines[0] == "| scenario | median | tokens/s | per stream | first token, s | GB/s read | peak MB per node |"
    assert lines[2:] == [
        "| two-nodes | ring x2 | 123.4 | 7.72 | 0.50 |  | 900, 700 |",
        "| reading | ring x2 |  |  |  | 20.0 | 900, 700 |",
    ]


def sets_result(name, metric, rates):
    """Of int8; rates: the ring's and llama.cpp's by instruction set."""
    labels = {
        f"{program} x1, {name}": (name, rate)
        for name, pair in rates.items()
        for program, rate in zip(("ring int8", "llama.cpp q8_0"), pair, strict=True)
    }
    checks = [{**CHECK, "what": f"int8, {name} against llama.cpp q8_0"} for name in rates]
    return {"name": name, "checks": checks, "medians": {label: {metric: rate} for label, (_, rate) in labels.items()},
            "settings": {label: {"instruction_set": name} for label, (name, _) in labels.items()}}  # fmt: skip


def test_what_was_measured_of_instruction_sets_stands_in_a_table():
    one = sets_result("sets-one", "decode_tokens_per_s", {"avx2": (12.5, 11.0), "avx2vnni": (13.5, 12.0)})
    prompt = sets_result("sets-prompt", "prefill_tokens_per_s", {"avx512": (208.0, 114.0)})
    ratio = "1.50x [1.40x .. 1.62x]"
    assert sets_table([one, prompt, RESULT]).splitlines()[2:] == [
        f"| one text | int8 | {PROCESSORS['avx2']} | 12.5 | 11.0 | {ratio} |",
        f"| one text | int8 | {PROCESSORS['avx2vnni']} | 13.5 | 12.0 | {ratio} |",
        f"| a prompt of 512 | int8 | {PROCESSORS['avx512']} | 208.0 | 114.0 | {ratio} |",
    ]


def test_what_was_not_measured_says_why():
    check = {**CHECK, "measured": None, "error": "no | such\nthing"}
    assert "| not measured: no / such thing |" in overview([{**RESULT, "checks": [check]}])


def test_shares_are_percentages():
    check = {**CHECK, "unit": "%", "measured": {**CHECK["measured"], "n": 1}}
    assert "| two-nodes | a against b | 150% (one run) | Intel Xeon, 2026-11-22 |" in overview(
        [{**RESULT, "checks": [check]}]
    )


def test_a_table_takes_the_place_of_the_one_before_and_of_nothing_else():
    document = "before\n<!-- results:a -->\nold\n<!-- /results:a -->\nafter <!-- results:b --><!-- /results:b -->"
    once = fill(document, "a", "| new |")
    assert (
        once == "before\n<!-- results:a -->\n| new |\n<!-- /results:a -->\nafter <!-- results:b --><!-- /results:b -->"
    )
    assert fill(once, "a", "| new |") == once


@pytest.mark.parametrize("document", ["", "<!-- results:a -->", "<!-- /results:a --> <!-- results:a -->"])
def test_a_document_without_a_place_is_refused(document):
    with pytest.raises(ValueError, match="no place for the results of a"):
        fill(document, "a", "x")
