#!/usr/bin/env python3
"""The table of published models and small clusters in docs/models.md: what a plan predicts from memory speeds alone.

    benchmarks/real_models.py            prints the table
    benchmarks/real_models.py --write    puts it between the marks in docs/models.md

A cell has the speed of one text and of 16, in tokens/s, and the time to the first token of a prompt of PROMPT tokens, with the
faster of a ring and of every block on all nodes. Nothing is run, and nobody measured these machines.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import on_path
from mdi.checkpoint.hfconfig import published_config
from mdi.errors import PlacementError
from mdi.placement.cost import CostModel
from mdi.placement.model import ModelShape, Workload, model_shape
from mdi.placement.plan import plan
from mdi.placement.profile import ClusterProfile, NodeProfile
from mdi.placement.prompts import tensor_first_token_s
from mdi.placement.tensor_plan import plan_tensor
from mdi.tensor.shares import why_not_shared_out
from mdi.units import duration
from side_by_side.tables import markdown

PAGE = on_path.ROOT / "docs" / "models.md"
LENGTH, PROMPT, TEXTS = 2048, 512, 16
GB = 1_000_000_000


@dataclass(frozen=True)
class Machines:
    """Machines of one kind, behind a switch of 1 Gbit/s with round trips of 0.3 ms.

    Attributes:
        free_bytes: what the system leaves of the memory; read_bytes_s: of it, with all cores.
    """

    name: str
    n: int
    free_bytes: int
    read_bytes_s: float

    def profile(self, n_nodes: int) -> ClusterProfile:
        nodes = tuple(
            NodeProfile(f"n{i}", "cpu", 4.0, self.free_bytes, 0, 0.0, self.read_bytes_s, (), (), 400_000_000)
            for i in range(n_nodes)
        )
        return ClusterProfile(nodes, (), "", "", "")


CLUSTERS = (
    Machines("Pi 5, 16 GB", 4, 145 * GB // 10, 10e9),
    Machines("mini PC, 32 GB", 8, 29 * GB, 40e9),
    Machines("dual Xeon, 256 GB", 4, 245 * GB, 80e9),
)
MODELS = (
    ("gemma-4-E2B", "q4_k"),
    ("gemma-4-E4B", "q4_k"),
    ("gpt-oss-20b", "mxfp4"),
    ("gemma-4-26B-A4B", "q4_k"),
    ("GLM-4.7-Flash", "q4_k"),
    ("gemma-4-31B", "q4_k"),
    ("Qwen3.5-35B-A3B", "q4_k"),
    ("Qwen3-Next-80B-A3B-Instruct", "q4_k"),
    ("GLM-4.5-Air", "q4_k"),
    ("gpt-oss-120b", "mxfp4"),
    ("Qwen3.5-122B-A10B", "q4_k"),
    ("MiniMax-M2", "q4_k"),
    ("GLM-4.6", "q4_k"),
    ("Qwen3.5-397B-A17B", "q4_k"),
    ("DeepSeek-V3", "q4_k"),
    ("DeepSeek-V3", "int8"),
    ("Kimi-K2-Instruct", "q4_k"),
    ("Kimi-K2-Instruct", "int8"),
)


def rate(tokens_s: float | None) -> str:
    return "-" if tokens_s is None else f"{tokens_s:.{1 if tokens_s < 20 else 0}f}"


def cell(profile: ClusterProfile, shape: ModelShape, may_share: bool) -> str:
    """The best of the ways that fit; a dash where 16 texts fit none."""
    one = _ways(profile, shape, may_share, 1)
    if not one:
        return "does not fit, predicted"
    many = _ways(profile, shape, may_share, TEXTS)
    first_s = min(first_s for _, first_s in [*one, *many])
    rates = [max((tokens_s for tokens_s, _ in ways), default=None) for ways in (one, many)]
    return f"{rate(rates[0])}; {rate(rates[1])}; {duration(first_s)} predicted"


def _ways(profile: ClusterProfile, shape: ModelShape, may_share: bool, n_texts: int) -> list[tuple[float, float]]:
    """Tokens per second of so many texts, and seconds to the first token, of each way that fits."""
    found, work = [], Workload(n_texts, LENGTH)
    with contextlib.suppress(PlacementError):
        ring = plan(profile, shape, work, may_share=False, prompt_tokens=PROMPT)
        assert ring.first_token is not None
        found.append((ring.tokens_s, ring.first_token.seconds))
    if may_share and len(profile.nodes) > 1:
        with contextlib.suppress(PlacementError):
            cost = CostModel(profile, shape, work)
            shared = plan_tensor(cost)
            found.append((shared.tokens_s, tensor_first_token_s(cost, shared, PROMPT)))
    return found


def cells(name: str, form: str) -> list[str]:
    config = published_config(name)
    assert config is not None, name
    shape = replace(model_shape(config, form, "fp16"), context_length=LENGTH)
    may_share = why_not_shared_out(config) is None
    found = [f"{name}, {form}", f"{shape.weight_bytes / GB:.0f} GB"]
    for of in CLUSTERS:
        for n_nodes in (of.n, 1):
            found.append(cell(of.profile(n_nodes), shape, may_share))
    return found


def table(models: tuple[tuple[str, str], ...] = MODELS) -> str:
    heads = [text for of in CLUSTERS for text in (f"{of.n} x {of.name}", "one of them")]
    return markdown(["model", "weights", *heads], [cells(*one) for one in models])


def write(said: str | None, page: Path, name: str, made: Callable[[], str]) -> None:
    """The command: print a table, and put it between the marks of its name on a page if that is asked for."""
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put it into {page.relative_to(on_path.ROOT)}")
    is_written, found = parser.parse_args().write, made()
    print(found)
    if is_written:
        text = page.read_text(encoding="utf-8")
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        page.write_text(f"{text.partition(begin)[0]}{begin}\n{found}\n{end}{text.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write(__doc__, PAGE, "real models", table)
