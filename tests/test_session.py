"""A run that one opens: in order, out of order, and left with an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mdi.cli import launch
from mdi.engine.sequence import SamplingParams
from mdi.errors import EngineError, MdiError, NodeLostError, UsageError
from mdi.run.choice import Choice
from mdi.run.form import Former
from mdi.run.local import LocalRing
from mdi.run.loop import RingLoop
from mdi.run.nodes import NodeSource, OwnProcesses
from mdi.run.run import Run
from mdi.spec.cluster import ClusterConfig, NodeConfig, standalone
from mdi.spec.options import StarterOptions
from tiny_checkpoint import reference, write_checkpoint

GREEDY = SamplingParams(6, temperature=0)
EXPECTED = list(reference("The ring", 6))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> StarterOptions:
    ckpt = write_checkpoint(tmp_path_factory.mktemp("session") / "tiny")
    return StarterOptions(ckpt=ckpt, device="cpu", dtype="float32", prompt_style="none")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of a run, in order."""
    made: list[str] = []

    def watch(owner: Any, name: str, told: str) -> None:
        method = getattr(owner, name)

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            made.append(f"{told} {kwargs['leave']}" if "leave" in kwargs else told)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    for owner, name, told in (
        (Choice, "open", "open"), (Choice, "place", "place"), (Former, "form", "form"), (RingLoop, "start", "start"),
        (Run, "end_on_nodes", "end"), (Choice, "close", "close"),
    ):  # fmt: skip
        watch(owner, name, told)
    return made


OPENED = ["open", "place", "form", "start"]


def test_texts_of_a_run_are_those_of_the_model(options: StarterOptions, calls: list[str]) -> None:
    with Run(NodeSource(standalone, threads=1), options, 6, ["The ring", "The ring"], leave=True) as run:
        assert run.max_length == len(run.prompt_ids[0]) + 6, "caches for what is known, and no more"
        for _ in range(2):
            samples = [run.submit("The ring", ids, GREEDY) for ids in run.prompt_ids]
            run.read()
            assert [sample.token_ids for sample in samples] == [EXPECTED] * 2
    assert calls == [*OPENED, "end True", "close"]
    run.close()
    assert len(calls) == 6, "harmless if repeated"
    assert [sample.text for sample in run.metrics().samples] == [sample.text for sample in samples] * 2


def test_a_text_can_be_cancelled(options: StarterOptions) -> None:
    with Run(NodeSource(standalone, threads=1), options, 80, ["The ring"]) as run:
        sample = run.submit("The ring", run.prompt_ids[0], SamplingParams(80, temperature=0))
        sample.cancel()
        run.read()
        assert sample.finish_reason == "cancelled" and not run.failed


@pytest.mark.parametrize("owner, step", [(Choice, "open"), (Choice, "place"), (Former, "form"), (RingLoop, "start")])
def test_what_cannot_be_opened_leaves_nothing_open(
    owner: Any, step: str, options: StarterOptions, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise EngineError("no more of it")

    monkeypatch.setattr(owner, step, fail)
    run = Run(NodeSource(standalone, threads=1), options, 6, ["The ring"])
    with pytest.raises(EngineError), run:
        raise AssertionError("it was not opened")
    n = OPENED.index(step)
    assert calls == [*OPENED[:n], "end False", *(["close"] if n else [])]
    assert not run.was_open


def test_a_prompt_that_does_not_fit_is_refused_before_nodes_are_asked(
    options: StarterOptions, calls: list[str]
) -> None:
    with pytest.raises(UsageError), Run(NodeSource(standalone), options, 6, ["The ring", [1] * 9999]):
        pass
    assert calls == ["open", "end False", "close"]


@pytest.mark.parametrize("error, state", [(NodeLostError("secondary0", "gone"), "BROKEN"), (KeyError(1), "RUNNING")])
def test_left_with_an_error(
    error: Exception, state: str, options: StarterOptions, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is ended all the same; the processes of other nodes are left alone, and nobody waits for one that is lost."""
    closing: list[bool] = []
    states: list[str] = []
    end = Run.end_on_nodes

    def note(self: Run, leave: bool) -> None:
        states.append(self.status(None)["state"])
        end(self, leave=leave)

    monkeypatch.setattr(Run, "end_on_nodes", note)
    run = Run(
        NodeSource(standalone), options, 60, n_texts=1, leave=True, on_close=lambda: closing.append(not calls[4:])
    )
    with pytest.raises(type(error)), run:
        raise error
    assert calls[4:] == ["end False", "close"] and closing == [True] and states == [state]


class FakeRing:
    """Processes that end when they are told."""

    def __init__(self) -> None:
        self.cluster = ClusterConfig(NodeConfig("starter", "127.0.0.1", 0, 0, threads=1))
        self.has_ended = self.is_closed = False

    def __enter__(self) -> FakeRing:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def check(self) -> None:
        if self.has_ended:
            raise NodeLostError("secondary0", "secondary0 has ended")

    def revive(self) -> None:
        self.has_ended = False


@pytest.mark.parametrize("is_revived", [False, True])
def test_processes_outlive_a_session_and_are_started_again_where_that_is_wanted(is_revived: bool) -> None:
    rings: list[Any] = []

    def make() -> LocalRing:
        rings.append(FakeRing())
        return rings[-1]

    with OwnProcesses(make, lambda ring: ring.cluster, is_revived) as nodes:
        nodes.check()  # before there are any
        assert nodes.cluster() == nodes.cluster() and len(rings) == 1
        rings[0].has_ended = True
        if is_revived:
            nodes.check()
            assert not rings[0].has_ended
        else:
            with pytest.raises(MdiError) as failure:
                nodes.check()
            assert failure.value.code == "lost"
    assert rings[0].is_closed and len(rings) == 1
    nodes.close()


def test_processes_of_this_machine_have_equal_parts(options: StarterOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all alike: nothing is measured."""
    seen: list[StarterOptions] = []

    class Seen(Run):
        def open(self) -> None:
            seen.append(self.options)
            raise UsageError("enough")

    monkeypatch.setattr("mdi.run.run.Run", Seen)
    assert launch("local-ring", ["--nodes", "2", "--ckpt", str(options.ckpt)]) == 2
    assert launch("local-ring", ["--nodes", "2", "--ckpt", str(options.ckpt), "--placement", "latency"]) == 2
    assert [one.placement for one in seen] == ["even", "latency"]


def test_a_missing_model_is_told_by_its_type(tmp_path: Path) -> None:
    with pytest.raises(MdiError) as failure, Run(NodeSource(standalone), StarterOptions(tmp_path / "none"), 6):
        pass
    assert failure.value.code in ("usage", "weights")
