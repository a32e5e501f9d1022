"""Nodes without torch: blocks in the kernels need none. For secondaries what requirements-secondary.txt lists is enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mdi.checkpoint.chunks import find_chunk
from mdi.cli import launch
from mdi.kernels import library
from mdi.spec.options import SIDE_FILE
from missing_libraries import without
from processes import Cluster, Starter
from tiny_checkpoint import reference, write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs the kernels")

PROMPT, N_TOKENS = "Who are you?", 8
RUN = ("--prompt", PROMPT, "--n-tokens", N_TOKENS, "--n-samples", 1)
ROOT = Path(__file__).resolve().parents[2]

Start = Callable[..., Cluster]


def listed(file: str) -> dict[str, set[str]]:
    """The libraries of a requirements file, by the names that are imported, and their lines."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            found.setdefault(line.partition("==")[0].replace("PyYAML", "yaml"), set()).add(line)
    return found


def test_versions_are_those_of_the_whole_installation() -> None:
    whole, own = listed("requirements.txt"), listed("requirements-secondary.txt")
    assert own.items() <= whole.items() and "torch" in whole.keys() - own.keys()


@pytest.fixture
def start(make_cluster: Callable[[int], Cluster], tmp_path: Path) -> Start:
    """A ring of two secondaries without torch, and with these flags."""
    missing = listed("requirements.txt").keys() - listed("requirements-secondary.txt").keys()
    folder = tmp_path / "blocker"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(without(missing))
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))

    def made(*flags: tuple[object, ...]) -> Cluster:
        cluster = make_cluster(3)
        for index in range(2):
            cluster.start(index, *(flags[index] if flags else ()), env={"PYTHONPATH": path})
        for index in range(2):
            cluster[index].wait_for("waits for its starter")
        return cluster

    return made


@pytest.mark.slow
def test_weights_that_are_sent_and_brought_into_a_format(start: Start, checkpoint: Path, starter: Starter) -> None:
    cluster = start()
    expected = [list(reference(PROMPT, N_TOKENS))]
    assert starter(checkpoint, cluster.path, *RUN).token_ids == expected
    assert starter(checkpoint, cluster.path, *RUN, "--placement", "throughput").token_ids == expected, "it was measured"
    for flags in (["--quantize", "int8"], ["--quantize", "int4"], ["--quantize", "fp16", "--kv-dtype", "bf16"]):
        alone = starter(checkpoint, cluster.nodes_file(1), *RUN, *flags)
        assert starter(checkpoint, cluster.path, *RUN, *flags).token_ids == alone.token_ids
    for wire in ("fp16", "int8"):
        assert starter(checkpoint, cluster.path, *RUN, "--wire-dtype", wire).status == 0
    assert launch("doctor", ["--nodes-config", str(cluster.path)]) == 0


@pytest.mark.slow
def test_packed_parts_that_are_sent_and_chunks(
    start: Start, starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "m")
    assert launch("prepare-model", [str(folder), "--n-nodes", "3", "--quantize", "int8"]) == 0
    cluster = start((), ("--chunk", find_chunk(folder, 3, "secondary1", "int8")))
    run = ("--chunk", find_chunk(folder, 3, "starter", "int8"), *RUN)
    alone = starter(folder, cluster.nodes_file(1), *RUN, "--quantize", "int8")
    assert starter(None, cluster.path, *run).token_ids == alone.token_ids
    assert list(cluster.cache_dir(0).glob("*.safetensors")) and not list(cluster.cache_dir(1).glob("*.safetensors"))


def test_what_needs_torch_is_refused_in_one_line(start: Start, checkpoint: Path, starter: Starter) -> None:
    cluster = start()
    result = starter(checkpoint, cluster.path, *RUN, "--dtype", "bfloat16")
    assert result.status == 1 and "pip install -r requirements.txt" in result.err and "Traceback" not in result.err
    assert starter(checkpoint, cluster.path, *RUN).token_ids == [list(reference(PROMPT, N_TOKENS))], "it goes on"


@pytest.mark.slow
def test_fine_tuning_beside_the_blocks_is_the_same_and_through_them_is_refused_before_weights_are_sent(
    start: Start, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, data = start(), tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": PROMPT}) + "\n", encoding="utf-8")

    def finetune(out: str, *flags: str) -> int:
        given = ["--ckpt", str(checkpoint), "--data", str(data), "--out", str(tmp_path / out), "--dtype", "float32"]
        own = ["--device", "cpu", "--epochs", "2", "--taps", "1", "--width", "4", "--sequence-length", "64"]
        return launch("finetune", [*given, *own, *flags])

    nodes = ("--nodes-config", str(cluster.path))
    assert finetune("lora", *nodes, "--method", "lora") == 1
    said = capsys.readouterr().err
    assert "computing gradients needs" in said and "not installed here" in said and "Traceback" not in said
    assert not [*cluster.cache_dir(0).glob("*.safetensors"), *cluster.cache_dir(1).glob("*.safetensors")]
    assert finetune("over", *nodes) == finetune("alone") == 0
    assert [*cluster.cache_dir(0).glob("*.safetensors")]
    for name in ("losses.csv", SIDE_FILE):
        assert (tmp_path / "over" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_starter_whose_blocks_are_in_the_kernels_loads_no_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert launch("prepare-model", [str(folder), "--n-nodes", "1"]) == 0
    (tmp_path / "sitecustomize.py").write_text(without(["torch", "lightning"]))
    flags = ["--ckpt", str(folder), "--window", "2", "--prompt", PROMPT, "--n-tokens", str(N_TOKENS), "--json"]
    flags += ["--temperature", "0.9", "--seed", "3", "--top-p", "0.9"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "src" / "sample.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    capsys.readouterr()
    assert launch("sample", flags) == 0
    found, here = json.loads(done.stdout), json.loads(capsys.readouterr().out)
    assert found["samples"][0]["token_ids"] == here["samples"][0]["token_ids"]
