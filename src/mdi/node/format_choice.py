"""The weight format of a run and the starter's number type; "auto" is the largest format that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from mdi.checkpoint.parts import stage_parts
from mdi.checkpoint.weights import own_packing
from mdi.errors import PlacementError
from mdi.machine.computing import Computing, choose_computing
from mdi.machine.resources import device_free_bytes
from mdi.machine.torch_use import load_torch
from mdi.node.model_family import ModelFamily
from mdi.node.starter_weights import StarterWeights
from mdi.spec.options import Requested, StarterOptions
from mdi.weight_formats import AUTO, LAYOUTS, ROUNDED, held_bytes

logger = logging.getLogger("mdi")


def starter_computing(family: ModelFamily, weights: StarterWeights, asked: Requested) -> Computing:
    """What the starter computes with. Raises UsageError if the device does not support the user's choice."""
    formats = Requested(quantize=weights.quantize, quantize_head=weights.quantize_head)
    config = family.kernel_config(weights.config)
    computing = choose_computing(config, asked.over(formats), weights.dtype, weights.stored_format)
    if computing.packing is None:
        load_torch(computing.why_torch or "this model")
    return computing


def with_format(options: StarterOptions, form: str | None) -> StarterOptions:
    """The options with a format instead of "auto"."""
    head = form if options.quantize_head in (None, AUTO) else options.quantize_head
    return replace(options, quantize=form, quantize_head=head)


def formats_to_try(weights: StarterWeights) -> list[str | None]:
    """For "auto": what loses nothing first, then ever smaller ones. Weights that are stored in a format keep it."""
    if weights.quantize is not None:
        return [weights.quantize]
    own = LAYOUTS[own_packing(weights.dtype).blocks].bits
    return [None, *(form for form in ROUNDED if LAYOUTS[form].bits < own)]


def first_that_fits(formats: list[str | None], place: Callable[[str | None], None]) -> None:
    """Try one format after the other until one can be placed. Raises PlacementError if none can."""
    for form, smaller in _pairs(formats):
        try:
            return place(form)
        except PlacementError:
            if smaller is None:
                raise
            logger.info("the model does not fit in %s: trying %s", form or "the checkpoint's own numbers", smaller)


def fits_here(weights: StarterWeights, form: str | None, device: str) -> bool:
    """Whether the starter's own part of a cut that is given fits into the memory that is free."""
    parts = [weights.part_bytes(part) for part in stage_parts(0, weights.blocks[0][1], starter=True)]
    held = form or weights.stored_format or own_packing(weights.dtype).blocks
    return held_bytes(parts, weights.dtype, held, weights.stored_format) <= device_free_bytes(device)


def _pairs(formats: list[str | None]) -> Iterator[tuple[str | None, str | None]]:
    yield from zip(formats, [*formats[1:], None], strict=True)
