"""The cost of a placement: memory of each node, time of each stage, tokens per second of the ring.

A ring in steady state (recurrent pipelining, MDI-LLM thesis, section 3.3.2): F frames go round for ever, each with the rows
of its share of the sequences. A round takes as long as the slowest stage, link or shared machine needs for F frames, and
never less than one frame's way round. Every sequence gains one token per round.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from mdi.model.caches import CHUNK_ROWS
from mdi.placement.model import ModelShape, Workload
from mdi.placement.profile import ClusterProfile, Links, NodeProfile, Times

# Where no time was measured: rows from which on more rows take more time, because computing and not reading is the limit.
FLAT_ROWS = 8


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one node; `activations` also covers kept rows, and what loading takes beside the weights, if that is more."""

    weights: int
    caches: int
    activations: int
    process: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.activations + self.process


@dataclass(frozen=True)
class Prediction:
    """How fast a ring is.

    Attributes:
        n_rows: of each frame; n_frames: in flight.
        stage_s: time of each stage for one frame, starter first.
        link_s: a frame's way from each stage to the next, hand-overs included; the last one leads back to the starter.
        busy_s: how long each of these links is busy with one frame.
        round_s: until every sequence has its next token.
        tokens_s: of all sequences together.
        limit: what limits the round: "stage", "link" or "round trip".
        slowest: place in the ring of the slowest stage, or of the node before the slowest link.
    """

    n_rows: int
    n_frames: int
    stage_s: tuple[float, ...]
    link_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    round_s: float
    tokens_s: float
    limit: str
    slowest: int


def time_of(times: Times, n_rows: float) -> float:
    """Seconds for so many rows: linear between the measurements; the last line is extended.

    A single measurement is taken to hold for up to FLAT_ROWS rows, and in proportion beyond.
    """
    if len(times) == 1:
        return times[0][1] * max(1.0, n_rows / max(FLAT_ROWS, times[0][0]))
    at = bisect.bisect_left(times, (n_rows, 0.0))
    if at == 0:
        return times[0][1]
    (rows_a, s_a), (rows_b, s_b) = times[at - 1 : at + 1] if at < len(times) else times[-2:]
    seconds = s_a + (s_b - s_a) * (n_rows - rows_a) / (rows_b - rows_a)
    return max(seconds, s_b) if n_rows > rows_b else seconds  # noise must not make many rows free


