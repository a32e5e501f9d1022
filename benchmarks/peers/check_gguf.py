"""Whether all systems compute the same model: greedy tokens in float32, side by side."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from peers.protocol import Case
from random_checkpoint import make_checkpoint

if TYPE_CHECKING:
    from side_by_side.scenarios import Setup

CASE = Case(3, 24, 24)


def check(setup: Setup, python: str) -> int:
    """Compare with litgpt's model without caches; returns the exit status."""
    from side_by_side.files import make_all
    from side_by_side.runner import MODULES, say
    from side_by_side.workers import Worker

    make_checkpoint(setup.ckpt, setup.shape)
    expected = reference(setup)
    specs = [setup.llama("float32", cache="float32"), setup.ring("float32", 2)]
    if make_all(setup.needs, python):
        return 1
    status = 0
    for spec in specs:
        interpreter = sys.executable if spec.kind == "ring" else python
        worker = Worker(
            spec.name, interpreter, MODULES[spec.kind], spec.options, list(spec.cores), setup.ckpt.parent / "logs",
            spec.environment,
        )  # fmt: skip
        worker.wait_ready(120)
        found = worker.run(CASE.to_json(), 300)["ids"]
        worker.end()
        n_same = sum(
            a == b for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
        )
        n_all = sum(map(len, expected))
        say(f"{spec.name}: {n_same} of {n_all} greedy tokens are litgpt's")
        status |= n_same != n_all
    return status


@torch.inference_mode()
def reference(setup: Setup) -> list[list[int]]:
    """litgpt's `GPT`, the whole text computed anew for each token."""
    from litgpt.config import Config
    from litgpt.model import GPT

    torch.set_num_threads(1)
    model = GPT(Config.from_file(setup.ckpt / "model_config.yaml"))
    weights = torch.load(setup.ckpt / "lit_model.pth", weights_only=True, mmap=True)
    model.load_state_dict({name: t.float() for name, t in weights.items()}, assign=True)
    texts = []
    for i in range(CASE.n_sequences):
        ids = CASE.prompt(i)
        for _ in range(CASE.n_new):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        texts.append(ids[CASE.n_prompt :])
    return texts
