"""The launchers of old/: three roles of NanoGPT started one by one, from a text to a ring; GPT-2 with its local ring."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gpt_models import TEXT, write_gpt2

from gpt.model import PositionGPT, greedy
from gpt.nodes_file import arrange
from gpt.weights import GPTConfig, open_gpt2, open_nano
from mdi.run.local import free_ports
from processes import Process, Spawn

OLD = Path(__file__).resolve().parents[2] / "old"


def launched(spawn: Spawn, launcher: str, *args: object) -> Process:
    return spawn("", *args, command=[sys.executable, str(OLD / f"{launcher}.py")])


def nodes_file(path: Path) -> Path:
    ports = iter(free_ports(6))
    path.write_text(json.dumps(arrange([
        {"addr": "127.0.0.1", "communication": {"port": next(ports)}, "inference": {"port_in": next(ports)}, "threads": 1}
        for _ in range(3)
    ])))  # fmt: skip
    return path


@pytest.mark.slow  # six programs of stages that seldom change
def test_nanogpt_from_a_text_to_three_roles(spawn: Spawn, tmp_path: Path) -> None:
    text, data, ckpt = tmp_path / "text.txt", tmp_path / "data", tmp_path / "nano"
    text.write_text(TEXT * 20)
    nodes = nodes_file(tmp_path / "nodes.json")
    cache = ("--cache-dir", tmp_path / "cache")
    workers = [
        launched(spawn, "nanoGPT/intermediate", "--nodes-config", nodes, 0, *cache),
        launched(spawn, "nanoGPT/finisher", "--nodes-config", nodes, *cache),
    ]
    prepared = launched(spawn, "nanoGPT/prepare_data", text, "--out", data)
    assert prepared.wait() == 0, prepared.story()
    shape = ("--blocks", 4, "--n-embd", 24, "--n-head", 2, "--context", 12, "--dropout", 0.1)
    small = ("--max-iters", 60, "--batch-size", 8, "--grad-acc-steps", 1, "--ckpt-interval", 30, "--lr", 1e-2)
    trained = launched(spawn, "nanoGPT/train", "--ckpt", ckpt, "--dataset", data, *shape, *small, "--threads", 1)
    assert trained.wait() == 0, trained.story()
    flags = (
        "--n-tokens",
        30,
        "--temperature",
        0,
        "--json",
        "--prompt",
        "The ring",
        "--prompt",
        "Who",
        "--prompt",
        "\n",
    )
    run = launched(spawn, "nanoGPT/starter", "--ckpt", ckpt, "--nodes-config", nodes, "--stop-nodes", *flags)
    assert run.wait() == 0, run.story()
    found = json.loads(run.out)
    assert [node["name"] for node in found["nodes"]] == ["starter", "intermediate0", "finisher"]
    source = open_nano(ckpt)
    model = PositionGPT(GPTConfig(**source.config.plain())).eval()
    model.load_state_dict({name: source.tensor(name) for name in source.specs})
    for sample in found["samples"]:
        assert sample["token_ids"] == greedy(model, sample["prompt_ids"], 30)
    assert all(worker.wait() == 0 for worker in workers), "--stop-nodes ends them"


@pytest.mark.slow
def test_gpt2_over_three_nodes_of_this_machine(spawn: Spawn, tmp_path: Path) -> None:
    """More samples than nodes; the tokenizer of vocab.json and merges.txt."""
    ckpt = write_gpt2(tmp_path / "gpt2")
    prompts = ["Hello there", "ring", "a b c d", "?"]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    run = launched(spawn, "GPT2/local_ring", "--nodes", 3, "--ckpt", ckpt, *flags, "--n-tokens", 50, "--temperature", 0,
                   "--json")  # fmt: skip
    assert run.wait() == 0, run.story()
    source = open_gpt2(ckpt)
    model = PositionGPT(GPTConfig(**source.config.plain())).eval()
    model.load_state_dict({name: source.tensor(name) for name in source.specs})
    vocab = json.loads((ckpt / "vocab.json").read_text())
    for prompt, sample in zip(prompts, json.loads(run.out)["samples"], strict=True):
        assert sample["prompt_ids"] == [vocab[c] for c in prompt.replace(" ", "Ġ")]
        ids = greedy(model, sample["prompt_ids"], 50)
        assert sample["token_ids"] == (ids[: ids.index(96)] if 96 in ids else ids)
