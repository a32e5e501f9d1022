"""Another cut of the model over the nodes that are left, or with one more: few blocks move, and no node is much slower.

Pure. Time is weighed: that of moving weights, once, against that of a frame, as often as the texts still need one. Nodes count
by their measurements, or by cautious guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

from mdi.placement.cost import CostModel
from mdi.placement.model import ModelShape, Workload
from mdi.placement.profile import DEFAULT_BYTES_S, ClusterProfile, Links, NodeProfile
from mdi.placement.search import fastest_of, ring_of, spread
from mdi.run.policy import Form, Stage, with_new_cut

# Where nothing was measured: how fast weights are read from memory by computing, and from disk by loading.
READ_BYTES_S = 5e9
LOAD_BYTES_S = 5e8
N_PACES = 48  # different paces that are tried, the fastest possible ones first
JOIN_GAIN = 1.1  # a node joins, or the order changes, if a round then takes so much less
# A link is slower than it was measured if a frame there and an answer back take so many times as long, and so much more.
SLOWER, SLOWER_S = 2.0, 0.01
INFINITE = float("inf")


class MovingCut:
    """The first node is the starter, which has all weights on its disk.

    Args:
        shape: the model, in the format that it runs in.
        profile: measurements of nodes and links; None if there are none.
        workload: texts at the same time, and their lengths.
        part_bytes: of a block, as it is sent.
        n_rounds: how many rounds the texts still need; may be set again.
    """

    def __init__(
        self, shape: ModelShape, profile: ClusterProfile | None, workload: Workload, part_bytes: float,
        n_rounds: Callable[[], int],
    ) -> None:  # fmt: skip
        self._shape = shape
        self._workload = workload
        self._profile = profile
        self._slower: dict[str, float] = {}
        self._most: dict[str, int] = {}
        # The two together, because another thread may plan while a node is learnt. Nodes are here as slow as they are now.
        self._measured = None if profile is None else (profile, CostModel(profile, shape, workload))
        self._part_bytes = part_bytes
        self.n_rounds = n_rounds

    def learn(self, node: NodeProfile) -> None:
        """A node that has come was measured. Its links are guessed."""
        if self._profile is not None:
            self._profile = replace(self._profile, nodes=(*self._profile.nodes, node))
            self.slow_down(self._slower)

    def slow_down(self, slower: Mapping[str, float]) -> None:
        """Plan from now on with nodes that compute so many times as long as they were measured to."""
        self._slower = dict(slower)
        if self._profile is not None:
            nodes = tuple(node.at_pace(self._slower.get(node.name, 1.0)) for node in self._profile.nodes)
            profile = replace(self._profile, nodes=nodes)
            self._measured = profile, CostModel(profile, self._shape, self._workload)

    def limit(self, most: Mapping[str, int]) -> None:
        """Plan from now on with nodes that have at most so many blocks, unless the model fits them in no such way."""
        self._most = dict(most)

    def __call__(self, stages: Sequence[Stage], most: Mapping[str, int]) -> tuple[int, ...] | None:
        """Blocks of each of these nodes, whose stages are their present ones; None if the model does not fit them.

        Args:
            most: blocks that a node can hold at most, where it has said so.
        """
        fewer = {name: min(n, most.get(name, n)) for name, n in self._most.items()}
        found = self._within(stages, {**most, **fewer})
        return self._within(stages, most) if found is None and fewer else found

    def _within(self, stages: Sequence[Stage], most: Mapping[str, int]) -> tuple[int, ...] | None:
        n_frames = max(1, self.n_rounds()) * self._n_frames(len(stages))
        return cut(self.holders(stages, most), self._block_bytes, n_frames, self._shape.cuts)

    def in_another_order(self, ring: Sequence[Stage], ways: Mapping[tuple[str, str], float]) -> Form | None:
        """The same nodes in another order, where links are slower than when they were measured.

        A slow pair of nodes is slow in both directions. If all links of a node that are known are slow, all others of
        it count as slow, too: then no order helps.

        Args:
            ways: seconds of a frame and an answer over links of this ring, and of earlier ones.

        Returns:
            None if nothing was measured, no link is slower, or it would not pay.
        """
        if (measured := self._measured) is None:
            return None
        profile, names = measured[0], [stage.name for stage in ring]
        by_name = {node.name: node for node in profile.nodes}
        if not by_name.keys() >= set(names):
            return None
        links = tuple(link for link in profile.links if {link.source, link.target} <= set(names))
        of_ring = replace(profile, nodes=tuple(by_name[name] for name in names), links=links)
        n_bytes = measured[1].terms(len(ring)).n_rows * self._shape.widest_row_bytes
        slower = slower_links(of_ring, ways, n_bytes)
        if not slower:
            return None
        now = tuple(replace(one, round_trip_s=one.round_trip_s + slower[one.source, one.target]) for one in links)
        cost = CostModel(replace(of_ring, links=now), self._shape, self._workload)
        present = spread(cost, ring_of(cost, range(len(ring)), cost.terms(len(ring)).n_rows))
        best = None if present is None else fastest_of(cost, len(ring), present.round_s / JOIN_GAIN)
        if present is None or best is None:
            return None
        holders = [ring[i] for i in best.order]
        if (present.round_s - best.round_s) * self.n_rounds() <= self.moving_s(holders, best.counts):
            return None
        edges = [0, *accumulate(best.counts)]
        return Form(tuple(Stage(one.name, edges[i], edges[i + 1]) for i, one in enumerate(holders)), is_moved=True)

    def slower_nodes(self, ring: Sequence[Stage], frame_s: Mapping[str, float]) -> dict[str, float]:
        """How many times as long a node computes as it was measured to, next to the best of those that compute as it does.

        Others would take other times for other frames than the run was planned with. Of stages with blocks of several kinds,
        or that skip rows of prompts, it is not known how long they take next to each other: then there are none.

        Args:
            frame_s: of secondaries, seconds of computing a frame.
        """
        is_alike = self._shape.is_uniform and self._shape.skipped_from is None
        if (measured := self._measured) is None or not is_alike:
            return {}
        known = {node.name: (node.device, node.computed_by) for node in measured[0].nodes}
        ratios = {
            stage.name: (
                known[stage.name],
                frame_s[stage.name]
                / slowest_s([holder], [stage.stop - stage.start])
                * self._slower.get(stage.name, 1.0),
            )
            for stage, holder in zip(ring, self.holders(ring, {}), strict=True)
            if stage.name in frame_s and stage.name in known and stage.stop > stage.start
        }
        best = {kind: min(ratio for other, ratio in ratios.values() if other == kind) for kind, _ in ratios.values()}
        return {name: ratio / best[kind] for name, (kind, ratio) in ratios.items() if best[kind] > 0}

    def weight_bytes(self, stage: Stage) -> float:
        """Of a block, in the memory of a node with this stage."""
        return fmean(block.held_bytes for block in self._shape.blocks[stage.start : stage.stop])

    def with_fewer(self, ring: Sequence[Stage], most: Mapping[str, int]) -> Form | None:
        """The same nodes, where some have at most so many blocks, or as few more as the others can hold; None if none can."""
        has = {stage.name: stage.stop - stage.start for stage in ring}
        for more in range(max((has[name] - n for name, n in most.items()), default=0)):
            limits = {name: max(n, min(n + more, has[name])) for name, n in most.items()}
            if (found := with_new_cut(ring, limits, self._within)) is not None:
                return found
        return None

    def cut_again(self, ring: Sequence[Stage], before: Sequence[Stage]) -> Form | None:
        """The same nodes with another cut, now that some are slower or short of memory, or are not; None if that is no gain.

        Args:
            before: the ring before any node was so, which comes back as it was.
        """
        is_free = not self._slower and not self._most
        is_as_before = is_free and [stage.name for stage in before] == [stage.name for stage in ring]
        found = Form(tuple(before), is_moved=True) if is_as_before else with_new_cut(ring, {}, self)
        if found is None:
            return None
        now_s, then_s = (
            self.round_s(ring, [one.stop - one.start for one in stages]) for stages in (ring, found.stages)
        )
        gained_s = (now_s - then_s) * self.n_rounds()
        return found if then_s * JOIN_GAIN <= now_s and self.moving_s(ring, found.counts) < gained_s else None

    def round_s(self, stages: Sequence[Stage], counts: Sequence[int]) -> float:
        """Seconds of a round of these nodes with `counts` blocks; without measurements, of a frame.

        What more nodes bring without smaller frames is guessed in no other way than by an even placement: the slowest node
        gets as little as possible.
        """
        return slowest_s(self.holders(stages, {}), counts) * self._n_frames(len(stages))

    def moving_s(self, stages: Sequence[Stage], counts: Sequence[int]) -> float:
        """How long it takes to move the weights for such a cut."""
        seconds, start = 0.0, 0
        for holder, count in zip(self.holders(stages, {}), counts, strict=True):
            seconds += holder.move_s * holder.n_moved(start, start + count)
            start += count
        return seconds

    def _n_frames(self, n_nodes: int) -> int:
        """Frames of a round."""
        return self._workload.frames(n_nodes) if self._measured is not None else 1

    def holders(self, stages: Sequence[Stage], most: Mapping[str, int]) -> list[Holder]:
        return [self._holder(k, stage, len(stages), most.get(stage.name)) for k, stage in enumerate(stages)]

    @property
    def _block_bytes(self) -> list[float]:
        n, length = self._workload.n_sequences, self._workload.sequence_length
        return [block.held_bytes + n * block.cache_bytes(length) for block in self._shape.blocks]

    def _holder(self, place: int, stage: Stage, n_used: int, most: int | None) -> Holder:
        block_s, base_s, most_bytes = self._times(place, stage.name, n_used)
        move_s = self._part_bytes / LOAD_BYTES_S
        if place:
            move_s += self._part_bytes / self._link_bytes_s(stage.name)
        return Holder(
            stage.name, (stage.start, stage.stop), block_s, base_s, move_s, most_bytes, least=min(place, 1), most=most
        )

    def _times(self, place: int, name: str, n_used: int) -> tuple[float, float, float]:
        """Seconds per block and beside blocks, and bytes that there are for blocks."""
        head_s = 0.0 if place else self._shape.head_bytes / READ_BYTES_S
        if (measured := self._measured) is None:
            return self._shape.reference.weight_bytes / READ_BYTES_S, head_s, float("inf")
        profile, cost = measured
        terms, known = cost.terms(n_used), _index(profile, name)
        if known is not None:
            return terms.unit_s(known), terms.base_s[known], min(terms.capacity(known))
        return fmean(terms.unit_s(i) for i in range(len(profile.nodes))), head_s, float("inf")

    def _link_bytes_s(self, name: str) -> float:
        if (measured := self._measured) is None:
            return DEFAULT_BYTES_S
        profile, cost = measured
        known = _index(profile, name)
        return DEFAULT_BYTES_S if known is None else cost.links.of(0, known)[1]


def _index(profile: ClusterProfile, name: str) -> int | None:
    return next((i for i, node in enumerate(profile.nodes) if node.name == name), None)


def slower_links(
    profile: ClusterProfile, ways: Mapping[tuple[str, str], float], n_bytes: float
) -> dict[tuple[str, str], float]:
    """Of each pair of nodes, in both directions, by how many seconds it is slower than measured; empty if none is.

    Args:
        ways: as for `MovingCut.in_another_order`; n_bytes: of a frame.
    """
    index = {node.name: i for i, node in enumerate(profile.nodes)}
    links = Links(profile)
    more: dict[frozenset[str], float] = {}
    for (source, target), way_s in ways.items():
        if source not in index or target not in index or source == target:
            continue
        round_trip_s, bytes_s = links.of(index[source], index[target])
        expected_s = round_trip_s + n_bytes / bytes_s
        is_slower = way_s > SLOWER * expected_s + SLOWER_S
        pair = frozenset((source, target))
        more[pair] = max(more.get(pair, 0.0), way_s - expected_s if is_slower else 0.0)
    if not any(more.values()):
        return {}
    of_node = {name: [s for pair, s in more.items() if name in pair] for name in index}
    wide = {name: min(found) if len(found) > 1 else 0.0 for name, found in of_node.items()}
    return {(a, b): max(more.get(frozenset((a, b)), 0.0), wide[a], wide[b]) for a in index for b in index if a != b}


def better_with(ring: Sequence[Stage], name: str, cut: MovingCut) -> Form | None:
    """The ring with one more node, at the place where the fewest bytes move; None if it does not gain JOIN_GAIN.

    The rule of Petals (Borzunov et al. 2023).
    """
    now_s = cut.round_s(ring, [stage.stop - stage.start for stage in ring])
    best: Form | None = None
    best_s = float("inf")
    for place in range(1, len(ring) + 1):
        holders = [*ring[:place], Stage(name, 0, 0), *ring[place:]]
        found = with_new_cut(holders, {}, cut)
        if (
            found is not None
            and cut.round_s(found.stages, found.counts) * JOIN_GAIN <= now_s
            and (s := cut.moving_s(holders, found.counts)) < best_s
        ):
            best, best_s = found, s
    return best


@dataclass(frozen=True)
class Holder:
    """A node that can hold blocks.

    Attributes:
        has: blocks in its memory, half-open; (0, 0) if there are none.
        block_s: of one block and a frame.
        base_s: seconds per frame for everything but blocks.
        move_s: of getting one more block: over its link, or from its disk.
        most_bytes: of weights and caches of blocks.
        least, most: blocks that it must hold (none for a starter), and can hold; None is any number.
    """

    name: str
    has: tuple[int, int]
    block_s: float
    base_s: float
    move_s: float
    most_bytes: float
    least: int = 1
    most: int | None = None

    def n_moved(self, start: int, stop: int) -> int:
        """How many of these blocks it does not have."""
        return (stop - start) - max(0, min(stop, self.has[1]) - max(start, self.has[0]))


def cut(
    holders: Sequence[Holder], block_bytes: Sequence[float], n_frames: float, cuts: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Blocks of each node, in ring order, so that moving and `n_frames` frames take the least time; None if nothing fits.

    Args:
        block_bytes: of each block, weights with its caches.
        cuts: where the model may be cut; None is everywhere.
    """
    allowed = frozenset(range(len(block_bytes) + 1) if cuts is None else cuts)
    best: tuple[float, tuple[int, ...]] | None = None
    for pace_s in _paces(holders, block_bytes, allowed):
        found = _moved_least(holders, block_bytes, pace_s, allowed)
        if found is None:
            continue
        moving_s, counts = found
        total = moving_s + n_frames * slowest_s(holders, counts)
        if best is None or total < best[0]:
            best = (total, counts)
    return None if best is None else best[1]


