"""One node's part of a model in the kernels, composed of blocks, ends, weights and a sum over a group.

Rows are float32 arrays; torch is not needed. A stage has the parts that its weights have: blocks, and with "embedding" and
"head" the ends of the model. The weights are all in memory (`Resident`) or in a window (`mdi.stages.window`). In a group, a
node has a share of every block, and the results are summed over the group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mdi.block_ranges import ADAPTER_PREFIX
from mdi.checkpoint.packing import EMBEDDING_SCALE
from mdi.engine.rows import ArrayRows
from mdi.engine.worker import WeightUse
from mdi.errors import EngineError, KernelError
from mdi.kernels.blocks import Blocks, Context, ExpertReader, Head, Linear, LowRank, Weights, array_of
from mdi.kernels.layout import Matrix, PackedRows, floats
from mdi.kernels.pages import CachePages, capacity_of
from mdi.kernels.positions import table_bytes
from mdi.kernels.slices import NO_SLICES, Slices
from mdi.model.caches import PageClass, StateClass, cache_classes
from mdi.model.spec import ModelSpec, Norm
from mdi.model.tensors import EMBEDDING, EMBEDDING_NORM, FINAL_NORM, HEAD, INPUT_TABLE, INPUTS, POSITIONS
from mdi.spec.extent import Extent
from mdi.stages.learned_rows import LearnedRows
from mdi.tensor.shard_blocks import GroupSum, ShardBlocks, SharedHead

HeadFunction = Callable[[np.ndarray], np.ndarray]  # float32 (M, n_embd) -> (M, tokens)
Take = Callable[[], None]  # see Blocks.forward
Forward = Callable[[np.ndarray, Slices, Sequence[int], Take, np.ndarray | None], None]  # as Blocks.forward


class EmbeddingTable(Protocol):
    """Rows of an embedding, in memory or elsewhere."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, ids: Any) -> np.ndarray: ...


class StageWeights(Protocol):
    """The weights of a stage, by part: `Resident`, or mdi.stages.window.Windowed.

    Attributes:
        ready, experts: see Blocks.forward_in_halves; None where all weights are in memory.
        cache_limit: bytes for caches, because the whole process has a limit; None without one.
        n_bytes: of memory that they take.
        mapped_bytes: those that are pages of a file, which the system counts as free memory, but which must stay.
    """

    @property
    def ready(self) -> Callable[[int, int], contextlib.AbstractContextManager[None]] | None: ...
    @property
    def experts(self) -> ExpertReader | None: ...
    @property
    def cache_limit(self) -> int | None: ...
    @property
    def n_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def use(self) -> WeightUse: ...

    def __contains__(self, part: str, /) -> bool: ...
    def __getitem__(self, part: str, /) -> Weights: ...

    def table(self, name: str = EMBEDDING, /) -> EmbeddingTable | None:
        """The embedding, or another one of the tables beside it."""

    def head(self, spec: ModelSpec, n_tokens: int, context: Context) -> HeadFunction:
        """The head for so many tokens. Raises KernelError if it is for others."""

    def check(self) -> None:
        """Called after each pass over the blocks. Raises EngineError (memory)."""

    def close(self) -> None:
        """Nothing is computed any more; harmless if repeated."""


class Resident:
    """Weights that are all in memory, which is used without copying.

    Args:
        weights: gives those of a part, by their names in the full model.
    """

    ready = None
    experts = None
    cache_limit = None

    def __init__(self, parts: Iterable[str], weights: Callable[[str], Weights]) -> None:
        self._parts = {part: weights(part) for part in parts}

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def __getitem__(self, part: str) -> Weights:
        return self._parts[part]

    def part_bytes(self, part: str) -> int:
        """Bytes of one part's weights in their packed form."""
        weights = self._parts[part].values()
        return sum(weight.data.nbytes if isinstance(weight, Matrix) else weight.nbytes for weight in weights)

    @property
    def n_bytes(self) -> int:
        return sum(map(self.part_bytes, self._parts))

    @property
    def mapped_bytes(self) -> int:
        weights = [w for part in self._parts.values() for w in part.values() if isinstance(w, Matrix)]
        return self.n_bytes if weights and all(not w.data.flags.writeable for w in weights) else 0

    @property
    def use(self) -> WeightUse:
        return WeightUse(self.n_bytes, self.n_bytes, 0.0)

    def table(self, name: str = EMBEDDING) -> EmbeddingTable | None:
        own = self._parts["embedding"]
        found = self._parts["head"].get(HEAD) if name == EMBEDDING and name not in own else own.get(name)
        return PackedRows(found) if isinstance(found, Matrix) else array_of(own, name)

    def head(self, spec: ModelSpec, n_tokens: int, context: Context) -> HeadFunction:
        return Head(spec, self._parts["head"], n_tokens, context)

    def check(self) -> None:
        """There is no limit."""

    def close(self) -> None:
        """Nothing needs to be ended."""


