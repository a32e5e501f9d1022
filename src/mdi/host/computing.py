"""The means of computing of a node (device, types, threads, formats), decided once and passed on as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mdi.block_ranges import block_span
from mdi.checkpoint.packing import Packing
from mdi.errors import Code, UsageError
from mdi.host.device import (
    check_format,
    choose_dtype,
    choose_kv_dtype,
    choose_packing,
    stays_packed,
    why_torch,
)
from mdi.kernels import library
from mdi.kernels.weight_formats import check_packed
from mdi.model.plain import ModelConfig, spec_of
from mdi.spec.arithmetic import Arithmetic
from mdi.spec.extent import Extent
from mdi.spec.model_id import Formats
from mdi.spec.options import Requested

# Of a run, or known from the rest.
_NOT_OF_STAGES = ("threads", "wire_dtype", "silence_s", "n_spans", "cache_share", "keep_prefixes", "why_torch")


@dataclass(frozen=True)
class Computing(Requested):
    """What was requested, with what has been decided: no choice is left open.

    Attributes:
        dtype: of the rows.
        quantize, quantize_head: None loses nothing.
        threads: of the CPU; None leaves them as they are.
        packing: what weights are brought into for the kernels; None: torch computes, and `why_torch` says why.
        is_rounded: see ModelId.
    """

    device: str
    dtype: str
    packing: Packing | None = None
    why_torch: str | None = None
    is_rounded: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """All of it that a stage in memory depends on, but for the threads."""
        return tuple(value for name, value in vars(self).items() if name not in _NOT_OF_STAGES)

    @property
    def path(self) -> str:
        """Name what computes the blocks, for people: the kernels and their instruction set, or torch and why."""
        if self.packing is not None:
            return f"kernels ({library.instruction_set()})"
        return f"torch: {self.why_torch}" if self.why_torch else "torch"

    def describe(self, name: str, start: int, stop: int) -> str:
        """A log line on what computes blocks [start, stop) of a node."""
        return f"{name}: {block_span(start, stop)} in {self.path}"

    def cache_type(self, asked: str) -> str:
        """What caches hold here, of a type that was asked for. UsageError if it is not for this device, or for torch."""
        return choose_kv_dtype(asked, self.dtype, self.device, self.why_torch)

    def arithmetic(self, kv_dtype: str) -> Arithmetic:
        """Of whole blocks, with caches that hold this type."""
        unit = library.arithmetic() if self.packing is not None else "torch"
        return Arithmetic(unit if self.device == "cpu" else self.device, Formats.one(self.format), kv_dtype)

    def extent(self, asked: Extent) -> Extent:
        """Of a stage that is computed so. Raises as `cache_type`."""
        return replace(asked, kv_dtype=self.cache_type(asked.kv_dtype))

    @property
    def format(self) -> str:
        """Format of the blocks' weights in memory, a name in weight_formats.FORMATS."""
        return (self.packing and self.packing.blocks) or self.quantize or self.dtype

    @property
    def head_format(self) -> str:
        """The same for head and embedding."""
        return (self.packing and self.packing.head) or self.quantize_head or self.dtype


def choose_computing(
    config: ModelConfig | None, asked: Requested, stored: str, stored_format: str | None = None,
    tied_type: str | None = None, is_rounded: bool = False,
) -> Computing:  # fmt: skip
    """Decide what a node computes with, from the request.

    Args:
        config: of the model; None for one that the kernels do not have.
        asked: its device is one that `choose_device` gave.
        stored, stored_format: type of the checkpoint's weights, and the format that they are packed in, if they are.
        tied_type: that of an embedding that is the head as well; None on a node that does not have both.
        is_rounded: see ModelId.

    Raises:
        UsageError: the device cannot do that, or nothing computes such a model.
    """
    device, quantize = asked.device or "cpu", asked.quantize
    check_packed(stored_format)
    check_format(None if quantize == stored_format else quantize, device)
    why = why_torch(config, device, asked.dtype)
    asked_for = quantize, asked.quantize_head
    quantize, head = (form if stays_packed(form, device, why is not None) else None for form in asked_for)
    if why is not None and config is not None:
        try:
            spec_of(config)
        except ValueError as e:
            raise UsageError(
                f"torch does not compute {e}, and the kernels do not compute {why}", code=Code.KERNELS
            ) from None
    packing = None
    if why is None:
        packing = choose_packing(stored, quantize or stored_format, head, asked.allow_clipping, not is_rounded)
        packing = packing.tied(tied_type)
    dtype = choose_dtype(asked.dtype, stored, device, quantize is not None or packing is not None)
    decided = replace(Requested.of(asked), device=device, dtype=dtype, quantize=quantize, quantize_head=head)
    return Computing(**vars(decided), packing=packing, why_torch=why, is_rounded=is_rounded)
