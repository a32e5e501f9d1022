"""Rows that adapters have learned, in the blocks of a node: prompts, deep prompts and prefixes (`mdi.checkpoint.virtual_rows`).

The first rows of a text with such an adapter are virtual: tokens stand for them in the text and in frames, so that nothing that
counts positions, moves rows or computes them again needs to know of them. A prompt replaces them before block 0, a deep prompt
is added to them before a later block. A prefix has their keys and values, which go to the caches as they are: these rows are
not computed, and leave the node as they came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mdi.checkpoint.virtual_rows import PREFIX_KEY, PREFIX_VALUE, PROMPT_TENSOR, STORED_ROWS
from mdi.errors import KernelError
from mdi.kernels.blocks import Weights, array_of
from mdi.kernels.cache_rows import piece_of
from mdi.kernels.pages import CachePages
from mdi.kernels.slices import Slice, Slices, adapter_of
from mdi.kernels.stage_caches import CacheRun
from mdi.model.spec import Attention, ModelSpec

Take = Callable[[], None]
Forward = Callable[[np.ndarray, Slices, Sequence[int], Take], None]  # as Blocks.forward


class _Prompted(NamedTuple):
    """Virtual rows of a text in a frame, with the prompts of its adapter by block, and their positions."""

    rows: slice
    prompts: dict[int, np.ndarray]
    positions: slice


class LearnedRows:
    """Of all adapters of a stage.

    Args:
        parts: tensors of adapters, by the names of their parts.
        cache_type: what the caches hold.

    Raises:
        KernelError: a prefix is not there for each block [start, stop), or rows of an adapter are of different numbers.
    """

    def __init__(self, parts: Mapping[str, Weights], spec: ModelSpec, start: int, stop: int, cache_type: str) -> None:
        self._start = start
        self._n_rows: dict[int, int] = {}  # by the number of the adapter
        self._prompts: dict[int, dict[int, np.ndarray]] = {}  # by adapter and block
        kept: dict[int, dict[tuple[int, str], np.ndarray]] = {}  # keys and values, by adapter
        mixer = spec.blocks[start].mixer
        shape = (mixer.n_groups, mixer.head_size) if isinstance(mixer, Attention) else (0, 0)  # others have no prefix
        for part in parts.values():
            for name in part:
                if (match := STORED_ROWS.fullmatch(name)) is None:
                    continue
                block, number, what = int(match[1]), int(match[2]), match[3]
                rows = array_of(part, name)
                if self._n_rows.setdefault(number, len(rows)) != len(rows):
                    raise KernelError(
                        f"{name} has {len(rows)} rows, where others of its adapter have {self._n_rows[number]}"
                    )
                if what == PROMPT_TENSOR:
                    self._prompts.setdefault(number, {})[block] = rows
                else:
                    kept.setdefault(number, {})[block, what] = rows.reshape(len(rows), *shape)
        self._prefixes: dict[int, CacheRun] = {}
        for number, own in kept.items():
            wanted = {(block, what) for block in range(start, stop) for what in (PREFIX_KEY, PREFIX_VALUE)}
            if number in self._prompts or own.keys() != wanted:
                raise KernelError(f"adapter {number} has no prefix for each of the blocks {start} to {stop - 1}")
            pieces = {i: piece_of(own[i, PREFIX_KEY], own[i, PREFIX_VALUE], cache_type) for i in range(start, stop)}
            self._prefixes[number] = CacheRun(0, self._n_rows[number], cache_type, pieces)

    def are_in(self, slices: Slices) -> bool:
        """Whether some rows of a frame are virtual."""
        return bool(self._n_rows) and any(map(self._n_virtual, slices))

    def _n_virtual(self, part: Slice) -> int:
        """How many of the first rows of a slice are virtual."""
        return max(0, min(self._n_rows.get(adapter_of(part[0]), 0) - part[1], part[2]))

    def forward(
        self, forward: Forward, caches: CachePages, rows: np.ndarray, slices: Slices, taps: Sequence[int], take: Take
    ) -> None:
        """Run the blocks with `forward`, in place; the other arguments as of `Blocks.forward`."""
        is_computed = np.ones(len(rows), dtype=bool)
        own: list[Slice] = []  # what is computed
        prompted: list[_Prompted] = []
        begin = n_before = 0
        for seq_id, start, n_rows, n_logits, *_ in slices:
            number, n = adapter_of(seq_id), self._n_virtual(Slice(seq_id, start, n_rows))
            if n and number in self._prefixes:
                caches.fill(seq_id, self._prefixes[number].part(start, start + n))
                is_computed[begin : begin + n] = False
                begin, start, n_rows, n_logits = begin + n, start + n, n_rows - n, min(n_logits, n_rows - n)
            elif n and number in self._prompts:
                prompted.append(
                    _Prompted(slice(n_before, n_before + n), self._prompts[number], slice(start, start + n))
                )
            if n_rows:
                own.append(Slice(seq_id, start, n_rows, n_logits))
            begin, n_before = begin + n_rows, n_before + n_rows
        computed = np.ascontiguousarray(rows[is_computed])

        def learn(block: int) -> None:
            """The rows before a block get what was learned for it."""
            for one in prompted:
                if (prompt := one.prompts.get(block)) is not None:
                    learned = prompt[one.positions]
                    computed[one.rows] = computed[one.rows] + learned if block else learned

        before = {block - 1 for one in prompted for block in one.prompts if block > self._start}
        stops = iter(behind := sorted({*taps, *before}))

        def stopped() -> None:
            block = next(stops)
            if block in taps:
                rows[is_computed] = computed
                take()
            learn(block + 1)

        learn(self._start)
        if own:
            forward(computed, own, behind, stopped)
        else:
            for _ in taps:
                take()
        rows[is_computed] = computed
