"""A stage in torch: one node's part of the model, run over the rows of a frame.

Its blocks (`mdi.stages.torch_block`) are named as in the full model, so that a chunk is a selection of its tensors.
`TorchStage` is such a stage for a whole run, with device and types decided. Nothing else of a secondary needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn as nn

from mdi.cancel import Cancel
from mdi.engine.rows import TensorRows, logit_rows
from mdi.engine.worker import StarterFrameStage, WeightUse
from mdi.errors import CheckpointError, EngineError
from mdi.host.computing import Computing
from mdi.kernels.cache_columns import CacheColumns
from mdi.kernels.positions import table_bytes
from mdi.kernels.slices import NO_SLICES, Slices, only_logits
from mdi.model.caches import cache_classes
from mdi.model.rows import HIDDEN
from mdi.model.spec import BlockInputs, Experts, ModelSpec
from mdi.stages.torch_attention import Batch, Positions
from mdi.stages.torch_block import Block, keep_rows_apart, norm_of
from mdi.stages.torch_cache import CACHE_TYPE_OF, TORCH_TYPES, TorchCaches
from mdi.stages.torch_packed import Weights, install, is_packed, layers_for

# Of modules, measured: of a block without experts, of one expert.
BLOCK_BYTES = 40_000
EXPERT_BYTES = 11_000

Tensors = Mapping[str, torch.Tensor]


class Stage(nn.Module):
    """Blocks [start, stop) of a model, on the meta device until `load` has given it all tensors.

    Args:
        cancel: checked before each block is built, which takes a moment where there are many experts.
    """

    transformer: nn.ModuleDict
    max_length: int  # this and what follows: from `prepare` on
    caches: TorchCaches
    _cache_columns: CacheColumns
    _positions: Positions

    def __init__(self, spec: ModelSpec, start: int, stop: int, cancel: Cancel | None = None) -> None:
        super().__init__()
        self.spec, self.n_embd = spec, spec.width
        self.start, self.stop = start, stop
        self.row_in, self.row_out = spec.row_at(start), spec.row_at(stop)
        self.n_finished = 0  # blocks, so far
        blocks = {}
        with torch.device("meta"):
            for i in range(start, stop):
                if cancel is not None:
                    cancel.check()
                blocks[str(i)] = Block(spec.blocks[i], spec.width, i - start)
        self.transformer = nn.ModuleDict({"h": nn.ModuleDict(blocks)})
        self.eval().requires_grad_(False)

    def load(
        self,
        parts: Sequence[str],
        weights: Callable[[str], Weights],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Take the weights, part by part, so that only one part exists twice.

        Args:
            parts: names of the parts that make up this stage.
            weights: gives those of a part, by their names in the full model; on a GPU int8 and int4 can stay packed.

        Raises:
            CheckpointError: a tensor is missing, unknown or of the wrong shape.
        """
        layers = functools.cache(lambda: layers_for(device, dtype))
        is_any_packed = False
        for part in parts:
            stored = weights(part)
            is_any_packed |= is_packed(stored)
            given = {
                name: t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype)
                for name, t in install(self, stored, layers).items()
            }
            self._check(part, given)
            self.load_state_dict(given, strict=False, assign=True)
        left = [name for name, t in self.state_dict().items() if t.is_meta]
        if left:
            raise CheckpointError(f"the weights lack the tensor {left[0]}" + _and_more(left))
        self.requires_grad_(False)
        if is_any_packed and device.type == "cpu":  # these round their rows to 8 bits, which makes last bits visible
            keep_rows_apart(self)

    def _check(self, part: str, given: Tensors) -> None:
        wanted = self.state_dict()
        for name, tensor in given.items():
            if name not in wanted:
                raise CheckpointError(f"part {part!r} has the tensor {name}, which this model does not have")
            if tensor.shape != wanted[name].shape:
                raise CheckpointError(
                    f"tensor {name} has the shape {list(tensor.shape)}, expected {list(wanted[name].shape)}"
                )

    def run_bytes(self, max_length: int, dtype: torch.dtype) -> int:
        """Memory that a run takes beside the weights: position tables, and the caches of one sequence of full length."""
        return run_bytes(self.spec, self.start, self.stop, max_length, dtype)

    def prepare(
        self, max_length: int, device: torch.device, dtype: torch.dtype, cache_limit: int | None = None
    ) -> None:
        """Build what depends on the longest sequence of a run: position tables and, empty, the caches.

        Args:
            max_length: tokens that a sequence may reach; at most the model's.
            dtype: number type of the caches.
            cache_limit: bytes that all caches together will take at most; None is not known.
        """
        self.max_length = max_length
        self._positions = Positions(max_length, device)
        self.caches = TorchCaches(self.spec, self.start, self.stop, max_length, device, dtype, cache_limit)
        self._cache_columns = CacheColumns(self.spec, self.start, self.stop, CACHE_TYPE_OF[dtype])

    @property
    def gathered_share(self) -> float:
        """Temporary memory of attention as a share of the caches: at most one block's keys and values."""
        return 1 / max(1, self.stop - self.start)

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.transformer["h"].children()]

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, slices: Slices, taps: Sequence[int] = ()) -> torch.Tensor:
        """Run the blocks.

        Args:
            x: (N, row_in.width), the rows of all slices.
            taps: numbers of blocks of this stage in the model, rising.

        Returns:
            (N, row_out.width); below them, for each tap, its block's outputs of the rows that need logits.

        Raises:
            EngineError: a slice that fits neither the run's length nor its sequence's cache.
        """
        for seq_id, first, n_rows, *_ in slices:
            if first + n_rows > self.max_length:
                raise EngineError(
                    f"position {first + n_rows} of sequence {seq_id}, but sequences of this run end at {self.max_length}"
                )
        batch = Batch(slices, self.caches, self._positions)
        if self._cache_columns.reads:
            self._cache_columns.put(self.caches, slices, x[:, self.n_embd :].float().cpu().numpy())
        seen: list[torch.Tensor] = []
        columns = given = {one.name: x[:, self.row_in.place(one.name)] for one in self.row_in.columns}
        whole = x = columns[HIDDEN]
        wanted = logit_rows(slices) if self.spec.skipped_from < self.stop else None
        for i, block in enumerate(self.blocks, self.start):
            if wanted is not None and i == max(self.start, self.spec.skipped_from):
                whole, x = x, x[wanted]  # only rows that give logits are computed from here on
                columns = {name: column[wanted] for name, column in columns.items()}
                batch = Batch(only_logits(slices), self.caches, self._positions, has_room=True)
            if not len(x) and len(whole):
                self.n_finished += self.stop - i
                break
            gated = block.of.gated
            x = block(x, batch) if gated is None else block(x, batch, columns[gated.column])
            self.n_finished += 1
            if i in taps:  # which models whose rows skip blocks do not have
                seen.append(x if (kept := logit_rows(slices)) is None else x[kept])
        if wanted is not None:
            whole = whole.clone()
            whole[wanted] = x
            x = whole
        if self.row_out.width > self.n_embd:
            made = self._cache_columns.made(self.caches, slices)
            given |= {name: torch.from_numpy(rows).to(x) for name, rows in made.items()}
            x = torch.cat([x, *(given[one.name] for one in self.row_out.columns[1:])], dim=1)
        return torch.cat([x, *seen]) if seen else x

    @torch.inference_mode()
    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile the MLPs, which are worth it and have static control flow; attention reads ragged caches.

        They are run once, with one row and with several, so that no sequence waits for the compiler.

        Raises:
            EngineError: torch cannot compile on this machine.
        """
        try:
            for block in self.blocks:
                block.mlp.compile(dynamic=True)
                weight = next(block.parameters())
                for n_rows in (1, 3):
                    block.mlp(torch.zeros(n_rows, self.n_embd, device=weight.device, dtype=weight.dtype))
        except Exception as e:  # of many kinds, from a missing compiler to a bug of one
            raise EngineError(f"--compile: torch cannot compile here: {(str(e).splitlines() or [''])[0]}") from e


def run_bytes(spec: ModelSpec, start: int, stop: int, max_length: int, dtype: torch.dtype) -> int:
    """`Stage.run_bytes` of blocks that need not be built."""
    tables, classes = (
        table_bytes(spec.blocks[start:stop], max_length),
        cache_classes(spec, start, stop, CACHE_TYPE_OF[dtype])[0],
    )
    return int(tables + sum(c.n_bytes(max_length) for c in classes))


def module_bytes(spec: ModelSpec, start: int, stop: int) -> int:
    """Memory of the blocks as Python objects, without one weight: nothing, but where a model asks for many experts."""
    n_experts = max(one.mlp.n if isinstance(one.mlp, Experts) else 0 for one in spec.kinds)
    return (stop - start) * (BLOCK_BYTES + n_experts * EXPERT_BYTES)


class Inputs(nn.Module):
    """Columns that the embedding gives to blocks, see `mdi.model.spec.BlockInputs`."""

    def __init__(self, of: BlockInputs, spec: ModelSpec) -> None:
        super().__init__()
        self._width, self._n_embd = of.width, spec.width
        self.table = nn.Embedding(spec.n_rows, spec.n_layer * of.width)
        self.proj = nn.Linear(spec.width, spec.n_layer * of.width, bias=False)
        self.norm = norm_of(of.norm, of.width)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Token ids (N,) and their hidden rows (N, n_embd) -> (N, blocks * width)"""
        of_hidden = self.norm((self.proj(x) * self._n_embd**-0.5).unflatten(1, (-1, self._width))).flatten(1)
        found: torch.Tensor = (of_hidden + self.table(ids) * self._width**0.5) * 2**-0.5
        return found


