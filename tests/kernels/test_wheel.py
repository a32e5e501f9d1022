"""What is installed brings the kernels compiled, where there is a compiler, and their sources in any case."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mdi.checkpoint.source import LitCheckpoint
from mdi.kernels import build
from mdi.kernels.library import NOTE
from mdi.text.tokenizer import read_tokenizer
from tiny_kernels import write_tiny_kernels

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "nano-llama"
PAGE = ROOT / "src" / "mdi" / "serve" / "page"
CROSS = "aarch64-linux-gnu-g++"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of Linux wheels")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the setup script reads, with tiny kernels."""
    project = tmp_path / "project"
    (project / "src" / "mdi").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    shutil.copytree(MODEL, project / "assets" / "nano-llama")
    for path in (ROOT / "src" / "mdi").glob("*.py"):
        shutil.copy(path, project / "src" / "mdi")
    kernels = project / "src" / "mdi" / "kernels"
    shutil.copytree(
        ROOT / "src" / "mdi" / "kernels", kernels, ignore=shutil.ignore_patterns("csrc", "*.so", "__pycache__")
    )
    write_tiny_kernels(kernels / "csrc")
    (project / "src" / "mdi" / "serve").mkdir()
    (project / "src" / "mdi" / "serve" / "__init__.py").touch()
    shutil.copytree(PAGE, project / "src" / "mdi" / "serve" / "page")
    return project


def _setup(project: Path, *commands: str, **environment: str) -> list[Path]:
    clean = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *commands], cwd=project, env=clean | environment, timeout=200,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return sorted(project.glob("dist/*"))


def _libraries(wheel: Path) -> list[bytes]:
    with zipfile.ZipFile(wheel) as file:
        assert "mdi/kernels/csrc/api.cpp" in file.namelist()
        assert {f"mdi/serve/page/files/{path.name}" for path in (PAGE / "files").iterdir()} <= set(file.namelist())
        return [file.read(name) for name in file.namelist() if name.endswith(".so")]


def _machine(library: bytes) -> int:
    """The number of the architecture in an ELF file."""
    assert library[:4] == b"\x7fELF"
    return int.from_bytes(library[18:20], "little")


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler here")
def test_a_wheel_serves_every_python_on_one_type_of_machine(project: Path) -> None:
    (wheel,) = _setup(project, "bdist_wheel")
    assert "-py3-none-" in wheel.name and wheel.stem.endswith(f"-linux_{build.this_machine()}")
    assert len(_libraries(wheel)) == 1


@pytest.mark.skipif(not shutil.which(CROSS), reason=f"{CROSS} is not installed")
def test_a_cross_compiler_makes_a_wheel_for_boards(project: Path) -> None:
    if shutil.which("c++"):
        _setup(project, "build")  # what is left of another build does not get into the wheel
        with (project / "src" / "mdi" / "kernels" / "csrc" / "stage.h").open("a") as file:
            file.write("// changed\n")
    (wheel,) = _setup(project, "bdist_wheel", CXX=CROSS)
    assert "-py3-none-" in wheel.name and wheel.stem.endswith("_aarch64")
    assert [_machine(library) for library in _libraries(wheel)] == [183]


def test_without_a_compiler_the_sources_are_installed(project: Path) -> None:
    (wheel,) = _setup(project, "bdist_wheel", CXX="no-such-c++")
    assert wheel.stem.endswith("-py3-none-any")
    assert not _libraries(wheel)
    with zipfile.ZipFile(wheel) as file:
        assert b"no-such-c++" in file.read(f"mdi/kernels/{NOTE}"), "why, for the first use"


def test_the_embedded_model_comes_with_all_its_weights_in_a_form_that_needs_no_torch(project: Path) -> None:
    (wheel,) = _setup(project, "bdist_wheel", CXX="no-such-c++")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(project / "installed")
    folder = project / "installed" / "mdi" / "nano-llama"
    assert not list(folder.glob("*.pth"))
    installed, original = LitCheckpoint(folder), LitCheckpoint(MODEL)
    assert installed.specs == original.specs and installed.config == original.config
    assert all(np.array_equal(installed.array(name), original.array(name)) for name in original.specs)
    read_tokenizer(folder, {}, {})


def test_the_source_distribution_holds_the_sources(project: Path) -> None:
    (archive,) = _setup(project, "sdist")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    csrc = {path.relative_to(project).as_posix() for path in (project / "src" / "mdi" / "kernels" / "csrc").iterdir()}
    assert csrc | {"setup.py", "src/mdi/kernels/build.py", "assets/nano-llama/lit_model.pth"} <= names
