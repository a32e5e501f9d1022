"""A stage in torch: one node's part of the model, run over the rows of a frame.

Blocks, norms and MLPs are litgpt's own, built with their global numbers (which decide about sliding windows, dual RoPE and
dense layers) and named as in the full model, so that a chunk is a selection of its tensors. `TorchStage` is such a stage for a
whole run, with device and types decided. Nothing else of a secondary needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import torch
import torch.nn as nn
from litgpt.config import Config
from litgpt.model import GPT, Block, RMSNorm, do_softcapping

from mdi.cancel import Cancel
from mdi.engine.rows import TensorRows, logit_rows
from mdi.engine.worker import StarterFrameStage, WeightUse
from mdi.errors import CheckpointError, EngineError
from mdi.host.computing import Computing
from mdi.kernels.positions import rope_tables
from mdi.kernels.slices import NO_SLICES, Slices
from mdi.model.caches import cache_classes
from mdi.model.plain import spec_of
from mdi.model.spec import Rotary
from mdi.spec.model import ModelConfig
from mdi.stages.torch_attention import Batch, cached, keep_rows_apart
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
    cos: torch.Tensor
    sin: torch.Tensor
    caches: TorchCaches

    def __init__(self, config: Config, start: int, stop: int, cancel: Cancel | None = None) -> None:
        super().__init__()
        self.config = config
        self.n_embd = config.n_embd
        self.start, self.stop = start, stop
        self.n_finished = 0  # blocks, so far
        blocks = {}
        with torch.device("meta"):
            for i in range(start, stop):
                if cancel is not None:
                    cancel.check()
                blocks[str(i)] = self.make_block(config, i, i - start)
        self.transformer = nn.ModuleDict({"h": nn.ModuleDict(blocks)})
        self.eval().requires_grad_(False)

    @staticmethod
    def make_block(config: Config, index: int, layer: int) -> Block:
        """Block `index` of the model, which is number `layer` of this stage."""
        block = Block(config, index)
        block.attn = cached(block.attn, layer)
        for name, norm in list(block.named_children()):
            if type(norm) is RMSNorm and not norm.add_unit_offset:  # torch's does the same in fewer steps
                setattr(block, name, nn.RMSNorm(norm.weight.shape, eps=norm.eps))
        return block

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
        return run_bytes(self.config, self.start, self.stop, max_length, dtype)

    def prepare(
        self, max_length: int, device: torch.device, dtype: torch.dtype, cache_limit: int | None = None
    ) -> None:
        """Build what depends on the longest sequence of a run: position tables and, empty, the caches.

        Args:
            max_length: tokens that a sequence may reach; at most config.block_size.
            dtype: number type of the caches.
            cache_limit: bytes that all caches together will take at most; None is not known.
        """
        self.max_length = max_length
        self.cos, self.sin = position_tables(self.config, max_length, device)
        size = self.sin.size(1)
        self.sin[:, : size - size // 2].neg_()  # as `rotate` needs it
        spec = spec_of(ModelConfig.from_litgpt(self.config))
        self.caches = TorchCaches(spec, self.start, self.stop, max_length, device, dtype, cache_limit)

    @property
    def gathered_share(self) -> float:
        """Temporary memory of attention as a share of the caches: at most one block's keys and values."""
        return 1 / max(1, self.stop - self.start)

    @property
    def blocks(self) -> list[Block]:
        blocks: list[Block] = list(self.transformer["h"].children())
        return blocks

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, slices: Slices, taps: Sequence[int] = ()) -> torch.Tensor:
        """Run the blocks.

        Args:
            x: (N, n_embd), the rows of all slices.
            taps: numbers of blocks of this stage in the model, rising.

        Returns:
            (N, n_embd); below them, for each tap, its block's outputs of the rows that need logits.

        Raises:
            EngineError: a slice that fits neither the run's length nor its sequence's cache.
        """
        for seq_id, first, n_rows, *_ in slices:
            if first + n_rows > self.max_length:
                raise EngineError(
                    f"position {first + n_rows} of sequence {seq_id}, but sequences of this run end at {self.max_length}"
                )
        batch = Batch(slices, self.caches)
        cos, sin = self.cos[batch.positions, None], self.sin[batch.positions, None]  # (N, 1, rope_n_elem[, 2])
        rope_indices = self.config.rope_indices
        x = x[None]  # litgpt's blocks want a batch dimension
        seen: list[torch.Tensor] = []
        for i, block in enumerate(self.blocks, self.start):
            if rope_indices is None:
                x = block(x, cos, sin, batch)
            else:
                x = block(x, cos[..., rope_indices[i]], sin[..., rope_indices[i]], batch)
            self.n_finished += 1
            if i in taps:
                seen.append(x[0] if (wanted := logit_rows(slices)) is None else x[0, wanted])
        return torch.cat([x[0], *seen]) if seen else x[0]

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
                    block.mlp(torch.zeros(1, n_rows, self.config.n_embd, device=weight.device, dtype=weight.dtype))
        except Exception as e:  # of many kinds, from a missing compiler to a bug of one
            raise EngineError(f"--compile: torch cannot compile here: {(str(e).splitlines() or [''])[0]}") from e


