"""Full disks and processes killed while they write: the checkpoints that were good before stay whole."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from litgpt.model import GPT

from forked_children import ForkedChildren
from mdi.errors import MdiError, UsageError
from mdi_training.checkpoint import load_state
from mdi_training.new_model import load_shape
from tiny_training import argv_of, curve, make_dataset, make_shape, train

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' limits on file sizes")

FLAGS = ("--max-iters", 12, "--ckpt-interval", 4, "--log-interval", 1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def children() -> Iterator[ForkedChildren]:
    with ForkedChildren("mdi.cli", "mdi_training.train_command", "mdi_training.loop", "litgpt.model") as made:
        yield made


def run_child(children: ForkedChildren, code: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """train.py in a process of its own, after some code that makes trouble."""
    code = f"{code}\nimport sys\nfrom mdi.cli import launch\nsys.exit(launch('train', sys.argv[1:]))"
    with tempfile.TemporaryDirectory() as folder:
        return children.run(code, [str(part) for part in argv], Path(folder))


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_loads(folder: Path) -> None:
    state = torch.load(folder / "lit_model.pth", weights_only=True)
    GPT(load_shape(folder)).load_state_dict(state, strict=True)


def limit(n_bytes: int) -> str:
    """A disk on which no file can grow longer."""
    return f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({n_bytes}, {n_bytes}))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refused", "n_bytes"),
    [("ckpt/lit_model.pth", lambda w, s: w // 2), ("ckpt/train_state.pth", lambda w, s: s - 1000)],
)
def test_a_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, dataset: Path, children: ForkedChildren, refused: str, n_bytes: Callable[[int, int], int]
) -> None:
    folder = make_shape(tmp_path / "ckpt")
    assert train(folder, dataset, *FLAGS) == 0
    expected = curve(folder)
    sizes = [(folder / name).stat().st_size for name in ("lit_model.pth", "train_state.pth")]
    before = hashes(folder)
    # A constant learning rate, so that there is something better to save.
    flags = ("--init", "resume", "--max-iters", 16, "--schedule", "constant")
    done = run_child(children, limit(n_bytes(*sizes)), *argv_of(folder, dataset, *flags))
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and f"{refused}: " in lines[0] and "unchanged" in lines[0], done.stderr
    assert "Traceback" not in done.stderr
    after = hashes(folder)
    changed = {name for name in before if after.get(name) != before[name]}
    if refused.endswith("lit_model.pth"):
        assert changed <= {"losses.csv", "losses.png"}
    assert "train_state.pth" not in changed and not list(folder.rglob("*.part"))
    assert_loads(folder)
    assert_loads(folder / "last")
    assert load_state(folder).progress.n_steps == 12
    # With room again, it goes on.
    assert train(folder, dataset, "--init", "resume", "--max-iters", 16, "--log-interval", 1) == 0
    assert curve(folder)[:12] == expected


KILL = """
import os, signal, torch
whole, count = torch.save, 0
def save(content, handle):
    global count
    count += 1
    if count == {n_saves}:
        handle.write(b"half of what was to be written")
        handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    whole(content, handle)
torch.save = save
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """What a run that nothing disturbs leaves."""
    folder = make_shape(tmp_path_factory.mktemp("whole"))
    assert train(folder, dataset, *FLAGS) == 0
    return folder


@pytest.mark.parametrize("n_saves", [4, 5, 6])  # the second evaluation's: best weights, last weights, state
def test_a_kill_while_saving_leaves_something_to_go_on_from(
    tmp_path: Path, dataset: Path, children: ForkedChildren, whole: Path, n_saves: int
) -> None:
    folder = make_shape(tmp_path / "ckpt")
    done = run_child(children, KILL.format(n_saves=n_saves), *argv_of(folder, dataset, *FLAGS))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(folder.rglob("*.part")), "it was killed in the middle of a file"
    assert_loads(folder)
    assert_loads(folder / "last")
    assert load_state(folder).progress.n_steps == 4
    assert train(folder, dataset, *FLAGS, "--init", "resume") == 0
    assert curve(folder) == curve(whole), "as if nothing had happened"
    assert not list(folder.rglob("*.part"))


def test_bad_data_touches_nothing(tmp_path: Path, dataset: Path) -> None:
    """A data set that was damaged between two runs."""
    data = make_dataset(tmp_path / "data")
    folder = make_shape(tmp_path / "ckpt")
    assert train(folder, data, "--max-iters", 4) == 0
    before = hashes(folder)
    content = bytearray((data / "train.bin").read_bytes())
    content[100] ^= 255
    (data / "train.bin").write_bytes(bytes(content))
    for flags in (("--init", "resume", "--max-iters", 8), ("--overwrite",)):
        with pytest.raises(UsageError) as caught:
            train(folder, data, *flags)
        assert caught.value.code == "damaged"
    (data / "val.bin").unlink()
    (data / "train.bin").unlink()
    with pytest.raises(UsageError) as caught:
        train(folder, data, "--init", "resume", "--max-iters", 8)
    assert caught.value.code == "damaged"
    assert hashes(folder) == before


def test_too_little_space_is_told_before_the_first_step(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    folder = make_shape(tmp_path / "ckpt")
    with pytest.raises(UsageError) as caught:
        train(folder, dataset)
    assert caught.value.code == "disk"
    assert [path.name for path in folder.iterdir()] == ["model_config.yaml"]


def test_a_loss_that_is_no_number_keeps_what_was_good(tmp_path: Path, dataset: Path) -> None:
    folder = make_shape(tmp_path / "ckpt")
    assert train(folder, dataset, "--max-iters", 4, "--ckpt-interval", 2) == 0
    before = hashes(folder)
    with pytest.raises(MdiError) as caught:
        train(
            folder,
            dataset,
            "--init",
            "resume",
            "--max-iters",
            40,
            "--lr",
            1e30,
            "--grad-clip",
            0,
            "--ckpt-interval",
            20,
        )
    assert caught.value.code == "loss"
    after = hashes(folder)
    assert {name for name in before if after[name] != before[name]} <= {"losses.csv", "losses.png"}
