"""Loss curves of fine-tuning through the blocks of a ring: over 1 to 3 nodes, after a killed node, and on one machine's torch.

    benchmarks/tuning_curves.py                 a tiny model of five blocks, 200 steps with each method, in float32

A node's process is killed in the middle of another curve over three; that run goes on over two. All compute with one thread.
The other machine's curve is that of litgpt's GPT with the products of LoRA in its weights, with torch's AdamW.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn import functional

import on_path  # noqa: F401
from mdi.model.plain import ModelConfig, spec_of
from mdi.run.local import LocalRing
from mdi.run.nodes import GivenNodes, OwnProcesses
from mdi.run.run import Run
from mdi.spec.cluster import standalone
from mdi.spec.options import LORA, METHODS, StarterOptions
from mdi_training.examples import Example
from mdi_training.frozen_head import FrozenHead, Sum
from mdi_training.ring_training import RingTraining, TunedModel, embedding_of
from mdi_training.tuned_tensors import TunedTensors, TuningKind, new_tensors
from mdi_training.tuning import Tuning, TuningSettings
from records import add_json_flag, parsed, save, told
from tiny_checkpoint import tiny_gpt, write_checkpoint

N_EXAMPLES, BATCH, LENGTH = 16, 4, 24
TARGETS = ("query", "key", "value", "projection", "mlp")


def examples() -> list[Example]:
    generator = np.random.default_rng(5)
    texts = [tuple(map(int, generator.integers(0, 300, LENGTH - i % 5))) for i in range(N_EXAMPLES)]
    return [Example(ids[:-1], 0, ids[1:]) for ids in texts]


def settings(n_steps: int) -> TuningSettings:
    return TuningSettings(n_steps // (N_EXAMPLES // BATCH), BATCH, 0.002, 7)


class OneMachine(Tuning):
    """LoRA in litgpt's GPT, on this machine, without any of the ring's code."""

    def __init__(self, tuned: TunedTensors, n_steps: int) -> None:
        super().__init__(tuned.named, examples(), N_EXAMPLES, settings(n_steps), {})
        self._gpt, self._scale = tiny_gpt().requires_grad_(False), tuned.kind.alpha / tuned.kind.rank

    def _product(self, block: int, module: str) -> torch.Tensor:
        path = f"base_model.model.model.layers.{block}.{module}"
        return self._scale * self.named[f"{path}.lora_B.weight"] @ self.named[f"{path}.lora_A.weight"]

    def learn(self, indices: Sequence[int]) -> float:
        own = dict(self._gpt.named_parameters())
        for i in range(self._gpt.config.n_layer):
            added = {
                "attn.qkv": torch.cat([self._product(i, f"self_attn.{one}_proj") for one in "qkv"]),
                "attn.proj": self._product(i, "self_attn.o_proj"), "mlp.fc_1": self._product(i, "mlp.gate_proj"),
                "mlp.fc_2": self._product(i, "mlp.up_proj"), "mlp.proj": self._product(i, "mlp.down_proj"),
            }  # fmt: skip
            for layer, product in added.items():
                name = f"transformer.h.{i}.{layer}.weight"
                own[name] = own[name] + product
        total, n_rows = torch.zeros(()), sum(self.examples[index].n_rows for index in indices)
        for index in indices:
            one = self.examples[index]
            logits = torch.func.functional_call(self._gpt, own, (torch.tensor([one.ids]),))[0]
            total = total + functional.cross_entropy(logits, torch.tensor(one.targets), reduction="sum") / n_rows
        total.backward()
        return float(total.detach())

    def sums(self, indices: Sequence[int]) -> Iterator[Sum]:
        raise AssertionError("only losses of steps are compared")


def curve(checkpoint: Path, cache: Path, method: str, n_nodes: int, n_steps: int, killed_at: int | None) -> list[float]:
    """The loss of each step; a node's process is killed after step `killed_at`."""
    options = StarterOptions(
        ckpt=checkpoint,
        prompt_style="none",
        device="cpu",
        dtype="float32",
        placement="even",
        cache_dir=cache,
        threads=1,
    )
    with ExitStack() as stack:
        source: Any = GivenNodes(standalone())
        if n_nodes > 1:
            source = OwnProcesses(lambda: LocalRing(n_nodes, None, 1, None, False, False), lambda ring: ring.cluster)
            stack.enter_context(source)
        run = stack.enter_context(Run(source, options, 2 * LENGTH, n_texts=1))
        weights, kind = run.model.weights, TuningKind(method, 4, 8, TARGETS, 8)
        tuned = new_tensors(kind, weights.config, 3, weights.source_of, embedding_of(run))
        state = tiny_gpt().state_dict()
        head = FrozenHead(
            spec_of(weights.config),
            {name: state[name].numpy() for name in ("lm_head.weight", "transformer.ln_f.weight")},
        )
        training = RingTraining(TunedModel(run, tuned, head), examples(), N_EXAMPLES, settings(n_steps), 2)
        found = []
        for i in range(n_steps):
            if i == killed_at:
                max(psutil.Process().children(), key=psutil.Process.create_time).kill()
            found.append(training.step())
        assert run.n_recoveries == (killed_at is not None)
        return found


def farthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--method", action="append", choices=METHODS[1:], help="only this one; repeatable")
    add_json_flag(parser, "tuning_curves")
    args = parsed(parser)
    if args.steps < 1 or args.steps % (N_EXAMPLES // BATCH):
        parser.error(f"--steps: {args.steps} are no whole passes of {N_EXAMPLES // BATCH} steps")
    torch.set_num_threads(1)  # as many as the other nodes have: products are added up in other orders by several
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "tiny", with_end=False)
        for method in args.method or METHODS[1:]:
            alone = curve(checkpoint, Path(folder), method, 1, args.steps, None)
            row: dict[str, Any] = {"first": alone[0], "last": alone[-1]}
            cases = {"2 nodes": (2, None), "3 nodes": (3, None), "3 nodes, one of them killed": (3, args.steps // 2)}
            for name, (n_nodes, killed_at) in cases.items():
                row[name] = farthest(curve(checkpoint, Path(folder), method, n_nodes, args.steps, killed_at), alone)
            if method == LORA:
                tuned = new_tensors(
                    TuningKind(method, 4, 8, TARGETS, 8),
                    ModelConfig.from_litgpt(tiny_gpt().config),
                    3,
                    lambda part: NoNorms(),
                )
                own = OneMachine(tuned, args.steps)
                row["one machine's torch"] = farthest([own.step() for _ in range(args.steps)], alone)
            result[method] = row
            differences = ", ".join(
                f"{name} {value:.1e}" for name, value in row.items() if name not in ("first", "last")
            )
            print(
                f"{method:12} loss {alone[0]:.4f} to {alone[-1]:.4f}; largest relative difference: {differences}",
                flush=True,
            )
    save(args.json, {"flags": told(args, "json"), "curves": result})


class NoNorms:
    specs: dict[str, Any] = {}


if __name__ == "__main__":
    main()