class NoCaches:
    """The caches of a stage without blocks."""

    def free(self, seq_id: int) -> None:
        """Nothing."""

    def rearrange(self, freed: Iterable[int], copies: Iterable[tuple[int, int]]) -> None:
        """Nothing."""

    def clear(self) -> None:
        """Nothing."""


class EndNorm:
    """A norm at one of the model's ends; few rows, computed in float64. None changes nothing.

    Args:
        name: of its tensors, without "weight" and "bias".

    Raises:
        KernelError: a tensor is missing or of another shape.
    """

    def __init__(self, norm: Norm | None, name: str, width: int, weights: Weights) -> None:
        self._norm = norm
        has = {} if norm is None else {"weight": norm.has_weight, "bias": norm.has_bias}
        parts = {what: floats(array_of(weights, f"{name}.{what}")) for what, is_there in has.items() if is_there}
        if any(part.shape != (width,) for part in parts.values()):
            raise KernelError(f"{name} is no norm of {width} numbers")
        self._weight, self._bias = parts.get("weight", np.float32(1)), parts.get("bias", np.float32(0))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 (N, n_embd) -> float32 (N, n_embd)"""
        if self._norm is None:
            return x
        wide = x.astype(np.float64)
        if self._norm.kind == "layer":
            wide -= wide.mean(axis=1, keepdims=True)
        wide /= np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + self._norm.eps)
        weight = self._weight + 1.0 if self._norm.unit_offset else self._weight
        normed: np.ndarray = (wide * weight + self._bias).astype(np.float32)
        return normed


class Inputs:
    """Columns that the embedding gives to blocks, see `mdi.model.spec.BlockInputs`."""

    def __init__(self, spec: ModelSpec, weights: StageWeights, context: Context) -> None:
        of, n, own, table = spec.ends.inputs, spec.n_layer, weights["embedding"], weights.table(INPUT_TABLE)
        assert of is not None
        self._of, self._width = of, spec.width
        proj = own.get(f"{INPUTS}proj.weight")
        if table is None or table.shape != (spec.n_rows, n * of.width):
            raise KernelError(f"the inputs of blocks of this model are {spec.n_rows} x {n * of.width}")
        if not isinstance(proj, Matrix) or (proj.n_out, proj.n_in) != (n * of.width, spec.width):
            raise KernelError(
                f"the projection to inputs of blocks is no packed weight of {n * of.width} x {spec.width}"
            )
        self._table = table
        self._proj = Linear(context, proj)
        self._norm = array_of(own, f"{INPUTS}norm.weight").astype(np.float32)

    def __call__(self, ids: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Token ids (N,) and their hidden rows (N, n_embd) -> float32 (N, blocks * width)"""
        of, rows = self._of, self._table[ids]
        own = floats(rows) if rows.dtype == np.uint16 else rows.astype(np.float32)
        found = (self._proj(np.ascontiguousarray(x)) * np.float32(self._width**-0.5)).reshape(-1, of.width)
        square = np.square(found.astype(np.float64)).mean(axis=1, keepdims=True) + of.norm.eps
        found = (found / np.sqrt(square)).astype(np.float32) * self._norm
        both = found.reshape(len(ids), -1) + own * np.float32(of.width**0.5)
        columns: np.ndarray = both * np.float32(2**-0.5)
        return columns


