"""`mdi cache`, and what `mdi list` and `mdi rm` say of the cache folder: what is in it, whose it is, and removing it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from mdi.checkpoint import disk_space
from mdi.checkpoint.hffolder import folder_record
from mdi.checkpoint.part_users import FILE, PartUser, note_user, read_users
from mdi.checkpoint.store import BlockStore
from mdi.checkpoint.weightfile import map_bytes
from mdi.cli import launch
from mdi.files import lock_file
from mdi.kernels import library
from mdi.run.cache_folder import KINDS, entries_of
from test_transfer import put
from tiny_checkpoint import write_checkpoint

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlockStore:
    """A cache with parts of a model that is here, of one that is gone, of both, of one on another machine, and of none."""
    monkeypatch.setenv("MDI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MDI_STORE", str(tmp_path / "models"))
    store = BlockStore(tmp_path / "cache")
    store.directory.mkdir()
    (tmp_path / "models" / "org" / "here").mkdir(parents=True)
    for i, users in enumerate(("here", "gone", "here gone", "elsewhere", "")):
        for part in range(2):
            sha = put(store, f"{users} {part}", 1000 * 10**i, 1e9 + 86400 * i)
            for name in users.split():
                note_user(store, [sha], name, None if name == "elsewhere" else tmp_path / "models" / "org" / name)
    return store


def sha_of(users: str, part: int = 0) -> str:
    return hashlib.sha256(f"{users} {part}".encode()).hexdigest()


def mdi(*words: str) -> int:
    return launch(words[0], list(words[1:]))


def left(store: BlockStore) -> set[str]:
    """The users of the parts that are still there."""
    names = {
        sha_of(users, part): users for users in ("here", "gone", "here gone", "elsewhere", "") for part in range(2)
    }
    return {names[sha] for sha in store.parts()}


def fill(folder: Path) -> dict[str, Path]:
    """A file of each other kind; returns them."""
    files = {
        "own kernels": f"kernels/{library.packaged_name().removesuffix('.so')}-0123.so",
        "old kernels": "kernels/_mdi_kernels-0123-4567.so",
        "hashes": "folders/tiny-01234567.json",
        "settings": "settings/org/name/config.json",
        "profiles": "profiles.json",
        "runs": "runs/20260101-000000-abcd/journal",
        "window": "window/spilt",
        "prefixes": f"prefixes/{'0' * 16}-{'0' * 16}/{'0' * 40}.kv",
        "tokenizers": f"tokenizers/{'0' * 64}-2/tokenizer.json",
        "leftovers": "abc.packed.999999999.part",
        "other": "real/of-the-user.bin",
    }
    for name in files.values():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(100))
    return {kind: folder / name for kind, name in files.items()}


def test_a_row_for_each_model_and_kind(store: BlockStore, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store.directory)
    (store.directory / "packed.json").write_text(json.dumps({"key": [sha_of("here"), 1000]}))
    assert mdi("cache") == 0
    head, *rows, end = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["received", "unknown", "unknown", "20.0 MB", "2001-09-13"] in rows
    assert ["received", "elsewhere", "another machine", "2.0 MB", "2001-09-12"] in rows
    assert ["received", "gone, here", "yes", "200.0 kB", "2001-09-11"] in rows
    assert ["received", "gone", "no", "20.0 kB", "2001-09-10"] in rows
    assert ["packed", "here", "yes", "1.0 kB", "2001-09-09"] in rows
    assert ["received", "here", "yes", "1.0 kB", "2001-09-09"] in rows
    assert [row[:4] for row in rows if row[0] == "kernels"] == [
        ["kernels", "other versions", "no", "100 bytes"], ["kernels", "this version", "yes", "100 bytes"]
    ]  # fmt: skip
    kinds = {row[0] for row in rows}
    assert kinds == {*KINDS, "other"} - {"weights"}
    files = [path for path in store.directory.rglob("*") if path.is_file()]
    assert "22.2 MB" in "".join(end) and "free there" in "".join(end)
    assert sum(entry.n_bytes for entry in entries_of(store.directory)) == sum(path.stat().st_size for path in files)


def test_what_belongs_to_one_model_alone_is_removed(store: BlockStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert mdi("cache", "rm", "gone", "--yes") == 0 and "20.0 kB is removed" in capsys.readouterr().out
    assert left(store) == {"here", "here gone", "elsewhere", ""}
    assert mdi("cache", "rm", "org/here", "--yes") == 0 and left(store) == {"here gone", "elsewhere", ""}
    assert mdi("cache", "rm", "unknown", "--yes") == 0 and left(store) == {"here gone", "elsewhere"}
    assert mdi("cache", "rm", "nobody", "--yes") == 2 and "elsewhere" in capsys.readouterr().err
    assert mdi("cache", "rm", "weights", "-y") == 0 and not left(store)


def test_what_no_model_needs_is_removed(store: BlockStore) -> None:
    files = fill(store.directory)
    assert mdi("cache", "rm", "--unused", "--yes") == 0
    assert left(store) == {"here", "here gone", "elsewhere", ""}
    assert {kind for kind, path in files.items() if not path.exists()} == {"old kernels", "leftovers"}


@pytest.mark.parametrize("kind", ["hashes", "settings", "profiles", "runs", "window", "leftovers"])
def test_a_kind_is_removed(store: BlockStore, kind: str) -> None:
    files = fill(store.directory)
    assert mdi("cache", "rm", kind, "--yes") == 0
    assert [name for name, path in files.items() if not path.exists()] == [kind]
    assert len(store.parts()) == 10


def test_kernels_of_all_versions_are_a_kind_and_other_files_are_none(store: BlockStore) -> None:
    files = fill(store.directory)
    assert mdi("cache", "rm", "other", "--yes") == 2 and mdi("cache", "rm", "kernels", "--yes") == 0
    assert [name for name, path in files.items() if not path.exists()] == ["own kernels", "old kernels"]


def test_it_asks_first(store: BlockStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert mdi("cache", "rm", "gone") == 2 and "--yes" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    assert mdi("cache", "rm", "gone") == 1 and "20.0 kB" in asked[0] and len(store.parts()) == 10
    assert mdi("cache", "--limit", "1MB") == 1 and len(store.parts()) == 10
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert mdi("cache", "rm", "gone") == 0 and len(store.parts()) == 8


def test_a_limit_removes_the_oldest_weights(store: BlockStore) -> None:
    fill(store.directory)
    assert mdi("cache", "--limit", "22.1MB", "--yes") == 0, "the records and other files count, too"
    assert left(store) == {"elsewhere", ""} and len(store.parts()) == 4
    before = store.parts()
    assert mdi("cache", "--limit", "22.2MB", "--yes") == 0 and store.parts() == before
    assert (
        mdi("cache", "--limit", "1", "--yes") == 0
        and not store.parts()
        and (store.directory / "profiles.json").exists()
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other locks")
def test_what_a_process_uses_stays(store: BlockStore, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, pathlib; from mdi.checkpoint.store import BlockStore; from mdi.checkpoint.weightfile import map_bytes\n"
        "store, used, mapped = BlockStore(sys.argv[1]), sys.argv[2], sys.argv[3]\n"
        "data = map_bytes(store.path(mapped), 0, 10)\n"
        "with store.in_use({used}):\n    print('ready', flush=True); sys.stdin.readline()"
    )
    partial = put(store, "coming", 500, 1.0, ".part")
    words = [sys.executable, "-c", code, str(store.directory), sha_of("gone"), sha_of("here")]
    src = {**os.environ, "PYTHONPATH": str(Path(disk_space.__file__).parents[2])}
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=src)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with open(store.directory / f"{partial}.part", "r+b") as file:
            assert lock_file(file.fileno())
            assert mdi("cache", "rm", "weights", "--yes") == 0 and "a process uses" in capsys.readouterr().out
            assert set(store.parts()) == {sha_of("gone"), sha_of("here")} and store.partial_bytes(partial) == 500
    finally:
        process.communicate("\n", timeout=60)
    assert mdi("cache", "rm", "weights", "--yes") == 0 and not store.parts() and not store.partial_bytes(partial)
    assert not list(store.directory.glob("use-*"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other locks")
def test_the_mark_of_a_process_that_was_killed_counts_no_more(store: BlockStore) -> None:
    (store.directory / "use-1-0123").write_text(json.dumps([sha_of("gone")]))
    assert mdi("cache", "rm", "gone", "--yes") == 0 and "gone" not in left(store)
    assert not list(store.directory.glob("use-*"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 5}', '{"a": [["name"]]}', "\udcff"])
def test_a_damaged_record_counts_as_empty(store: BlockStore, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (store.directory / FILE).write_bytes(text.encode(errors="surrogateescape"))
    assert mdi("cache") == 0 and "gone" not in capsys.readouterr().out
    note_user(store, [sha_of("gone")], "model", None)
    assert read_users(store.directory) == {sha_of("gone"): {PartUser("model", "")}}


def test_the_usual_limit(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """22.222 MB are there: what is free decides how much of them may stay, and a run is never refused."""
    free = 30_000_000
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: Usage(10**9, 0, free))
    assert store.free_space(3_000_000, set()) == 0, "half of 52 MB"
    assert store.free_space(4_000_000, set()) == 122_000 and left(store) == {"here gone", "elsewhere", ""}
    free = 0
    oldest = sha_of("elsewhere")
    mapped = map_bytes(store.path(sha_of("elsewhere", 1)), 0, 10)
    with store.in_use({oldest}):
        assert store.free_space(10**12, {sha_of("")}) == 10_100_000, "all but what is used, and what the run keeps"
    assert set(store.parts()) == {oldest, sha_of("elsewhere", 1), sha_of("")}
    del mapped
    store.free_space(10**12, set())
    assert not store.parts()


def test_a_model_takes_along_what_only_it_used(
    store: BlockStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "models" / "org" / "here"
    write_checkpoint(home)
    record = folder_record(store.directory, home)
    record.parent.mkdir()
    record.write_text("{}")
    received = put(store, "received", 5000, 1e9)
    note_user(store, [received], "here", None)
    assert mdi("list") == 0
    out = capsys.readouterr().out
    assert "the models take" in out and "the cache folder 22.2 MB (`mdi cache`" in out
    assert mdi("rm", "org/here", "--yes") == 0 and "7.0 kB of the cache that only it used" in capsys.readouterr().out
    assert received not in store.parts() and not record.exists()
    assert left(store) == {"here gone", "gone", "elsewhere", ""}