class Terms:
    """Times and memory with a given number of rows per frame: a stage's time is `base_s` plus its share of `prefix_s`.

    Args:
        n_rows, n_frames: that the times are for.
        held: rows per frame and frames that there must be memory for.
    """

    def __init__(self, cost: CostModel, n_rows: int, n_frames: int, held: tuple[int, int]) -> None:
        self._cost = cost
        self.n_rows, self.n_frames = n_rows, n_frames
        self.has_columns = cost.shape.cut_bytes is not None  # besides hidden, in rows at some cuts
        nodes = range(len(cost.profile.nodes))
        self.base_s = [cost.head_s(n_rows) if i == 0 else 0.0 for i in nodes]
        self.block_s = [cost.block_s(i, n_rows) for i in nodes]  # of the reference block
        self._prefixes: dict[int, list[float]] = {}
        self._capacity: dict[int, tuple[float, float]] = {}
        self._most: dict[int, int] = {}
        self._running = [cost.activation_bytes(i, *held) for i in (0, 1)]  # of the starter, of any other node

    def prefix_s(self, i: int) -> list[float]:
        """Running sums of the times of all blocks on node `i`."""
        if i not in self._prefixes:
            work = [self.block_s[i] * part for part in self._cost.work]
            read = self._cost.cache_read_s(i, self.n_rows)
            self._prefixes[i] = [a + read * b for a, b in zip(work, self._cost.looks, strict=True)]
        return self._prefixes[i]

    def unit_s(self, i: int) -> float:
        """Time of one block: of any block if all are alike, else of a mean one."""
        n, cost = self._cost.n_layer, self._cost
        return (self.block_s[i] * cost.work[n] + cost.cache_read_s(i, self.n_rows) * cost.looks[n]) / n

    def stage_s(self, i: int, start: int, stop: int) -> float:
        prefix = self.prefix_s(i)
        return max(self.base_s[i] + prefix[stop] - prefix[start], self._cost.reads_s(i, start, stop, self.n_rows))

    def link_s(self, a: int, b: int, cut: int) -> tuple[float, float]:
        """A frame's way from node `a` to node `b` with the rows at a cut, and how long the link is busy with it."""
        n_bytes, links = self.n_rows * self._cost.shape.row_bytes_at(cut), self._cost.links
        return links.seconds(a, b, n_bytes), links.transmit_s(a, b, n_bytes)

    def links_s(self, order: Sequence[int], counts: Sequence[int]) -> list[tuple[float, float]]:
        """`link_s` of each link of a ring."""
        ends = zip(order, [*order[1:], order[0]], itertools.accumulate(counts), strict=True)
        return [self.link_s(*one) for one in ends] if len(order) > 1 else []

    def capacity(self, i: int) -> tuple[float, float]:
        """Bytes left for blocks: for their weights with caches, and for their weights while they are loaded."""
        if i not in self._capacity:
            fixed = self._cost.fixed_bytes(i)
            free = self._cost.profile.nodes[i].memory_bytes - fixed
            self._capacity[i] = (free - self._running[i > 0], free - self._cost.load_bytes(i))
        return self._capacity[i]

    def fits(self, i: int, start: int, stop: int) -> bool:
        running, loading = self.capacity(i)
        weights = self._cost.weights[stop] - self._cost.weights[start]
        caches = self._cost.caches_bytes(start, stop)
        return weights + caches <= running and weights <= loading

    def reach(self, i: int, start: int, stage_s: float) -> int:
        """Where a stage that begins with block `start` has to end, to fit the node and to take at most `stage_s`."""
        running, loading = self.capacity(i)
        weights, held, prefix = self._cost.weights, self._cost.held, self.prefix_s(i)
        begin = self._cost.begins[start]
        if min(running, loading) < 0 or self.base_s[i] > stage_s:
            return start
        stop = bisect.bisect_right(held, begin + running) - 1
        stop = min(stop, bisect.bisect_right(weights, weights[start] + loading) - 1)
        return min(stop, bisect.bisect_right(prefix, prefix[start] + stage_s - self.base_s[i]) - 1)

    def most_blocks(self, i: int) -> int:
        """How many blocks fit, where all are alike; -1 if not even a stage without blocks does."""
        if i not in self._most:
            running, loading = self.capacity(i)
            block, cache = self._cost.weights[1], self._cost.caches[1]
            most = int(min(running // (block + cache), loading // block)) if min(running, loading) >= 0 else -1
            self._most[i] = min(most, self._cost.shape.n_layer)
        return self._most[i]


class Windows(Protocol):
    """Nodes that keep a part of their weights on the disk."""

    prompt_rows: int

    def reads_s(self, i: int, start: int, stop: int, n_rows: int) -> float:
        """Seconds in which node `i` reads what a frame needs of the blocks [start, stop) and, on the starter, the head."""


class CostModel:
    """A cluster, a model and a run of it.

    Args:
        timed: sequences that the times are for, if other than the workload's; memory is always for the workload.
        windows: nodes that read weights while they compute; None: none does.
    """

    def __init__(
        self, profile: ClusterProfile, shape: ModelShape, workload: Workload, timed: int | None = None,
        windows: Windows | None = None,
    ) -> None:  # fmt: skip
        self.profile, self.shape, self.workload, self._windows = profile, shape, workload, windows
        self.timed = Workload(timed or workload.n_sequences, workload.sequence_length)
        self.links = Links(profile)
        length, n_sequences = workload.sequence_length, workload.n_sequences
        reference = shape.reference
        self.work = shape.sums(lambda b: b.macs / reference.macs)
        self.weights = shape.sums(lambda b: b.held_bytes)
        self.caches = shape.sums(lambda b: n_sequences * b.cache_bytes(length))
        self.held = [weight + cache for weight, cache in zip(self.weights, self.caches, strict=True)]
        # What every node of a group has, however large its share: of weights, and with caches.
        self.whole_weights = shape.sums(lambda b: b.whole_bytes)
        self.whole = shape.sums(lambda b: b.whole_bytes + b.is_cache_whole * n_sequences * b.cache_bytes(length))
        # Of caches in front of a cut, a stage behind it has copies, as far as a block behind it reads them.
        each = [n_sequences * b.cache_bytes(length) for b in shape.blocks]
        self._copies = [sum(each[i] for i in shape.caches_before(cut)) for cut in range(shape.n_layer + 1)]
        self.begins = [held - copied for held, copied in zip(self.held, self._copies, strict=True)]
        # While a sequence grows, its cache is half full on average.
        self.looks = shape.sums(lambda b: b.read_bytes(-(-length // 2)))
        self._terms: dict[tuple[int, int, tuple[int, int]], Terms] = {}

    @cached_property
    def _largest(self) -> int:
        return max(block.load_bytes for block in self.shape.blocks)

    @cached_property
    def is_uniform(self) -> bool:
        return self.shape.is_uniform

    @property
    def n_layer(self) -> int:
        return self.shape.n_layer

    @property
    def n_nodes(self) -> int:
        return len(self.profile.nodes)

    def terms(self, n_used: int, timed: Workload | None = None) -> Terms:
        """For a ring of so many nodes."""
        work = timed or self.timed
        held = (self.workload.rows_per_frame(n_used), self.workload.frames(n_used))
        key = (work.rows_per_frame(n_used), work.frames(n_used), held)
        if key not in self._terms:
            self._terms[key] = Terms(self, *key)
        return self._terms[key]

    def block_s(self, i: int, n_rows: int) -> float:
        """The reference block on node `i`, without looking at the cache."""
        return block_s(self.profile.nodes[i], self.shape, n_rows)

    def reads_s(self, i: int, start: int, stop: int, n_rows: int) -> float:
        """Seconds in which node `i` reads from its disk what a frame needs of these blocks: it computes meanwhile."""
        return 0.0 if self._windows is None else self._windows.reads_s(i, start, stop, n_rows)

    @property
    def prompt_rows(self) -> int:
        """Rows of prompts in a frame at most."""
        return CHUNK_ROWS if self._windows is None else self._windows.prompt_rows

    def cache_read_s(self, i: int, n_rows: int) -> float:
        """Seconds per byte of one sequence's caches that a frame looks at."""
        speed = self.profile.nodes[i].read_bytes_s
        return n_rows / speed if speed else 0.0

    def head_s(self, n_rows: int) -> float:
        """Embedding, final norm and head on the starter, and the small model for one token, by its bytes."""
        starter, shape = self.profile.nodes[0], self.shape
        draft_s = block_s(starter, shape, 1) * self.workload.draft_bytes / shape.reference.weights_read(1)
        if starter.head_s:
            return time_of(starter.head_s, n_rows) + draft_s
        return block_s(starter, shape, n_rows) * shape.head_bytes / shape.reference.weights_read(n_rows) + draft_s

    def own_bytes(self, i: int) -> int:
        """Weights of a node besides its blocks."""
        return self.shape.embedding_bytes + self.shape.head_bytes + self.workload.draft_bytes if i == 0 else 0

    def fixed_bytes(self, i: int) -> int:
        """Bytes of a node besides its blocks, without those that depend on the rows of a frame."""
        return self.profile.nodes[i].process_bytes + self.shape.runtime_bytes + self.own_bytes(i) + self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """Of rows that a node has sent; a ring of one of these nodes keeps none, which is not reckoned with."""
        return self.workload.kept_bytes(self.shape.widest_row_bytes, len(self.profile.nodes))

    def load_bytes(self, i: int) -> int:
        """Where layers are packed, one tensor is there twice while a stage is loaded."""
        return max(self._largest, self.shape.head_load_bytes) if i == 0 else self._largest

    def activation_bytes(self, i: int, n_rows: int, n_frames: int) -> int:
        """Frames in flight, the widest layer, the scores of a piece of prompt, position tables, on the starter the logits."""
        shape, length = self.shape, self.workload.sequence_length
        prefill = min(CHUNK_ROWS, length)
        rows = n_rows + prefill
        scores = 2 * 4 * shape.n_head * prefill * length  # as they are, and after the softmax
        logits = 3 * 4 * n_rows * shape.vocab_size if i == 0 else 0
        buffers = 2 * n_frames * rows * shape.widest_row_bytes
        return 2 * rows * shape.work_row_bytes + scores + shape.table_bytes * length + buffers + logits

    def caches_bytes(self, start: int, stop: int) -> float:
        """Of the blocks [start, stop), copies included."""
        return self.caches[stop] - self.caches[start] + (self._copies[start] if stop > start else 0)

    def memory(self, i: int, start: int, stop: int, n_used: int) -> MemoryUse:
        """Memory of node `i` for the blocks [start, stop) in a ring of `n_used` nodes."""
        caches = self.caches_bytes(start, stop)
        running = self.activation_bytes(i, self.workload.rows_per_frame(n_used), self.workload.frames(n_used))
        return MemoryUse(
            weights=int(self.own_bytes(i) + self.weights[stop] - self.weights[start]),
            caches=int(caches),
            activations=int(max(running, self.load_bytes(i) - caches)) + self.shape.runtime_bytes + self.kept_bytes,
            process=self.profile.nodes[i].process_bytes,
        )

    def predict(
        self, order: Sequence[int], counts: Sequence[int], n_sequences: int | None = None, more_frames: int = 0
    ) -> Prediction:
        """How fast the ring is with these nodes in this order, starter first, with so many blocks each.

        Args:
            n_sequences: other than those that the times are for, e.g. 1 for one sequence alone.
            more_frames: in flight beyond one per node.
        """
        timed = replace(self.timed, n_sequences=n_sequences or self.timed.n_sequences, more_frames=more_frames)
        terms = self.terms(len(order), timed)
        stages, start = [], 0
        for i, count in zip(order, counts, strict=True):
            stages.append(terms.stage_s(i, start, start + count))
            start += count
        links = terms.links_s(order, counts)
        ways, busy = tuple(way for way, _ in links), tuple(busy for _, busy in links)
        return _pace(terms.n_rows, terms.n_frames, tuple(stages), ways, busy, timed.n_sequences)


def _pace(
    n_rows: int,
    n_frames: int,
    stages: tuple[float, ...],
    ways: tuple[float, ...],
    busy: tuple[float, ...],
    n_sequences: int,
) -> Prediction:
    path = sum(stages) + sum(ways)
    stage, link = max(stages), max(busy, default=0.0)
    round_s = max(n_frames * stage, n_frames * link, path)
    if round_s == n_frames * stage:  # with links, one text takes longer for the whole round than for a stage
        limit, slowest = "stage", stages.index(stage)
    elif round_s == n_frames * link:
        limit, slowest = "link", busy.index(link)
    else:
        limit, slowest = "round trip", stages.index(stage)
    tokens_s = n_sequences / round_s if round_s else float("inf")
    return Prediction(n_rows, n_frames, stages, ways, busy, round_s, tokens_s, limit, slowest)


def block_s(node: NodeProfile, shape: ModelShape, n_rows: int) -> float:
    """The reference block on a node: as measured, or else the time to read its weights, or to compute with many rows."""
    if node.block_s:
        return time_of(node.block_s, n_rows)
    of = shape.reference
    return max(of.weights_read(n_rows), of.weights_read(1) * n_rows / FLAT_ROWS) / node.read_bytes_s


@dataclass(frozen=True)
class LinkSpeed:
    """Of the links of a group.

    Attributes:
        delay_s: from one node to another, of a few bytes.
        bytes_s: rate of one node to all others together.
        message_s: of a node's own time for each message, sent and received.
    """

    delay_s: float
    bytes_s: float
    message_s: float = 1e-5


def seconds(algorithm: str, n_nodes: int, n_bytes: int, speed: LinkSpeed) -> float:
    """Of one sum of `n_bytes`, until the last node has it. Nodes send and receive at the same time."""
    if n_nodes < 2:
        return 0.0
    n, d, o, b = n_nodes, speed.delay_s, speed.message_s, n_bytes / speed.bytes_s
    if algorithm == "star":
        return 2 * (d + (n - 1) * (b + o))
    if algorithm == "exchange":
        return d + (n - 1) * (b + 2 * o)
    if algorithm == "ring":
        return 2 * (n - 1) * (d + b / n + 2 * o)
    assert algorithm == "tree", algorithm
    depth, most = (
        math.floor(math.log2(n)),
        math.ceil(math.log2(n)),
    )  # hops from a leaf to the root; what the root receives
    return 2 * (depth * d + most * (b + o))
