"""plan.py with a window: what it says of memory and of waits, against the simulation and the window that a run would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mdi.cli import launch
from mdi.partition.example import boards

CONFIG = "tiny-llama-1.1b"


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(boards().to_json()))
    return path


def planned(capsys: pytest.CaptureFixture[str], profiles: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    one = ["--profiles", str(profiles), "--nodes", "starter", "--config", CONFIG, "--sequence-length", "64"]
    assert launch("plan", [*one, "--dtype", "float32", "--json", *flags]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out) if status == 0 else {}
    return found


def test_a_slow_disk_is_waited_for_and_a_fast_one_is_not(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_slow = planned(capsys, profiles, "--window", "2", "--disk-rate", "100M")
    slow = of_slow["windows"][0]
    n_texts, pass_s = of_slow["n_sequences"], slow["chosen"]["times"]["pass_s"]
    assert of_slow["tokens_per_s"] == pytest.approx(n_texts / pass_s), "the speed has the waits in it"
    assert of_slow["tokens_per_s_one_sequence"] * slow["pass_bytes"] <= slow["disk_bytes_s"] * 1.001
    assert slow["chosen"]["units"] == 2 and slow["chosen"]["retain"] is None
    assert not slow["is_tight"] and not slow["is_loose"]
    assert slow["chosen"]["times"]["wait_s"] > 0.5 * slow["chosen"]["times"]["pass_s"]
    assert slow["pass_bytes"] / slow["disk_bytes_s"] <= slow["chosen"]["times"]["pass_s"] * 1.0001
    assert slow["best"]["times"]["pass_s"] < slow["chosen"]["times"]["pass_s"]
    fast = planned(capsys, profiles, "--window", "2", "--disk-rate", "900G")["windows"][0]
    assert (
        fast["is_tight"]
        and fast["is_loose"]
        and fast["chosen"]["times"]["wait_s"] < 0.01 * fast["chosen"]["times"]["pass_s"]
    )


def test_weights_of_1b_in_700_mb(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, profiles, "--memory", "700M", "--disk-rate", "1G")
    window, node = report["windows"][0], report["nodes"][0]
    assert node["bytes"]["weights"] == window["resident_bytes"]
    assert node["bytes"]["total"] <= node["free_bytes"] == 700 << 20
    unit = 4 * 2048 * (2048 + 512 + 2048 + 3 * 5632)  # attention and MLP of a block
    assert window["resident_bytes"] >= unit and window["pass_bytes"] > 3_000_000_000
    more = planned(capsys, profiles, "--memory", "2G", "--disk-rate", "1G")["windows"][0]
    assert more["pass_bytes"] < window["pass_bytes"]
    assert more["chosen"]["times"]["pass_s"] < window["chosen"]["times"]["pass_s"]


def test_too_little_memory_and_a_disk_that_nobody_measured(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(capsys, profiles, "--memory", "100M", "--disk-rate", "1G", status=2)
    data = json.loads(profiles.read_text())
    data["nodes"][0]["disk_read_bytes_s"] = 0
    profiles.write_text(json.dumps(data))
    planned(capsys, profiles, "--window", "2", status=2)
    planned(capsys, profiles, "--retain", "2", status=2)


def test_a_model_that_fits_nowhere_else_is_planned_for_a_ring(
    profiles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--profiles",
        str(profiles),
        "--config",
        "Llama-2-7b-hf",
        "--sequence-length",
        "64",
        "--dtype",
        "float32",
        "--json",
    ]
    assert launch("plan", [*flags, "--placement", "even"]) == 1
    capsys.readouterr()
    assert launch("plan", [*flags, "--placement", "even", "--window", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["windows"]) == len(report["nodes"]) == 3
    for window, node in zip(report["windows"], report["nodes"], strict=True):
        assert window["resident_bytes"] < node["free_bytes"]


def test_shares_of_all_blocks_have_windows_of_their_own(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--profiles",
        str(profiles),
        "--config",
        CONFIG,
        "--sequence-length",
        "64",
        "--dtype",
        "float32",
        "--placement",
        "even",
    ]
    assert launch("plan", [*flags, "--window", "2", "--disk-rate", "100M", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    starter, other, _ = report["share_windows"]
    of_blocks = 22 * 4 * 2048 * (2 * 2048 + 512 + 3 * 5632)
    assert other["pass_bytes"] == pytest.approx(of_blocks / 3, rel=0.1)
    assert starter["pass_bytes"] == pytest.approx(other["pass_bytes"] + 4 * 2048 * 32000, rel=0.1), "and the head"
    assert not other["is_tight"] and starter["best"]["times"]["pass_s"] <= starter["chosen"]["times"]["pass_s"]
    slowest_s = max(window["chosen"]["times"]["pass_s"] for window in report["share_windows"])
    assert report["parallel"]["tensor_tokens_s"] == pytest.approx(1 / slowest_s), "waits included"
    assert report["parallel"]["ring_tokens_s"] == pytest.approx(report["tokens_per_s"])
    assert report["parallel"]["mode"] == "tensor", "three disks read at the same time"
    assert launch("plan", [*flags, "--memory", "600M", "--disk-rate", "900G"]) == 0
    told = capsys.readouterr().out
    assert "share of secondary0" in told and "--parallel auto takes" in told


def test_each_node_of_a_group_has_a_window_over_its_share(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(profiles.read_text())
    for node in data["nodes"][1:]:
        node["group"] = "b"
    profiles.write_text(json.dumps(data))
    flags = ["--config", CONFIG, "--sequence-length", "64", "--dtype", "float32", "--layers", "6,16", "--json"]
    assert launch("plan", ["--profiles", str(profiles), *flags, "--window", "2", "--disk-rate", "100M"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [node["name"] for node in report["nodes"]] == ["starter", "b"]
    windows = {window["name"]: window for window in report["windows"]}
    assert list(windows) == ["starter", "secondary0", "secondary1"]
    of_blocks = 16 * 4 * 2048 * (2 * 2048 + 512 + 3 * 5632)
    assert windows["secondary0"]["pass_bytes"] == pytest.approx(of_blocks / 2, rel=0.1)
    in_memory = sum(windows[name]["resident_bytes"] for name in ("secondary0", "secondary1"))
    assert report["nodes"][1]["bytes"]["weights"] == in_memory
    waits_s = windows["starter"]["chosen"]["times"]["wait_s"] + windows["secondary0"]["chosen"]["times"]["wait_s"]
    assert report["tokens_per_s"] <= 1.01 / waits_s, "the nodes of a group wait at the same time"


def test_it_is_told_in_words(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--profiles", str(profiles), "--nodes", "starter", "--config", CONFIG, "--sequence-length", "64"]
    assert launch("plan", [*flags, "--dtype", "float32", "--window", "2", "--disk-rate", "100M"]) == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith(("window", "disk", "best"))] == [
        "window", "disk", "best",
    ]  # fmt: skip
