#!/usr/bin/env python3
"""Memory of a node with and without a window, and times with one, for TPI-LLM's tables 1, 2 and 6: by the model of `mdi plan`.

    benchmarks/window_memory.py [--json FILE]

Weights in float32. Every layer is shared out over N nodes, as there: the share of the node that gets most (whole heads; keys
and values with their queries). Bytes are those of packed weights as plan.py reckons with them, for the starter, which has most:
all of embedding and head without a window; with one of W = 2 (table 2), one attention, one MLP, and pieces of the head no
larger than these; twice as much with W = 4 (table 6). What a process takes beside weights is not among them
(docs/distributing.md has it measured). Nothing is run.

Times are those of table 1: a group of 8 nodes, each with a window as large as their peak, links of 300 Mbit/s and 1 ms. They do
not say how fast their devices read: MEMORY_S and DISK_S are by the laptops behind their proposition 4, where an attention and
an MLP of 64 and 129 MB took 11 and 17 ms to compute and 18 and 30 ms to load. How long prompts are is not said: here PROMPT.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import on_path  # noqa: F401
from mdi.placement.cost import LinkSpeed, seconds
from mdi.placement.tensor_plan import SUMS_PER_BLOCK
from mdi.spec.options import DEFAULT_SUM
from records import add_json_flag, save

NODES = (2, 4, 6, 8)
GIB = 1 << 30  # what the paper calls GB: 257 of them are its 68,976,648,192 weights in float32
UNITS = (2, 4)
MEMORY_S, DISK_S = 193e6 / 28e-3, 193e6 / 48e-3  # bytes per second
LINK = LinkSpeed(1e-3, 300e6 / 8)
PROMPT, LENGTH, PROCESS_BYTES = 16, 128, 82_000_000
YI_34B = {"name": "Yi-34B", "n_layer": 60, "n_embd": 7168, "n_head": 56, "n_query_groups": 8, "head_size": 128,
          "intermediate_size": 20480, "padded_vocab_size": 64000, "vocab_size": 64000, "bias": False,
          "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "rotary_percentage": 1.0,
          "parallel_residual": False}  # fmt: skip
# The paper's name, litgpt's, its table 2: peak GiB per device without and with its window, for NODES; table 6: with its window;
# its table 1, with its window: seconds to the first token, and of a token.
Row = tuple[float, ...]
MODELS: dict[str, tuple[Any, Row, Row, Row, Row]] = {
    "Llama 2-3B": ("open_llama_3b", (7.3, 4.3, 3.2, 2.8), (1.5, 1.4, 1.4, 1.4), (1.7, 1.5, 1.5, 1.5), (2.0, 1.9)),
    "Llama 2-7B": ("Llama-2-7b-hf", (13.7, 7.7, 5.5, 4.5), (2.0, 1.8, 1.7, 1.7), (2.4, 2.1, 1.8, 1.8), (3.0, 2.6)),
    "Llama 2-13B": ("Llama-2-13b-hf", (25.7, 13.9, 9.8, 8.1), (2.3, 2.2, 2.2, 2.1), (2.8, 2.5, 2.3, 2.2), (5.8, 2.9)),
    "Llama 2-70B": (
        "Llama-2-70b-hf",
        (130, 66.6, 46.6, 34.9),
        (3.7, 3.3, 3.3, 3.1),
        (4.5, 3.1, 3.1, 3.1),
        (29.4, 26.1),
    ),
    "Llama 3.1-8B": ("Llama-3.1-8B", (18.4, 11.8, 9.4, 8.5), (5.9, 5.6, 5.5, 5.4), (6.3, 5.8, 5.6, 5.5), (4.5, 4.3)),
    "Llama 3.1-70B": (
        "Llama-3.1-70B", (137.7, 74.0, 51.1, 42.3), (10.8, 10.5, 11.4, 11.3), (10.8, 10.5, 11.5, 11.4), (32.9, 29.9),
    ),
    "Yi-34B": (YI_34B, (67, 36.4, 23.9, 20.4), (5.0, 5.0, 5.0, 4.9), (6.0, 5.6, 5.3, 5.2), (15.7, 13.7)),
}  # fmt: skip


def share_of(config: Any, n_nodes: int) -> Any:
    """The config of the largest share: heads and columns rounded up; where heads of a group are split, all that it needs."""
    n_head = -(-config.n_head // n_nodes)
    per_group = config.n_head // config.n_query_groups
    n_groups = -(-n_head // per_group)
    if n_head % n_groups:  # the packed weight is as large as that of the next number that divides
        n_head = n_groups * -(-n_head // n_groups)
    columns = -(-config.intermediate_size // n_nodes)
    return replace(config, n_head=n_head, n_query_groups=n_groups, intermediate_size=columns)


def gibibytes(config: Any, n_nodes: int) -> list[float]:
    """Of weights on the starter, without a window and with those of UNITS."""
    from mdi.placement.windows import matrices_of
    from mdi.stages.window_budget import plan_window
    from mdi.stages.window_files import block_units

    share = share_of(config, n_nodes)
    matrices, head = matrices_of(share, "float32", 0, config.n_layer, is_starter=True)
    blocks = block_units(matrices)
    assert head is not None
    embedding = 4 * config.padded_vocab_size * config.n_embd
    without = sum(unit.n_bytes for unit in blocks) + head.n_bytes + embedding
    return [without / GIB, *(plan_window(blocks, head, n, None).resident_bytes / GIB for n in UNITS)]


def predicted_s(config: Any, limit_gib: float) -> tuple[float, float]:
    """Seconds to the first token, and of a token, of a group of 8: what the node with the largest share takes, and the sums."""
    from mdi.placement.model import Workload, model_shape
    from mdi.placement.plan import plan
    from mdi.placement.profile import ClusterProfile, NodeProfile
    from mdi.placement.windows import NodeWindows

    n_nodes, limit = NODES[-1], int(limit_gib * GIB)
    share, work = share_of(config, n_nodes), Workload(1, LENGTH)
    node = NodeProfile("starter", "cpu", 8.0, limit, 0, DISK_S, MEMORY_S, (), (), PROCESS_BYTES, window_bytes=limit)
    profile, shape = ClusterProfile((node,), (), "", "", ""), model_shape(share, "float32")
    windows = NodeWindows(share, shape, profile, work)
    found = plan(profile, shape, work, windows=windows, prompt_tokens=PROMPT)
    assert found.first_token is not None
    sums_s = (
        config.n_layer * SUMS_PER_BLOCK * seconds(DEFAULT_SUM, n_nodes, n_rows * 4 * config.n_embd, LINK)
        for n_rows in (PROMPT, 1)
    )
    return found.first_token.seconds + next(sums_s), 1 / found.tokens_s + next(sums_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_flag(parser, "window_memory")
    args = parser.parse_args()
    from litgpt.config import Config

    from mdi.model.plain import ModelConfig

    result = {}
    names = "without", *(f"window_{n}" for n in UNITS)
    for name, (of, *paper, times) in MODELS.items():
        config = ModelConfig.from_litgpt(Config(**of) if isinstance(of, dict) else Config.from_name(of))
        ours = zip(*(gibibytes(config, n) for n in NODES), strict=True)
        result[name] = {key: {"paper": a, "ours": b} for key, a, b in zip(names, paper, ours, strict=True)}
        result[name]["times"] = {"paper": times, "ours": predicted_s(config, paper[1][-1])}
        print(name, json.dumps(result[name]))
    save(args.json, {"nodes": NODES, "models": result})


if __name__ == "__main__":
    main()
