"""A disk that fails, gives nothing, or a file that is not what it was: told in one line, and the stage can be closed."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from windows import chunks, run, windowed

import mdi.stages.window_files as unit_reader
from mdi.checkpoint.chunks import ChunkFile, find_chunk
from mdi.cli import launch
from mdi.errors import CheckpointError, EngineError
from mdi.kernels import library
from mdi.spec.window import WindowOptions
from mdi.stages.kernel_stage import KernelStage
from tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no kernels: {library.why_not()}")


@pytest.fixture
def chunk(tmp_path: Path) -> ChunkFile:
    return chunks(tmp_path)[0]


@pytest.fixture
def stage(chunk: ChunkFile) -> Iterator[KernelStage]:
    made = windowed(chunk, 0, 5, WindowOptions(2))
    yield made
    made.close()


def fails(stage: KernelStage) -> str:
    """What a pass says, in one line."""
    with pytest.raises(CheckpointError) as error:
        for _ in range(4):
            run(stage, (1,))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_that_is_cut_short(stage: KernelStage, chunk: ChunkFile) -> None:
    run(stage, (3,))
    os.truncate(chunk.path, 8192)
    assert str(chunk.path) in fails(stage)


def test_a_file_that_is_written_to(stage: KernelStage, chunk: ChunkFile) -> None:
    run(stage, (3,))
    with open(chunk.path, "r+b") as file:
        file.seek(4096)
        file.write(b"other weights")
    os.utime(chunk.path, (1, 1))
    assert str(chunk.path) in fails(stage)


def reading(monkeypatch: pytest.MonkeyPatch, instead: Callable[..., int]) -> None:
    monkeypatch.setattr(os, "preadv", instead)


def test_a_disk_that_fails(stage: KernelStage, chunk: ChunkFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    run(stage, (3,))
    reading(monkeypatch, broken)
    assert str(chunk.path) in fails(stage)


def test_a_disk_that_failed_once_is_read_again(
    stage: KernelStage, chunk: ChunkFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, is_broken = os.preadv, threading.Event()

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name == "weights" and is_broken.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    expected = windowed(chunk, 0, 5, WindowOptions(50))
    wanted = run(expected)
    expected.close()
    reading(monkeypatch, failing)
    run(stage, (3,))
    for _ in range(2):
        is_broken.set()
        assert str(chunk.path) in fails(stage)
        is_broken.clear()
        stage.caches.clear()
        assert all((a == b).all() for a, b in zip(run(stage), wanted, strict=True))
        stage.caches.clear()


def test_a_disk_that_gives_nothing(stage: KernelStage, chunk: ChunkFile, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, read = threading.Event(), os.preadv

    def stuck(fd: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name == "weights":
            go_on.wait(60)
        return read(fd, buffers, offset)

    run(stage, (3,))
    monkeypatch.setattr(unit_reader, "GIVEN_UP_S", 0.1)
    reading(monkeypatch, stuck)
    assert str(chunk.path) in fails(stage)
    go_on.set()


class Waits(threading.Condition):
    """Whose waits take these seconds of a clock."""

    def __init__(self, steps: Sequence[float]) -> None:
        super().__init__()
        self.steps, self.now = list(steps), 1000.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += self.steps.pop(0)
        return True


@pytest.mark.parametrize(
    "steps, signs, has_failed",
    [
        ([1, 500, 1, 1], 0, False),  # stopped meanwhile, as by Ctrl-Z
        ([1] * 62, 0, True),
        ([1] * 100, 10, False),  # bytes come every ten seconds
    ],
    ids=["stopped", "silent", "slow"],
)
def test_a_process_that_was_stopped_has_not_waited_for_the_disk(
    steps: list[float], signs: int, has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = Waits(steps)
    monkeypatch.setattr(unit_reader.time, "monotonic", lambda: changed.now)

    def last_sign() -> float:
        return changed.now // signs * signs if signs else 0.0

    def wait() -> float:
        with changed:
            return unit_reader.wait_for_disk(changed, lambda: not changed.steps, last_sign, None)

    if has_failed:
        with pytest.raises(CheckpointError, match="given nothing"):
            wait()
    else:
        assert wait() == sum(steps)


def test_a_slow_disk_is_waited_for_with_a_word(
    stage: KernelStage, chunk: ChunkFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, read = threading.Event(), os.preadv

    def late(fd: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name == "weights" and not slow.is_set():
            assert said.wait(60)
            slow.set()
        return read(fd, buffers, offset)

    said, warning = threading.Event(), logging.Handler()
    warning.emit = lambda record: said.set()  # type: ignore[method-assign]
    expected = windowed(chunk, 0, 5, WindowOptions(50))
    wanted = run(expected, (3, 1))
    run(stage, (2,))
    monkeypatch.setattr(unit_reader, "LOG_WAIT_S", 0.01)
    reading(monkeypatch, late)
    logging.getLogger("mdi").addHandler(warning)
    try:
        with caplog.at_level(logging.WARNING, logger="mdi"):
            found = run(stage, (3, 1))
    finally:
        logging.getLogger("mdi").removeHandler(warning)
    assert all((a == b).all() for a, b in zip(found, wanted, strict=True)) and slow.is_set()
    assert str(chunk.path) in caplog.text and stage.weight_use.wait_s > 0
    expected.close()


@pytest.mark.parametrize("way", ["cut", "broken"])
def test_a_run_whose_disk_fails_ends_with_one_line(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert launch("prepare-model", [str(folder), "--n-nodes", "1", "--quantize", "float32"]) == 0
    path, read, n_reads = find_chunk(folder, 1, "starter"), os.preadv, iter(range(1000))

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if threading.current_thread().name == "weights" and next(n_reads) >= 40:  # in the third pass or so
            if way == "broken":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            os.truncate(path, 8192)
        return read(fd, buffers, offset)

    reading(monkeypatch, failing)
    capsys.readouterr()
    flags = ["--ckpt", str(folder), "--window", "2", "--prompt-style", "none", "--json"]
    assert launch("sample", [*flags, "--prompt", "Who are you?", "--n-tokens", "60", "--temperature", "0"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert "\n" not in told["error"] and str(path) in told["error"]
    assert len(told["samples"]) == 1 and 0 < len(told["samples"][0]["token_ids"]) < 60, "what was reached is told"


def test_reads_that_end_early_are_gone_on_with(chunk: ChunkFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As network file systems may, and a signal."""
    read = os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        return read(fd, [buffers[0][: max(512, len(buffers[0]) // 3)]], offset)

    expected = windowed(chunk, 0, 5, WindowOptions(50))
    reading(monkeypatch, short)
    stage = windowed(chunk, 0, 5, WindowOptions(2))
    assert all((a == b).all() for a, b in zip(run(stage), run(expected), strict=True))
    stage.close()
    expected.close()


def test_a_file_system_without_direct_reads(chunk: ChunkFile, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args)

    expected = windowed(chunk, 0, 5, WindowOptions(2))
    monkeypatch.setattr(os, "open", refuse)
    stage = windowed(chunk, 0, 5, WindowOptions(2))
    assert all((a == b).all() for a, b in zip(run(stage), run(expected), strict=True))
    stage.close()
    expected.close()


def test_a_stage_that_was_closed_computes_no_more(stage: KernelStage) -> None:
    run(stage, (2,))
    stage.close()
    stage.close()
    with pytest.raises((EngineError, CheckpointError, OSError)):
        run(stage, (1,))


def test_a_chunk_that_lacks_its_end_is_refused_when_it_is_opened(chunk: ChunkFile) -> None:
    os.truncate(chunk.path, os.path.getsize(chunk.path) - 4096)
    with pytest.raises(CheckpointError):
        windowed(chunk, 0, 5, WindowOptions(2))
