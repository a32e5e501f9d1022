"""Loads the weights of a part for a node's stage: packed for the kernels, or as torch needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mdi.checkpoint.packing import Packing, PartWeights, arrays_of
from mdi.checkpoint.resident import name_in_faults, populate
from mdi.checkpoint.weight_memory import WeightPlacer
from mdi.checkpoint.weights import WeightSource
from mdi.kernels import library
from mdi.kernels.layout import MOST, check_range

if TYPE_CHECKING:
    import torch

    from mdi.machine.computing import Computing
    from mdi.model.packed_linear import Weights


def kernel_weights(
    source: WeightSource, part: str, packing: Packing, placer: WeightPlacer, check: Callable[[], None] = lambda: None
) -> PartWeights:
    """The weights of a part in memory, or in their file if that has the right form.

    Args:
        placer: decides whether mapped weights are copied and kept in memory.
        check: called repeatedly while pages come from the disk; its exceptions pass through.

    Raises:
        CheckpointError: the source cannot be read, or does not have the part.
    """
    weights = source.weights(part, packing)
    arrays = arrays_of(weights)
    populate(arrays, str(source), lambda n_bytes: check())
    name_in_faults(library.load(), arrays, str(source))
    return placer.place(weights)


def torch_weights(source: WeightSource, part: str, computing: Computing) -> Weights:
    """The weights of a part for torch: packed in the format that was asked for, else plain.

    Raises:
        CheckpointError: as `kernel_weights`; or they are too large for the type that is computed in.
    """
    form = computing.quantize if part.startswith("block.") else computing.quantize_head
    if form is not None:
        return dict(source.weights(part, Packing(form, form, computing.clips)))
    tensors = source.tensors(part)
    if computing.dtype != "float16":
        return dict(tensors)
    return {name: _within_half(tensor, name, computing.clips) for name, tensor in tensors.items()}


def _within_half(tensor: torch.Tensor, name: str, clips: bool) -> torch.Tensor:
    """A tensor that half precision holds. Raises CheckpointError as `torch_weights`."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return tensor
    low, high = tensor.aminmax()
    if check_range("float16", max(float(high), -float(low)), name, clips):
        return tensor.float().clamp(-MOST["float16"], MOST["float16"]).half()
    return tensor
