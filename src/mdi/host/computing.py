"""The means of computing of a node (device, types, threads, formats), decided once and passed on as one value."""

from __future__ import annotations

from dataclasses import dataclass

from mdi.block_ranges import block_span
from mdi.checkpoint.packing import Packing
from mdi.errors import UsageError
from mdi.host.device import (
    check_format,
    choose_dtype,
    choose_kv_dtype,
    choose_packing,
    stays_packed,
    why_torch,
)
from mdi.kernels import library
from mdi.model.plain import spec_of
from mdi.spec.model import ModelConfig
from mdi.spec.options import Requested


@dataclass(frozen=True)
class Computing:
    """Devices and number types are named as torch names them.

    Attributes:
        dtype: of the rows.
        kv_dtype: what caches hold.
        quantize, quantize_head: formats that weights of blocks and head were asked for in; None loses nothing.
        threads: of the CPU; None leaves them as they are.
        compile: whether torch compiles the blocks' MLPs.
        clips: whether weights that are too large for their format are clipped.
        packing: what weights are brought into for the kernels; None: torch computes, and `why_torch` says why.
    """

    device: str
    dtype: str
    kv_dtype: str = "float32"
    quantize: str | None = None
    threads: int | None = None
    packing: Packing | None = None
    quantize_head: str | None = None
    compile: bool = False
    why_torch: str | None = None
    clips: bool = False

    @property
    def path(self) -> str:
        """Name what computes the blocks, for people: the kernels and their instruction set, or torch and why."""
        if self.packing is not None:
            return f"kernels ({library.instruction_set()})"
        return f"torch: {self.why_torch}" if self.why_torch else "torch"

    def describe(self, name: str, start: int, stop: int) -> str:
        """A log line on what computes blocks [start, stop) of a node."""
        return f"{name}: {block_span(start, stop)} in {self.path}"

    @property
    def format(self) -> str:
        """Format of the blocks' weights in memory, a name in weight_formats.FORMATS."""
        return (self.packing and self.packing.blocks) or self.quantize or self.dtype

    @property
    def head_format(self) -> str:
        """The same for head and embedding."""
        return (self.packing and self.packing.head) or self.quantize_head or self.dtype


def choose_computing(
    config: ModelConfig | None, asked: Requested, stored: str, stored_format: str | None = None
) -> Computing:
    """Decide what a node computes with, from the request.

    Args:
        config: of the model; None for one that the kernels do not have.
        asked: its device is one that `choose_device` gave.
        stored, stored_format: type of the checkpoint's weights, and the format that they are packed in, if they are.

    Raises:
        UsageError: the device cannot do that, or nothing computes such a model.
    """
    device, quantize = asked.device or "cpu", asked.quantize
    check_format(None if quantize == stored_format else quantize, device)
    quantize, head = (form if stays_packed(form, device) else None for form in (quantize, asked.quantize_head))
    why = why_torch(config, device, asked.dtype)
    if why is not None and config is not None:
        try:
            spec_of(config)
        except ValueError as e:
            raise UsageError(
                f"torch does not compute {e}, and the kernels do not compute {why}", code="kernels"
            ) from None
    clips = asked.allow_clipping
    packing = None if why is not None else choose_packing(stored, quantize or stored_format, head, clips)
    dtype = choose_dtype(asked.dtype, stored, device, quantize is not None or packing is not None)
    kv_dtype = choose_kv_dtype(asked.kv_dtype, dtype, device, why)
    return Computing(device, dtype, kv_dtype, quantize, asked.threads, packing, head, asked.compile, why, clips)
