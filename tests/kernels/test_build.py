"""The library of kernels is compiled once, found again, and its absence is told in a line."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mdi.errors import KernelError, UsageError
from mdi.kernels import build, library
from tiny_kernels import write_tiny_kernels

SRC = Path(__file__).resolve().parents[2] / "src"

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler here"
)


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and tiny kernels in the place of the real ones."""
    monkeypatch.setenv("MDI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MDI_KERNELS", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    csrc = tmp_path / "csrc"
    write_tiny_kernels(csrc)
    monkeypatch.setattr(build, "CSRC", csrc)
    monkeypatch.setattr(library, "PACKAGE", tmp_path)
    library.look_again()
    yield csrc
    library.look_again()


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes what it is asked to a file, a line each time."""
    log = tmp_path / "calls"
    _compiler(tmp_path / "counting", f'echo "$*" >> {log}\nexec c++ "$@"', monkeypatch)
    return log


def _compiler(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def _linked(log: Path) -> int:
    return sum("-shared" in line for line in log.read_text().splitlines())


@needs_compiler
def test_it_is_compiled_once_and_says_so(counting: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mdi"):
        first, second = library.compiled_library(), library.compiled_library()
    assert first == second and first.is_file()
    assert _linked(counting) == 1
    assert len(caplog.records) == 2, "that it begins, and how long it took"
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, "lock"])


@needs_compiler
def test_other_sources_are_another_library(tiny: Path) -> None:
    first = library.compiled_library()
    (tiny / "stage.h").write_text("inline float twice(float x) { return x + x; }\n")
    assert library.compiled_library() != first
    assert first.is_file()


@needs_compiler
def test_another_compiler_is_another_library(counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library.compiled_library()
    newer = '[ "$*" = -v ] && echo "newer" >&2\nexec c++ "$@"'
    _compiler(tmp_path / "newer", newer, monkeypatch)
    assert library.compiled_library() != first


@needs_compiler
def test_three_processes_that_start_together_compile_it_once(counting: Path, tiny: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from mdi.kernels import build, library\n"
    code += (
        "build.CSRC = Path(sys.argv[1]); library.PACKAGE = build.CSRC\nlibrary.load()\nprint(library.find_library())"
    )
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", code, tiny], cwd=SRC, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    told = [process.communicate(timeout=120) for process in starters]
    assert [process.returncode for process in starters] == [0, 0, 0], told
    assert len({out for out, _ in told}) == 1
    assert _linked(counting) == 1
    assert sum(len(err.splitlines()) for _, err in told) == 2, "one of them says that it compiles, and how long it took"


@needs_compiler
def test_what_an_ended_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "cache" / "kernels" / "build-left"
    left.mkdir(parents=True)
    (left / "api.o").write_bytes(b"half")
    library.compiled_library()
    assert not left.exists()


@needs_compiler
def test_old_libraries_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    old = [folder / f"_mdi_kernels-{index:02d}.so" for index in range(library.KEPT + 2)]
    for index, path in enumerate(old):
        path.touch()
        os.utime(path, (index + 1, index + 1))
    library.compiled_library()
    assert [path.is_file() for path in old] == [False, False, *[True] * library.KEPT]


@needs_compiler
def test_one_that_another_user_put_there_is_not_run(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library.compiled_library()
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert library.is_safe(path) is (path.stat().st_uid == 0)  # the administrator's are taken by all
    monkeypatch.undo()
    assert library.is_safe(path)


@needs_compiler
def test_the_one_that_was_installed_is_taken_if_it_is_of_these_sources(tiny: Path, tmp_path: Path) -> None:
    installed = tmp_path / library.packaged_name()
    installed.touch()
    assert library.find_library() == installed
    (tiny / "stage.h").write_text("inline float twice(float x) { return x + x; }\n")
    assert library.find_library().parent == tmp_path / "cache" / "kernels"


@needs_compiler
def test_flags_that_a_compiler_does_not_know_leave_out_their_instruction_set(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$*" in *-mavx512f*|*armv8.2*) echo "error: unknown" >&2; exit 1;; esac\nexec c++ "$@"'
    _compiler(tmp_path / "old-one", script, monkeypatch)
    assert library.load() is not None
    assert library.instruction_set() in ("avx2", "neon", "plain")
    monkeypatch.setenv("MDI_KERNELS", "avx512")
    library.look_again()
    with pytest.raises(UsageError):
        library.load()


def _is_missing(caplog: pytest.LogCaptureFixture) -> str:
    """The reason why there is no library, which has been told in one line."""
    assert library.load() is None and library.instruction_set() == "off"
    assert len([r for r in caplog.records if r.levelno == logging.WARNING and library.why_not() in r.getMessage()]) == 1
    assert "\n" not in library.why_not()
    return library.why_not()


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt install g++" in _is_missing(caplog)


def test_a_compiler_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-c++ -m64")
    assert "no-such-c++" in _is_missing(caplog)


def test_a_compiler_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _compiler(tmp_path / "broken", "echo 'cannot find my parts' >&2; exit 3", monkeypatch)
    assert "cannot find my parts" in _is_missing(caplog)


@needs_compiler
def test_the_first_error_of_the_compiler_is_told(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tiny / "stage.h").write_text("#error these are\n#error two errors\n")
    assert "these are" in _is_missing(caplog)
    assert not list((tmp_path / "cache" / "kernels").glob("*.so"))


@needs_compiler
def test_a_library_that_lacks_something_is_not_made(tiny: Path, tmp_path: Path) -> None:
    with (tiny / "api.cpp").open("a") as file:
        file.write("int elsewhere(); API int mdi_more() { return elsewhere(); }\n")
    with pytest.raises(KernelError):
        library.compiled_library()
    assert not list((tmp_path / "cache" / "kernels").glob("*.so"))


@needs_compiler
def test_a_compiler_for_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(KernelError):
        library.compiled_library()


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MDI_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(KernelError):
        library.compiled_library()


@needs_compiler
def test_a_damaged_library_is_told(caplog: pytest.LogCaptureFixture) -> None:
    path = library.compiled_library()
    path.write_bytes(b"")
    assert str(path) in _is_missing(caplog)


@needs_compiler
def test_an_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_KERNELS", "Plain")
    assert library.load() is not None and library.instruction_set() == "plain"


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MDI_KERNELS", "off")
    assert library.load() is None and library.instruction_set() == "off"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("value", ["sse9", "neon,avx2", "native"])
def test_what_cannot_be_forced_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_KERNELS", value)
    with pytest.raises(UsageError):
        library.load()


@needs_compiler
def test_instructions_that_the_machine_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_KERNELS", "avx2" if build.this_machine() == "aarch64" else "neon")
    with pytest.raises(UsageError):
        library.load()


def test_forced_instructions_need_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_KERNELS", "plain")
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(UsageError):
        library.load()
