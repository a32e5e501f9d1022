"""A node's share of a range of blocks in the kernels, the sum over the group, and logits that each node has a part of."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mdi.errors import Code, EngineError
from mdi.kernels.blocks import PIECES, Blocks, Context, MdiFrame, MdiNorm, Tensors
from mdi.kernels.exchange import MdiMesh
from mdi.kernels.slices import Slices
from mdi.model.spec import Attention
from mdi.tensor.mesh import Tally
from mdi.tensor.shares import Share
from mdi.tensor.sums import AllReduce


class GroupSum:
    """A node's place in a group.

    Args:
        share: what this node has of each block, and of the head.

    Attributes:
        tally: what sums took in this run.
        name: of the group that it is, or was, a part of.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.tally, self.name = Tally(), ""
        self._all: AllReduce | None = None

    def join(self, name: str, all_reduce: AllReduce) -> None:
        """The nodes of the group of this name are connected: from here on frames can be computed."""
        self._all, self.tally, self.name = all_reduce, all_reduce.mesh.tally, name

    def leave(self) -> None:
        """Close the connections; harmless if there are none."""
        joined, self._all = self._all, None
        if joined is not None:
            joined.mesh.close()

    @property
    def joined(self) -> AllReduce:
        """The sum over all nodes. Raises EngineError if they are not connected."""
        if self._all is None:
            raise EngineError(
                "a share of the blocks cannot be computed alone: the nodes of the group are not connected"
            )
        return self._all

    def send(self, logits: np.ndarray) -> None:
        """Send a member's part of the logits, float32 (M, tokens), to the first node."""
        self.joined.mesh.swap([(0, logits.reshape(-1).view(np.uint8).data)], [])


class SharedHead:
    """All logits on the first node, once the others have computed the same rows: float32 (M, n_embd) -> (M, vocabulary).

    Args:
        own: the first node's rows of the head; None if it has none.
    """

    def __init__(self, group: GroupSum, own: Callable[[np.ndarray], np.ndarray] | None) -> None:
        bounds = group.share.shares.vocabulary
        assert bounds is not None
        self._group, self._own, self._bounds = group, own, bounds
        self._widths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        bounds, widths = self._bounds, self._widths
        logits = np.empty((len(x), bounds[-1]), dtype=np.float32)
        if self._own is not None:
            logits[:, : widths[0]] = self._own(x)
        others = [rank for rank in range(1, len(widths)) if widths[rank]]
        found = self._group.joined.mesh.swap([], [(rank, 4 * len(x) * widths[rank]) for rank in others])
        for rank, data in found.items():
            logits[:, bounds[rank] : bounds[rank + 1]] = np.frombuffer(data, dtype=np.float32).reshape(len(x), -1)
        return logits


Ready = Callable[[int, int], contextlib.AbstractContextManager[None]]


