"""Compiles `csrc` into one shared library with the kernels for every instruction set of a machine.

It needs Python and a C++ compiler (gcc or clang), no more: the setup script runs it before anything is installed.

One file of `csrc`, `isa_<name>.cpp`, belongs to one instruction set; all others but `selftest.cpp` are compiled for every
machine. A macro for each of the former says that it is there: MDI_HAS_AVX512 and so on.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mdi.errors import KernelError

CSRC = Path(__file__).with_name("csrc")


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set, for which `isa_<name>.cpp` is compiled.

    Attributes:
        name: as MDI_KERNELS and the library call it.
        machine: the architecture that has it, as compilers call that; "" is any.
        flags: of the compiler.
    """

    name: str
    machine: str
    flags: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return f"isa_{self.name}.cpp"


# Which of them a processor has is found out at run time; never -march=native.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c")
# gcc moves loads far ahead of their use there, for which registers do not suffice; clang ignores the flag.
_AARCH64 = ("-fno-schedule-insns",)
INSTRUCTION_SETS = (
    InstructionSet("amx", "x86_64", (*_AVX512, "-mamx-tile", "-mamx-int8")),
    InstructionSet("avx512", "x86_64", _AVX512),
    InstructionSet("avx2vnni", "x86_64", (*_AVX2, "-mavxvnni")),
    InstructionSet("avx2", "x86_64", _AVX2),
    InstructionSet("neon_i8mm", "aarch64", ("-march=armv8.2-a+dotprod+i8mm", *_AARCH64)),
    InstructionSet("neon_dot", "aarch64", ("-march=armv8.2-a+dotprod", *_AARCH64)),
    InstructionSet("neon", "aarch64", _AARCH64),
    InstructionSet("plain", ""),
)

# Results must be the same to the bit on every machine, so the compiler must not fuse a product and a sum.
COMMON = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-pthread")
OPTIMIZED = ("-O3",)
# A library that lacks something is refused when it is made, as Apple's linker does anyway, and not when it is loaded. It has
# no names of what is not called from outside.
_LINKING = ("-Wl,-z,defs", "-Wl,-s")
SELFTEST = "selftest.cpp"
_ISA_SOURCES = "isa_*.cpp"

_SAME_MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}  # one architecture, two names
_BYTES_PER_COMPILER = 600 << 20  # memory that one run of the compiler may take
_DEADLINE_S = 600.0  # of one run of the compiler; a small board needs a minute
_BUILDING = "build-"  # starts the name of a folder in which something is compiled


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that answers.

    Attributes:
        command: how it is called; more than one word if CXX has several.
        version: its version text.
        machine, system: the architecture and the rest of the target (vendor, system, C library) that it compiles for.
    """

    command: tuple[str, ...]
    version: str
    machine: str
    system: str

    @property
    def is_apples(self) -> bool:
        return any(name in self.system for name in ("apple", "darwin", "macos"))

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.version.encode()).hexdigest()[:8]

    def run(self, *arguments: str | os.PathLike[str]) -> None:
        """Raises KernelError with its first error line."""
        done = _run([*self.command, *(os.fspath(argument) for argument in arguments)])
        if done.returncode:
            raise KernelError(f"{shlex.join(self.command)} does not compile the kernels: {_first_error(done)}")

    def knows(self, flags: Sequence[str]) -> bool:
        with tempfile.TemporaryDirectory(prefix=_BUILDING) as folder:
            source = Path(folder) / "empty.cpp"  # zig can neither read /dev/null nor check without writing
            source.touch()
            return not _run([*self.command, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]).returncode


def find_compiler() -> Compiler:
    """CXX, else the first available of c++, g++ and clang++. Raises KernelError that says what to install."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked and not shutil.which(asked[0]):
        raise KernelError(f"CXX asks for {asked[0]!r}, but there is no such compiler")
    command = asked or [name for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]
    if not command:
        raise KernelError(
            "there is no C++ compiler: install one (Debian, Ubuntu: sudo apt install g++; Fedora: sudo dnf install gcc-c++; "
            "macOS: xcode-select --install)"
        )
    for question in ("-v", "--version"):  # gcc names its target after the first only, zig after the second only
        answer = _run([*command, question])
        version = answer.stderr + answer.stdout
        target = re.search(r"^Target: ([^-\s]+)(\S*)", version, re.MULTILINE)
        if target and not answer.returncode:
            return Compiler(tuple(command), version, _architecture(target[1]), target[2])
    raise KernelError(f"the C++ compiler {shlex.join(command)} does not work: {_first_error(answer)}")


