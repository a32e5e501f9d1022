"""Loads the weights of a part for a node's stage: packed for the kernels, or as torch needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mdi.checkpoint.packing import Packing, PartWeights, arrays_of
from mdi.checkpoint.resident import name_in_faults, populate
from mdi.checkpoint.weight_memory import WeightPlacer
from mdi.checkpoint.weights import WeightSource
from mdi.kernels import library

if TYPE_CHECKING:
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


def torch_weights(source: WeightSource, part: str, blocks: str | None, head: str | None) -> Weights:
    """The weights of a part for torch: packed in the format that is given for it, plain if none is.

    Args:
        blocks, head: formats of blocks, and of head and embedding; None for plain numbers, in the type that is computed in.

    Raises:
        CheckpointError: as `kernel_weights`.
    """
    form = blocks if part.startswith("block.") else head
    if form is None:
        return dict(source.tensors(part))
    return dict(source.weights(part, Packing(form, form)))
