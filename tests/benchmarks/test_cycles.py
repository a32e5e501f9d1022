"""Finding the inner loops of the kernels in assembly, and whose model of ports is asked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cycles import MODELS, innermost, port_bound, tile_name

NESTED = """
\tmov\tx0, 0
.L1:
\tld1r\t{v0.4s}, [x1]
.L2:
\tldr\tq1, [x2], 16
\tfmla\tv2.4s, v1.4s, v0.4s
\tcmp\tx2, x3
\tbne\t.L2
\tfmla\tv2.4s, v1.4s, v0.4s
\tcbnz\tx4, .L1
\tret
"""


def test_the_innermost_loop_is_found() -> None:
    body = innermost(NESTED.splitlines())
    assert [line.split("\t")[1] for line in body] == ["ldr", "fmla", "cmp", "bne"]
    assert innermost(["\tfmla\tv2.4s, v1.4s, v0.4s", "\tret"]) == []


@pytest.mark.parametrize(
    ("function", "tile"),
    [
        ("_ZN8mdi_avx29int8_tileILi4ELi1EEEvRK9MdiMatrix", "int8, 4 rows"),
        ("_ZN8mdi_neon10float_tileILi1ELi4ELi1EEEvRK9MdiMatrix", "bf16, 1 row, 4 panels"),
        ("_ZN8mdi_avx29half_tileILi2ELi1ELi5EEEvRK9MdiMatrix", "mxfp4, 2 rows"),
        ("_ZN8mdi_neon9byte_tileILi2ELi1ELi4EEEvRK9MdiMatrix", "int4, 2 rows"),
    ],
)
def test_tiles_are_named(function: str, tile: str) -> None:
    assert tile_name(function) == tile


def test_the_bound_counts_what_only_some_ports_can_do() -> None:
    """Three of four cycles go to one of two ports: neither the most loaded group nor the sum of all sets the bound."""
    one, other = frozenset({"N1UnitV0"}), frozenset({"N1UnitV1"})
    either, load = one | other, frozenset({"N1UnitL"})
    assert port_bound([(one, 3.0), (either, 1.0), (load, 2.5)]) == (3.0, "V0")
    assert port_bound([(one, 2.0), (other, 1.0), (either, 2.0), (load, 2.25)]) == (2.5, "V0+V1")
    assert port_bound([(one, 1.0), (other, 1.0), (load, 2.25)]) == (2.25, "L")


@pytest.mark.skipif(shutil.which("llvm-mca-19") is None, reason="llvm-mca 19 is not installed (Debian: llvm-19)")
def test_the_model_of_another_core_is_refused() -> None:
    program = Path(__file__).resolve().parents[2] / "benchmarks" / "cycles.py"
    done = subprocess.run([sys.executable, program, "--cpu", "cortex-a72"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "cortex-a72" in done.stderr and "A57" in done.stderr
    assert "cortex-a72" not in MODELS
