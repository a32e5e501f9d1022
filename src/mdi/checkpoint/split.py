"""How many blocks each node gets when nothing is known about the nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from mdi.errors import SplitError


def split_layers(n_layer: int, n_nodes: int, head_blocks: float) -> tuple[int, ...]:
    """An even cut, the starter first: the slowest node gets as little as possible.

    Args:
        head_blocks: the head's cost, in blocks. The head is a matrix product with the whole vocabulary, for every token;
            the embedding is a table lookup and costs next to nothing, in time.

    Returns:
        Blocks per node: the starter may get none, a secondary gets at least one.

    Raises:
        SplitError: fewer than 1 or more than n_layer + 1 nodes.
    """
    if not 1 <= n_nodes <= n_layer + 1:
        raise SplitError(
            f"a model of {n_layer} blocks can be cut over 1 to {n_layer + 1} nodes (a starter may hold no block), not {n_nodes}"
        )
    if n_nodes == 1:
        return (n_layer,)
    n_secondaries = n_nodes - 1

    def slowest(n_starter: int) -> tuple[float, int]:
        largest = -(-(n_layer - n_starter) // n_secondaries)
        return max(n_starter + head_blocks, largest), -n_starter

    n_starter = min(range(n_layer - n_secondaries + 1), key=slowest)
    share, rest = divmod(n_layer - n_starter, n_secondaries)
    return (n_starter, *(share + (i < rest) for i in range(n_secondaries)))


def head_cost(config: Mapping[str, Any]) -> float:
    """Bytes of the head over bytes of a block that a token reads: both are bound by memory bandwidth."""
    n_embd, n_head, groups = config["n_embd"], config["n_head"], config["n_query_groups"] or config["n_head"]
    head_size = config.get("head_size") or n_embd // n_head
    attention = n_embd * head_size * (n_head + 2 * groups) + n_embd * head_size * n_head
    n_matrices = 2 if config.get("mlp_class_name") == "GptNeoxMLP" else 3
    width = config.get("intermediate_size") or 4 * n_embd
    if config.get("mlp_class_name") == "LLaMAMoE":
        width = (config.get("moe_intermediate_size") or width) * max(1, config.get("n_expert_per_token") or 1)
    head: float = n_embd * (config.get("padded_vocab_size") or config["vocab_size"])
    return head / (attention + n_matrices * n_embd * width)


def default_split(config: Mapping[str, Any], n_nodes: int) -> tuple[int, ...]:
    """The even cut of a model; see `split_layers`."""
    return split_layers(config["n_layer"], n_nodes, head_cost(config))


def parse_layers(text: str, n_layer: int, n_nodes: int | None = None) -> tuple[int, ...]:
    """A cut by hand, "4,9,9"; SplitError with the numbers if it does not add up."""
    try:
        counts = tuple(int(field) for field in text.split(","))
    except ValueError:
        raise SplitError(f"--layers {text!r}: expected blocks per node, starter first, like 4,9,9") from None
    if n_nodes is not None and len(counts) != n_nodes:
        raise SplitError(f"--layers {text}: {len(counts)} numbers for {n_nodes} nodes")
    if counts[0] < 0 or any(count < 1 for count in counts[1:]):
        raise SplitError(f"--layers {text}: a secondary holds at least 1 block, the starter at least 0")
    if sum(counts) != n_layer:
        raise SplitError(f"--layers {text}: that is {sum(counts)} blocks, the model has {n_layer}")
    return counts


def ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Block ranges [start, stop) of the nodes."""
    return list(pairwise(accumulate(counts, initial=0)))
