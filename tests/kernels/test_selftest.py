"""The kernels' own test program: under sanitizers, and on emulated ARM boards with the checksums of this machine.

It prints a line for each kernel of each instruction set that it finds: set, kernel, checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mdi.files import replacing
from mdi.kernels import build, library

KEPT = Path(__file__).resolve().parents[2] / "build" / "selftest"  # programs of these very sources are used again
SRC = Path(__file__).resolve().parents[2] / "src"
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# The instruction sets of boards, best first, that are tried there: what a processor has in common with the first is left out.
EXPECTED = {"cortex-a72": {"neon", "plain"}, "cortex-a76": {"neon_dot"}, "max": {"neon_i8mm"}}

Sums = dict[tuple[str, str], str]  # (instruction set, kernel) -> checksum

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler here"
)
needs_emulator = pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which(EMULATOR)),
    reason=f"{CROSS} and {EMULATOR} are not installed (Debian: g++-aarch64-linux-gnu, qemu-user)",
)

pytestmark = pytest.mark.skipif(not (build.CSRC / build.SELFTEST).is_file(), reason="there is no test program yet")

LIMIT_S = 1500  # of a test that compiles or emulates: ten times what it takes on a machine with nothing else to do


def _program(
    name: str,
    flags: Sequence[str],
    link_flags: Sequence[str] = (),
    sets: Sequence[build.InstructionSet] = build.INSTRUCTION_SETS,
) -> Path:
    """The compiled program. Two workers of pytest that ask for the same one get it from whoever is first, and for two others
    compile them at the same time."""
    compiler = build.find_compiler()
    made_from = (build.sources_hash(build.CSRC), compiler.version, flags, link_flags, sets)
    path = KEPT / name / hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    with library.locked(path.parent):
        if not path.is_file():
            for old in path.parent.glob("*"):
                if old.is_file() and old.name != "lock":
                    old.unlink()
            build.compile_selftest(compiler, path, build.CSRC, flags, link_flags, sets)
    return path


def _sums(*command: str | Path) -> Sums:
    environment = os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr or done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    sums = {(instruction_set, kernel): checksum for instruction_set, kernel, checksum in lines}
    assert len(sums) == len(lines) > 0
    return sums


def _sums_here() -> Sums:
    """Of all instruction sets of this machine, under sanitizers. Who runs the program first writes down what it printed."""
    program = _program("address-undefined", build.sanitizing("address,undefined"))
    printed = program.with_suffix(".printed")
    with library.locked(program.parent):
        if not printed.is_file():
            with replacing(printed) as file:
                file.write(json.dumps([[*key, checksum] for key, checksum in _sums(program).items()]).encode())
    return {
        (instruction_set, kernel): checksum for instruction_set, kernel, checksum in json.loads(printed.read_text())
    }


def _by_kernel(sums: Sums, fused: bool) -> dict[str, set[str]]:
    """Which checksums each kernel has, over all instruction sets with fused multiply-adds, or over those without."""
    found: dict[str, set[str]] = {}
    for (instruction_set, kernel), checksum in sums.items():
        if (instruction_set != "plain") == fused:
            found.setdefault(kernel, set()).add(checksum)
    return found


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@needs_compiler
def test_no_byte_is_read_or_written_beside_memory_and_nothing_is_undefined() -> None:
    sums = _sums_here()
    assert all(len(checksums) == 1 for checksums in _by_kernel(sums, fused=True).values())


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@needs_compiler
def test_threads_do_not_race() -> None:
    """Of one instruction set: the threads are the same for all."""
    few = [s for s in build.INSTRUCTION_SETS if s.name in ("avx2", "neon", "plain")]
    _sums(_program("thread", build.sanitizing("thread"), sets=few), "1")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@needs_compiler
@needs_emulator
@pytest.mark.parametrize("cpu", EXPECTED)
def test_boards_compute_the_same_bits(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CXX", CROSS)
        program = _program("aarch64", ("-O1",), ["-static"])
    there = _sums(EMULATOR, "-cpu", cpu, program, str(len(EXPECTED[cpu])))
    here = _sums_here()  # last: another worker may be at it meanwhile
    assert {instruction_set for instruction_set, _ in there} == EXPECTED[cpu]
    for fused in {instruction_set != "plain" for instruction_set in EXPECTED[cpu]}:
        known = _by_kernel(here, fused)
        if known:  # an x86 machine without AVX2 has nothing to compare with
            assert _by_kernel(there, fused) == known


FEW_THREADS = """
import resource
from pathlib import Path
from mdi.errors import KernelError
from mdi.kernels.blocks import Context
from mdi.kernels.library import load

load()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
try:
    Context(256)
except KernelError as e:
    print(e.code)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems count memory in other ways")
def test_threads_that_the_system_refuses_are_an_error_and_no_crash() -> None:
    command = [sys.executable, "-c", FEW_THREADS]
    done = subprocess.run(command, cwd=SRC, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
