#!/usr/bin/env python3
"""What the weight formats cost in quality: perplexity, and agreement of the most probable token.

    benchmarks/quality.py --text tiny-shakespeare.txt

Everything runs in the kernels, with the formats as prepare_model.py writes them. `--text` is a text of which
the model has not seen the last tenth; for the embedded model that is tiny Shakespeare
(https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt).

The same is measured on a copy with planted outliers: in each norm and each MLP, a five-hundredth of the channels (one at
least) is made 30 times larger, and undone in the layer that reads it. In exact arithmetic the copy is the same model.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import on_path
from mdi.checkpoint.packing import Packing
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.source import LitCheckpoint
from mdi.checkpoint.torch_tensors import as_array
from mdi.checkpoint.weights import WeightSource
from mdi.kernels.weight_formats import LAYOUTS
from mdi.model.plain import spec_of
from mdi.stages.kernel_stage import KernelStage, Resident
from mdi.text.texts import TextCodec
from records import add_json_flag, save

FACTOR, SHARE = 30.0, 0.002
FORMATS = [name for name in LAYOUTS if name != "float32"]


class ChangedSource(WeightSource):
    """Another source with some tensors in the place of its own."""

    def __init__(self, source: WeightSource, changed: Mapping[str, torch.Tensor]) -> None:
        self._source, self._changed = source, changed
        self.model, self.config = source.model, source.config
        self.config_hash, self.dtype = source.config_hash, source.dtype
        self.specs = {name: TensorSpec("F32", spec.shape) for name, spec in source.specs.items()}

    def array(self, name: str) -> np.ndarray:
        return as_array(self._changed[name] if name in self._changed else self._source.tensor(name).float())

    def part_names(self) -> list[str]:
        return self._source.part_names()

    def known(self, part: str) -> None:
        return None

    def remember(self, info: object) -> None: ...

    def release(self) -> None:
        self._source.release()


def planted(source: WeightSource, seed: int = 1) -> WeightSource:
    """The same model with outlier channels (Llama's layers only)."""
    generator = torch.Generator().manual_seed(seed)
    changed: dict[str, torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        return changed.setdefault(name, source.tensor(name).float().clone())

    def plant(grown: str, undone: Sequence[str]) -> None:
        n = tensor(grown).size(0)
        channels = torch.randperm(n, generator=generator)[: max(1, round(SHARE * n))]
        tensor(grown)[channels] *= FACTOR
        for name in undone:
            tensor(name)[:, channels] /= FACTOR

    for i in range(source.config.n_layer):
        block = f"transformer.h.{i}."
        plant(f"{block}norm_1.weight", [f"{block}attn.qkv.weight"])
        plant(f"{block}norm_2.weight", [f"{block}mlp.fc_1.weight", f"{block}mlp.fc_2.weight"])
        plant(f"{block}mlp.fc_2.weight", [f"{block}mlp.proj.weight"])
    plant("transformer.ln_f.weight", ["lm_head.weight"])
    return ChangedSource(source, changed)


def stage_of(source: WeightSource, form: str) -> KernelStage:
    """The whole model in one format, head and embedding too."""
    weights = Resident(source.part_names(), lambda part: source.weights(part, Packing(form, form)))
    stage = KernelStage(spec_of(source.config), 0, source.config.n_layer, weights)
    stage.prepare(source.config.block_size)
    return stage


def judge(stage: KernelStage, ids: Sequence[int]) -> tuple[float, torch.Tensor]:
    """Nats per token, and the most probable token at each position, over windows of the model's whole context."""
    length = stage.max_length
    total, best = 0.0, []
    for number, start in enumerate(range(0, len(ids) - length, length)):
        window = np.array(ids[start : start + length + 1])
        rows = stage(stage.embed(window[:-1]), [(number, 0, length)])
        stage.caches.free(number)
        logits = torch.from_numpy(stage.head(rows))
        total += F.cross_entropy(logits, torch.from_numpy(window[1:]), reduction="sum").item()
        best.append(logits.argmax(dim=-1))
    found = torch.cat(best)
    return total / found.numel(), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, default=on_path.ROOT / "assets" / "nano-llama")
    parser.add_argument("--text", type=Path, required=True, help="its last tenth is what is measured on")
    parser.add_argument("--n-tokens", type=int, default=20_000, help="of the held-out text (default: 20000)")
    add_json_flag(parser, "quality")
    args = parser.parse_args()
    codec = TextCodec.from_checkpoint(args.ckpt)
    text = args.text.read_text(encoding="utf-8")
    ids = codec.encode(text[int(len(text) * 0.9) :])[: args.n_tokens]
    checkpoint = LitCheckpoint(args.ckpt)
    results: dict[str, dict[str, dict[str, float]]] = {"model": {}}
    print(f"{'model':<10}{'format':<8}{'perplexity':>11}{'change':>9}{'same token':>12}")
    for kind, source in (("as it is", ChangedSource(checkpoint, {})), ("planted", planted(checkpoint))):
        exact, best = judge(stage_of(source, "float32"), ids)
        print(f"{kind:<10}{'float32':<8}{math.exp(exact):>11.3f}")
        for name in FORMATS:
            loss, found = judge(stage_of(source, name), ids)
            change = math.exp(loss - exact) - 1
            same = float((found == best).float().mean())
            results["model"][f"{kind}/{name}"] = {"perplexity": math.exp(loss), "change": change, "same_token": same}
            print(f"{kind:<10}{name:<8}{math.exp(loss):>11.3f}{change:>+9.2%}{same:>12.1%}")
    save(args.json, {"n_tokens": len(ids), **results})


if __name__ == "__main__":
    main()