def position_tables(config: Config, max_length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (max_length, rope_n_elem[, 2 kinds of layers]): litgpt's, or scaled in ways that it lacks."""
    if "rope_type" in (config.rope_adjustments or {}):
        rotary = spec_of(ModelConfig.from_litgpt(config)).blocks[0].mixer.positions
        assert isinstance(rotary, Rotary)
        cos, sin = (torch.from_numpy(table).to(device) for table in rope_tables(rotary, max_length))
        return cos, sin
    # litgpt's table builder is a method that reads just these two attributes.
    found: tuple[torch.Tensor, torch.Tensor] = GPT.rope_cache(
        SimpleNamespace(config=config, max_seq_length=max_length), device=device
    )
    return found


def run_bytes(config: Config, start: int, stop: int, max_length: int, dtype: torch.dtype) -> int:
    """`Stage.run_bytes` of blocks that need not be built."""
    tables = 2 * 4 * max_length * config.rope_n_elem * (2 if config.rope_local_base_freq else 1)
    classes, _ = cache_classes(spec_of(ModelConfig.from_litgpt(config)), start, stop, CACHE_TYPE_OF[dtype])
    return int(tables + sum(c.n_bytes(max_length) for c in classes))


def module_bytes(config: Config, start: int, stop: int) -> int:
    """Memory of the blocks as Python objects, without one weight: nothing, but where a config asks for many experts."""
    return (stop - start) * (BLOCK_BYTES + config.n_expert * EXPERT_BYTES)


class StarterStage(Stage):
    """The starter's stage: token embedding, blocks [0, stop), and final norm and head for what comes back."""

    is_head_shared = False

    def __init__(self, config: Config, stop: int) -> None:
        super().__init__(config, 0, stop)
        with torch.device("meta"):
            self.transformer["wte"] = nn.Embedding(config.padded_vocab_size, config.n_embd)
            self.transformer["ln_f"] = config.norm_class(config.n_embd, eps=config.norm_eps)
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias)
        self.eval().requires_grad_(False)

    @property
    def returned_width(self) -> int:
        """Columns of the rows that come back to `head`."""
        return self.config.n_embd

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor, slices: Slices = NO_SLICES) -> torch.Tensor:
        """(N,) token ids -> (N, n_embd)"""
        x = self.transformer["wte"](ids)
        if self.config.scale_embeddings:
            x = x * torch.tensor(self.config.n_embd**0.5, dtype=x.dtype)
        return x

    @torch.inference_mode()
    def head(self, x: torch.Tensor) -> torch.Tensor:
        """(M, n_embd) rows that went through all blocks -> (M, padded_vocab_size) logits"""
        logits = self.lm_head(self.transformer["ln_f"](x))
        if self.config.final_logit_softcapping is not None:
            logits = do_softcapping(logits, self.config.final_logit_softcapping)
        return logits


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
