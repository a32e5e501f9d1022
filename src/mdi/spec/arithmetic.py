"""What the bits of rows depend on: how the stage of a node computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mdi.kernels.format_maps import shown
from mdi.spec.decode import Meta, ShortName, Whole
from mdi.spec.model_id import Formats

IN_KERNELS = (
    "fused",
    "plain",
)  # classes of kernels.library.arithmetic() whose bits depend on no batch, cut or processor

_Bounds = Annotated[tuple[Whole, ...], Meta(max_length=4096)]


@dataclass(frozen=True)
class Arithmetic:
    """How blocks are computed. The same blocks give the same bits where these are equal, and `is_certain`.

    Attributes:
        unit: a class of the kernels (kernels.library.arithmetic), "torch", or the device on which torch computes.
        formats: of the blocks' weights in memory.
        kv_dtype: what caches hold, see Extent.
        share: of a node in a group: rank, bounds of heads and of columns; None: it computes whole blocks.
    """

    unit: ShortName
    formats: Formats
    kv_dtype: ShortName = "auto"
    share: tuple[Whole, _Bounds, _Bounds] | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether a row has the same bits in the company of any other rows."""
        return self.unit in IN_KERNELS

    @property
    def is_certain(self) -> bool:
        """Whether any other stage of this arithmetic gives the same bits."""
        return self.is_fixed and self.share is None

    def __str__(self) -> str:
        return f"{self.unit} {shown(self.formats.only)} {self.kv_dtype}" if self.is_certain else self.unit