def _always(block: int, half: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Sum(Protocol):
    """The sum over all nodes of a group: every node calls it with its own numbers, in the same order."""

    def reduce(self, x: np.ndarray) -> None:
        """float32 (n_rows, n_cols), contiguous: becomes the sum, with the same bits on all nodes."""

    def lent(self, n_bytes: int) -> contextlib.AbstractContextManager[MdiMesh | None]:
        """The exchange with which the kernels do sums of so many bytes themselves; None if they cannot."""

    def end(self, x: np.ndarray) -> None:
        """`reduce`, where the kernels gave up before the sum, or in it."""


PHASES = 6  # of a block, csrc/stage.h: attention, its sum, what is added, the other half likewise; it may come before the sum


class ShardBlocks(Blocks):
    """The share of one node in the blocks [start, stop).

    Args:
        tensors: of block i, by litgpt's names without "transformer.h.<i>.": the node's shards, see tensor.shard_source.

    Raises:
        KernelError: a tensor is missing or of another shape, or there are no kernels.
    """

    def __init__(
        self, share: Share, start: int, stop: int, tensors: Callable[[int], Tensors], cache_type: str, context: Context
    ) -> None:  # fmt: skip
        self._share = share
        super().__init__(share.spec, start, stop, tensors, cache_type, context)
        self._gains: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for i in range(start, stop):
            self._take_norms(i, tensors)

    def prepare(self, max_length: int, capacities: Sequence[int], limit_bytes: int | None = None) -> None:
        """See Blocks; the caches know what they have of each block."""
        super().prepare(max_length, capacities, limit_bytes)
        self.caches.shares = {i: self._share.of(i).cached for i in range(self.start, self.stop)}

    def _take_norms(self, index: int, tensors: Callable[[int], Tensors]) -> None:
        """Norms over all heads need a sum over all nodes, and are computed here."""
        mixer = self.spec.blocks[index].mixer
        if isinstance(mixer, Attention) and mixer.qk_norm is not None and mixer.qk_norm_over_all:
            of_block = tensors(index)
            q, k = (np.asarray(of_block[f"attn.norm_{x}.weight"], dtype=np.float32) for x in "qk")
            offset = np.float32(mixer.qk_norm.unit_offset)
            self._gains[index] = q + offset, k + offset
            attention = self._blocks[index - self.start].attention
            attention.norm_q = attention.norm_k = MdiNorm()

    def _mixer(self, index: int) -> Attention:
        mixer = self.spec.blocks[index].mixer
        assert isinstance(mixer, Attention)
        return mixer

    def forward_shared(self, rows: np.ndarray, slices: Slices, group: Sum, ready: Ready | None = None) -> None:
        """Run the blocks over the rows, in place; all nodes of the group do so at the same time, and end with the same rows.

        Args:
            rows: float32 (N, n_embd), contiguous; the same on all nodes.
            ready: as of Blocks.forward_in_halves, None if all weights are in memory.
                Only the sums of norms over all heads happen meanwhile.

        Raises:
            EngineError: as Blocks.forward. RingError: a node of the group is lost.
        """
        frame, kept = self._frame(rows, slices)
        self.context.poll_neighbours()
        y, z = np.empty_like(rows), np.empty_like(rows)

        def run(first: int, stop: int) -> None:
            self._run_phases(frame, y, z, group, first, stop)

        if ready is None and not self._gains:
            run(0, PHASES * (self.stop - self.start))
            return
        ready = ready or _always
        for i in range(self.start, self.stop):
            first = PHASES * (i - self.start)
            mlp = first + (1 if self.spec.blocks[i].residual == "parallel" else 3)
            with ready(i, 0):
                if i in self._gains:
                    self._attention(i, frame, len(rows), y, group)
                else:
                    run(first, first + 1)
            run(first + 1, mlp)
            with ready(i, 1):
                run(mlp, mlp + 1)
            run(mlp + 1, first + PHASES)
        del kept

    def _run_phases(self, frame: MdiFrame, y: np.ndarray, z: np.ndarray, group: Sum, first: int, stop: int) -> None:
        """Phases of all blocks, counted through; where the kernels cannot do a sum, it is done here."""
        at, library = ctypes.c_int32(first), self.context.library
        while at.value < stop:
            with group.lent(y.nbytes) as mesh:
                failed = library.mdi_shared(
                    self.context.handle, ctypes.byref(self._stage), ctypes.byref(frame), ctypes.c_void_p(y.ctypes.data),
                    ctypes.c_void_p(z.ctypes.data), None if mesh is None else ctypes.byref(mesh), ctypes.byref(at), stop,
                )  # fmt: skip
            if failed:
                raise EngineError(f"no memory is left to compute a frame of {frame.n_rows} rows", Code.MEMORY)
            if at.value < stop:
                group.end(z if at.value % PHASES == PHASES - 2 else y)
                at.value += 1

    def _attention(self, block: int, frame: MdiFrame, n_rows: int, y: np.ndarray, group: Sum) -> None:
        """The part that this node's heads add, in `y`, where norms go over the heads of all nodes."""
        heads = self._normed_heads(block, frame, n_rows, group)
        if self._mixer(block).n_head:
            of_heads = MdiFrame.from_buffer_copy(frame)
            of_heads.rows = heads.ctypes.data
            self._piece(block, PIECES["attend"], of_heads, y)
        else:
            y[:] = 0

    def _normed_heads(self, block: int, frame: MdiFrame, n_rows: int, group: Sum) -> np.ndarray:
        """Queries, keys, values (n_rows, width), queries and keys after their norms, which go over all heads of all nodes."""
        share, whole, own = self._share.of(block), self._share.whole.blocks[block].mixer, self._mixer(block)
        assert isinstance(whole, Attention) and own.qk_norm is not None
        size = own.head_size
        heads = np.empty((n_rows, self._blocks[block - self.start].attention.qkv.n_out), dtype=np.float32)
        self._piece(block, PIECES["project"], frame, heads)
        n_q, n_k = own.n_head * size, own.n_groups * size
        q, k = heads[:, :n_q], heads[:, n_q : n_q + n_k]
        counted = np.repeat([share.counts_group(g) for g in range(*share.groups)], size)
        squares = np.stack([np.square(q).sum(1), np.square(k[:, counted]).sum(1)], axis=1).astype(np.float32)
        group.reduce(squares)
        n_all = np.array([whole.n_head * size, whole.n_groups * size], dtype=np.float32)
        factors = 1 / np.sqrt(squares / n_all + np.float32(own.qk_norm.eps))
        gain_q, gain_k = self._gains[block]
        q *= factors[:, :1]
        q *= gain_q
        k *= factors[:, 1:]
        k *= gain_k
        return heads
