"""Parts that arrive from elsewhere: resumed, checked, refused."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from mdi.cancel import Cancel
from mdi.checkpoint import store
from mdi.checkpoint.parts import PartInfo
from mdi.checkpoint.records import BELIEVED_S, stamp_of
from mdi.checkpoint.store import PIECE_BYTES, BlockStore
from mdi.errors import CheckpointError, Code
from mdi.files import lock_file
from mdi.model.plain import ModelConfig
from mdi.stages.window_files import WeightBytes

TENSORS = {"transformer.h.0.a": torch.arange(700_000.0), "transformer.h.0.b": torch.ones(3)}
DATA = save(TENSORS)
INFO = PartInfo("block.0", hashlib.sha256(DATA).hexdigest(), len(DATA))


class Asked(Cancel):
    """Counts in a list how often it was looked at."""

    def __init__(self, asked: list[int]) -> None:
        super().__init__()
        self._asked = asked

    def check(self) -> None:
        self._asked.append(1)


def test_a_part_arrives(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "cache" / "parts")
    assert store.free_bytes() > 0
    assert not store.has(INFO.sha256)
    asked: list[int] = []
    counted: list[int] = []
    stream = io.BytesIO(DATA)

    def read(n: int) -> bytes:
        asked.append(n)
        return stream.read(n)

    store.receive(INFO, 0, read, counted.append)
    assert store.has(INFO.sha256)
    assert store.partial_bytes(INFO.sha256) == 0
    assert store.path(INFO.sha256).read_bytes() == DATA
    assert max(asked) <= PIECE_BYTES
    assert sum(counted) == len(DATA)
    tensors = store.part(INFO, ModelConfig(), "").tensors("block.0")
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert sorted(p.name for p in store.directory.iterdir()) == sorted([f"{INFO.sha256}.safetensors", "checked.json"])


def test_more_than_the_part_is_not_read(tmp_path: Path) -> None:
    stream = io.BytesIO(DATA + b"next request")
    BlockStore(tmp_path).receive(INFO, 0, stream.read)
    assert stream.read() == b"next request"


@pytest.mark.parametrize("back", [0, 1000])
def test_going_on(tmp_path: Path, back: int) -> None:
    store = BlockStore(tmp_path)
    cut = 1_500_000
    with pytest.raises(CheckpointError) as e:
        store.receive(INFO, 0, io.BytesIO(DATA[:cut]).read)
    assert f"{cut} of {len(DATA)} bytes" in str(e.value) and e.value.code == "weights"
    assert store.partial_bytes(INFO.sha256) == cut
    store = BlockStore(tmp_path)  # another process
    store.receive(INFO, cut - back, io.BytesIO(DATA[cut - back :]).read)
    assert store.path(INFO.sha256).read_bytes() == DATA


def test_an_error_while_reading_keeps_what_came(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    stream = io.BytesIO(DATA)

    def read(n: int) -> bytes:
        if stream.tell() >= PIECE_BYTES:
            raise ConnectionResetError
        return stream.read(n)

    with pytest.raises(ConnectionResetError):
        store.receive(INFO, 0, read)
    assert store.partial_bytes(INFO.sha256) == PIECE_BYTES
    with pytest.raises(CheckpointError) as e:
        store.receive(INFO, PIECE_BYTES + 1, read)
    assert f"byte {PIECE_BYTES + 1} " in str(e.value) and e.value.code == "busy"
    with pytest.raises(CheckpointError) as e:
        store.receive(INFO, -1, read)
    assert "byte -1" in str(e.value) and e.value.code == "busy"


def test_all_is_there_but_unchecked(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    (tmp_path / f"{INFO.sha256}.part").write_bytes(DATA)
    store.receive(INFO, len(DATA), io.BytesIO().read)
    assert store.has(INFO.sha256)


def test_too_much_is_there(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    (tmp_path / f"{INFO.sha256}.part").write_bytes(DATA + b"more")
    with pytest.raises(CheckpointError) as e:
        store.receive(INFO, len(DATA) + 4, io.BytesIO().read)
    assert INFO.name in str(e.value) and e.value.code == "busy"
    store.receive(INFO, len(DATA), io.BytesIO().read)
    assert store.path(INFO.sha256).read_bytes() == DATA


def test_other_bytes_are_refused_and_removed(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    with pytest.raises(CheckpointError) as e:
        store.receive(INFO, 0, io.BytesIO(DATA[:-1] + b"!").read)
    assert INFO.sha256 in str(e.value) and e.value.code == "weights"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sha", ["", "../../etc/passwd", "A" * 64, "ab" * 32 + "\n", "ab" * 31])
def test_what_is_no_hash(tmp_path: Path, sha: str) -> None:
    store = BlockStore(tmp_path)
    for act in (store.has, store.path, store.partial_bytes):
        with pytest.raises(CheckpointError) as e:
            act(sha)
        assert "sha256" in str(e.value) and e.value.code == "weights"


def test_a_file_damaged_later(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    store.receive(INFO, 0, io.BytesIO(DATA).read)
    path = store.path(INFO.sha256)
    for damaged in (DATA[:-10], DATA[:-1] + bytes([DATA[-1] ^ 0x80])):
        assert store.has(INFO.sha256)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            store.part(INFO, ModelConfig(), "")
        assert not store.has(INFO.sha256) and not path.exists(), "it can come again"
        store.receive(INFO, 0, io.BytesIO(DATA).read)
    with pytest.raises(CheckpointError):
        store.part(PartInfo("block.0", "ab" * 32, 1), ModelConfig(), "")


def test_a_bit_that_was_lost_while_no_process_looked(tmp_path: Path) -> None:
    """Same size, same time: only the hash tells."""
    BlockStore(tmp_path).receive(INFO, 0, io.BytesIO(DATA).read)
    store = BlockStore(tmp_path)
    path = store.path(INFO.sha256)
    before = path.stat()
    path.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 0x80]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    asked: list[int] = []
    assert not store.has(INFO.sha256, Asked(asked)) and not path.exists()
    assert len(asked) == -(-len(DATA) // PIECE_BYTES), "whoever waits is asked between the pieces"


def refuses(error: int) -> Any:
    """`open` on a machine that gives this error."""

    def open_(*args: Any, **options: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return open_


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_that_is_short_of_something_says_nothing_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    BlockStore(tmp_path).receive(INFO, 0, io.BytesIO(DATA).read)
    store = BlockStore(tmp_path)
    with monkeypatch.context() as short:
        short.setattr("builtins.open", refuses(error))
        with pytest.raises(CheckpointError) as caught:
            store.has(INFO.sha256)
    assert str(store.path(INFO.sha256)) in str(caught.value)
    assert store.path(INFO.sha256).read_bytes() == DATA and store.has(INFO.sha256)


class FailingFile(io.FileIO):
    """Its second megabyte cannot be read."""

    def readinto(self, buffer: Any) -> int:
        if self.tell():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readinto(buffer) or 0


def test_a_part_that_the_disk_cannot_read_stays_until_it_has_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as missing, but an error of the disk is no proof that the file is damaged."""
    BlockStore(tmp_path).receive(INFO, 0, io.BytesIO(DATA).read)
    (tmp_path / "checked.json").unlink()
    store, path, opened = BlockStore(tmp_path), BlockStore(tmp_path).path(INFO.sha256), open
    with monkeypatch.context() as broken:
        broken.setattr("builtins.open", lambda p, *a, **o: FailingFile(p) if p == path else opened(p, *a, **o))
        assert not store.has(INFO.sha256)
        with pytest.raises(CheckpointError):
            store.part(INFO, ModelConfig(), "")
        assert path.exists()
        store.receive(INFO, 0, io.BytesIO(DATA).read)
    assert path.read_bytes() == DATA and store.has(INFO.sha256)


