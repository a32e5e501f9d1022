"""A model and a run of it as numbers: sizes of blocks, embedding, head and caches. Uses neither litgpt nor tensors.

`mdi.placement.model_shape` makes a ModelShape from a litgpt config and a weight format.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from mdi.errors import UsageError
from mdi.kernels.page_sizes import PAGE, n_pages
from mdi.spec.limits import most_bytes


@dataclass(frozen=True)
class BlockShape:
    """One transformer block.

    Attributes:
        weight_bytes: in the model's format, as held in memory.
        load_bytes: additional memory while it is loaded and packed.
        macs: multiplications per row; of experts, those that a row is sent to.
        page_bytes: keys and values of a page of one sequence, see kernels.page_sizes.
        window: positions that a row looks back on at most; None is all.
    """

    weight_bytes: int
    load_bytes: int
    macs: int
    page_bytes: int
    window: int | None = None

    def cache_bytes(self, length: int) -> int:
        """Most bytes of a sequence of `length` positions, from its first token to its last."""
        return n_pages(self.window, length) * self.page_bytes

    def read_bytes(self, length: int) -> float:
        """Bytes of caches that attention reads for one row at the end."""
        return min(length, self.window or length) * self.page_bytes / PAGE


@dataclass(frozen=True)
class ModelShape:
    """A model in one weight format.

    Attributes:
        name, config_hash, format: as in a ClusterProfile.
        context_length: positions that the model was made for.
        row_bytes: one position's activations on the wire.
        blocks: in order.
        embedding_bytes, head_bytes: what the starter holds besides; head with the final norm.
        head_load_bytes: the same for the larger of the two.
        head_macs: multiplications of the head per row.
        n_head, vocab_size: for what attention scores and logits take.
        work_row_bytes: the widest activations of a block, per row.
        table_bytes: position tables, per position.
        kv_dtype: what caches hold, a name in kernels.page_sizes.CACHE_TYPES.
        runtime_bytes: memory of a process as soon as it computes: workspace of kernels, and the allocator's reserve.
    """

    name: str
    config_hash: str
    format: str
    context_length: int
    row_bytes: int
    blocks: tuple[BlockShape, ...]
    embedding_bytes: int
    head_bytes: int
    head_load_bytes: int
    head_macs: int
    n_head: int
    vocab_size: int
    work_row_bytes: int
    table_bytes: int
    runtime_bytes: int = 0
    kv_dtype: str = "float32"

    @property
    def n_layer(self) -> int:
        return len(self.blocks)

    @property
    def reference(self) -> BlockShape:
        """The block that a node's `block_s` is measured with: the middle one, which is of the common kind."""
        return self.blocks[self.n_layer // 2]

    @property
    def is_uniform(self) -> bool:
        return all(block == self.blocks[0] for block in self.blocks)

    @property
    def weight_bytes(self) -> int:
        return self.embedding_bytes + self.head_bytes + sum(block.weight_bytes for block in self.blocks)

    def sums(self, value: Callable[[BlockShape], float]) -> list[float]:
        """Running sums over the blocks: entry e minus entry s is what blocks [s, e) have together."""
        return [0.0, *itertools.accumulate(value(block) for block in self.blocks)]


@dataclass(frozen=True)
class Workload:
    """The work of a run: sequences at the same time, and how long each may become, prompt included.

    Attributes:
        more_frames: in flight beyond one per node.
        replay_bytes: that each node may keep of the rows that it has sent.
        draft_bytes: weights of a small model that the starter computes for each token of a text (--draft).
    """

    n_sequences: int = 1
    sequence_length: int = 2048
    more_frames: int = 0
    replay_bytes: int = 0
    draft_bytes: int = 0

    def __post_init__(self) -> None:
        if self.n_sequences < 1 or self.sequence_length < 1:
            raise UsageError(
                f"a plan needs at least one sequence of one token, got {self.n_sequences} of {self.sequence_length}"
            )

    def kept_bytes(self, row_bytes: int, n_nodes: int) -> int:
        """Bytes of sent rows that a node keeps."""
        if n_nodes < 2:
            return 0
        return most_bytes(self.replay_bytes, self.n_sequences, self.sequence_length, row_bytes)

    def rows_per_frame(self, n_nodes: int) -> int:
        """A frame goes round for each node, or more, each with an even share of the sequences (engine/scheduler.py)."""
        return -(-self.n_sequences // (n_nodes + self.more_frames))

    def frames(self, n_nodes: int) -> int:
        """Frames in flight: with few sequences some stay away."""
        return -(-self.n_sequences // self.rows_per_frame(n_nodes))
