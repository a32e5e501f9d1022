"""A node that measures itself: what it says, what it keeps, and when it measures again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mdi.node.profiler
from mdi.checkpoint.store import BlockStore
from mdi.errors import CheckpointError
from mdi.node.profiler import FILE, Profiler, Subject
from mdi.node.profiling import ROWS, Bench, disk_read_bytes_s
from mdi.partition.profile import NodeProfile
from tiny_checkpoint import plain, tiny_config

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = plain(asdict(tiny_config()))
SUBJECT = Subject(CONFIG, "h" * 64, torch.float32, None)


def profiler(folder: Path) -> Profiler:
    return Profiler("secondary0", CPU, folder, span_s=0.01)


@pytest.mark.parametrize("quantize", [None, "int8", "fp16"])
def test_a_node_measures_itself(tmp_path: Path, quantize: str | None) -> None:
    told: list[tuple[str, int, int]] = []
    bench = Bench(CONFIG, CPU, torch.float32, quantize, quantize, 0.005, lambda *what: told.append(what))
    speeds = bench.run(tmp_path / "cache", with_head=True)
    assert [rows for rows, _ in speeds.block_s] == list(ROWS) and all(s > 0 for _, s in speeds.block_s)
    assert [rows for rows, _ in speeds.head_s] == list(ROWS[:-1]) and all(s > 0 for _, s in speeds.head_s)
    assert speeds.read_bytes_s > 1e8
    assert speeds.disk_read_bytes_s >= 0
    assert [done for _, done, _ in told] == list(range(len(told))) and told[-1][1] == told[-1][2]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_larger_model_takes_longer(tmp_path: Path) -> None:
    """The times are of this model: twenty times the work is seen, whatever the machine."""
    large = plain(asdict(tiny_config(n_embd=256, n_head=8, head_size=32, intermediate_size=8192, n_layer=2)))
    small_s, large_s = (
        Bench(config, CPU, torch.float32, None, span_s=0.05).run(tmp_path, with_head=False).block_s[2][1]
        for config in (CONFIG, large)
    )
    assert large_s > small_s


def test_a_model_with_a_context_smaller_than_what_is_measured(tmp_path: Path) -> None:
    config = plain(asdict(tiny_config(block_size=40)))
    speeds = Bench(config, CPU, torch.float32, None, span_s=0.005).run(tmp_path, with_head=False)
    assert len(speeds.block_s) == len(ROWS) and speeds.head_s == ()


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profiler(tmp_path)
    assert not first.is_kept(SUBJECT)
    found = first.profile(SUBJECT, BlockStore(tmp_path))
    assert first.is_kept(SUBJECT) and first.progress is None
    assert found == NodeProfile.from_json(found.to_json()), "it can be sent"
    assert found.name == "secondary0" and found.memory_bytes > found.process_bytes > 0 and found.disk_bytes > 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it is measured again")

    monkeypatch.setattr(Bench, "run", fail)
    again = profiler(tmp_path).profile(SUBJECT, BlockStore(tmp_path))  # another process
    assert again.block_s == found.block_s and again.read_bytes_s == found.read_bytes_s
    for other in (
        replace(SUBJECT, config_hash="i" * 64),
        replace(SUBJECT, quantize="int8"),
        replace(SUBJECT, dtype=torch.bfloat16),
        replace(SUBJECT, with_head=True),
    ):
        with pytest.raises(AssertionError, match="measured again"):
            profiler(tmp_path).profile(other, None)
    with pytest.raises(AssertionError, match="measured again"):
        profiler(tmp_path).profile(SUBJECT, None, fresh=True)
    monkeypatch.setattr(mdi.node.profiler, "cpu_model", lambda: "another processor")
    with pytest.raises(AssertionError, match="measured again"):
        profiler(tmp_path).profile(SUBJECT, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', '{"x": {"block_s": "fast"}}', "\0"])
def test_a_kept_file_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert not profiler(tmp_path).is_kept(SUBJECT)
    profiler(tmp_path).profile(SUBJECT, None)
    assert profiler(tmp_path).is_kept(SUBJECT)
    assert len(json.loads((tmp_path / FILE).read_text())) == 1


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    found = profiler(tmp_path / "file" / "cache").profile(SUBJECT, None)
    assert found.block_s and found.disk_read_bytes_s == 0.0


def test_a_model_of_which_no_block_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdi.node.profiling, "device_free_bytes", lambda device: 1 << 12)
    with pytest.raises(CheckpointError, match="GB of memory are free"):
        profiler(tmp_path).profile(SUBJECT, None)


def test_the_disk(tmp_path: Path) -> None:
    assert disk_read_bytes_s(tmp_path, limit_s=0.05) >= 0
    assert list(tmp_path.iterdir()) == []