def test_using_a_part_does_not_look_like_writing_to_it(tmp_path: Path) -> None:
    """A window of another run may be reading it, and looks whether it has changed."""
    store = BlockStore(tmp_path)
    store.receive(INFO, 0, io.BytesIO(DATA).read)
    path = store.path(INFO.sha256)
    os.utime(path, (1000, 1000))
    store.checked.put(INFO.sha256, INFO, stamp_of(path))
    file = WeightBytes(path)
    store.part(INFO, ModelConfig(), "")
    file.check()
    file.close()
    assert path.stat().st_mtime == 1000 < path.stat().st_atime


def test_a_part_that_was_used_stays_longer(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, len(DATA) + 1000)
    store.receive(INFO, 0, io.BytesIO(DATA).read)
    newer = tmp_path / f"{'ab' * 32}.safetensors"
    newer.write_bytes(bytes(900))
    for path, used_s in ((store.path(INFO.sha256), 1000), (newer, 2000)):
        os.utime(path, (used_s, used_s))
    store.part(INFO, ModelConfig(), "")
    assert store.free_space(500, set()) == 900 and store.parts() == (INFO.sha256,)


def test_a_part_is_hashed_once_by_all_processes(tmp_path: Path) -> None:
    BlockStore(tmp_path).receive(INFO, 0, io.BytesIO(DATA).read)
    for _ in range(3):
        store = BlockStore(tmp_path)  # as another process has it
        asked: list[int] = []
        assert store.has(INFO.sha256, Asked(asked)) and store.part(INFO, ModelConfig(), "")
        assert not asked, "using a file sets its time, which is no reason to hash it"


