"""Clusters and models made of numbers, and every placement of a small one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from mdi.model.caches import PageClass
from mdi.placement.cost import CostModel
from mdi.placement.model import BlockShape, ModelShape, Workload
from mdi.placement.profile import ClusterProfile, LinkProfile, NodeProfile

MB = 1_000_000


def node(name: str, speed: float = 1.0, memory_mb: float = 1000, **changes: object) -> NodeProfile:
    """A node that needs 1 ms / speed for a block and one row."""
    block_s = tuple((rows, seconds / speed) for rows, seconds in ((1, 1e-3), (4, 1.5e-3), (16, 4e-3), (128, 30e-3)))
    profile = NodeProfile(name, "cpu", 4.0, int(memory_mb * MB), 10**10, 0.0, 10e9, block_s, (), 50 * MB)
    return replace(profile, **changes)


def cluster(*nodes: NodeProfile, links: tuple[LinkProfile, ...] = ()) -> ClusterProfile:
    return ClusterProfile(nodes, links, "tiny", "0" * 64, "float32")


def block(
    weight_mb: float = 10, macs: int = 2_500_000, page_bytes: int = 2048 * 32, window: int | None = None
) -> BlockShape:
    return BlockShape(int(weight_mb * MB), int(weight_mb * MB), macs, PageClass(window, page_bytes))


def model(n_layer: int = 6, blocks: tuple[BlockShape, ...] | None = None, **changes: object) -> ModelShape:
    shape = ModelShape(
        name="tiny", config_hash="0" * 64, format="float32", context_length=2048, row_bytes=4096,
        blocks=blocks or (block(),) * n_layer, embedding_bytes=20 * MB, head_bytes=20 * MB, head_load_bytes=20 * MB,
        head_macs=5_000_000, n_head=8, vocab_size=5000, work_row_bytes=16384, table_bytes=512,
    )  # fmt: skip
    return replace(shape, **changes)


def every_placement(cost: CostModel) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All choices of nodes, in all orders, with all splits where the model may be cut, that fit the memory."""
    for n_used in range(1, min(cost.n_nodes, cost.n_layer + 1) + 1):
        for others in itertools.permutations(range(1, cost.n_nodes), n_used - 1):
            order = (0, *others)
            for counts in _splits(cost.n_layer, n_used):
                if may_be_cut(cost, counts) and fits(cost, order, counts):
                    yield order, counts


def may_be_cut(cost: CostModel, counts: tuple[int, ...]) -> bool:
    cuts = cost.shape.cuts
    return cuts is None or all(edge in cuts for edge in itertools.accumulate(counts))


def fits(cost: CostModel, order: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    start = 0
    for i, count in zip(order, counts, strict=True):
        if cost.memory(i, start, start + count, len(order)).total > cost.profile.nodes[i].memory_bytes:
            return False
        start += count
    return True


def _splits(n_layer: int, n_nodes: int) -> Iterator[tuple[int, ...]]:
    """Every way to give the starter none or more and each other node one or more."""
    for cuts in itertools.combinations(range(n_layer), n_nodes - 1):
        edges = [*cuts, n_layer]
        yield (edges[0], *(b - a for a, b in itertools.pairwise(edges)))


@st.composite
def nodes(draw: st.DrawFn, name: str) -> NodeProfile:
    speed = draw(st.sampled_from([0.15, 0.3, 0.6, 1.0, 1.0, 2.5, 8.0]))
    memory = draw(st.sampled_from([20, 90, 120, 150, 180, 260]))
    cores = draw(st.sampled_from([0.5, 1.0, 4.0, 8.0]))
    head = draw(st.sampled_from([(), ((1, 2e-3), (16, 5e-3))]))
    return node(name, speed, memory, n_cores=cores, head_s=head)


@st.composite
def links(draw: st.DrawFn, names: list[str]) -> tuple[LinkProfile, ...]:
    if draw(st.booleans()):
        return ()
    pairs = draw(st.sets(st.sampled_from([(a, b) for a in names for b in names if a != b] or [("", "")]), max_size=8))
    found = []
    for a, b in sorted(pairs - {("", "")}):
        round_trip = draw(st.sampled_from([1e-4, 1e-3, 2e-2]))
        found.append(LinkProfile(a, b, round_trip, draw(st.sampled_from([1e6, 12.5e6, 125e6]))))
    return tuple(found)


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 4, max_blocks: int = 6) -> CostModel:
    """A cluster, a model and a run. About half of the models have blocks that differ, or rows, and of the clusters links."""
    names = [f"n{i}" for i in range(draw(st.integers(1, max_nodes)))]
    profile = cluster(*(draw(nodes(name)) for name in names), links=draw(links(names)))
    starter, *others = profile.nodes
    profile = replace(profile, nodes=(replace(starter, memory_bytes=starter.memory_bytes + 40 * MB), *others))
    n_layer = draw(st.integers(1, max_blocks))
    kinds = [block(), block(25, 6_000_000), block(4, 1_000_000, 8192), block(10, 2_500_000, 2048, window=128)]
    are_alike = draw(st.booleans())
    shape = model(n_layer, None if are_alike else tuple(draw(st.sampled_from(kinds)) for _ in range(n_layer)))
    if draw(st.booleans()):
        inner = draw(st.sets(st.integers(1, max(1, n_layer - 1)), max_size=n_layer))
        if len(cuts := sorted({0, n_layer, *(c for c in inner if c < n_layer)})) <= n_layer:
            shape = replace(shape, cuts=tuple(cuts))
    if draw(st.booleans()):  # at some cuts, rows have columns besides hidden
        wide = draw(st.lists(st.sampled_from([1, 1, 2, 5]), min_size=n_layer, max_size=n_layer))
        shape = replace(shape, cut_bytes=(*(shape.row_bytes * n for n in wide), shape.row_bytes))
    workload = Workload(draw(st.sampled_from([1, 2, 3, 4, 8, 13, 40])), draw(st.sampled_from([100, 1000])))
    return CostModel(profile, shape, workload)
