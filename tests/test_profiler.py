"""A node that measures itself: what it says, what it keeps, and when it measures again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mdi.placement.profiler
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.store import BlockStore
from mdi.control.client import ControlClient
from mdi.control.messages import InitRequest, PartSpec, ProfileRequest
from mdi.errors import CheckpointError, ControlError
from mdi.host.computing import Computing
from mdi.kernels.weight_formats import LAYOUTS
from mdi.model.plain import ModelConfig
from mdi.node.runs import Runs
from mdi.node.secondary import SecondaryNode
from mdi.placement.profile import NodeProfile
from mdi.placement.profiler import FILE, Profiler, bench_of
from mdi.placement.profiling import ROWS, Bench, Speeds, Subject, disk_read_bytes_s
from mdi.spec.extent import Extent
from mdi.spec.model_id import ModelId
from secondaries import entry_of, secondary
from tiny_checkpoint import tiny_config
from waiting import until

CONFIG = ModelConfig.from_litgpt(tiny_config())
SUBJECT = Subject(CONFIG, "h" * 64, Computing("cpu", "float32"))


def computed(**changes: Any) -> Subject:
    return replace(SUBJECT, computing=replace(SUBJECT.computing, **changes))


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def profiler(folder: Path) -> Profiler:
    return Profiler("secondary0", folder, span_s=0.01)


@pytest.mark.parametrize(
    "subject",
    [
        *(computed(quantize=form, quantize_head=form) for form in (None, "int8", "fp16")),
        *(computed(packing=Packing(form, form)) for form in LAYOUTS),
    ],
    ids=lambda subject: f"{'torch' if subject.computing.packing is None else 'kernels'}-{subject.computing.format}",
)
def test_a_node_measures_itself(tmp_path: Path, subject: Subject) -> None:
    told: list[tuple[str, int, int]] = []
    bench = bench_of(subject, 0.005, lambda *what: told.append(what))
    speeds = bench.run(tmp_path / "cache", with_head=True)
    assert [rows for rows, _ in speeds.block_s] == list(ROWS) and all(s > 0 for _, s in speeds.block_s)
    assert [rows for rows, _ in speeds.head_s] == list(ROWS[:-2]) and all(s > 0 for _, s in speeds.head_s)
    assert speeds.read_bytes_s > 1e8
    assert speeds.disk_read_bytes_s >= 0
    steps = list(dict.fromkeys(done for _, done, _ in told))  # building tells of itself before each block
    assert steps == list(range(len(steps))) and told[-1][1] == told[-1][2]
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_a_larger_model_takes_longer(tmp_path: Path) -> None:
    """The times are of this model: twenty times the work is seen, whatever the machine."""
    large = ModelConfig.from_litgpt(tiny_config(n_embd=256, n_head=8, head_size=32, intermediate_size=8192, n_layer=2))
    small_s, large_s = (
        bench_of(replace(SUBJECT, config=config), 0.05, quiet).run(tmp_path, with_head=False).block_s[2][1]
        for config in (CONFIG, large)
    )
    assert large_s > small_s


def test_a_model_with_a_context_smaller_than_what_is_measured(tmp_path: Path) -> None:
    config = ModelConfig.from_litgpt(tiny_config(block_size=40))
    speeds = bench_of(replace(SUBJECT, config=config), 0.005, quiet).run(tmp_path, with_head=False)
    assert len(speeds.block_s) == len(ROWS) and speeds.head_s == ()


def test_memory_that_is_left_to_others_is_not_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "run", lambda *args, **kwargs: Speeds(0.0, 1e9, ((1, 1.0),), ()))
    monkeypatch.setattr(Profiler, "available_bytes", lambda self, device: 5000)
    for spare_bytes, left in ((0, 5000), (3000, 2000), (9000, 0)):
        found = Profiler("secondary0", tmp_path, spare_bytes=spare_bytes).profile(SUBJECT, None)
        assert found.memory_bytes - found.process_bytes == left


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profiler(tmp_path)
    assert not first.is_kept(SUBJECT)
    found = first.profile(SUBJECT, BlockStore(tmp_path))
    assert first.is_kept(SUBJECT) and first.progress is None
    assert found == NodeProfile.from_json(found.to_json()), "it can be sent"
    assert found.name == "secondary0" and found.memory_bytes > found.process_bytes > 0 and found.disk_bytes > 0

    class MeasuredAgainError(Exception):
        """The test says so."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MeasuredAgainError

    monkeypatch.setattr(Bench, "run", fail)
    again = profiler(tmp_path).profile(SUBJECT, BlockStore(tmp_path))  # another process
    assert again.block_s == found.block_s and again.read_bytes_s == found.read_bytes_s
    for other in (
        replace(SUBJECT, config_hash="i" * 64),
        computed(quantize="int8"),
        computed(packing=Packing("float32", "float32")),
        computed(dtype="bfloat16"),
        replace(SUBJECT, with_head=True),
    ):
        with pytest.raises(MeasuredAgainError):
            profiler(tmp_path).profile(other, None)
    with pytest.raises(MeasuredAgainError):
        profiler(tmp_path).profile(SUBJECT, None, fresh=True)
    monkeypatch.setattr(mdi.placement.profiler, "cpu_model", lambda: "another processor")
    with pytest.raises(MeasuredAgainError):
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
    monkeypatch.setattr(mdi.placement.profiling, "device_free_bytes", lambda device: 1 << 12)
    with pytest.raises(CheckpointError) as e:
        profiler(tmp_path).profile(SUBJECT, None)
    assert "memory" in str(e.value) and e.value.code == "weights"