ENTRIES = (f'"{INFO.sha256}": "x"', f'"{INFO.sha256}": []', f'"{INFO.sha256}": [[], 1, "block.0", "no hash", 3]')


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": 3}', *(f'{{"format_version": 3, "hashes": {{{entry}}}}}' for entry in ENTRIES)]
)
def test_a_damaged_record_is_ignored(tmp_path: Path, text: str) -> None:
    BlockStore(tmp_path).receive(INFO, 0, io.BytesIO(DATA).read)
    (tmp_path / "checked.json").write_text(text)
    asked: list[int] = []
    assert BlockStore(tmp_path).has(INFO.sha256, Asked(asked)) and asked


@pytest.mark.parametrize("age_s", [BELIEVED_S + 10, -100])
def test_what_was_hashed_long_ago_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    store = BlockStore(tmp_path)
    store.receive(INFO, 0, io.BytesIO(DATA).read)
    later = time.time() + age_s
    monkeypatch.setattr("mdi.checkpoint.records.time.time", lambda: later)
    for one in (store, BlockStore(tmp_path)):
        asked: list[int] = []
        assert one.has(INFO.sha256, Asked(asked)) and asked
        monkeypatch.setattr("mdi.checkpoint.records.time.time", lambda: later + 2 * age_s)


def test_many_parts_are_looked_for_at_a_time(tmp_path: Path) -> None:
    BlockStore(tmp_path).receive(INFO, 0, io.BytesIO(DATA).read)
    (tmp_path / "checked.json").unlink()
    assert BlockStore(tmp_path).have(["ab" * 32, INFO.sha256, "cd" * 32]) == {INFO.sha256}

    (tmp_path / "checked.json").unlink()
    stopped = Cancel()
    stopped.cancel(LookupError("the run was ended"))
    with pytest.raises(LookupError):
        BlockStore(tmp_path).have([INFO.sha256, "ab" * 32], stopped)


# Two processes with one folder


