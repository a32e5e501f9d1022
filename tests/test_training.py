"""Training: the schedule, the windows, a loss reached from a fixed seed, and checkpoints that litgpt loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from litgpt.config import Config
from litgpt.model import GPT

from mdi.errors import CheckpointError, MdiError, UsageError
from mdi_training.checkpoint import save_checkpoint
from mdi_training.loop import StepReport, Trainer, TrainingProgress, make_optimizer
from mdi_training.lora import add_adapters
from mdi_training.new_model import load_shape, new_model
from mdi_training.record import ProgressLines
from mdi_training.schedule import learning_rate
from mdi_training.training_settings import LoraSettings, TrainingSettings
from mdi_training.windows import Windows
from tiny_training import SHAPE, grammar_text, losses, make_dataset, make_shape, train, val_losses

ROOT = Path(__file__).parent.parent


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return make_dataset(tmp_path / "data")


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return make_shape(tmp_path / "ckpt")


def test_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    rates = [learning_rate(i, peak=1.0, floor=0.1, n_warmup=4, n_steps=15) for i in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[9] == pytest.approx(0.55)
    assert rates[14:] == [pytest.approx(0.1)] * 6
    assert all(a >= b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert learning_rate(0, peak=1.0, floor=0.1, n_warmup=0, n_steps=1) == pytest.approx(0.1)


def test_an_epoch_sees_each_window_once_and_targets_are_one_ahead() -> None:
    ids = np.arange(1000, dtype=np.uint16)
    windows = Windows(ids, 16, seed=3)
    starts = [windows.start(i) for i in range(windows.n_per_epoch)]
    assert sorted(b - a for a, b in zip(sorted(starts), sorted(starts)[1:], strict=False)) == [16] * (len(starts) - 1)
    assert starts != sorted(starts)
    again = [windows.start(windows.n_per_epoch + i) for i in range(windows.n_per_epoch)]
    assert again != starts
    inputs, targets = windows.batch(5, 3)
    assert inputs.shape == targets.shape == (3, 16) and inputs.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    # The order depends on seed and position alone, whatever was asked before.
    assert [Windows(ids, 16, seed=3).start(i) for i in (70, 5)] == [windows.start(70), windows.start(5)]


@pytest.mark.parametrize("n_ids", [17, 18, 31, 32, 33, 63])
def test_windows_stay_inside_short_files(n_ids: int) -> None:
    windows = Windows(np.arange(n_ids, dtype=np.uint16), 16, seed=0)
    for i in range(50):
        assert 0 <= windows.start(i) <= n_ids - 17
    assert sum(len(inputs) for inputs, _ in windows.in_order(2, 100)) == (n_ids - 1) // 16
    with pytest.raises(UsageError) as caught:
        Windows(np.arange(16, dtype=np.uint16), 16, seed=0)
    assert caught.value.code == "short"


def test_evaluation_windows_are_the_same_and_spread_over_the_file() -> None:
    windows = Windows(np.arange(1601, dtype=np.uint16), 16, seed=0)
    first = [inputs[:, 0].tolist() for inputs, _ in windows.in_order(2, 5)]
    assert first == [inputs[:, 0].tolist() for inputs, _ in windows.in_order(2, 5)]
    assert first == [[0, 160], [320, 480], [640, 800], [960, 1120], [1280, 1440]]


def test_a_stated_loss_is_reached_and_litgpt_loads_the_result(
    ckpt: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(ckpt, dataset, "--max-iters", 150, "--ckpt-interval", 50) == 0
    found = val_losses(ckpt)
    # The text has ln 12 = 2.48 nats of choice in about nine tokens, 0.28 each; guessing would cost ln 320 = 5.77.
    assert len(found) == 3 and found[-1] < 0.36 and found[-1] < found[0]
    out = capsys.readouterr().out
    assert "step 150/150" in out and "tokens/s" in out and "left" in out and "done after 150 steps" in out

    state = torch.load(ckpt / "lit_model.pth", weights_only=True)
    model = GPT(Config.from_file(ckpt / "model_config.yaml"))
    model.load_state_dict(state, strict=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    from litgpt.tokenizer import Tokenizer

    tokenizer = Tokenizer(ckpt)
    ids = tokenizer.encode("Anna:\n")
    for _ in range(2):
        ids = torch.cat([ids, model(ids[None])[0, -1].argmax()[None]])
    assert tokenizer.decode(ids).startswith("Anna:\nAnna ")


def test_the_same_seed_gives_the_same_weights(ckpt: Path, dataset: Path) -> None:
    saved = []
    for seed in (1, 1, 2):
        assert train(ckpt, dataset, "--max-iters", 3, "--seed", seed, "--overwrite", "--save-dtype", "float16") == 0
        saved.append(torch.load(ckpt / "lit_model.pth", weights_only=True))
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert not all(torch.equal(saved[0][name], saved[2][name]) for name in saved[0])
    assert {tensor.dtype for tensor in saved[0].values()} == {torch.float16}


def test_making_a_model_leaves_the_global_random_state(ckpt: Path) -> None:
    before = torch.random.get_rng_state()
    new_model(load_shape(ckpt), seed=4)
    assert torch.equal(before, torch.random.get_rng_state())


def make_windows(settings: TrainingSettings, n_ids: int = 400) -> Windows:
    ids = np.random.default_rng(0).integers(0, 320, n_ids).astype(np.uint16)
    return Windows(ids, settings.sequence_length, settings.seed)


def make_trainer(settings: TrainingSettings, n_ids: int = 400) -> Trainer:
    windows = make_windows(settings, n_ids)
    return Trainer(new_model(Config(**SHAPE), settings.seed), windows, windows, settings)


def test_accumulated_gradients_are_those_of_one_large_batch() -> None:
    whole = make_trainer(TrainingSettings(sequence_length=8, batch_size=6, grad_acc_steps=1, max_iters=4))
    parts = make_trainer(TrainingSettings(sequence_length=8, batch_size=2, grad_acc_steps=3, max_iters=4))
    for _ in range(3):
        assert whole.step()[1] == pytest.approx(parts.step()[1], abs=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_a_run_goes_on_from_its_progress_and_optimizer() -> None:
    settings = TrainingSettings(sequence_length=8, batch_size=2, grad_acc_steps=2, max_iters=6)
    straight = make_trainer(settings)
    expected = [straight.step()[1] for _ in range(6)]
    first, windows = make_trainer(settings), make_windows(settings)
    for _ in range(3):
        first.step()
    second = Trainer(
        first.model,
        windows,
        windows,
        settings,
        optimizer=first.optimizer,
        progress=TrainingProgress(n_steps=first.progress.n_steps),
    )
    assert [second.step()[1] for _ in range(3)] == expected[3:]


def test_what_is_dropped_depends_on_seed_and_step_alone() -> None:
    """So that a resumed run drops the same: not on what was drawn before in this process."""

    def losses_of(seed: int, global_seed: int, n_before: int = 0) -> list[float]:
        settings = TrainingSettings(
            sequence_length=8, batch_size=2, grad_acc_steps=2, max_iters=6, seed=seed, lr=1e-30, min_lr=0.0
        )
        windows = Windows(np.full(400, 7, dtype=np.uint16), 8, 1)  # all alike: only what is dropped makes a difference
        model = add_adapters(Config(**SHAPE), LoraSettings(r=2, dropout=0.5), seed=1)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight) * (3 if "lora" in name else 1))
        trainer = Trainer(model, windows, windows, settings, progress=TrainingProgress(n_steps=n_before))
        torch.manual_seed(global_seed)
        before = torch.random.get_rng_state()
        found = [trainer.step()[1] for _ in range(3 - n_before)]
        assert torch.equal(torch.random.get_rng_state(), before), "the global random state is left alone"
        return found

    expected = losses_of(seed=1, global_seed=1)
    assert len(set(expected)) == 3, "each step drops something else"
    assert losses_of(seed=1, global_seed=2) == expected
    assert losses_of(seed=1, global_seed=3, n_before=2) == expected[2:], "as a run that was resumed at this step"
    assert losses_of(seed=2, global_seed=1) != expected


def test_weight_decay_is_for_matrices_only() -> None:
    model = new_model(Config(**{**SHAPE, "bias": True}), seed=0)
    decayed, free = make_optimizer(model, TrainingSettings(sequence_length=8, weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3 and free["weight_decay"] == 0.0
    assert all(p.dim() == 2 for p in decayed["params"]) and all(p.dim() == 1 for p in free["params"])
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))


def scripted(val: list[float]) -> Callable[[], float]:
    script = iter(val)
    return lambda: next(script)


def test_only_better_weights_are_saved_and_patience_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrainingSettings(
        sequence_length=8, batch_size=1, grad_acc_steps=1, max_iters=20, ckpt_interval=1, patience=2
    )
    trainer = make_trainer(settings)
    monkeypatch.setattr(trainer, "evaluate", scripted([3.0, 2.0, 2.5, 1.5, 1.6, 1.7, 0.1]))
    reports: list[StepReport] = []
    saves: list[int] = []
    progress = trainer.run(reports.append, lambda is_best: saves.append(trainer.progress.n_steps) if is_best else None)
    assert saves == [1, 2, 4]
    assert progress == TrainingProgress(n_steps=6, best_val_loss=1.5, n_worse=2)
    assert [report.val_loss for report in reports] == [3.0, 2.0, 2.5, 1.5, 1.6, 1.7]


def test_each_pass_and_each_step_can_be_watched() -> None:
    settings = TrainingSettings(
        sequence_length=8, batch_size=1, grad_acc_steps=3, max_iters=2, ckpt_interval=2, eval_iters=2, log_interval=2
    )
    seen: list[object] = []
    make_trainer(settings).run(
        lambda news: seen.append(("report", news.step)),
        lambda is_best: None,
        on_step=lambda news: seen.append(("step", news.step)),
        on_pass=seen.append,
    )
    passes = ["pass 1 of 3", "pass 2 of 3", "pass 3 of 3"]
    first, second, held_out = (
        [f"step {number}/2: {what}" for what in whats]
        for number, whats in ((1, passes), (2, passes), (2, ["held out, pass 1", "held out, pass 2"]))
    )
    assert seen == [*first, ("step", 1), *second, *held_out, ("report", 2)]


def test_no_ten_seconds_pass_without_a_line() -> None:
    now, said = [0.0], list[str]()
    lines = ProgressLines(said.append, 9, lambda: now[0])

    def step(number: int, seconds: float) -> StepReport:
        """Of three passes of that length."""
        for i in range(3):
            lines.on_pass(f"step {number}/9: pass {i + 1} of 3")
            now[0] += seconds
        return StepReport(number, 0.1, 2.0, None, 5.0, now[0], 60.0)

    for number in range(1, 4):
        lines.on_step(step(number, 0.5))
    assert not said, "lines of the record come often enough"
    lines.report(step(4, 1.0))
    assert len(said) == 1 and said[0].startswith("step 4/9: loss 2.0")
    lines.on_step(step(5, 6.0))
    assert said[1:] == ["step 5/9: pass 3 of 3", said[0].replace("4/9", "5/9")], (
        "with the loss, although a line just came"
    )
    lines.on_step(step(6, 20.0))
    assert [line.partition(":")[0] for line in said[3:]] == ["step 6/9"] * 3


def test_a_slow_run_shows_its_first_steps(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is slow if no time counts as short; the file of the losses has no other rows for it."""
    monkeypatch.setattr("mdi_training.record.SILENT_S", 0.0)
    folder = make_shape(tmp_path / "m")
    assert train(folder, dataset, "--max-iters", 2, "--grad-acc-steps", 2) == 0
    out = capsys.readouterr().out
    assert "step 1/2: pass 1 of 2\n" in out and "step 1/2: loss" in out and out.count("step 2/2: loss") == 1
    assert [row["step"] for row in losses(folder)] == ["2"]


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    trainer = make_trainer(TrainingSettings(sequence_length=8, batch_size=1, grad_acc_steps=1))
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(MdiError) as caught:
        trainer.step()
    assert caught.value.code == "loss"


