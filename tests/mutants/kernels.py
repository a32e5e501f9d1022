"""The kernels."""

from __future__ import annotations

from mutants.mutant import Mutant

BLOCKS = "tests/kernels/test_kernel_blocks.py"

MUTANTS = [
    Mutant(
        "float32 values of a cache are doubled",
        "csrc:put",
        "to_bf16(x)",
        "to_bf16(x * 2)",
        BLOCKS,
    ),
]