def test_the_disk(tmp_path: Path) -> None:
    assert disk_read_bytes_s(tmp_path, limit_s=0.05) >= 0
    assert list(tmp_path.iterdir()) == []


# Asked for over HTTP


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SecondaryNode]:
    with secondary(0, tmp_path / "cache") as one:
        one.profiler.span_s = 0.01
        yield one


REQUEST = ProfileRequest(ModelId(CONFIG.name, CONFIG, "h" * 64, "float32"))


def init_request(**changes: Any) -> InitRequest:
    return InitRequest(
        "0" * 16, "0" * 16, 1, ("starter", "secondary0"), "p", "127.0.0.1", 1,
        ModelId("m", ModelConfig(n_layer=1), "h", "float32"), (0, 1), (PartSpec("block.0", "a" * 64, 100),), Extent(10),
        **changes,
    )  # fmt: skip


def test_a_secondary_is_asked(node: SecondaryNode) -> None:
    client = ControlClient(entry_of(node))
    answer = client.profile(REQUEST)
    found = NodeProfile.from_json(answer["profile"])
    assert (found.name, found.device, answer["format"], answer["kept"]) == ("secondary0", "cpu", "float32", False)
    assert found.head_s == () and [rows for rows, _ in found.block_s] == list(ROWS)
    again = client.profile(REQUEST)
    assert again["kept"] is True and again["profile"]["block_s"] == answer["profile"]["block_s"]
    assert client.profile(replace(REQUEST, fresh=True))["kept"] is False
    assert client.profile(replace(REQUEST, quantize="int8"))["format"] == "int8"
    assert node.status(None)["state"] == "IDLE" and node.status(None)["measuring"] is None


def test_a_nodes_own_format_goes_first(tmp_path: Path) -> None:
    with secondary(0, tmp_path / "cache", quantize="int8") as node:
        node.profiler.span_s = 0.01
        assert ControlClient(entry_of(node)).profile(replace(REQUEST, dtype="bfloat16"))["format"] == "int8"