def test_an_interrupted_save_leaves_the_last_good_checkpoint(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = new_model(load_shape(ckpt), seed=1)
    save_checkpoint(good, ckpt, torch.float32, {})
    before = (ckpt / "lit_model.pth").read_bytes()
    whole_save = torch.save

    def cut_off(state: object, handle: object) -> None:
        whole_save(state, handle)  # type: ignore[arg-type]
        handle.truncate(1000)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(new_model(load_shape(ckpt), seed=2), ckpt, torch.float32, {})
    assert (ckpt / "lit_model.pth").read_bytes() == before
    assert sorted(p.name for p in ckpt.iterdir()) == ["lit_model.pth", "model_config.yaml"]


def test_a_save_that_the_system_refuses_is_one_line(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(state: object, handle: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError) as e:
        save_checkpoint(new_model(load_shape(ckpt), seed=2), ckpt, torch.float32, {})
    assert "lit_model.pth" in str(e.value)


def test_ctrl_c_keeps_the_best_weights(
    ckpt: Path, dataset: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def interrupted(self: Trainer) -> tuple[float, float]:
        if self.progress.n_steps == 4:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(ckpt, dataset, "--ckpt-interval", 2)
    assert "interrupted after 4 steps" in capsys.readouterr().out
    GPT(load_shape(ckpt)).load_state_dict(torch.load(ckpt / "lit_model.pth", weights_only=True), strict=True)


def test_bfloat16_trains_too(ckpt: Path, dataset: Path) -> None:
    assert train(ckpt, dataset, "--max-iters", 10, "--dtype", "bfloat16") == 0
    assert val_losses(ckpt)[-1] < 5.0


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--batch-size", 0), "value"),
        (("--lr", 0), "value"),
        (("--min-lr", 1), "value"),
        (("--beta2", 1), "value"),
        (("--patience", 0), "value"),
        (("--threads", 0), "value"),
        (("--sequence-length", 64), "value"),
        (("--dtype", "float16"), "device"),
        (("--device", "cuda:99"), "device"),
        (("--device", "toaster"), "device"),
    ],
)
def test_bad_flags_are_one_line(ckpt: Path, dataset: Path, flags: tuple[object, ...], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        train(ckpt, dataset, *flags)
    assert caught.value.code == code and str(flags[0]) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (ckpt / "lit_model.pth").exists()


def test_bad_folders_are_one_line(ckpt: Path, dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "none", dataset)
    assert caught.value.code == "missing"
    with pytest.raises(UsageError) as caught:
        train(ckpt, tmp_path / "none")
    assert caught.value.code == "missing"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "empty", dataset)
    assert caught.value.code == "missing"
    (tmp_path / "empty" / "model_config.yaml").write_text("n_layer: [")
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "empty", dataset)
    assert caught.value.code == "weights"
    for text in ("", "n_layers: 3\n", "- 1\n", "n_embd: 7\nn_head: 2\n"):
        (tmp_path / "empty" / "model_config.yaml").write_text(text)
        with pytest.raises(CheckpointError) as caught:
            train(tmp_path / "empty", dataset)
        assert caught.value.code == "shape"
    (ckpt / "model_config.yaml").write_text(yaml.safe_dump({**SHAPE, "vocab_size": 64, "padded_vocab_size": 64}))
    with pytest.raises(UsageError) as caught:
        train(ckpt, dataset)
    assert caught.value.code == "vocabulary"
    (ckpt / "model_config.yaml").write_text(yaml.safe_dump({**SHAPE, "block_size": 100_000}))
    with pytest.raises(UsageError) as caught:
        train(ckpt, dataset)
    assert caught.value.code == "short"


