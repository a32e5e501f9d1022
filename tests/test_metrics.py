import json
import math
import os
import subprocess
import sys
import unicodedata
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdi.errors import ControlError, UsageError
from mdi.metrics import (
    NodeMetrics,
    RunMetrics,
    SampleMetrics,
    append_time_run,
    peak_rss_bytes,
    tokens_over_time,
    write_tokens_csv,
)
from mdi.run.report import format_report

NODE = NodeMetrics("secondary0", (3, 7), 123_000_000, 1.5, 0.25, 0.01, 4096, 12)


def sample(times_s, n_kept=None, prompt="Who are you?", reason="length"):
    n = len(times_s) if n_kept is None else n_kept
    return SampleMetrics.from_times(prompt, "text", range(n), [5, 6], reason, times_s)


def run_of(*samples, nodes=(NODE,), duration_s=2.0, model="nano-llama"):
    return RunMetrics.from_parts(model, samples, nodes, duration_s)


def test_json_is_exactly_the_documented_object():
    run = run_of(sample([0.5, 0.75, 1.0]))
    assert json.loads(json.dumps(run.to_json(), allow_nan=False)) == {
        "samples": [
            {
                "prompt": "Who are you?",
                "text": "text",
                "token_ids": [0, 1, 2],
                "prompt_ids": [5, 6],
                "finish_reason": "length",
                "ttft_s": 0.5,
                "tokens_per_s": 4.0,
                "may_differ_from": None,
                "guessed": 0,
                "confirmed": 0,
                "tokens_per_round": 1.0,
            }
        ],
        "tokens_per_s": 1.5,
        "n_nodes": 1,
        "nodes": [
            {
                "name": "secondary0",
                "layers": [3, 7],
                "peak_rss_bytes": 123_000_000,
                "compute_s": 1.5,
                "wait_s": 0.25,
                "send_s": 0.01,
                "bytes_sent": 4096,
                "frames": 12,
                "weights_resident_bytes": 0,
                "weights_read_bytes": 0,
                "disk_wait_s": 0.0,
                "expert_hits": 0,
                "expert_misses": 0,
            }
        ],
        "model": "nano-llama",
        "weights": "",
        "recoveries": [],
        "parallel": "ring",
        "guessed": 0,
        "confirmed": 0,
        "tokens_per_round": 1.0,
        "inexact_guesses": False,
    }


@pytest.mark.parametrize(
    "times_s, ttft_s, rate",
    [([], None, 0), ([0.3], 0.3, 0), ([0.0, 0.0], 0.0, 0), ([0.5, 0.5], 0.5, 4.0)],  # the last: as the tokens of beams
)
def test_rates_of_almost_nothing_are_numbers(times_s, ttft_s, rate):
    made = sample(times_s)
    assert (made.ttft_s, made.tokens_per_s) == (ttft_s, rate)
    run = run_of(made, duration_s=0.0)
    assert run.tokens_per_s == 0
    json.dumps(run.to_json(), allow_nan=False)
    format_report(run)


def test_a_token_taken_back_by_a_stop_sequence_does_not_count_for_the_run():
    run = run_of(sample([0.5, 1.0, 1.5], n_kept=1, reason="stop"), sample([1.0]))
    assert run.n_tokens == 2
    assert run.tokens_per_s == 1.0
    assert run.samples[0].tokens_per_s == 2.0


def test_node_metrics_go_through_json():
    assert NodeMetrics.from_json(json.loads(json.dumps(NODE.to_json()))) == NODE
    assert NodeMetrics.from_json({**NODE.to_json(), "later": 1, "compute_s": 2}).compute_s == 2.0


@pytest.mark.parametrize(
    "field, value",
    [
        ("name", None),
        ("name", ""),
        ("layers", [1]),
        ("layers", [7, 3]),
        ("layers", [0, -1]),
        ("layers", [0, True]),
        ("layers", "03"),
        ("peak_rss_bytes", -1),
        ("peak_rss_bytes", 1.5),
        ("bytes_sent", True),
        ("frames", "12"),
        ("compute_s", -0.1),
        ("compute_s", math.nan),
        ("wait_s", math.inf),
        ("wait_s", 10**400),
        ("send_s", None),
    ],
)
def test_node_metrics_refuse_garbage_and_name_the_field(field, value):
    with pytest.raises(ControlError) as e:
        NodeMetrics.from_json({**NODE.to_json(), field: value}, "secondary1 said")
    assert f"secondary1 said.{field}" in str(e.value) and e.value.code == "control"
    missing = {k: v for k, v in NODE.to_json().items() if k != field}
    with pytest.raises(ControlError) as e:
        NodeMetrics.from_json(missing)
    assert field in str(e.value) and e.value.code == "control"


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_node_metrics_of_anything_else(data):
    with pytest.raises(ControlError):
        NodeMetrics.from_json(data)


def test_tokens_over_time_merges_the_samples():
    assert tokens_over_time([sample([0.2, 0.4]), sample([0.1, 0.4, 0.9])]) == [
        (0.1, 1),
        (0.2, 2),
        (0.4, 3),
        (0.4, 4),
        (0.9, 5),
    ]
    assert tokens_over_time([]) == []


