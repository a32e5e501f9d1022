"""What a starter makes of nodes that are slow, or say strange things, and of runs that cannot work."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mdi
import mdi.cancel
import mdi.host.resources
import mdi.node.secondary_status
import mdi.node.worker
import mdi.run.setup
import mdi.stages.torch_stage
from mdi.cli import launch
from mdi.engine.sequence import SamplingParams
from mdi.errors import ControlError, EngineError, MdiError, NodeLostError, UsageError
from mdi.node.node_weights import NodeWeights
from mdi.node.secondary import SecondaryNode
from mdi.node.worker import Waits
from mdi.run.local import free_ports
from mdi.run.run import Run
from mdi.run.supply import StarterSupply
from mdi.run.texts import SampleReader
from mdi.stages.torch_stage import Stage
from test_node import generate, plain_checkpoint, ring, wait_state  # noqa: F401
from tiny_checkpoint import encode, reference
from waiting import until

Ring = Callable[..., tuple[Run, SecondaryNode]]


@pytest.mark.slow
def test_a_node_that_is_ready_early_waits_for_the_others(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The starter takes longer than a node waits for one that says nothing."""
    load = StarterSupply.reading

    def load_late(*args: Any) -> Any:
        threading.Event().wait(9.0)
        return load(*args)

    monkeypatch.setattr(StarterSupply, "reading", load_late)
    starter, secondary = ring()
    secondary.waits = Waits(lease_s=7.0)
    assert generate(starter) == list(reference("The ring", 6))