def test_a_starter_names_device_and_threads(node: SecondaryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of these tests was started with a device, so that only its threads are left to the starter."""
    used: list[int] = []
    run = Bench.run
    monkeypatch.setattr(Bench, "run", lambda self, *args: (used.append(torch.get_num_threads()), run(self, *args))[1])
    client, before = ControlClient(entry_of(node)), torch.get_num_threads()
    answers = [client.profile(replace(REQUEST, threads=n, device="cuda:7")) for n in (1, 2, 1, None)]
    assert [answer["profile"]["device"] for answer in answers] == ["cpu"] * 4, "its own goes first"
    assert [answer["threads"] for answer in answers] == [1, 2, 1, before]
    assert [answer["kept"] for answer in answers] == [False, False, True, before in (1, 2)], (
        "each is a profile of its own"
    )
    assert used == [1, 2, *([before] if before > 2 else [])] and torch.get_num_threads() == before


def test_a_node_that_was_told_nothing_takes_what_the_starter_names(tmp_path: Path) -> None:
    with secondary(0, tmp_path / "a", device=None) as free, secondary(1, tmp_path / "b", threads=3) as set_:
        free.profiler.span_s = set_.profiler.span_s = 0.01
        client = ControlClient(entry_of(free))
        assert client.profile(replace(REQUEST, device="cpu"))["profile"]["device"] == "cpu"
        with pytest.raises(ControlError) as e:
            client.profile(replace(REQUEST, device="cuda:99"))
        assert "secondary0" in str(e.value) and "'cuda:99'" in str(e.value)
        assert e.value.status == 400
        with pytest.raises(ControlError) as e:
            client.init(init_request(device="banana"))
        assert "'banana'" in str(e.value)
        assert e.value.code == "usage"
        assert ControlClient(entry_of(set_)).profile(replace(REQUEST, threads=1))["threads"] == torch.get_num_threads()
        assert free.status(None)["own"] == {"device": None, "threads": None} and "cpu" in free.status(None)["devices"]
        assert set_.status(None)["own"] == {"device": "cpu", "threads": 3}


def test_only_who_had_it_measured_for_a_run_can_end_it(node: SecondaryNode) -> None:
    """As a starter does with --stop-nodes, whose placement left the node out."""
    client = ControlClient(entry_of(node))
    client.profile(replace(REQUEST, run="a" * 16))
    with pytest.raises(ControlError) as caught:
        client.stop("b" * 16, leave=True)
    assert caught.value.code == "run"
    client.init(init_request())
    with pytest.raises(ControlError) as caught:
        client.stop("a" * 16, leave=True)  # it is another starter's now
    assert caught.value.code == "run"
    client.stop("0" * 16)
    until(lambda: client.status()["state"] == "IDLE")
    assert not node.is_leaving
    client.stop("a" * 16, leave=True)
    assert node.is_leaving


def test_runs_and_measurements_wait_for_each_other(node: SecondaryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()

    def run(self: Bench, *args: Any) -> Any:
        self.progress("disk", 0, 8)
        began.set()
        assert go_on.wait(60)
        raise MemoryError("no more of it")

    monkeypatch.setattr(Bench, "run", run)
    client = ControlClient(entry_of(node))
    errors: list[ControlError] = []

    def ask() -> None:
        try:
            client.profile(REQUEST)
        except ControlError as e:
            errors.append(e)

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(60)
    try:
        assert client.status()["measuring"] == {"what": "disk", "done": 0, "total": 8}
        for refused in (lambda: client.profile(REQUEST), lambda: client.init(init_request())):
            with pytest.raises(ControlError) as caught:
                refused()  # type: ignore[no-untyped-call]
            assert caught.value.code == "busy"
    finally:
        go_on.set()
        thread.join(30)
    assert "MemoryError: no more of it" in str(errors[0]), "the node goes on"
    assert node.status(None)["measuring"] is None
    monkeypatch.undo()
    node.profiler.span_s = 0.01
    assert client.profile(REQUEST)["kept"] is False


def test_a_node_in_a_run_does_not_measure_itself(node: SecondaryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runs, "active", [SimpleNamespace(state="RUNNING")])
    with pytest.raises(ControlError) as caught:
        ControlClient(entry_of(node)).profile(REQUEST)
    assert caught.value.code == "busy"
    monkeypatch.undo()


def with_config(plain: dict[str, Any]) -> dict[str, Any]:
    return {**REQUEST.to_json(), "model": {**REQUEST.model.to_json(), "config": plain}}


@pytest.mark.parametrize(
    "body",
    [{}, [], {"model": {}}, {**REQUEST.to_json(), "fresh": 1}, {**REQUEST.to_json(), "quantize": 4},
     with_config({**CONFIG.plain(), "n_layer": -1}), {**REQUEST.to_json(), "dtype": "float7"},
     with_config({**CONFIG.plain(), "n_head": 7})],
)  # fmt: skip
def test_a_subject_that_makes_no_sense_is_refused(node: SecondaryNode, body: Any) -> None:
    data = json.dumps(body).encode()
    with pytest.raises(ControlError) as caught:
        ControlClient(entry_of(node)).ask("profile", {}, 30.0, [data], len(data))
    assert caught.value.status in (400, 500) and "Traceback" not in str(caught.value)
    assert node.status(None)["state"] == "IDLE"
