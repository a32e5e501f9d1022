"""Data-parallel training: two real processes, started by torchrun, give the losses of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from litgpt.config import Config

from mdi.errors import UsageError
from mdi_training.loop import Trainer
from mdi_training.new_model import new_model
from mdi_training.processes import Processes
from mdi_training.training_settings import TrainingSettings
from mdi_training.windows import Windows
from tiny_training import SHAPE, argv_of, losses, make_dataset, make_shape, train

SRC = Path(__file__).resolve().parents[1] / "src"
FLAGS = ("--max-iters", 8, "--ckpt-interval", 3, "--log-interval", 1, "--grad-acc-steps", 4, "--batch-size", 2)
FLAGS += ("--sequence-length", 16)


def torchrun(n_processes: int, *argv: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_processes)]
    command += ["--master-addr", "127.0.0.1", "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "--module", "mdi", "train", *map(str, argv)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    "kind", [pytest.param("dense", marks=pytest.mark.slow), "experts"]
)  # which has the dense layers, too
def test_two_processes_give_the_losses_of_one(tmp_path: Path, kind: str) -> None:
    dataset = make_dataset(tmp_path / "data")
    # More experts than a batch can choose, so that some get no token.
    experts = dict(mlp_class_name="LLaMAMoE", n_expert=40, n_expert_per_token=1, moe_intermediate_size=16)
    shape = experts if kind == "experts" else {}
    one, two = make_shape(tmp_path / "one", **shape), make_shape(tmp_path / "two", **shape)
    assert train(one, dataset, *FLAGS) == 0
    done = torchrun(2, *argv_of(two, dataset, *FLAGS))
    assert done.returncode == 0, done.stderr
    assert "Warning: " not in done.stderr, done.stderr
    assert "on 2 processes (cpu, ...)" in done.stdout and done.stdout.count("step 8/8") == 1
    assert [row["step"] for row in losses(two)] == [str(i) for i in range(1, 9)]
    for name in ("lr", "train_loss", "val_loss"):
        found, expected = ([float(row[name] or 0) for row in losses(folder)] for folder in (two, one))
        assert found == pytest.approx(expected, rel=2e-4), name
    states = [torch.load(folder / "lit_model.pth", weights_only=True) for folder in (one, two)]
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], atol=2e-3, rtol=1e-2)
    # What two processes began, one goes on with.
    assert train(two, dataset, *FLAGS, "--max-iters", 10, "--init", "resume") == 0
    assert [row["step"] for row in losses(two)][-1] == "10"


def test_forward_passes_have_to_be_shared_evenly() -> None:
    model = new_model(Config(**SHAPE), seed=0)
    windows = Windows(np.zeros(100, dtype=np.uint16), 8, seed=0)
    settings = TrainingSettings(sequence_length=8, grad_acc_steps=3)
    with pytest.raises(UsageError) as caught:
        Trainer(model, windows, windows, settings, processes=Processes(0, 2))
    assert caught.value.code == "value"


def test_who_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Processes.from_environment() == Processes(0, 1, 0, 1)
    for name, value in dict(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4).items():
        monkeypatch.setenv(name, str(value))
    processes = Processes.from_environment()
    assert processes == Processes(5, 8, 1, 4) and not processes.is_first
    assert list(processes.share(24)) == [5, 13, 21]
    assert processes.device_for("cpu") == "cpu"
    with pytest.raises(UsageError) as caught:
        processes.device_for("cuda:0")
    assert caught.value.code == "device"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert processes.device_for("cuda") == "cuda:1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError) as caught:
        processes.device_for("cuda")
    assert caught.value.code == "device"
    for name, value in (("RANK", "8"), ("RANK", "x"), ("LOCAL_RANK", "4")):
        with monkeypatch.context() as broken, pytest.raises(UsageError) as caught:
            broken.setenv(name, value)
            Processes.from_environment()
        assert caught.value.code == "environment"


def test_shares_are_disjoint_and_whole() -> None:
    for count in (1, 2, 3):
        parts = [part for rank in range(count) for part in Processes(rank, count).share(6)]
        assert sorted(parts) == list(range(6))
