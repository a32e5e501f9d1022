"""A run that stopped goes on as if it had not: the same losses to the last digit, the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from mdi.errors import CheckpointError, UsageError
from mdi_training.checkpoint import load_state
from mdi_training.interrupt import StopRequest
from mdi_training.loop import Trainer
from tiny_training import curve, losses, make_dataset, make_shape, train, train_with

FLAGS = ("--max-iters", 14, "--ckpt-interval", 4, "--log-interval", 1, "--grad-acc-steps", 2)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """A trained checkpoint to fine-tune."""
    folder = make_shape(tmp_path_factory.mktemp("base"))
    assert train(folder, dataset, "--max-iters", 20) == 0
    return folder


def same_weights(one: Path, two: Path) -> bool:
    states = [torch.load(folder / "lit_model.pth", weights_only=True) for folder in (one, two)]
    assert states[0].keys() == states[1].keys()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def interrupt_at(monkeypatch: pytest.MonkeyPatch, n_steps: int, number: int = signal.SIGINT) -> None:
    """The signal comes in the middle of the step after so many."""
    step = Trainer.step

    def interrupted(self: Trainer) -> tuple[float, float]:
        if self.progress.n_steps == n_steps:
            os.kill(os.getpid(), number)
        return step(self)

    monkeypatch.setattr(Trainer, "step", interrupted)


def arguments_of(kind: str, base: Path, dataset: Path, folder: Path) -> tuple[object, ...]:
    if kind == "lora":
        return (base, dataset, *FLAGS, "--init", "finetune", "--lora-r", 4, "--lora-dropout", 0.3, "--out", folder)
    return (make_shape(folder), dataset, *FLAGS, *(("--dtype", "bfloat16") if kind == "bfloat16" else ()))


@pytest.fixture(scope="module", params=["scratch", "bfloat16", "lora"])
def uninterrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, base: Path, dataset: Path
) -> tuple[str, Path]:
    """A kind of training, and the folder of a run of it that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train(*arguments_of(request.param, base, dataset, folder)) == 0
    return request.param, folder


