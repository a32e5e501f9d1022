"""Ranges of blocks: how many each node gets, and how they are written and named. Pure: numbers in, numbers and text out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mdi.errors import SplitError
from mdi.model.spec import Experts, ModelSpec
from mdi.model.tensors import block_tensors

ADAPTER_PREFIX = "adapter."  # of a part with what adapters add to a block, before its number (checkpoint.adapters)


def span(start: int, stop: int) -> str:
    """ "0-3" for [0, 4), "3" for [3, 4), "none" for [4, 4): for a place that says that it is about blocks."""
    if stop <= start:
        return "none"
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def block_span(start: int, stop: int) -> str:
    """ "blocks 0-3", "block 3" or "no blocks"."""
    if stop <= start:
        return "no blocks"
    return f"{'block' if stop == start + 1 else 'blocks'} {span(start, stop)}"


def split_layers(
    n_layer: int, n_nodes: int, cost_embedding_blocks: float = 0.0, cuts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The most even split into blocks per node, starter first.

    Args:
        n_layer: blocks of the model.
        n_nodes: 1 to n_layer + 1; each secondary gets a block at least, the starter may get none.
        cost_embedding_blocks: work of the starter besides its blocks, in units of one block.
        cuts: where the model may be cut (ModelSpec.allowed_cuts); None is everywhere.

    Raises:
        SplitError: there are not enough blocks for the nodes.
    """
    check_n_nodes(n_layer, n_nodes, cuts)
    n_secondaries = n_nodes - 1
    if n_secondaries == 0:
        return (n_layer,)
    if cuts is not None and len(cuts) <= n_layer:
        return split_at(cuts, [1] * n_nodes, cost_embedding_blocks)

    def counts(own: int) -> tuple[int, ...]:
        each, more = divmod(n_layer - own, n_secondaries)
        return (own, *(each + (i < more) for i in range(n_secondaries)))

    def unevenness(split: tuple[int, ...]) -> tuple[float, float, int]:
        loads = [split[0] + cost_embedding_blocks, *split[1:]]
        # the slowest node sets the pace; of equal splits the lighter starter is better, because it samples as well
        return max(loads), sum(load * load for load in loads), split[0]

    return min((counts(own) for own in range(n_layer - n_secondaries + 1)), key=unevenness)


def split_at(cuts: Sequence[int], sizes: Sequence[int], of_first: float = 0.0) -> tuple[int, ...]:
    """Blocks per stage where a model may be cut at some places only: the slowest as fast as can be, then all of them even.

    Args:
        cuts: the places, from 0 to the number of blocks.
        sizes: how fast each stage is; each but the first gets a block at least, of `len(cuts) - 1` pieces in all.
        of_first: work of the first stage besides its blocks, in units of one block.
    """

    def best(
        limit: float, cost: Callable[[float], float], join: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        """The least cost of all stages, none of which takes longer than a limit, with the ends of all."""
        ways: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by the end of the stages so far
        for k, size in enumerate(sizes):
            after: dict[int, tuple[float, list[int]]] = {}
            for start, (spent, ends) in ways.items():
                for stop in cuts:
                    load = (stop - start + (0 if k else of_first)) / size
                    if stop < start + (k > 0) or load > limit:
                        continue
                    found = join(spent, cost(load)), [*ends, stop]
                    if stop not in after or found < after[stop]:
                        after[stop] = found
            ways = after
        return ways[cuts[-1]]

    slowest, _ = best(float("inf"), lambda load: load, max)
    _, ends = best(slowest, lambda load: load * load, lambda a, b: a + b)
    return tuple(stop - start for start, stop in zip([0, *ends], ends, strict=False))


def default_split(spec: ModelSpec, n_nodes: int) -> tuple[int, ...]:
    """The most even split of a model. Raises SplitError."""
    return split_layers(spec.n_layer, n_nodes, head_cost_blocks(spec), spec.allowed_cuts())


def check_n_nodes(n_layer: int, n_nodes: int, cuts: Sequence[int] | None = None) -> None:
    """Raises SplitError if there are not enough blocks for the nodes."""
    most = n_layer + 1 if cuts is None else len(cuts)
    if not 1 <= n_nodes <= most:
        needs = (
            "each secondary needs a block" if most > n_layer else f"it may be cut before {_listed(cuts or ())} alone"
        )
        raise SplitError(f"a model of {n_layer} blocks can be cut for 1 to {most} nodes ({needs}), not for {n_nodes}")


def parse_layers(text: str, n_layer: int, n_nodes: int, cuts: Sequence[int] | None = None) -> tuple[int, ...]:
    """Blocks per node given by hand, as "4,9,9".

    Args:
        cuts: where the model may be cut; None is everywhere.

    Raises:
        SplitError: it is not a list of numbers, does not fit the number of nodes or of blocks, or cuts elsewhere.
    """
    check_n_nodes(n_layer, n_nodes, cuts)
    try:
        counts = tuple(int(number) for number in text.split(","))
    except ValueError:
        raise SplitError(f"layers {text!r}: expected the blocks per node, starter first, such as 4,9,9") from None
    if len(counts) != n_nodes:
        raise SplitError(f"layers {text!r} are the blocks of {len(counts)} nodes, but there are {n_nodes} nodes")
    if min(counts) < 0:
        raise SplitError(f"layers {text!r}: a node cannot hold {min(counts)} blocks")
    if 0 in counts[1:]:
        empty = f"secondary{counts.index(0, 1) - 1}"
        raise SplitError(f"layers {text!r}: {empty} gets no block; only the starter may have none")
    if sum(counts) != n_layer:
        raise SplitError(f"layers {text!r} are {sum(counts)} blocks in all, but the model has {n_layer}")
    for cut, _ in ranges(counts)[1:]:
        if cuts is not None and cut not in cuts:
            near = max(c for c in cuts if c < cut), min(c for c in cuts if c > cut)
            raise SplitError(
                f"layers {text!r}: the model cannot be cut before block {cut}, since a block reads what an earlier one "
                f"has kept: cut it before {_listed(near)}"
            )
    return counts


def _listed(cuts: Sequence[int]) -> str:
    return " or ".join(map(str, cuts))


def ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Blocks per node as half-open ranges: (4, 9) gives [(0, 4), (4, 13)]."""
    result, start = [], 0
    for count in counts:
        result.append((start, start + count))
        start += count
    return result


def head_cost_blocks(spec: ModelSpec) -> float:
    """Work of the head for one token, in units of one block: the ratio of the weights that each reads.

    The embedding counts as nothing, because a token reads one row of it. Norms and attention over the cache are left out.
    """
    return spec.width * spec.n_rows / _block_weights(spec)


def _block_weights(spec: ModelSpec) -> int:
    """Weights that one token meets in the last block; of experts, those that it is sent to. The router is left out."""
    block, found = spec.blocks[-1], 0.0
    used = block.mlp.n_used / block.mlp.n if isinstance(block.mlp, Experts) else 1.0
    for name, shape in block_tensors(block, spec.width).items():
        if len(shape) == 2 and name != "mlp.gate.weight":
            found += math.prod(shape) * (used if name.startswith("mlp.experts.") else 1)
    return round(found)