def this_machine() -> str:
    """The architecture that this process runs on."""
    return _architecture(platform.machine().lower())


def sources_hash(csrc: Path) -> str:
    """A hash of everything that makes a library, except the compiler. Raises KernelError if the sources cannot be read."""
    digest = hashlib.sha256(repr((COMMON, OPTIMIZED, INSTRUCTION_SETS)).encode())
    try:
        for path in sorted(path for path in csrc.iterdir() if path.suffix in (".cpp", ".h")):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode() + content)
    except OSError as e:
        raise KernelError(f"the sources of the kernels cannot be read ({e}): install MDI-LLM again") from e
    return digest.hexdigest()[:16]


def compile_library(
    compiler: Compiler, output: Path, csrc: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Compile the library and put it to `output`, in one step; `progress` gets numbers of files. Raises KernelError."""
    link_flags = ("-shared", *(() if compiler.is_apples else _LINKING))
    _compile(compiler, output, csrc, OPTIMIZED, link_flags, progress=progress)


def compile_selftest(
    compiler: Compiler, output: Path, csrc: Path, flags: Sequence[str], link_flags: Sequence[str],
    sets: Sequence[InstructionSet] = INSTRUCTION_SETS,
) -> None:  # fmt: skip
    """Compile the program that prints a checksum of each kernel; `flags` are for compiling and linking."""
    _compile(compiler, output, csrc, flags, (*flags, *link_flags), sets, with_selftest=True)


def sanitizing(names: str) -> tuple[str, ...]:
    """Flags for a program that ends at the first error of these (as -fsanitize takes them)."""
    return ("-O0", "-g", f"-fsanitize={names}", "-fno-sanitize-recover=all")


def remove_remains(folder: Path) -> None:
    """Remove the files of a process that was ended while it compiled. Only while no other process compiles there."""
    for path in folder.glob(f"{_BUILDING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _compile(
    compiler: Compiler,
    output: Path,
    csrc: Path,
    flags: Sequence[str],
    link_flags: Sequence[str],
    sets: Sequence[InstructionSet] = INSTRUCTION_SETS,
    with_selftest: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    sets = [
        s for s in sets
        if s.machine in ("", compiler.machine) and (csrc / s.source).is_file() and compiler.knows(s.flags)
    ]  # fmt: skip
    found = tuple(f"-DMDI_HAS_{s.name.upper()}=1" for s in sets)
    general = sorted(set(csrc.glob("*.cpp")) - set(csrc.glob(_ISA_SOURCES)) - {csrc / SELFTEST})
    if with_selftest:
        general.append(csrc / SELFTEST)
    units = [(csrc / s.source, s.flags) for s in sets] + [(path, found) for path in general]
    if not general:
        raise KernelError(f"there are no sources of the kernels in {csrc}: install MDI-LLM again")
    try:
        with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=output.parent) as folder:
            done = itertools.count(1)

            def work(unit: tuple[Path, Sequence[str]]) -> Path:
                result = _compile_unit(compiler, Path(folder), (*COMMON, *flags), unit)
                progress(next(done), len(units))
                return result

            with ThreadPoolExecutor(_n_at_once()) as pool:
                objects = list(pool.map(work, units))
            linked = Path(folder) / "linked"
            compiler.run(*COMMON, *objects, *link_flags, "-o", linked)
            with linked.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(linked, output)
    except OSError as e:
        raise KernelError(f"the kernels cannot be written to {output.parent} ({e.strerror or e})") from e


def _compile_unit(compiler: Compiler, folder: Path, flags: Sequence[str], unit: tuple[Path, Sequence[str]]) -> Path:
    source, own_flags = unit
    result = folder / f"{source.stem}.o"
    compiler.run(*flags, *own_flags, "-c", source, "-o", result)
    return result


def _n_at_once() -> int:
    """Number of compilers at a time: one per core, if there is memory for them."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # a system that does not say
        return n_cores
    return max(1, min(n_cores, memory_bytes // _BYTES_PER_COMPILER))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LC_ALL": "C"}  # its words are looked at
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"error: no end within {_DEADLINE_S:.0f} s")
    except OSError as e:
        return subprocess.CompletedProcess(command, 1, "", f"error: {e.strerror or e}")


def _first_error(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b", line)]
    return (errors or lines or [f"it ended with status {done.returncode}"])[0]


def _architecture(name: str) -> str:
    return _SAME_MACHINE.get(name, name)
