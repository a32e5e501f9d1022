"""The README's table of models and machines: what a plan predicts.

    python benchmarks/boxes.py            prints the table
    python benchmarks/boxes.py --write    puts it between the marks in README.md

A predicted cell comes from `plan.py` for machines that are only described (their speed is that of their memory). So do those of
llama.cpp's RPC: its nodes compute one after the other, with all texts in one batch, so a token takes the sum of their times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from mdi.placement.profile import ClusterProfile, boards  # noqa: E402

BEGIN, END = "<!-- boxes -->", "<!-- end of boxes -->"
LENGTH = 1024  # positions of a text
GB = 1_000_000_000


@dataclass(frozen=True)
class Box:
    """Args: free_bytes: what the system leaves of the memory; read_bytes_s: of its memory, with all cores."""

    name: str
    free_bytes: int
    read_bytes_s: float


BOARD_4, BOARD_8 = Box("4 GB board, 5 GB/s", 32 * GB // 10, 5e9), Box("8 GB board, 10 GB/s", 7 * GB, 10e9)
PC_16, PC_32 = Box("16 GB PC, 20 GB/s", 14 * GB, 20e9), Box("32 GB PC, 40 GB/s", 29 * GB, 40e9)
CASES = (
    ("TinyLlama 1.1B", "tiny-llama-1.1b", "int8", 3, BOARD_4),
    ("Qwen 2.5 3B", "Qwen2.5-3B", "int4", 3, BOARD_4),
    ("Llama 3.1 8B", "Llama-3.1-8B", "int4", 3, BOARD_8),
    ("Qwen 2.5 32B", "Qwen2.5-32B", "int4", 3, PC_16),
    ("Llama 3.1 70B", "Llama-3.1-70B", "int4", 3, PC_32),
)


def cluster(n_nodes: int, box: Box) -> ClusterProfile:
    """Machines of one kind, joined as `plan.py --example` joins its boards: 0.4 ms, 110 MB/s."""
    example = boards()
    nodes = tuple(
        replace(example.nodes[0], name=f"n{i}", memory_bytes=box.free_bytes, read_bytes_s=box.read_bytes_s)
        for i in range(n_nodes)
    )
    names = [node.name for node in nodes]
    links = tuple(replace(example.links[0], source=a, target=b) for a in names for b in names if a != b)
    return replace(example, nodes=nodes, links=links)


def planned(profile: ClusterProfile, config: str, weights: str, n_texts: int, *flags: str) -> dict[str, Any] | None:
    """The plan as `plan.py --json` prints it; None if the model does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profiles.json"
        path.write_text(json.dumps(profile.to_json()))
        words = [
            "--profiles",
            str(path),
            "--config",
            config,
            "--quantize",
            weights,
            "--n-samples",
            str(n_texts),
            "--json",
        ]
        words += ["--sequence-length", str(LENGTH), "--kv-dtype", "fp16", *flags]
        found = subprocess.run(
            [sys.executable, str(ROOT / "src" / "plan.py"), *words], capture_output=True, text=True, env={**os.environ}
        )
    answer: dict[str, Any] = json.loads(found.stdout)
    return None if "error" in answer else answer


def one_after_the_other(
    profile: ClusterProfile, ring: dict[str, Any], config: str, weights: str, n_texts: int
) -> float:
    """Tokens per second where one frame with all texts is under way: texts over the sum of stages and links."""
    layers = ",".join(str(node["blocks"][1] - node["blocks"][0]) for node in ring["nodes"])
    # With as many frames as nodes, a frame of this plan has `n_texts` rows.
    roomy = replace(profile, nodes=tuple(replace(node, memory_bytes=1000 * GB) for node in profile.nodes))
    found = planned(roomy, config, weights, n_texts * len(ring["nodes"]), "--layers", layers)
    assert found is not None and found["rows_per_frame"] == n_texts
    return n_texts / sum(node["stage_s"] + node["link_s"] for node in found["nodes"])


def rate(value: float | None, note: str = "predicted") -> str:
    return "does not fit" if value is None else f"{value:.{1 if value < 20 else 0}f} {note}".rstrip()


def row(model: str, config: str, weights: str, n_nodes: int, box: Box) -> list[str]:
    profile = cluster(n_nodes, box)
    ring = planned(profile, config, weights, 16)
    assert ring is not None, f"{model} does not fit on {n_nodes} of {box.name}"
    alone = planned(replace(profile, nodes=profile.nodes[:1], links=()), config, weights, 16)
    memory = max(node["bytes"]["total"] for node in ring["nodes"])
    one, many = (one_after_the_other(profile, ring, config, weights, n) for n in (1, 16))
    return [
        f"{model}, {weights}", f"{n_nodes} x {box.name}", f"{memory / GB:.1f} GB predicted",
        rate(ring["tokens_per_s_one_sequence"]), rate(ring["tokens_per_s"]),
        rate(None if alone is None else alone["tokens_per_s"]), f"{rate(one)}; {rate(many)}",
    ]  # fmt: skip


def table() -> str:
    head = [
        "model", "machines", "memory of the fullest node", "one text, tokens/s", "16 texts, tokens/s",
        "16 texts, one machine alone", "llama.cpp's RPC: one text; 16",
    ]  # fmt: skip
    rows = [head, ["---"] * len(head), *(row(*case) for case in CASES)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    args = parser.parse_args()
    found = table()
    print(found)
    if args.write:
        path = ROOT / "README.md"
        text = path.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        path.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