@pytest.mark.parametrize("n_steps", [2, 8, 12])
def test_the_curve_after_a_resume_is_that_of_the_uninterrupted_run(
    tmp_path: Path,
    dataset: Path,
    base: Path,
    uninterrupted: tuple[str, Path],
    n_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, whole = uninterrupted
    folders = whole, tmp_path / "parts"
    with monkeypatch.context() as patched:
        interrupt_at(patched, n_steps)
        assert train(*arguments_of(kind, base, dataset, folders[1])) == 130
    assert len(losses(folders[1])) == n_steps + 1
    # Nothing but the two folders is said again: the settings are those that the run began with.
    assert train_with("--init", "resume", "--ckpt", folders[1], "--dataset", dataset, "--device", "cpu") == 0
    assert len(curve(folders[0])) == 14 and curve(folders[1]) == curve(folders[0])
    assert same_weights(*folders) and same_weights(folders[0] / "last", folders[1] / "last")


def test_a_finished_run_can_be_made_longer(tmp_path: Path, dataset: Path) -> None:
    folder = make_shape(tmp_path / "m")
    schedule = ("--schedule", "constant", "--ckpt-interval", 2)
    assert train(folder, dataset, "--max-iters", 4, *schedule) == 0
    assert (
        train_with("--init", "resume", "--ckpt", folder, "--dataset", dataset, "--max-iters", 8, "--device", "cpu") == 0
    )
    whole = make_shape(tmp_path / "whole")
    assert train(whole, dataset, "--max-iters", 8, *schedule) == 0
    assert curve(folder) == curve(whole)
    assert load_state(folder).settings.max_iters == 8 and load_state(folder).progress.elapsed_s > 0


def test_flags_change_a_resumed_run_unless_the_old_ones_are_forced(tmp_path: Path, dataset: Path) -> None:
    folder = make_shape(tmp_path / "m")
    assert train(folder, dataset, "--max-iters", 4, "--ckpt-interval", 2, "--lr", 0.01) == 0
    resume = ("--init", "resume", "--ckpt", folder, "--dataset", dataset, "--device", "cpu")
    assert train_with(*resume, "-F", "--max-iters", 6, "--lr", 0.5) == 0
    assert load_state(folder).progress.n_steps == 4 and load_state(folder).settings.lr == 0.01
    assert train_with(*resume, "--max-iters", 6, "--lr", 0.005) == 0
    assert load_state(folder).progress.n_steps == 6 and load_state(folder).settings.lr == 0.005
    assert [int(row["step"]) for row in losses(folder)] == [2, 4, 6]


def test_sigterm_saves_and_says_how_to_go_on(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_shape(tmp_path / "m")
    interrupt_at(monkeypatch, 3, signal.SIGTERM)
    assert train(folder, dataset) == 143
    out, err = capfd.readouterr()
    assert "stopped after 4 steps" in out and f"--init resume --ckpt {folder}" in out
    assert err.count("the present step") == 1
    assert not (folder / "lit_model.pth").exists() and (folder / "last" / "lit_model.pth").exists()
    assert load_state(folder).progress.n_steps == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handlers are as they were"


@pytest.mark.parametrize("is_telling", [True, False])
def test_a_request_to_stop_is_answered_at_once(is_telling: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """The step in hand may take minutes; of several processes one answers."""
    with StopRequest(is_telling) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.number == signal.SIGINT
        assert ("again" in capfd.readouterr().err) is is_telling


def test_a_second_interrupt_ends_at_once(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 3)
    interrupt_at(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(make_shape(tmp_path / "m"), dataset)
    assert not (tmp_path / "m" / "train_state.pth").exists()


def test_best_and_last_differ_and_always_update_makes_them_one(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out loss is made to rise, so that the first evaluation stays the best."""
    count = iter(range(100))
    monkeypatch.setattr(Trainer, "evaluate", lambda self: float(next(count)))
    for flags, are_same in ((), False), (("-au",), True):
        folder = make_shape(tmp_path / str(are_same))
        assert train(folder, dataset, "--max-iters", 6, "--ckpt-interval", 2, *flags) == 0
        assert same_weights(folder, folder / "last") is are_same


def test_nothing_to_resume(tmp_path: Path, dataset: Path, base: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        train(make_shape(tmp_path / "m"), dataset, "--init", "resume")
    assert caught.value.code == "missing"
    assert train(base, dataset, "--init", "hf", "--max-iters", 2) == 0
    (base / "train_state.pth").rename(tmp_path / "kept")
    try:
        with pytest.raises(CheckpointError) as caught:
            train(base, dataset, "--init", "resume")
        assert caught.value.code == "missing" and "finetuned" in str(caught.value)
    finally:
        (tmp_path / "kept").rename(base / "train_state.pth")


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "other"])
def test_a_damaged_state_is_one_line(tmp_path: Path, dataset: Path, damage: str) -> None:
    folder = make_shape(tmp_path / "m")
    assert train(folder, dataset, "--max-iters", 2) == 0
    path = folder / "train_state.pth"
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-3000], "noise": b"\x80\x04noise" * 50, "empty": b"", "other": content}[damage])
    if damage == "other":
        torch.save({"format_version": 99}, path)
    before = (folder / "lit_model.pth").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        train(folder, dataset, "--init", "resume")
    assert caught.value.code == "unreadable"
    assert "\n" not in str(caught.value)
    assert (folder / "lit_model.pth").read_bytes() == before


def test_another_data_set_is_warned_of(tmp_path: Path, dataset: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_shape(tmp_path / "m")
    assert train(folder, dataset, "--max-iters", 2) == 0
    other = make_dataset(tmp_path / "other", seed=2)
    assert train(folder, other, "--init", "resume", "--max-iters", 4) == 0
    assert "is not the data set that this run began with" in caplog.text


def test_adapters_want_the_weights_that_they_began_with(tmp_path: Path, dataset: Path, base: Path) -> None:
    copy = make_shape(tmp_path / "copy")
    (copy / "lit_model.pth").write_bytes((base / "lit_model.pth").read_bytes())
    out = tmp_path / "out"
    assert train(copy, dataset, "--init", "finetune", "--lora-r", 2, "--max-iters", 2, "--out", out) == 0
    state = torch.load(copy / "lit_model.pth", weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, copy / "lit_model.pth")
    with pytest.raises(CheckpointError) as caught:
        train(out, dataset, "--init", "resume", "--max-iters", 4)
    assert caught.value.code == "changed"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--lora-r", 4), "flags"),
        (("--lora-alpha", 4), "flags"),
        (("--init", "resume", "--lora-r", 4), "flags"),
        (("--init", "resume", "--config", "pythia-14m"), "flags"),
        (("--init", "finetune", "--fit-vocab"), "flags"),
        (("-F",), "flags"),
        (("--schedule", "cosine", "--decay-iters", 0), "value"),
        (("--init", "finetune", "--lora-r", 4, "--lora-targets", "query,feet"), "value"),
        (("--init", "finetune", "--lora-r", -1), "value"),
        (("--init", "finetune", "--lora-r", 1, "--lora-dropout", 1), "value"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, dataset: Path, flags: tuple[object, ...], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        train(make_shape(tmp_path / "m"), dataset, *flags)
    assert caught.value.code == code