def reader(during: Callable[[], None] = lambda: None) -> Callable[[int], bytes]:
    """Gives the bytes of the part; `during` is called before the second piece."""
    stream = io.BytesIO(DATA)

    def read(n: int) -> bytes:
        if stream.tell():
            during()
        return stream.read(min(n, len(DATA) // 2 + 1))

    return read


def test_a_part_that_comes_to_another_process_is_waited_for(tmp_path: Path) -> None:
    """Nobody writes into its file, and nobody makes room by removing it."""
    first, second, refused = BlockStore(tmp_path), BlockStore(tmp_path, limit_bytes=len(DATA)), []

    def try_as_well() -> None:
        have = second.partial_bytes(INFO.sha256)
        assert 0 < have < len(DATA)
        for offset in (0, have):
            with pytest.raises(CheckpointError, match="another process") as told:
                second.receive(INFO, offset, reader())
            refused.append(told.value.code)
        second.free_space(len(DATA), ())

    first.receive(INFO, 0, reader(try_as_well))
    assert set(refused) == {Code.BUSY}
    assert first.path(INFO.sha256).read_bytes() == DATA
    with pytest.raises(CheckpointError) as told:
        second.receive(INFO, 0, reader())
    assert told.value.code == Code.BUSY and second.has(INFO.sha256) and not second.partial_bytes(INFO.sha256)


def test_a_transfer_that_was_cut_off_goes_on_in_another_process(tmp_path: Path) -> None:
    first, second = BlockStore(tmp_path), BlockStore(tmp_path)

    def cut_off() -> None:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        first.receive(INFO, 0, reader(cut_off))
    have = second.partial_bytes(INFO.sha256)
    assert have > 0
    second.receive(INFO, have, io.BytesIO(DATA[have:]).read)
    assert first.has(INFO.sha256)


def test_a_part_that_another_process_has_just_finished_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file was opened under its first name, and has another one when it is locked."""
    first, second = BlockStore(tmp_path), BlockStore(tmp_path)

    def lock_late(file: int) -> bool:
        monkeypatch.setattr(store, "lock_file", lock_file)
        first.receive(INFO, 0, reader())
        return lock_file(file)

    monkeypatch.setattr(store, "lock_file", lock_late)
    with pytest.raises(CheckpointError) as told:
        second.receive(INFO, 0, reader())
    assert told.value.code == Code.BUSY
    assert first.path(INFO.sha256).read_bytes() == DATA


def test_without_locks_no_record_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some network file systems: another process may have written to the file when it had been hashed."""

    def refuse(file: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(store, "lock_file", refuse)
    one = BlockStore(tmp_path)
    one.receive(INFO, 0, reader())
    path = one.path(INFO.sha256)
    assert path.read_bytes() == DATA and one.checked.find(INFO.sha256, stamp_of(path)) is None
    assert one.has(INFO.sha256)


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = BlockStore(tmp_path / "file" / "cache")
    with pytest.raises(CheckpointError) as e:
        store.receive(INFO, 0, io.BytesIO(DATA).read)
    assert "block.0" in str(e.value) and e.value.code == "weights"


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX")
def test_a_full_disk(tmp_path: Path) -> None:
    """A real limit: no file may grow beyond 1.2 MB in that process."""
    code = textwrap.dedent("""
        import io, resource, sys
        from mdi.checkpoint.parts import PartInfo
        from mdi.checkpoint.store import BlockStore
        from mdi.errors import CheckpointError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000, 1_200_000))
        store = BlockStore(sys.argv[1])
        try:
            store.receive(PartInfo("block.7", "ab" * 32, 5_000_000), 0, io.BytesIO(bytes(5_000_000)).read)
        except CheckpointError as e:
            print(e)
        print(list(store.directory.iterdir()))
    """)
    src = Path(__file__).parents[1] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env={"PYTHONPATH": str(src)}, timeout=120
    )  # fmt: skip
    message, left = done.stdout.splitlines()
    assert "the disk is full" in message
    assert "block.7 needs 5000000 bytes" in message
    assert str(tmp_path) in message
    assert left == "[]"
