"""Compiles the kernels for `pip install` and for wheels; all else that setuptools asks stands in pyproject.toml.

No C++ compiler is no failure: the installed package then compiles them at first use, or does without.
CXX=aarch64-linux-gnu-g++ makes a wheel for boards.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).parent / "src"))

from mdi.errors import KernelError  # noqa: E402
from mdi.kernels import build, library  # noqa: E402

EXTENSION = "mdi.kernels.kernels"
# Who has this glibc (2.x) has at least this C++ library (GLIBCXX_3.4.x): pairs of the manylinux policies.
SYSTEMS = ((28, 24), (31, 28), (34, 29), (35, 30), (39, 33))


class BuildKernels(build_ext):
    """Calls the compiler as a first use would, for whatever machine it compiles for."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], library.packaged_name()))

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        for old in output.parent.glob(library.ANY_NAME):  # of other sources, or for another machine
            old.unlink()
        try:
            build.compile_library(build.find_compiler(), output, build.CSRC)
        except KernelError as e:
            raise CompileError(str(e)) from e


class KernelsWheel(bdist_wheel):
    """The library is no module of some Python's: a wheel serves every Python on one kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        built = list(Path(self.bdist_dir).rglob(library.packaged_name()))
        if not built:
            return "py3", "none", "any"
        return "py3", "none", self._platform(built[0])

    def _platform(self, library: Path) -> str:
        if not sys.platform.startswith("linux"):
            return super().get_tag()[2]
        machine = build.find_compiler().machine
        content = library.read_bytes()
        glibc = max(map(int, re.findall(rb"GLIBC_2\.(\d+)", content)), default=None)
        cxx = max(map(int, re.findall(rb"GLIBCXX_3\.4\.(\d+)", content)), default=0)
        oldest = next((system for system, has in SYSTEMS if has >= cxx), None)
        if glibc is None or oldest is None:  # another C library, or one that is newer than all that we know
            return f"linux_{machine}"
        return f"manylinux_2_{max(glibc, oldest)}_{machine}"


setup(
    ext_modules=[Extension(EXTENSION, sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelsWheel},
)