def test_tokens_csv(tmp_path):
    run = run_of(sample([0.5, 1.25]), sample([0.75]), nodes=(NODE, NODE, NODE), model="org/Some Model-1.1B")
    path = write_tokens_csv(tmp_path / "logs" / "deep", run)
    assert path.name == "tokens_time_samples_3nodes_org-Some-Model-1.1B_2samples.csv"
    assert path.read_bytes() == b"time_s,tokens\n0.500000,1\n0.750000,2\n1.250000,3\n"
    assert write_tokens_csv(path.parent, run) == path
    assert list(path.parent.iterdir()) == [path]


def test_a_model_name_stays_inside_the_folder():
    assert run_of(model="../../etc").file_stem == "1nodes_etc_0samples"
    assert run_of(model="..").file_stem == "1nodes_model_0samples"


def test_tokens_csv_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as e:
        write_tokens_csv(tmp_path / "file" / "logs", run_of())
    assert "tokens_time_samples_1nodes_nano-llama_0samples.csv" in str(e.value)
    assert "\n" not in str(e.value)


def append(path, **changed):
    values = {"n_samples": 3, "n_layers": 8, "context_size": 512, "gen_time_s": 1.5}
    append_time_run(path, timestamp=datetime(2025, 1, 2, 3, 4, 5), **{**values, **changed})


def test_time_run_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "a" / "b" / "times.csv"
    append(path)
    append(path, n_samples=4)
    assert path.read_text().splitlines() == [
        "timestamp,n_samples,n_layers,context_size,gen_time",
        "2025-01-02 03:04:05,3,8,512,1.500000",
        "2025-01-02 03:04:05,4,8,512,1.500000",
    ]


def test_time_run_goes_on_after_an_unfinished_line_and_in_an_empty_file(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("old,row")
    append(path)
    assert path.read_text() == "old,row\n2025-01-02 03:04:05,3,8,512,1.500000\n"
    path.write_text("")
    append(path)
    assert path.read_text().startswith("timestamp,")


def test_time_run_takes_the_present_time(tmp_path):
    append_time_run(tmp_path / "t", n_samples=1, n_layers=1, context_size=1, gen_time_s=1)
    assert datetime.fromisoformat((tmp_path / "t").read_text().splitlines()[1].split(",")[0])


def test_time_run_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError):
        append(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        append(tmp_path / "file" / "times.csv")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_time_run_on_a_full_disk():
    with pytest.raises(UsageError) as e:
        append("/dev/full")
    assert "/dev/full" in str(e.value)


def words(line):
    return " ".join(line.split())


def columns(line):
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def test_report_has_what_was_measured_in_aligned_columns():
    nodes = (NodeMetrics("starter", (0, 3), 1_500_000_000, 0.5, 1.0, 0.02, 2_048_000, 12), NODE)
    run = run_of(sample([0.05, 0.1, 0.15], reason="eos"), sample([1.5, 2.0], prompt="Speak!"), nodes=nodes)
    lines = format_report(run).split("\n")
    assert lines[0] == "nano-llama: 2 samples on 2 nodes, 5 tokens in 2.0 s, 2.5 tokens/s"
    assert lines[2].split("  ")[0] == "sample"
    assert words(lines[3]) == "0 3 20.0 50 ms eos Who are you?"
    assert words(lines[4]) == "1 2 2.0 1.5 s length Speak!"
    assert lines[5].split()[:3] == ["total", "5", "2.5"]
    assert words(lines[8]) == "starter 0-2 1.5 GB 500 ms 25% 1.0 s 50% 20 ms 409.6 kB"
    assert words(lines[9]) == "secondary0 3-6 123.0 MB 1.5 s 75% 250 ms 12% 10 ms 819 bytes"
    assert len({line.index("%") for line in lines[8:10]}) == 1
    assert len(lines[7]) == len(lines[8]) == len(lines[9])


@given(
    st.lists(
        st.tuples(st.text(), st.lists(st.floats(0, 1e6), max_size=5), st.none() | st.text(max_size=40)), max_size=4
    ),
    st.text(max_size=120),
    st.lists(st.tuples(st.text(min_size=1), st.integers(0, 10**13), st.floats(0, 1e6)), max_size=3),
)
def test_report_stays_within_its_width(made, model, node_values):
    samples = [sample(sorted(times), prompt=prompt, reason=reason) for prompt, times, reason in made]
    nodes = [NodeMetrics(name, (10, 99), n, s, s, s, n, 10**7) for name, n, s in node_values]
    lines = format_report(run_of(*samples, nodes=nodes, duration_s=1e6, model=model)).split("\n")
    assert max(columns(line) for line in lines) <= 100
    assert len(lines) == 4 + len(samples) + (2 + len(nodes) if nodes else 0)
    assert all(c.isprintable() for line in lines for c in line)


def test_peak_memory_grows_with_what_is_held():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from mdi.metrics import peak_rss_bytes as peak\n"
        "before = peak(); held = bytearray(b'x') * 50_000_000; print(before, peak())"
    )
    src = Path(__file__).parent.parent / "src"
    big = bytearray(b"y") * 150_000_000  # of this process; the child must not count it
    out = subprocess.run([sys.executable, "-c", code, os.fspath(src)], capture_output=True, text=True, check=True)
    before, after = map(int, out.stdout.split())
    assert after - before >= 45_000_000
    assert peak_rss_bytes() >= len(big)
    if sys.platform == "linux":
        assert before < len(big)
