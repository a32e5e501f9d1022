"""Files as programs of before wrote them, in files/: of a tiny model whose numbers follow from their names.

They are written once, by `python -m golden.golden_files FOLDER` with tests/ and src/ in PYTHONPATH, and never again for what is
there: a file that users may have must load for good, or be refused with a reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from litgpt.config import Config

from golden.golden_values import HERE, lit_folder, numbers
from mdi.checkpoint.adapters import weights_hash
from mdi.checkpoint.chunks import write_chunks
from mdi.checkpoint.derived import PackedSource
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.source import open_source
from mdi.model.plain import ModelConfig
from mdi.run.journal import Journal, JournalText, RunRecord
from mdi.stages.side import Base, SideShape, write_side
from mdi_training.checkpoint import SavedRun, save_state
from mdi_training.examples import Example
from mdi_training.loop import TrainingProgress, make_optimizer
from mdi_training.lora import add_adapters, load_base, trained_weights
from mdi_training.side_training import SideModule, SideTraining
from mdi_training.training_settings import LoraSettings, TrainingSettings
from mdi_training.tuned_tensors import TunedTensors, TuningKind, new_tensors
from mdi_training.tuning import Tuning, TuningSettings

FILES = HERE / "files"
SHAPE = Config(
    name="golden", block_size=64, n_layer=2, n_embd=8, n_head=2, n_query_groups=1, vocab_size=24, padded_vocab_size=24,
    intermediate_size=16, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
    mlp_class_name="LLaMAMLP",
)  # fmt: skip
CONFIG = ModelConfig.from_litgpt(SHAPE)
PACKED = ("int8", "int4", "mxfp4", "bf16")

RECORD = RunRecord(
    {"ckpt": "golden", "n_tokens": 9, "seed": 7}, "a" * 64, [JournalText("one", [1, 2]), JournalText("two", [3])], 0, "b" * 64
)  # fmt: skip
EXAMPLES = [Example((1, 2, 3), 1, (3, 4)), Example((5, 6), 0, (6, 7))]
TUNING = TuningSettings(epochs=2, batch_size=2, lr=0.01, seed=3)
KINDS = {
    "lora": TuningKind("lora", rank=2, targets=("query", "value", "mlp")),
    "prompt": TuningKind("prompt", length=3),
    "deep-prompt": TuningKind("deep-prompt", length=3),
    "prefix": TuningKind("prefix", length=3),
    "classes": TuningKind("lora", rank=1, labels=("good", "bad")),
}
SIDES = {
    "side": SideShape(Base("golden", "c" * 64, "d" * 64, "float32"), 8, (0,), 3, "lm"),
    "side-classes": SideShape(Base("golden", "c" * 64, "d" * 64, "float32"), 8, (0,), 3, "classes", ("good", "bad")),
}
LORA = LoraSettings(1)
TRAINING = TrainingSettings(sequence_length=8, batch_size=1, grad_acc_steps=1, max_iters=5)
PROGRESS = TrainingProgress(n_steps=1, best_val_loss=2.5, n_worse=1, elapsed_s=3.0)


class Steady(Tuning):
    """Its gradients follow from the parameters alone: what is written and read is that of each training."""

    def learn(self, indices: Sequence[int]) -> float:
        total = sum((one.square().sum() for one in self.named.values()), torch.zeros(()))
        total.backward()
        return float(total.detach())

    def sums(self, indices: Sequence[int]) -> Sequence[object]:  # type: ignore[override]
        return ()


def side_module(name: str) -> SideModule:
    module = SideModule(SIDES[name], seed=1)
    fill(dict(module.named_parameters()))
    return module


class SteadySide(SideTraining):
    """The same with the parameters of a side network."""

    learn = Steady.learn


def side_training(name: str) -> SteadySide:
    return SteadySide(side_module(name), None, None, EXAMPLES, 2, TUNING)  # type: ignore[arg-type]


def tensors_training(tuned: TunedTensors) -> Steady:
    return Steady(tuned.named, EXAMPLES, 2, TUNING, {**asdict(tuned.kind), "parts": 2}, "e" * 64)


@torch.no_grad()
def fill(named: dict[str, torch.nn.Parameter]) -> None:
    for name, parameter in named.items():
        parameter.copy_(torch.from_numpy(numbers(name, tuple(parameter.shape))))


def tuned(name: str, model: Path, *, is_filled: bool) -> TunedTensors:
    source = open_source(model)
    made = new_tensors(KINDS[name], CONFIG, 1, lambda part: source)
    if is_filled:
        fill(made.named)
    return made


def trained_model(model: Path) -> torch.nn.Module:
    """With adapters whose numbers follow from their names, after a step."""
    made = add_adapters(SHAPE, LORA, 1)
    source = open_source(model)
    load_base(made, {name: t for part in source.part_names() for name, t in source.tensors(part).items()})
    fill({name: one for name, one in made.named_parameters() if one.requires_grad})
    return made


def write(folder: Path) -> None:
    """All of them."""
    model = lit_folder(folder / "model", CONFIG)
    source = open_source(model)
    journal = Journal.new(folder / "journal", replace(RECORD))
    journal.add(0, [4, 5], None)
    journal.add(1, [6], "length", may_differ_from=0)
    journal.close()
    for name in KINDS:
        made = tuned(name, model, is_filled=True)
        made.write(folder / name, "golden", weights_hash(source))
        training = tensors_training(made)
        training.step()
        training.save(folder / name)
    for name in SIDES:
        write_side(folder / name, SIDES[name], side_module(name).tensors())
        side = side_training(name)
        side.step()
        side.save(folder / name)
    trained = trained_model(model)
    optimizer = make_optimizer(trained, TRAINING)  # type: ignore[arg-type]
    sum(one.square().sum() for one in trained.parameters() if one.requires_grad).backward()  # type: ignore[union-attr]
    optimizer.step()
    weights = {name: one.clone() for name, one in trained_weights(trained).items()}  # type: ignore[arg-type]
    save_state(
        folder / "training", SavedRun(TRAINING, PROGRESS, weights, optimizer.state_dict(), {}, {}, "f" * 64, LORA, None)
    )
    for form in PACKED:
        packed = PackedSource(source, Packing(form, form))
        for part in ("block.1", "embedding"):
            (folder / f"{part}.{form}.safetensors").write_bytes(b"".join(map(bytes, packed.pieces(part))))
    write_chunks(source, folder, [1, 1])
    write_chunks(PackedSource(source, Packing("int4", "int8")), folder, [1, 1])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