class StarterStage(Stage):
    """The starter's stage: token embedding, blocks [0, stop), and final norm and head for what comes back."""

    is_head_shared = False

    def __init__(self, spec: ModelSpec, stop: int) -> None:
        super().__init__(spec, 0, stop)
        ends = spec.ends
        with torch.device("meta"):
            self.transformer["wte"] = nn.Embedding(spec.n_rows, spec.width)
            if ends.n_positions:
                self.transformer["wpe"] = nn.Embedding(ends.n_positions, spec.width)
            self.transformer["wte_norm"] = norm_of(ends.embedding_norm, spec.width)
            if ends.inputs is not None:
                self.transformer["inputs"] = Inputs(ends.inputs, spec)
            self.transformer["ln_f"] = norm_of(ends.final_norm, spec.width)
            self.lm_head = nn.Linear(spec.width, spec.n_rows, bias=ends.head_bias)
        self.eval().requires_grad_(False)

    @property
    def returned_width(self) -> int:
        """Columns of the rows that come back to `head`."""
        return self.n_embd

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor, slices: Slices = NO_SLICES) -> torch.Tensor:
        """(N,) token ids -> (N, row_in.width), with the positions of the slices where the model has learned some."""
        x: torch.Tensor = self.transformer["wte"](ids)
        if (factor := self.spec.ends.embedding_factor) is not None:
            x = x * torch.tensor(factor, dtype=x.dtype)
        if n := self.spec.ends.n_positions:
            positions = [i for _, start, n_rows, *_ in slices for i in range(start, start + n_rows)]
            if len(positions) != len(ids) or (positions and max(positions) >= n):
                raise EngineError(f"{len(ids)} rows at positions that the model does not have")
            x = x + self.transformer["wpe"](torch.tensor(positions, device=ids.device))
        found: torch.Tensor = self.transformer["wte_norm"](x)
        if self.spec.ends.inputs is not None:
            found = torch.cat([found, self.transformer["inputs"](ids, found)], dim=1)
        return found

    @torch.inference_mode()
    def head(self, x: torch.Tensor) -> torch.Tensor:
        """(M, n_embd) rows that went through all blocks -> (M, padded_vocab_size) logits"""
        logits: torch.Tensor = self.lm_head(self.final_norm(x))
        cap = self.spec.ends.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.inference_mode()
    def final_norm(self, x: torch.Tensor) -> torch.Tensor:
        """(M, n_embd) the same rows -> (M, n_embd), what the head multiplies"""
        normed: torch.Tensor = self.transformer["ln_f"](x)
        return normed


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