class Ends:
    """The embedding, and the final norm and head for what comes back. Alone, it is a stage without blocks.

    Args:
        spec: of the whole model.
        head: float32 (M, n_embd) rows that went through all blocks -> (M, padded_vocab_size) logits

    Raises:
        KernelError: the embedding is of another shape.
    """

    def __init__(self, spec: ModelSpec, weights: StageWeights, head: HeadFunction, context: Context) -> None:
        self.n_embd = self.returned_width = spec.width
        self.row_in = self.row_out = spec.row_at(0)
        self._inputs = None if spec.ends.inputs is None else Inputs(spec, weights, context)
        ends, n_tokens, table = spec.ends, spec.n_rows, weights.table()
        if table is None or table.shape != (n_tokens, self.n_embd):
            raise KernelError(f"the embedding of this model is {n_tokens} x {self.n_embd}")
        self._table = table
        self._scale = weights["embedding"].get(EMBEDDING_SCALE)
        self._factor = None if ends.embedding_factor is None else np.float32(ends.embedding_factor)
        own, self._positions = weights["embedding"], None
        if ends.n_positions:
            self._positions = floats(array_of(own, POSITIONS))
            if self._positions.shape != (ends.n_positions, self.n_embd):
                raise KernelError(f"the learned positions of this model are {ends.n_positions} x {self.n_embd}")
        self._norm = EndNorm(ends.embedding_norm, EMBEDDING_NORM, self.n_embd, own)
        self.final_norm = EndNorm(ends.final_norm, FINAL_NORM.removesuffix(".weight"), self.n_embd, weights["head"])
        self.head = head
        self.is_head_shared = isinstance(head, SharedHead)
        self.caches = NoCaches()

    def embed(self, ids: np.ndarray, slices: Slices = NO_SLICES) -> np.ndarray:
        """(N,) token ids -> float32 (N, row_in.width)

        Args:
            slices: of the rows; for learned positions.

        Raises:
            EngineError: a token or a position that the model does not have.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._table):
            raise EngineError(f"token ids from {ids.min()} to {ids.max()}, but the model has {len(self._table)}")
        rows = self._table[ids]
        x = floats(rows) if rows.dtype == np.uint16 else rows.astype(np.float32, copy=False)
        if self._scale is not None:
            assert isinstance(self._scale, np.ndarray)
            x = x * self._scale[ids, None]
        if self._factor is not None:
            x = x * self._factor
        if self._positions is not None:
            x = x + self._positions[self._checked_positions(slices, len(ids))]
        x = self._norm(x)
        return x if self._inputs is None else np.concatenate([x, self._inputs(ids, x)], axis=1)

    def _checked_positions(self, slices: Slices, n_rows: int) -> np.ndarray:
        assert self._positions is not None
        positions = np.concatenate(
            [np.arange(start, start + n) for _, start, n, *_ in slices] or [np.empty(0, np.int64)]
        )
        if len(positions) != n_rows or (n_rows and not 0 <= positions.min() <= positions.max() < len(self._positions)):
            raise EngineError(f"{n_rows} rows at positions that the model does not have")
        return positions

    def __call__(self, x: np.ndarray, slices: Slices, taps: Sequence[int] = ()) -> np.ndarray:
        """The rows that `embed` made, which go through no block here."""
        return np.ascontiguousarray(x, dtype=np.float32)


class KernelStage:
    """Blocks [start, stop), and the ends if the weights have them.

    Args:
        spec: of the whole model.
        weights: of these blocks, and of the ends; in a group, of this node's share.
        n_threads: see kernels.blocks.Context.
        cache_type: what caches hold, one of model.caches.CACHE_TYPES.
        group: the share and the sum, in a group.
        adapters: what adapters add to the blocks, by the names of their parts (checkpoint.adapters); not in a group.

    Attributes:
        ends: embedding and head, None if the stage has none; `embed`, `head` and `final_norm` are theirs.

    Raises:
        KernelError: a tensor is missing or of another shape.
    """

    rows = ArrayRows()
    _forward: Forward
    embed: Callable[..., np.ndarray]  # see Ends.embed
    head: HeadFunction
    final_norm: EndNorm

    def __init__(
        self, spec: ModelSpec, start: int, stop: int, weights: StageWeights, n_threads: int = 1,
        cache_type: str = "float32", group: GroupSum | None = None, adapters: Mapping[str, Weights] | None = None,
    ) -> None:  # fmt: skip
        self.spec, self._adapters = spec, adapters or {}
        self.start, self.stop, self.n_blocks = start, stop, stop - start
        self.n_embd = self.returned_width = spec.width
        self.row_in, self.row_out = spec.row_at(start), spec.row_at(stop)
        self.cache_type = cache_type
        self.weights, self.group = weights, group
        self.max_length = 0
        self._context = Context(n_threads)
        self._learned = LearnedRows(self._adapters, spec, start, stop, cache_type)
        if group is None:
            self._blocks = Blocks(spec, start, stop, self._of_block, cache_type, self._context, self._low_rank_of)
            self._forward = self._blocks.forward if weights.ready is None else self._forward_in_halves
        else:
            self._blocks = self._shares = ShardBlocks(
                group.share, start, stop, self._of_block, cache_type, self._context
            )
            self._forward = self._forward_shared
        head = self._made_head() if "head" in weights else None
        self.ends: Ends | None = None
        self.is_head_shared = False
        self._own_logits: HeadFunction | None = None  # of a node of a group that only has rows of the head
        if "embedding" in weights:
            assert head is not None
            self.ends = Ends(spec, weights, head, self._context)
            self.embed, self.head, self.is_head_shared = self.ends.embed, self.ends.head, self.ends.is_head_shared
            self.final_norm = self.ends.final_norm
        else:
            self._own_logits = head

    def _of_block(self, index: int) -> dict[str, Matrix | np.ndarray]:
        prefix = f"transformer.h.{index}."
        return {name.removeprefix(prefix): weight for name, weight in self.weights[f"block.{index}"].items()}

    def _low_rank_of(self, index: int) -> list[LowRank]:
        """The terms that adapters add to a block."""
        part = self._adapters.get(f"{ADAPTER_PREFIX}{index}")
        if part is None:
            return []
        from mdi.checkpoint.adapters import low_rank

        own = self.weights[f"block.{index}"]

        def norm(name: str) -> np.ndarray | None:
            found = own.get(name)
            return found if isinstance(found, np.ndarray) else None

        return low_rank(part, index, norm, self.spec)

    def _made_head(self) -> HeadFunction | None:
        """The head, or this node's rows of it."""
        rows = None if self.group is None else self.group.share.vocabulary
        if rows is None:
            return self.weights.head(self.spec, self.spec.n_rows, self._context)
        own = self.weights.head(self.spec, rows[1] - rows[0], self._context) if rows[0] < rows[1] else None
        assert self.group is not None
        return SharedHead(self.group, own) if "embedding" in self.weights else own

    @property
    def at_starter(self) -> KernelStage | Ends:
        if self.group is None:
            return self
        assert self.ends is not None
        return self.ends

    @property
    def weight_use(self) -> WeightUse:
        return self.weights.use

    @property
    def mapped_bytes(self) -> int:
        return self.weights.mapped_bytes

    @property
    def cache_limit(self) -> int | None:
        return self.weights.cache_limit

    @property
    def gathered_share(self) -> float:
        """The kernels read keys and values in place."""
        return 0.0

    def compile(self) -> None:
        """The kernels are compiled already."""

    def run_bytes(self, max_length: int) -> int:
        """Memory that a run takes besides the weights: position tables, and the caches of one sequence of full length."""
        extent = Extent(max_length, kv_dtype=self.cache_type)
        return run_bytes(self._blocks.spec, self.start, self.stop, extent)

    def prepare(self, max_length: int, cache_limit: int | None = None) -> None:
        """Build what depends on the longest sequence of a run: position tables and, empty, the caches.

        Args:
            cache_limit: bytes that all caches together will take at most; None is not known.
        """
        limit = min((limit for limit in (cache_limit, self.cache_limit) if limit is not None), default=None)
        self.max_length = max_length
        self._blocks.prepare(max_length, [capacity_of(c, max_length, limit) for c in self._blocks.classes], limit)

    @property
    def n_finished(self) -> int:
        """Blocks that it has computed so far, also of the frame that is being computed. From any thread."""
        return self._blocks.n_finished

    @property
    def caches(self) -> CachePages:
        return self._blocks.caches

    @property
    def cache_classes(self) -> list[PageClass | StateClass]:
        return self._blocks.caches.classes

    def __call__(self, x: np.ndarray, slices: Slices, taps: Sequence[int] = ()) -> np.ndarray:
        """Run the blocks.

        Args:
            x: float32 (N, row_in.width), the rows of all slices; they stay as they are.
            taps: numbers of blocks of this stage in the model, rising.

        Returns:
            float32 (N, row_out.width), memory of its own; below them, for each tap, its block's outputs of the rows that need
            logits.

        Raises:
            EngineError: a slice that fits neither the run's length nor its sequence's cache.
            RingError: a node of the group is lost.
        """
        rows = np.array(x[:, : self.n_embd], dtype=np.float32, order="C", copy=True)
        columns = np.ascontiguousarray(x[:, self.n_embd :], np.float32) if self.row_in.width > self.n_embd else None
        seen: list[np.ndarray] = []

        def take() -> None:
            seen.append(self.rows.wanting_logits(rows, slices).copy())

        if self.n_blocks and self._learned.are_in(slices):
            assert columns is None  # see virtual_rows.why_no_rows
            self._learned.forward(
                lambda x, of, at, tap: self._forward(x, of, at, tap, None), self.caches, rows, slices, taps, take
            )
        elif self.n_blocks:
            self._forward(rows, slices, taps, take, columns)
        if self.row_out.width > self.n_embd:  # the columns that are read behind these blocks
            made = self._blocks.cache_columns.made(self.caches, slices) if self.n_blocks else {}
            others = [
                own if (own := made.get(one.name)) is not None else x[:, self.row_in.place(one.name)]
                for one in self.row_out.columns[1:]
            ]
            rows = np.concatenate([rows, *others], axis=1)
        return np.concatenate([rows, *seen]) if seen else rows

    def last_logits(self, ids: np.ndarray, slices: Slices) -> np.ndarray:
        """Logits behind the last of some tokens, for a whole model in memory: blocks and head in one call of the kernels.

        Args:
            ids: (N,) of the rows of all slices.

        Returns:
            float32 (1, padded_vocab_size), the same bits as `head` gives.

        Raises:
            EngineError: as a call.
        """
        assert self.ends is not None and isinstance(self.head, Head)
        x = self.embed(ids, slices)
        columns = np.ascontiguousarray(x[:, self.n_embd :]) if self.row_in.width > self.n_embd else None
        rows = np.ascontiguousarray(x[:, : self.n_embd])
        return self._blocks.forward_last(rows, slices, self.head.linear, columns)

    def _forward_in_halves(
        self, rows: np.ndarray, slices: Slices, taps: Sequence[int], take: Take, columns: np.ndarray | None
    ) -> None:
        assert self.weights.ready is not None
        self._blocks.forward_in_halves(rows, slices, self.weights.ready, taps, take, columns, self.weights.experts)
        self.weights.check()

    def _forward_shared(
        self, rows: np.ndarray, slices: Slices, taps: Sequence[int], take: Take, columns: np.ndarray | None
    ) -> None:
        """Together with the other nodes of the group: all of them compute the same rows at the same time."""
        assert self.group is not None and not taps and columns is None
        self._shares.forward_shared(rows, slices, self.group.joined, self.weights.ready)
        self.weights.check()

    def send_logits(self, x: np.ndarray) -> None:
        """Send this node's part of the logits of some rows (M, n_embd), if it has any, to the group's first node."""
        if self._own_logits is not None and self.group is not None and len(x):
            self.group.send(self._own_logits(x))

    def close(self) -> None:
        """Nothing is computed any more; harmless if repeated."""
        self.weights.close()


def run_bytes(spec: ModelSpec, start: int, stop: int, extent: Extent) -> int:
    """`KernelStage.run_bytes` of blocks that need not be built; in a group, `spec` is that of a share."""
    length = extent.max_length
    tables = table_bytes(spec.blocks[start:stop], length)
    return tables + sum(c.n_bytes(length) for c in cache_classes(spec, start, stop, extent.kv_dtype)[0])
