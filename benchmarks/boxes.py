#!/usr/bin/env python3
"""The README's table of models and machines: what a plan predicts.

    python benchmarks/boxes.py            prints the table
    python benchmarks/boxes.py --write    puts it between the marks in README.md

A predicted cell is that of `mdi plan` for machines that are only described (their speed is that of their memory). So are those
of llama.cpp's RPC: its nodes compute one after the other, with all texts in one batch, so a token takes the sum of their times.
"""

from __future__ import annotations

from dataclasses import replace

from litgpt.config import Config

import on_path
from mdi.errors import PlacementError
from mdi.model.plain import ModelConfig
from mdi.placement.model import ModelShape, Workload, model_shape
from mdi.placement.plan import PlanReport, plan
from mdi.placement.profile import ClusterProfile, boards
from mdi.spec.limits import REPLAY_BYTES
from real_models import GB, Machines, rate, write
from side_by_side.tables import markdown

LENGTH = 1024  # positions of a text


BOARD_4, BOARD_8 = ("4 GB board, 5 GB/s", 3, 32 * GB // 10, 5e9), ("8 GB board, 10 GB/s", 3, 7 * GB, 10e9)
PC_16, PC_32 = ("16 GB PC, 20 GB/s", 3, 14 * GB, 20e9), ("32 GB PC, 40 GB/s", 3, 29 * GB, 40e9)
CASES = (
    ("TinyLlama 1.1B", "tiny-llama-1.1b", "int8", Machines(*BOARD_4)),
    ("Qwen 2.5 3B", "Qwen2.5-3B", "int4", Machines(*BOARD_4)),
    ("Llama 3.1 8B", "Llama-3.1-8B", "int4", Machines(*BOARD_8)),
    ("Qwen 2.5 32B", "Qwen2.5-32B", "int4", Machines(*PC_16)),
    ("Llama 3.1 70B", "Llama-3.1-70B", "int4", Machines(*PC_32)),
)


def cluster(box: Machines) -> ClusterProfile:
    """Machines of one kind, joined as `mdi plan --example` joins its boards: 0.4 ms, 110 MB/s."""
    example = boards()
    nodes = tuple(
        replace(example.nodes[0], name=f"n{i}", memory_bytes=box.free_bytes, read_bytes_s=box.read_bytes_s)
        for i in range(box.n)
    )
    names = [node.name for node in nodes]
    links = tuple(replace(example.links[0], source=a, target=b) for a in names for b in names if a != b)
    return replace(example, nodes=nodes, links=links)


def workload(n_texts: int) -> Workload:
    return Workload(n_texts, LENGTH, replay_bytes=REPLAY_BYTES)


def one_after_the_other(profile: ClusterProfile, ring: PlanReport, shape: ModelShape, n_texts: int) -> float:
    """Tokens per second where one frame with all texts is under way: texts over the sum of stages and links."""
    # With as many frames as nodes, a frame of this plan has `n_texts` rows.
    roomy = replace(profile, nodes=tuple(replace(node, memory_bytes=1000 * GB) for node in profile.nodes))
    layers = [node.stop - node.start for node in ring.nodes]
    found = plan(roomy, shape, workload(n_texts * len(ring.nodes)), layers=layers)
    assert found.n_rows == n_texts
    return n_texts / sum(node.stage_s + node.link_s for node in found.nodes)


def row(model: str, name: str, weights: str, box: Machines) -> list[str]:
    profile, work = cluster(box), workload(16)
    shape = model_shape(ModelConfig.from_litgpt(Config.from_name(name)), weights, "fp16")
    ring = plan(profile, shape, work)
    try:
        alone = told(plan(replace(profile, nodes=profile.nodes[:1], links=()), shape, work).tokens_s)
    except PlacementError:
        alone = "does not fit"
    memory = max(node.memory.total for node in ring.nodes)
    one, many = (told(one_after_the_other(profile, ring, shape, n)) for n in (1, 16))
    return [
        f"{model}, {weights}", f"{box.n} x {box.name}", f"{memory / GB:.1f} GB predicted", told(ring.tokens_s_one),
        told(ring.tokens_s), alone, f"{one}; {many}",
    ]  # fmt: skip


def told(tokens_s: float) -> str:
    return f"{rate(tokens_s)} predicted"


def table() -> str:
    head = [
        "model", "machines", "memory of the fullest node", "one text, tokens/s", "16 texts, tokens/s",
        "16 texts, one machine alone", "llama.cpp's RPC: one text; 16",
    ]  # fmt: skip
    return markdown(head, [row(*case) for case in CASES])


if __name__ == "__main__":
    write(__doc__, on_path.ROOT / "README.md", "boxes", table)
