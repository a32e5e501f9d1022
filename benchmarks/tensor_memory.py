"""What the weights of a node take where blocks are shared out: by the shapes of models, nothing is loaded.

    tensor_memory.py [--format float32] [--nodes 2 4 6 8] [--head shared] [MODEL ...]

MODEL is a name in litgpt's table. Prints, in GiB, as TPI-LLM does, what the starter (embedding and head or its rows of it, and
its share) and the largest other node have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from litgpt.config import Config

from mdi.checkpoint.packing import Packing
from mdi.checkpoint.parts import part_of
from mdi.checkpoint.safetensors_layout import TensorSpec
from mdi.checkpoint.shapes import model_shapes
from mdi.model.plain import ModelConfig
from mdi.tensor.shard_source import shard_shapes
from mdi.tensor.shares import Share, share_out

GIB = 1 << 30
MODELS = ("Llama-2-7b-hf", "Llama-2-13b-hf", "Llama-2-70b-hf", "Llama-3.1-8B", "Llama-3.1-70B")


def share_bytes(config: ModelConfig, n_nodes: int, rank: int, packing: Packing, is_head_shared: bool) -> int:
    """Of the weights of node `rank`, as they lie in memory."""
    share = Share(share_out(config, [1.0] * n_nodes, is_head_shared), rank, config)
    total = 0
    for name, shape in model_shapes(config, "a model").items():
        part = part_of(name)
        if part == "embedding" or (part == "head" and not is_head_shared):
            stored = (
                packing.stored(name, TensorSpec("F32" if packing.head == "float32" else "BF16", shape))
                if rank == 0
                else {}
            )
            total += sum(spec.n_bytes for spec in stored.values())
    for part in {part_of(name) for name in model_shapes(config, "a model")}:
        if part.startswith("block.") or (part == "head" and is_head_shared):
            for name, shape in shard_shapes(share, packing, part).items():
                total += sum(spec.n_bytes for spec in packing.stored(name, TensorSpec("F32", shape)).values())
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--format", default="float32")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--head", choices=("starter", "shared"), default="starter")
    args = parser.parse_args()
    packing = Packing(args.format, args.format)
    for model in args.models:
        config = ModelConfig.from_litgpt(Config.from_name(model))
        told = []
        for n in args.nodes:
            each = [share_bytes(config, n, rank, packing, args.head == "shared") / GIB for rank in range(n)]
            told.append(f"{each[0]:.1f} / {max(each[1:]):.1f}")
        print(f"| {model} | {' | '.join(told)} |")


if __name__ == "__main__":
    main()
