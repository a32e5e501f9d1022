"""Rings of real processes with small caches, few bytes on the wire, and nodes that stay on their cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import Cluster, Starter
from tiny_checkpoint import reference

NANO_LLAMA = Path(__file__).resolve().parents[2] / "assets" / "nano-llama"
SPEAKERS = ["ROMEO:", "JULIET:", "First Citizen:", "KING RICHARD II:", "MENENIUS:\nWhat"]
N_TOKENS = 24
PROMPTS = ["Who are you?", "The ring", "x", "A", "Where have you been all the time?"]


def prompt_flags(prompts: list[str]) -> list[str]:
    return [flag for prompt in prompts for flag in ("--prompt", prompt)]


def sent(result: object) -> int:
    return sum(node["bytes_sent"] for node in result.json["nodes"])  # type: ignore[attr-defined]


@pytest.mark.slow
def test_few_bytes_on_the_wire_and_in_the_caches(ring: Cluster, starter: Starter) -> None:
    """Caches alone change nothing from ring to ring. int8 rows round twice: nine of ten first tokens stay, of a real model."""
    flags = ["--n-tokens", N_TOKENS, "--kv-dtype", "bf16", *prompt_flags(SPEAKERS)]
    alone = starter(NANO_LLAMA, ring.nodes_file(1), *flags).token_ids
    plain = starter(NANO_LLAMA, ring.path, *flags)
    assert plain.token_ids == alone
    results = {wire: starter(NANO_LLAMA, ring.path, *flags, "--wire-dtype", wire) for wire in ("fp16", "int8")}
    for wire, share in (("fp16", 0.65), ("int8", 0.45)):  # headers and tables among them: this model's rows are narrow
        assert sent(results[wire]) < share * sent(plain)
        pairs = [(a[:8], b[:8]) for a, b in zip(alone, results[wire].token_ids, strict=True)]
        agreeing = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
        assert agreeing >= 0.9 * sum(len(a) for a, _ in pairs), (wire, pairs)


@pytest.mark.slow
def test_sequences_wait_for_cache_memory_and_all_get_their_turn(
    make_cluster: Callable[[int], Cluster], checkpoint: Path, starter: Starter
) -> None:
    """With room for one or two at a time; the smallest node decides, whichever it is."""
    cluster = make_cluster(2)
    cluster.start(0, "--kv-memory", "30K")
    flags = ["--n-tokens", 12, "--layers", "3,2", "--wait", 100, *prompt_flags(PROMPTS)]
    expected = [list(reference(prompt, 12)) for prompt in PROMPTS]
    assert starter(checkpoint, cluster.path, *flags).token_ids == expected
    assert starter(checkpoint, cluster.path, *flags, "--kv-memory", "40K", "--frames", 3).token_ids == expected

    refused = starter(checkpoint, cluster.path, *flags, "--n-tokens", 400)
    assert refused.status == 2
    assert "of cache on secondary0" in refused.json["error"] and "ask for fewer tokens" in refused.json["error"]
    refused = starter(checkpoint, cluster.path, *flags, "--kv-memory", "1K")
    assert refused.status == 2 and "of cache on starter, which has 1.0 kB" in refused.json["error"]
    half = starter(checkpoint, cluster.path, *flags, "--kv-dtype", "bf16")
    assert half.status == 0
    cluster.wait_states("READY")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 if sys.platform == "linux" else True, reason="needs two cores")
def test_a_node_stays_on_its_cores(make_cluster: Callable[[int], Cluster], checkpoint: Path, starter: Starter) -> None:
    core = max(os.sched_getaffinity(0))
    cluster = make_cluster(2)
    node = cluster.start(0, "--cores", core)
    result = starter(checkpoint, cluster.path, "--n-tokens", 6, "--n-samples", 1, "--wait", 100)
    assert result.token_ids == [list(reference("Who are you?", 6))]
    for task in Path(f"/proc/{node.pid}/task").iterdir():
        assert os.sched_getaffinity(int(task.name)) == {core}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-memory", "much"], "--kv-memory: expected a size like 2G"),
        (["--cores", "a"], "--cores: expected core numbers"),
        (["--cores", "4095"], "cannot run on core 4095"),
        (["--frames", "0"], "--frames must be from 1"),
    ],
)
def test_flags_that_cannot_be(checkpoint: Path, starter: Starter, ring: Cluster, flags: list[str], words: str) -> None:
    refused = starter(checkpoint, ring.nodes_file(1), *flags)
    assert refused.status == 2 and words in refused.err
