"""Pages of mapped files: brought into memory, found to be gone, and named when they are gone later on."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from mdi.checkpoint.weightfile import map_bytes
from mdi.errors import CheckpointError
from mdi.stages import building as loading
from mdi.stages.building import label_for_fault_reports, populate

DATA = np.random.default_rng(0).integers(0, 255, 300_000, dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(DATA.tobytes())
    return tmp_path / "weights"


@pytest.mark.parametrize("span", [(0, 300_000), (4096, 5000), (5001, 299_999), (0, 0)])
def test_bytes_of_a_file(path: Path, span: tuple[int, int]) -> None:
    found = map_bytes(path, *span)
    assert np.array_equal(found, DATA[slice(*span)])
    assert not found.size or not found.flags.writeable
    copied = map_bytes(path, *span, is_writable=True)
    copied[:] = 0
    assert path.read_bytes() == DATA.tobytes()


def test_a_file_that_is_shorter_than_it_was(path: Path) -> None:
    with pytest.raises(CheckpointError) as e:
        map_bytes(path, 0, 300_001)
    assert "300000 bytes, 300001" in str(e.value) and e.value.code == "weights"
    with pytest.raises(CheckpointError) as e:
        map_bytes(path.parent / "nothing", 0, 1)
    assert "nothing" in str(e.value) and e.value.code == "weights"


@pytest.mark.parametrize("knows", [True, False])
def test_all_pages_are_brought(path: Path, monkeypatch: pytest.MonkeyPatch, knows: bool) -> None:
    if not knows:
        monkeypatch.setattr(loading, "madvise_function", lambda: None)
    monkeypatch.setattr(loading, "POPULATE_BYTES", 70_000)
    whole = map_bytes(path, 0, 300_000)
    told: list[int] = []
    populate([whole, whole[:100].view(np.float32), np.ones(3), np.empty(0)], str(path), told.append)
    assert told == [70_000] * 4 + [20_000, 100, 24]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells of such a page but a signal")
def test_a_file_that_was_cut_short_after_it_was_mapped(path: Path) -> None:
    whole = map_bytes(path, 0, 300_000)
    if loading.ask_for(whole.ctypes.data, 4096):
        return  # a kernel before 5.14
    os.truncate(path, 100_000)
    populate([whole[:90_000]], str(path))
    with pytest.raises(CheckpointError) as e:
        populate([whole], str(path))
    assert str(path) in str(e.value) and e.value.code == "weights"


class Library:
    """What the kernels' library is asked for."""

    def __init__(self) -> None:
        self.watched: dict[int, tuple[int, int, bytes]] = {}
        self.n_asked = 0

    class _Function:
        def __init__(self, call: object) -> None:
            self.call = call

        def __call__(self, *args: object) -> object:
            return self.call(*args)  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        if name == "mdi_watch_mapping":
            function = Library._Function(self._watch)
        elif name == "mdi_unwatch_mapping":
            function = Library._Function(self.watched.pop)
        else:
            raise AttributeError(name)
        setattr(self, name, function)
        return function

    def _watch(self, start: int, n_bytes: int, message: bytes) -> int:
        self.n_asked += 1
        self.watched[self.n_asked] = start, n_bytes, message
        return self.n_asked


@pytest.mark.slow
def test_each_mapping_is_named_as_long_as_it_is_there(path: Path) -> None:
    library = Library()
    whole = map_bytes(path, 0, 300_000)
    start = whole.ctypes.data
    views = [whole[4096:8192].view(np.uint16), whole[:8]]
    label_for_fault_reports(library, [*views, np.ones(2)], str(path))
    ((found, n_bytes, message),) = library.watched.values()
    assert (found, n_bytes) == (start, 300_000)
    assert str(path).encode() in message and message.endswith(b"\n") and message.count(b"\n") == 1
    del whole
    gc.collect()
    assert library.watched
    views.clear()
    gc.collect()
    assert not library.watched
    label_for_fault_reports(object(), [np.ones(2)], str(path))  # a library that does not know of it