def slowest_s(holders: Sequence[Holder], counts: Sequence[int]) -> float:
    """Seconds of the slowest node for a frame; the others wait for it."""
    return max(h.base_s + h.block_s * n for h, n in zip(holders, counts, strict=True))


def _paces(holders: Sequence[Holder], block_bytes: Sequence[float], cuts: Collection[int]) -> list[float]:
    """Times of the slowest stage that are worth a try, from the shortest that is possible on."""
    n = len(block_bytes)
    paces = sorted({h.base_s + h.block_s * count for h in holders for count in range(h.least, n + 1)})
    low, high = 0, len(paces)
    while low < high:  # the more time, the more fits
        middle = (low + high) // 2
        if _moved_least(holders, block_bytes, paces[middle], cuts) is None:
            low = middle + 1
        else:
            high = middle
    return paces[low : low + N_PACES]


def _moved_least(
    holders: Sequence[Holder], block_bytes: Sequence[float], pace_s: float, cuts: Collection[int]
) -> tuple[float, tuple[int, ...]] | None:
    """The cut with the least time of moving in which no stage takes more than `pace_s`; None if there is none."""
    n = len(block_bytes)
    sums = [0.0, *accumulate(block_bytes)]
    costs = [0.0] + [INFINITE] * n  # of the cheapest way in which the nodes so far hold the first blocks
    ways: list[list[int]] = []
    for holder in holders:
        free_s = pace_s - holder.base_s
        most = int(free_s / holder.block_s * (1 + 1e-9)) if holder.block_s else n
        if free_s < 0:
            most = 0
        if holder.most is not None:
            most = min(most, holder.most)
        after, way = [INFINITE] * (n + 1), [0] * (n + 1)
        for start, cost in enumerate(costs):
            if cost == INFINITE:
                continue
            for stop in range(start + holder.least, min(n, start + most) + 1):
                if sums[stop] - sums[start] > holder.most_bytes:
                    break
                total = cost + holder.move_s * holder.n_moved(start, stop)
                if stop in cuts and total < after[stop]:
                    after[stop], way[stop] = total, start
        costs = after
        ways.append(way)
    if costs[n] == INFINITE:
        return None
    counts, stop = [], n
    for way in reversed(ways):
        counts.append(stop - way[stop])
        stop = way[stop]
    return costs[n], tuple(reversed(counts))