def test_loading_that_takes_long_is_told(
    ring: Ring,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each step waits until the starter has said what it waits for."""
    caplog.set_level("DEBUG")
    monkeypatch.setattr(mdi.cancel, "REPORT_S", -1.0)

    missing, source_of = NodeWeights.missing, NodeWeights.source_of
    looks = "secondary0 checks which weights it already has"
    loads = "secondary0 loads its weights: 1 of 3 parts"
    monkeypatch.setattr(
        NodeWeights, "missing", lambda self, *args: (until(lambda: looks in caplog.text), missing(self, *args))[1]
    )

    def load(self: NodeWeights, part: Any, request: Any) -> Any:
        if part.name == "block.3":
            until(lambda: loads in caplog.text)
        return source_of(self, part, request)

    monkeypatch.setattr(NodeWeights, "source_of", load)
    starter, _ = ring()
    assert generate(starter) == list(reference("The ring", 6))
    assert looks in caplog.text and loads in caplog.text
    assert "starter loads its weights: 0 of 4 parts" in caplog.text


@pytest.mark.usefixtures("in_torch")
def test_rows_that_are_not_finite_end_the_run(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    class Overflowing(Stage):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs) * float("inf")

    monkeypatch.setattr(mdi.stages.torch_stage, "Stage", Overflowing)
    starter, secondary = ring()
    with pytest.raises(EngineError) as e:
        generate(starter)
    assert "--dtype float32" in str(e.value) and e.value.code == "engine"
    starter.close()
    assert "not finite" in wait_state(secondary, "IDLE")["error"], "the others are told why"


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit])
def test_whatever_ends_the_engine_ends_every_wait(
    ring: Ring,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    def sample(*_: object) -> list[int]:
        raise error("no more of it")

    monkeypatch.setattr("mdi.engine.starter.sample", sample)
    starter, secondary = ring()
    starter.open()
    reader = SampleReader()
    params = SamplingParams(6, temperature=0)
    mine, other = (starter.submit("The ring", encode("The ring"), params, reader=r) for r in (None, reader))
    with pytest.raises(EngineError) as e:
        starter.read()
    assert error.__name__ in str(e.value) and "no more of it" in str(e.value)
    reader.read()
    assert (mine.finish_reason, other.finish_reason, mine.has_ended, other.has_ended) == (None, None, True, True)
    assert starter.failed
    with pytest.raises(EngineError):
        starter.submit("The ring", encode("The ring"), params)
    assert "no more of it" in wait_state(secondary, "IDLE")["error"], "nobody waits for a computation that has ended"


def test_a_reader_that_raises_costs_nobody_else_anything(ring: Ring) -> None:  # noqa: F811
    def show(text: str) -> None:
        raise BrokenPipeError("nobody reads this")

    starter, _ = ring()
    starter.open()
    params = SamplingParams(6, temperature=0)
    with SampleReader() as reader:
        broken = starter.submit("The ring", encode("The ring"), params, on_text=show, reader=reader)
        with pytest.raises(BrokenPipeError):
            reader.read()
    whole = starter.submit("The ring", encode("The ring"), params)
    starter.read()
    assert whole.token_ids == list(reference("The ring", 6)) and len(broken.token_ids) < 6
    starter.close()


def test_a_stop_string_ends_a_sample_where_the_engine_stops_computing(ring: Ring) -> None:  # noqa: F811
    starter, _ = ring()
    starter.open()
    params = SamplingParams(12, temperature=0)
    whole = starter.submit("The ring", encode("The ring"), params)
    starter.read()
    assert len(whole.text) > 4
    stop = whole.text[2:4]
    cut = starter.submit("The ring", encode("The ring"), params, [stop])
    starter.read()
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < 12
    starter.close()


def test_measurements_that_cannot_be_read_cost_nothing_else(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    status = SecondaryNode.status_of  # of requests, and of what is pushed
    monkeypatch.setattr(SecondaryNode, "status_of", lambda *args: {**status(*args), "metrics": {"frames": "many"}})
    starter, _ = ring()
    starter.open()
    sample = starter.submit("The ring", encode("The ring"), SamplingParams(6, temperature=0))
    starter.read()
    starter.close()
    own, other = starter.metrics().nodes
    starter.close()
    assert sample.token_ids == list(reference("The ring", 6))
    assert (own.name, other.name, other.frames) == ("starter", "secondary0", 0) and own.frames > 0


def test_what_a_node_lacks_must_make_sense(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    missing_of = mdi.node.secondary_status.missing_of

    def odd(*args: Any) -> Any:
        missing = missing_of(*args)
        return missing and [{**entry, "have_bytes": -5} for entry in missing]

    monkeypatch.setattr(mdi.node.secondary_status, "missing_of", odd)
    starter, _ = ring()
    with pytest.raises(ControlError) as caught:
        generate(starter)
    assert caught.value.code == "control"


def test_a_run_that_cannot_fit_is_refused(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    little = SimpleNamespace(available=1000, total=1 << 40)
    starter, _ = ring()
    monkeypatch.setattr(mdi.host.resources.psutil, "virtual_memory", lambda: little)
    with pytest.raises(MdiError) as caught:
        generate(starter)
    assert caught.value.code == "memory"


def test_prompts_that_cannot_be_continued(ring: Ring) -> None:  # noqa: F811
    starter, _ = ring()
    starter.open()
    for ids, words in (([], "without any token"), ([1] * 5000, "holds"), ([1, 10**6], "belongs to another model")):
        with pytest.raises(UsageError) as e:
            starter.model.check_prompt(ids)
        assert words in str(e.value) and e.value.code == "usage"


def test_json_does_not_swallow_what_else_was_asked_for(
    plain_checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = tmp_path / "times.csv"
    flags = ["--prompt", "The ring", "--prompt-style", "none", "--n-tokens", "3", "--json", "--time-run", str(times)]
    assert launch("sample", ["--ckpt", str(plain_checkpoint), "--device", "cpu", *flags]) == 0
    assert len(json.loads(capsys.readouterr().out)["samples"]) == 1
    assert len(times.read_text().splitlines()) == 2


def test_a_node_of_another_version_that_understands_is_told(
    ring: Ring,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", logger="mdi")
    starter, _ = ring()
    assert generate(starter) == list(reference("The ring", 6))
    assert "version" not in caplog.text
    status = SecondaryNode.status
    monkeypatch.setattr(SecondaryNode, "status", lambda self, run: {**status(self, run), "version": "1.9.0"})
    starter, _ = ring()
    assert generate(starter) == list(reference("The ring", 6))
    (told,) = [record.getMessage() for record in caplog.records if "version" in record.getMessage()]
    assert "secondary0" in told and "1.9.0" in told and mdi.__version__ in told


def test_a_wrong_port_in_is_told_with_the_right_one(ring: Ring) -> None:  # noqa: F811
    (wrong,) = free_ports(1)
    starter, secondary = ring(port_in=wrong)
    with pytest.raises(NodeLostError) as caught:
        generate(starter)
    assert caught.value.node == "secondary0"
    assert str(wrong) in str(caught.value) and f"listens on {secondary.ring_port}" in str(caught.value)
