"""Compiles the kernels and writes the demo's model for `pip install` and for wheels; all else stands in pyproject.toml.

No C++ compiler is no failure: the installed package then says why (an editable one does not), and compiles them at first use,
or does without. CXX may be a cross compiler; `make wheels` (.ci/wheels) uses that, and names what comes out after the systems
that can load it.
"""

from __future__ import annotations

import collections
import pickle
import shutil
import struct
import sys
import zipfile
from json import dumps
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "src"))

from mdi.errors import KernelError  # noqa: E402
from mdi.kernels import build, library  # noqa: E402

EXTENSION = "mdi.kernels.kernels"
MODEL = ROOT / "assets" / "nano-llama"  # a LitGPT checkpoint, whose weights only torch reads


class BuildKernels(build_ext):
    """Calls the compiler as a first use would, for whatever machine it compiles for."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], library.packaged_name()))

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        for old in output.parent.glob(library.ANY_NAME):  # of other sources, or for another machine
            old.unlink()
        note = output.with_name(library.NOTE)
        note.unlink(missing_ok=True)
        try:
            build.compile_library(build.find_compiler(), output, build.CSRC)
        except KernelError as e:  # pip shows nothing of it: the first use does
            note.write_text(str(e), encoding="utf-8")
            raise CompileError(str(e)) from e


class BuildModel(build_py):
    """Puts the embedded model into the package, as safetensors."""

    def run(self) -> None:
        super().run()
        if self.editable_mode or not MODEL.is_dir():  # a clone has the checkpoint itself
            return
        folder = Path(self.build_lib, "mdi", MODEL.name)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("model_config.yaml", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, folder)
        write_safetensors(MODEL / "lit_model.pth", folder / "lit_model.safetensors")


class StateDict(pickle.Unpickler):
    """The table of a file that torch.save wrote: tensors as (key of the bytes, shape). Calls nothing that the file names."""

    def persistent_load(self, pid: Any) -> str:
        return str(pid[2])  # ("storage", its kind, key, device, size)

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch", "HalfStorage"): "float16",
            ("torch._utils", "_rebuild_tensor_v2"): lambda key, offset, shape, *_: (key, shape),
        }
        return known[module, name]


def write_safetensors(pth: Path, output: Path) -> None:
    """Write the tensors of a checkpoint in float16, each whole in its own record of the archive."""
    with zipfile.ZipFile(pth) as archive:
        top = archive.namelist()[0].partition("/")[0]
        with archive.open(f"{top}/data.pkl") as table:
            tensors = StateDict(table).load()
        contents = {name: archive.read(f"{top}/data/{key}") for name, (key, _) in tensors.items()}
    header, position = {}, 0
    for name, (_, shape) in tensors.items():
        stop = position + len(contents[name])
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    head = dumps(header).encode()
    head += b" " * (-len(head) % 8)
    output.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(contents.values()))


class KernelsWheel(bdist_wheel):
    """The library is no module of some Python's: a wheel serves every Python on one kind of machine."""

    def get_tag(self) -> tuple[str, str, str]:
        has_library = any(Path(self.bdist_dir).rglob(library.packaged_name()))
        if not has_library and not self.plat_name_supplied:
            return "py3", "none", "any"
        if self.plat_name_supplied or not sys.platform.startswith("linux"):
            return "py3", "none", super().get_tag()[2]
        return "py3", "none", f"linux_{build.find_compiler().machine}"


setup(
    ext_modules=[Extension(EXTENSION, sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildModel, "bdist_wheel": KernelsWheel},
)
