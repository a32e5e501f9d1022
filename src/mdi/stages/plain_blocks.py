"""Blocks of a stage in torch, in float32 and with gradients: whole texts at once, without caches, a block's weights at a time.

For training, in which a block's packed weights are what they stand for, and rows are not rounded. A backward pass has the
input of each block, and computes one block at a time again, so that it needs the activations of one block only. These inputs
are those of the forward pass before it, as long as there is memory for them (KeptInputs); else they are computed again, too.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from mdi.checkpoint.adapters import gain_factor
from mdi.checkpoint.packing import norm_before, plain
from mdi.errors import Code, UsageError
from mdi.host.resources import free_memory_bytes
from mdi.kernels.blocks import Weights
from mdi.model.spec import ModelSpec
from mdi.stages.torch_attention import Positions, Texts
from mdi.stages.torch_block import Block, Heads
from mdi.stages.trained_tensors import NONE, Trained, is_learned, of_blocks

Each = Callable[[], None]

KEPT_SHARE = 1 / 8  # of free memory, for the inputs of blocks

_ONE = threading.Lock()  # several questions take turns, so that a process has one block's activations in memory


class KeptInputs:
    """The input of each block in the last forward passes of a stage, for the backward passes that follow.

    A pass is known by all that it is computed from, so no inputs are ever taken for those of other rows. The oldest go first.
    """

    def __init__(self, free_bytes: Callable[[], int] = free_memory_bytes) -> None:
        self._free_bytes, self._lock = free_bytes, threading.Lock()
        self._passes: OrderedDict[bytes, Sequence[torch.Tensor]] = OrderedDict()

    def put(self, key: bytes, inputs: Sequence[torch.Tensor]) -> None:
        with self._lock:
            self._passes[key] = inputs
            self._passes.move_to_end(key)
            n_bytes = sum(one.nbytes for kept in self._passes.values() for one in kept)
            most = KEPT_SHARE * (self._free_bytes() + n_bytes)
            while n_bytes > most:
                n_bytes -= sum(one.nbytes for one in self._passes.popitem(last=False)[1])

    def take(self, key: bytes) -> list[torch.Tensor] | None:
        """None if they are not here any more. A pass has one backward pass: they are not kept for another one."""
        with self._lock:
            found = self._passes.pop(key, None)
        return None if found is None else list(found)


class PlainBlocks:
    """Blocks that gradients go through.

    Args:
        spec: of the model.
        weights: of block i, by their names in the model; packed ones are made plain while the block is computed.
        each: called after each block.
        kept: where the inputs of blocks are kept from a forward pass to its backward pass; None: nowhere.
    """

    def __init__(
        self, spec: ModelSpec, weights: Callable[[int], Weights], each: Each = lambda: None,
        kept: KeptInputs | None = None,
    ) -> None:  # fmt: skip
        self._spec, self._weights, self._each, self._kept = spec, weights, each, kept

    def forward(self, x: np.ndarray, start: int, stop: int, trained: Trained = NONE) -> np.ndarray:
        """float32 (texts, tokens, n_embd) before block `start` -> the same before block `stop`

        Args:
            trained: of these blocks, see `stages.trained_tensors`; used for this call.
        """
        with torch.no_grad():
            *inputs, found = self._inputs(torch.tensor(x), start, stop, trained)
        if self._kept is not None:
            self._kept.put(_hash_of_pass(x, start, stop, trained), inputs)
        return found.numpy()

    def backward(
        self, x: np.ndarray, dy: np.ndarray, start: int, stop: int, trained: Trained = NONE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The gradients with respect to `x`, float32 (texts, tokens, n_embd), and to what is learned in `trained`, of a number
        whose gradient with respect to `forward(x, start, stop, trained)` is `dy`.
        """
        inputs = None if self._kept is None else self._kept.take(_hash_of_pass(x, start, stop, trained))
        if inputs is None:
            with torch.no_grad():
                inputs = self._inputs(torch.tensor(x), start, stop - 1, trained)
        gradient, found = torch.tensor(dy), dict[str, np.ndarray]()
        for index in reversed(range(start, stop)):
            rows = inputs.pop().requires_grad_()
            own = _tensors(of_blocks(trained, index, index + 1))
            learned = [name for name in own if is_learned(name)]
            with _ONE, torch.enable_grad():
                wanted = [rows, *(own[name].requires_grad_() for name in learned)]
                gradient, *others = torch.autograd.grad(self._block(index, rows, own), wanted, gradient)
            found |= {name: one.numpy() for name, one in zip(learned, others, strict=True)}
            self._each()
        return gradient.numpy(), found

    def _inputs(self, x: torch.Tensor, start: int, stop: int, trained: Trained) -> list[torch.Tensor]:
        """The rows before each block, and before block `stop`."""
        found = [x]
        for index in range(start, stop):
            with _ONE:
                found.append(self._block(index, found[-1], _tensors(of_blocks(trained, index, index + 1))))
            self._each()
        return found

    def _block(self, index: int, x: torch.Tensor, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.device("meta"):
            block = Block(self._spec.blocks[index], self._spec.width)
        path = f"transformer.h.{index}."
        arrays = plain(dict(self._weights(index)))  # torch warns of those that cannot be written to
        tensors = {
            name.removeprefix(path): torch.from_numpy(w if w.flags.writeable else w.copy())
            for name, w in arrays.items()
        }
        block.load_state_dict(tensors, strict=False, assign=True)
        block.requires_grad_(False)
        if left := [name for name, tensor in block.state_dict().items() if tensor.is_meta]:
            raise UsageError(f"the weights of block {index} lack {left[0]}", code=Code.TENSOR)
        own = {name.removeprefix(path): tensor for name, tensor in own.items()}
        self._add_adapters(block, path, own)
        prefix: list[torch.Tensor] = []
        if (prompt := own.get("prompt")) is not None:
            x = torch.cat([x[:, : len(prompt)] + prompt[: x.size(1)], x[:, len(prompt) :]], dim=1)
        elif (key := own.get("prefix_key")) is not None:
            if not isinstance(block.attn, Heads) or block.attn.of.window:
                raise UsageError(
                    "a prefix cannot stand before attention in windows, or latent attention", code=Code.KERNELS
                )
            prefix = [key, own["prefix_value"]]
        n_texts, n_tokens, _ = x.shape
        positions = Positions(n_tokens + (len(prefix[0]) if prefix else 0), x.device)
        found: torch.Tensor = block(x.flatten(0, 1), Texts(n_texts, n_tokens, positions, prefix))
        return found.view_as(x)

    def _add_adapters(self, block: Block, prefix: str, own: Mapping[str, torch.Tensor]) -> None:
        """Have the block's linear layers add what adapters add to them."""
        norms = block.state_dict()
        for name in own:
            if not name.endswith(".a"):
                continue
            layer, _, first, _ = name.rsplit(".", 3)
            a, b = own[name], own[f"{name[:-1]}b"]
            norm = (norm_before(f"{prefix}{layer}.weight", self._spec) or "").removeprefix(prefix)
            gain, here = own.get(f"{norm.removesuffix('weight')}gain"), norms.get(norm)
            if gain is not None and here is not None:
                factor = gain_factor(prefix + norm, gain.numpy(), here.numpy(), self._spec)
                a = a if factor is None else a * torch.tensor(factor)
            block.get_submodule(layer).register_forward_hook(partial(_added, a=a, b=b, first=int(first)))


def _hash_of_pass(x: np.ndarray, start: int, stop: int, trained: Trained) -> bytes:
    """Of a pass: a hash of all that it is computed from."""
    found = hashlib.blake2b(f"{x.shape} {start} {stop}".encode(), digest_size=32)
    found.update(np.ascontiguousarray(x).data)
    for name, array in sorted(trained.items()):
        found.update(f"{name} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.digest()


def _tensors(trained: Trained) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in trained.items()}


def _added(
    layer: torch.nn.Module,
    given: tuple[torch.Tensor],
    found: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """A linear layer's results and, from number `first` on, those of an adapter; a (rank, inputs), b (rank, outputs)."""
    return found + functional.pad(given[0] @ a.T @ b, (first, found.size(-1) - first - b.size(1)))