class TorchStage:
    """A stage for a whole run, with device and types decided; the same methods as `KernelStage`.

    Args:
        inner: the stage itself.
        kv_dtype: what its caches hold.
        stored: type of the weights that it is loaded with; None if they are packed.
    """

    def __init__(self, inner: Stage, computing: Computing, kv_dtype: str, stored: str | None) -> None:
        self.inner = inner
        self.start, self.stop, self.n_embd = inner.start, inner.stop, inner.n_embd
        self.row_in, self.row_out = inner.row_in, inner.row_out
        self._device, self._dtype = torch.device(computing.device), getattr(torch, computing.dtype)
        self._kv_dtype = TORCH_TYPES[kv_dtype]
        self._may_be_mapped = stored == computing.dtype and computing.device == "cpu"
        self.rows = TensorRows(self._device, self._dtype)

    @property
    def at_starter(self) -> StarterFrameStage:
        return cast(StarterFrameStage, self.inner)

    def load(self, parts: Sequence[str], weights: Callable[[str], Weights]) -> None:
        self.inner.load(parts, weights, self._device, self._dtype)

    @property
    def weight_use(self) -> WeightUse:
        """Nothing is read from the disk while it computes."""
        n_bytes = sum(tensor.nbytes for tensor in self.inner.state_dict().values())
        return WeightUse(n_bytes, n_bytes, 0.0)

    def close(self) -> None:
        """Nothing needs to be ended."""

    def run_bytes(self, max_length: int) -> int:
        return self.inner.run_bytes(max_length, self._kv_dtype)

    def prepare(self, max_length: int, cache_limit: int | None = None) -> None:
        self.inner.prepare(max_length, self._device, self._kv_dtype, cache_limit)

    def compile(self) -> None:
        self.inner.compile()

    @property
    def max_length(self) -> int:
        return self.inner.max_length

    @property
    def n_finished(self) -> int:
        """Blocks that it has computed so far; a replayed step counts none. From any thread."""
        return getattr(self.inner, "n_finished", 0)

    @property
    def caches(self) -> TorchCaches:
        return self.inner.caches

    @property
    def cache_limit(self) -> int | None:
        """There is none for the whole process."""
        return None

    @property
    def gathered_share(self) -> float:
        return self.inner.gathered_share

    @property
    def mapped_bytes(self) -> int:
        """Weights that are pages of a file. Those in another format are no parameters of the stage any more."""
        return sum(p.nbytes for p in self.inner.parameters()) if self._may_be_mapped else 0

    def __call__(self, x: torch.Tensor, slices: Slices, taps: Sequence[int] = ()) -> torch.Tensor:
        found: torch.Tensor = self.inner(x, slices, taps) if taps else self.inner(x, slices)
        return found