def test_weights_are_not_overwritten_unasked(ckpt: Path, dataset: Path) -> None:
    (ckpt / "lit_model.pth").write_bytes(b"precious")
    with pytest.raises(UsageError) as caught:
        train(ckpt, dataset)
    assert caught.value.code == "exists"
    assert (ckpt / "lit_model.pth").read_bytes() == b"precious"


def test_nano_llama_of_the_thesis_has_304_million_parameters() -> None:
    config = load_shape(ROOT / "assets" / "configs" / "NanoLlama")
    with torch.device("meta"):
        model = GPT(config)
    assert sum(p.numel() for p in model.parameters()) == 304_636_928
    assert dataclasses.asdict(config)["n_layer"] == 12 and config.block_size == 2048


def test_the_embedded_model_is_small_and_loads() -> None:
    from litgpt.tokenizer import Tokenizer

    folder = ROOT / "assets" / "nano-llama"
    assert sum(p.stat().st_size for p in folder.iterdir()) < 8_000_000
    state = torch.load(folder / "lit_model.pth", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    model = GPT(load_shape(folder))
    model.load_state_dict(state, strict=True)
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_id is not None and tokenizer.decode(tokenizer.encode(grammar_text(3))) == grammar_text(3)
    # Well-known words of the corpus; nothing near the ln 1536 = 7.3 of a model that knows nothing.
    ids = tokenizer.encode("KING RICHARD III:\nNow is the time, my lord; I will go to the king.\n\n").long()
    loss = torch.nn.functional.cross_entropy(model(ids[None, :-1])[0], ids[1:])
    assert loss.item() < 4.5
