"""What a weight takes in each format: the one table that the cost model and the planner look it up in."""

from __future__ import annotations

from dataclasses import dataclass

from mdi.errors import UsageError


@dataclass(frozen=True)
class WeightFormat:
    """How the linear layers of blocks and head are held, and what is computed in.

    Attributes:
        bits_per_weight: of a linear layer, scales of blocks of weights included.
        bytes_per_output: besides, for each output of a linear layer: scales and sums.
        value_bytes: of everything else: norms, biases, embedding, activations, caches, rows on the wire.
    """

    name: str
    bits_per_weight: float
    bytes_per_output: float
    value_bytes: int

    def linear_bytes(self, n_out: int, n_in: int) -> float:
        return n_out * n_in * self.bits_per_weight / 8 + n_out * self.bytes_per_output


FORMATS = {
    f.name: f
    for f in (
        WeightFormat("float32", 32, 0, 4),
        WeightFormat("bfloat16", 16, 0, 2),
        WeightFormat("float16", 16, 0, 2),
        # Those of the kernels (kernels.layout), which compute in float32.
        WeightFormat("bf16", 16, 0, 4),
        WeightFormat("fp16", 16, 0, 4),
        WeightFormat("int8", 8.25, 0, 4),
        WeightFormat("int4", 4.5, 0, 4),
    )
}

# What weights can be packed in, see kernels.layout, which is not imported for flags.
PACKED = ("float32", "bf16", "fp16", "int8", "int4")

# Formats that a model can be brought into to take less, the most precise first.
SMALLER = ("fp16", "int8", "int4")


AUTO = "auto"  # the largest format that fits


def check_packed(name: str | None) -> None:
    """Raises UsageError if a name is not one of `PACKED`; None is no format."""
    if name is not None and name not in PACKED:
        raise UsageError(f"unknown weight format {name!r}: expected one of {', '.join(PACKED)}")


def weight_format(name: str) -> WeightFormat:
    """Raises UsageError: there is no such format."""
    if name not in FORMATS:
        raise UsageError(f"unknown weight format {name!r}: expected {', '.join(FORMATS)}")
    return FORMATS[name]
