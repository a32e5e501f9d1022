"""One node's part of a model in the kernels. Rows are float32 arrays; torch is not needed.

Same life as a stage of torch (`model.stage`): made for a range of blocks, loaded part by part, prepared for a run, then called
for each frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mdi.errors import EngineError, KernelError
from mdi.kernels.blocks import Blocks, Head, Weights, array_of, n_tables, rope_n_elem
from mdi.kernels.context import Context
from mdi.kernels.layout import Matrix, floats
from mdi.kernels.page_sizes import CacheClass, cache_classes
from mdi.kernels.pages import CachePages, capacity_of
from mdi.slices import Slices


class EmbeddingTable(Protocol):
    """Rows of an embedding, in memory or elsewhere."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, ids: Any) -> np.ndarray: ...


class WeightUse(NamedTuple):
    """Of a stage's weights: bytes of memory, at most; bytes read from the disk; seconds that computing waited for the disk."""

    resident_bytes: int
    read_bytes: int
    wait_s: float


class KernelStage:
    """Blocks [start, stop).

    Args:
        config: litgpt's Config as a plain dict, with all defaults.
        n_threads: see kernels.context.Context.
        cache_type: what caches hold, one of kernels.page_sizes.CACHE_TYPES.
    """

    _context: Context  # this and what follows: from `load` on
    _blocks: Blocks

    def __init__(
        self, config: Mapping[str, Any], start: int, stop: int, n_threads: int = 1, cache_type: str = "float32",
    ) -> None:  # fmt: skip
        self.config = config
        self.start, self.stop = start, stop
        self.n_embd = self.returned_width = int(config["n_embd"])
        self.cache_type = cache_type
        self.max_length = 0
        self._n_threads = n_threads
        self._weights: dict[str, Weights] = {}

    def load(self, parts: Sequence[str], weights: Callable[[str], Weights]) -> None:
        """Take the weights, without copying their memory.

        Args:
            parts: names of the parts that make up this stage.
            weights: gives those of a part, by their names in the full model.

        Raises:
            KernelError: a tensor is missing or of another shape.
        """
        self._weights = {part: weights(part) for part in parts}
        self._context = Context(self._n_threads)
        self._blocks = self._made_blocks()

    def _made_blocks(self) -> Blocks:
        return Blocks(self.config, self.start, self.stop, self._of_block, self.cache_type, self._context)

    def _of_block(self, index: int) -> dict[str, Matrix | np.ndarray]:
        prefix = f"transformer.h.{index}."
        return {name.removeprefix(prefix): weight for name, weight in self._weights[f"block.{index}"].items()}

    def weights_of(self, part: str) -> Weights:
        """The weights of one part; another stage may use them as well."""
        return self._weights[part]

    def part_bytes(self, part: str) -> int:
        """Bytes of one part's weights in their packed form."""
        weights = self._weights[part].values()
        return sum(weight.data.nbytes if isinstance(weight, Matrix) else weight.nbytes for weight in weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in their packed form."""
        return sum(map(self.part_bytes, self._weights))

    @property
    def cache_limit(self) -> int | None:
        """Limit for caches in bytes, because the whole process has a limit; None without one."""
        return None

    @property
    def weight_use(self) -> WeightUse:
        return WeightUse(self.weight_bytes, self.weight_bytes, 0.0)

    @property
    def mapped_bytes(self) -> int:
        """Weights that are pages of a file, which the system counts as free memory, but which must stay."""
        weights = [w for part in self._weights.values() for w in part.values() if isinstance(w, Matrix)]
        return self.weight_bytes if weights and all(not w.data.flags.writeable for w in weights) else 0

    @property
    def gathered_share(self) -> float:
        """The kernels read keys and values in place."""
        return 0.0

    def compile(self) -> None:
        """The kernels are compiled already."""

    @property
    def n_blocks(self) -> int:
        return self.stop - self.start

    @property
    def cache_classes(self) -> list[CacheClass]:
        return cache_classes(self.config, self.start, self.stop, self.cache_type)[0]

    def run_bytes(self, max_length: int) -> int:
        """Memory that a run takes beside the weights: position tables, and the caches of one sequence of full length."""
        tables = 2 * 4 * max_length * rope_n_elem(self.config) * n_tables(self.config)
        return tables + sum(c.n_bytes(max_length) for c in self.cache_classes)

    def prepare(self, max_length: int, cache_limit: int | None = None) -> None:
        """Build what depends on the longest sequence of a run: position tables and, empty, the caches.

        Args:
            cache_limit: bytes that all caches together will take at most; None is not known.
        """
        self.max_length = max_length
        self._blocks.prepare(max_length, [capacity_of(c, max_length, cache_limit) for c in self.cache_classes])

    @property
    def n_finished(self) -> int:
        """Blocks that it has computed so far, also of the frame that is being computed. From any thread."""
        return self._blocks.n_finished

    @property
    def caches(self) -> CachePages:
        return self._blocks.caches

    def __call__(self, x: np.ndarray, slices: Slices) -> np.ndarray:
        """Run the blocks.

        Args:
            x: float32 (N, n_embd), the rows of all slices; they stay as they are.

        Returns:
            float32 (N, n_embd), memory of its own.

        Raises:
            EngineError: a slice that fits neither the run's length nor its sequence's cache.
        """
        rows = np.array(x, dtype=np.float32, order="C", copy=True)
        if self.n_blocks:
            self._run(rows, slices)
        return rows

    def _run(self, rows: np.ndarray, slices: Slices) -> None:
        """All blocks, in place."""
        self._blocks.forward(rows, slices)

    def close(self) -> None:
        """Nothing is computed any more; harmless if repeated."""


class KernelStarterStage(KernelStage):
    """The starter's stage: token embedding, blocks [0, stop), and final norm and head for what comes back."""

    _table: EmbeddingTable
    _table_scale: Matrix | np.ndarray | None
    _head: Callable[[np.ndarray], np.ndarray]

    def __init__(self, config: Mapping[str, Any], stop: int, n_threads: int = 1, cache_type: str = "float32") -> None:
        super().__init__(config, 0, stop, n_threads, cache_type)

    def load(self, parts: Sequence[str], weights: Callable[[str], Weights]) -> None:
        super().load(parts, weights)
        embedding, head = self._weights["embedding"], self._weights["head"]
        self._table = array_of(embedding, "transformer.wte.weight")
        self._table_scale = embedding.get("transformer.wte.weight_scale")
        n_tokens = int(self.config["padded_vocab_size"])
        if self._table.shape != (n_tokens, self.n_embd):
            raise KernelError(f"the embedding of this model is {n_tokens} x {self.n_embd}")
        self._head = self._made_head(head)

    def _made_head(self, weights: Weights) -> Callable[[np.ndarray], np.ndarray]:
        return Head(self.config, weights, int(self.config["padded_vocab_size"]), self._context)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """(N,) token ids -> float32 (N, n_embd)

        Raises:
            EngineError: a token that the model does not have.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._table):
            raise EngineError(f"token ids from {ids.min()} to {ids.max()}, but the model has {len(self._table)}")
        rows = self._table[ids]
        x = rows.astype(np.float32) if rows.dtype == np.int8 else floats(rows)
        if self._table_scale is not None:
            assert isinstance(self._table_scale, np.ndarray)
            x = x * self._table_scale[ids, None]
        if self.config["scale_embeddings"]:
            x = x * np.float32(self.n_embd**0.5)
        return x

    def head(self, x: np.ndarray) -> np.ndarray:
        """float32 (M, n_embd) rows that went through all blocks -> (M, padded_vocab_size) logits"""
        return self._head(x)
